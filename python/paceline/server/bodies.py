# SPDX-License-Identifier: Apache-2.0
"""Reads the bodies of requests: bounded in bytes, time and depth, and every field by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, Final

from paceline.checks import check_int, check_text, did_you_mean, shorten
from paceline.limits import MAX_LOGIT_BIAS
from paceline.server.admission import MAX_SHORT_BODY, BodyBytes, HeldBytes
from paceline.server.errors import ApiError, refusal, wrong_field
from paceline.server.json_values import (
    MAX_JSON_DEPTH,
    TOO_DEEP,
    JsonRefused,
    Quota,
    parse_json,
    refuse_constant,
    twice,
)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

#: The key of a request's `Body` in its ASGI scope.
BODY: Final = "paceline.body"
# They may have a prompt of as many token ids as the body holds.
_TOKEN_FIELDS: Final = ("prompt", "tokens")


class ClientGone(Exception):
    """The client has closed the connection."""


class Body:
    """The body of a request, and what it takes of the bytes that all of them may have.

    Attributes:
        is_short: Whether the event loop may parse it.
    """

    def __init__(self, data: bytes, held: HeldBytes) -> None:
        self.is_short = len(data) <= MAX_SHORT_BODY
        self._data = data
        self._held = held

    def take(self) -> bytes:
        """Returns the bytes, once, so that they are freed when they have been parsed."""
        data, self._data = self._data, b""
        return data

    def release(self) -> None:
        """Says that nothing needs what the body had any more. Doing it twice is fine."""
        self._data = b""
        self._held.release()


async def read_body(
    receive: Receive, *, max_bytes: int, timeout_s: float, total: BodyBytes
) -> Body:
    """Reads the body of a request.

    Args:
        receive: The connection.
        max_bytes: Largest body.
        timeout_s: Longest time for all of it.
        total: Counts the bytes until `Body.release`.

    Raises:
        ApiError: 408, 413, or 503 for `total`.
        ClientGone: The connection was closed.
    """
    parts: list[bytes] = []
    num_bytes = 0
    held = HeldBytes(total)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > max_bytes:
                    raise too_large(max_bytes)
                held.grow(num_bytes)
                if not message.get("more_body", False):
                    return Body(b"".join(parts), held)
    except BaseException as error:
        held.release()
        if not isinstance(error, TimeoutError):
            raise
        raise ApiError(
            408,
            f"the body of the request did not arrive within {timeout_s:g} s; send it faster, or "
            "start the server with a longer --read-timeout",
            headers={"connection": "close"},
        ) from None


def too_large(max_bytes: int) -> ApiError:
    """Makes the error for a body of more than `max_bytes`."""
    return ApiError(
        413,
        f"the body of the request is too long; allowed: {max_bytes} bytes. Send less, or start the "
        "server with a larger --max-body-bytes",
        headers={"connection": "close"},
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses the JSON object of a request.

    Raises:
        ApiError: It is invalid, has a key twice, NaN or Infinity, or more levels or values than
            `parse_json` allows.
    """
    try:
        value = _parse(body)
    except JsonRefused as error:
        field = None if error.field is None else error.field[:100]
        raise refusal(f"the body {error}", field) from None
    except RecursionError:
        raise refusal(f"the body {TOO_DEEP}") from None
    except UnicodeDecodeError as error:
        raise refusal(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise refusal(f"the body is not valid JSON: {error}") from None
    except ValueError:
        raise refusal("the body has an integer of thousands of digits") from None
    if not isinstance(value, dict):
        raise refusal(f"the body is {shorten(value)}; allowed: a JSON object")
    return value


def _parse(body: bytes) -> Any:
    text = body.decode("utf-8-sig")
    if len(body) > MAX_SHORT_BODY:
        return parse_json(text, Quota(), uncounted=_TOKEN_FIELDS)
    # Faster, and short enough to keep Python's lock.
    value = json.loads(text, object_pairs_hook=_unique, parse_constant=refuse_constant)
    _check_depth(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        raise twice(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return made


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise JsonRefused(TOO_DEEP, None)


class Fields:
    """The fields of a request, each of which is taken once. One that is null counts as absent."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Starts with all fields."""
        self._names = list(given)
        self._given = {name: value for name, value in given.items() if value is not None}

    def take(self, name: str) -> Any:
        """Takes a field; None if it is absent."""
        return self._given.pop(name, None)

    def take_bool(self, name: str, default: bool = False) -> bool:
        """Takes a switch."""
        value = self._given.pop(name, default)
        if not isinstance(value, bool):
            raise wrong_field(name, value, "true or false")
        return value

    def take_text(self, name: str) -> str | None:
        """Takes a string; None if it is absent."""
        value = self._given.pop(name, None)
        return None if value is None else check_text(name, value)

    def take_int(self, name: str, low: int, high: int) -> int | None:
        """Takes an integer from `low` to `high`; None if it is absent."""
        value = self._given.pop(name, None)
        return None if value is None else check_int(name, value, low, high)

    def take_object(self, name: str) -> dict[str, Any] | None:
        """Takes an object; None if it is absent."""
        value = self._given.pop(name, None)
        if value is not None and not isinstance(value, dict):
            raise wrong_field(name, value, "an object")
        return value

    def peek(self, name: str) -> Any:
        """Returns a field without taking it; None if it is absent."""
        return self._given.get(name)

    def replace(self, name: str, value: Any) -> None:
        """Puts another value in the place of a field."""
        self._given[name] = value

    def take_sampling(self, names: Collection[str]) -> dict[str, Any]:
        """Takes sampling parameters, and logit_bias, whose keys are strings in JSON."""
        parameters = {name: self._given.pop(name) for name in names if name in self._given}
        biases = self.take_object("logit_bias")
        if biases is not None and len(biases) > MAX_LOGIT_BIAS:
            parameters["logit_bias"] = biases  # is refused for its length
        elif biases is not None:
            parameters["logit_bias"] = [(_token_id(key), bias) for key, bias in biases.items()]
        return parameters

    def finish(
        self, allowed: Collection[str], refused: Mapping[str, tuple[str, tuple[Any, ...]]]
    ) -> None:
        """Refuses what was not taken.

        Args:
            allowed: All fields that the route takes.
            refused: Fields that others have: what to do instead, and the values that are the same
                as leaving the field out.

        Raises:
            ApiError: A field is left.
        """
        for name in self._names:
            if name not in allowed and name not in refused:
                hint = did_you_mean(name, allowed)
                raise refusal(
                    f"unknown field {shorten(name)}{hint}; allowed: {', '.join(sorted(allowed))}",
                    name[:100],
                )
        for name, value in self._given.items():
            if name not in refused:
                raise refusal(
                    f"{name} is {shorten(value)}, which has no meaning in this request; leave it "
                    "out",
                    name,
                )
            advice, neutral = refused[name]
            # `1 == True`, but they are different values of JSON.
            if not any(value == one and type(value) is type(one) for one in neutral):
                raise refusal(f"{name} is not supported: {advice}", name)


@contextlib.contextmanager
def object_of(
    fields: Fields,
    name: str,
    allowed: Collection[str],
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] | None = None,
) -> Iterator[Fields]:
    """Takes an object, whose members are all taken in the block; for the rest see `finish`."""
    inner = Fields(fields.take_object(name) or {})
    with inside(name):
        yield inner
        inner.finish(allowed, refused or {})


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Names the field whose object is read in errors about its members."""
    try:
        yield
    except ApiError as error:
        raise refusal(f"{name}: {error.message}", name) from None
    except ValueError as error:
        raise refusal(f"{name}: {error}", name) from None


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise refusal(f"logit_bias has the key {shorten(key)}; allowed: token ids", "logit_bias")
    return int(key)
