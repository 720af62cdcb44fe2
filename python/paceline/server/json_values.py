# SPDX-License-Identifier: Apache-2.0
"""A parser of JSON that a large text of a client cannot turn against the server.

`json.loads` keeps Python's lock from its first character to its last: an event loop stands still
for seconds while any thread reads 8 MB of brackets. `parse_json` leaves strings and numbers to
`json`, reads objects and lists itself, and limits their depth and how many values there are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn

from paceline.checks import shorten

MAX_JSON_DEPTH: Final = 64
#: Of one request. As many take some 50 MB; 4,096 messages with parts have a tenth of it.
MAX_VALUES: Final = 2**18

_skip_space: Final = re.compile(r"[ \t\n\r]*").match
_match_numbers: Final = re.compile(r"[-+.eE\d, \t\n\r]*", re.ASCII).match
# Numbers of a list are read by `json` together, as many as these characters hold.
_NUMBERS_CHARS: Final = 2**14
# An object without other objects and lists in it, such as a message, is read by `json` as a whole
# if it has at most as many characters.
_match_flat: Final = re.compile(r'\{(?:[^"{}\[\]]|"(?:[^"\\]|\\.)*+")*+\}').match
_FLAT_CHARS: Final = 2**12
_CLOSING: Final = {"[": "]", "{": "}"}
TOO_DEEP: Final = f"is nested too deeply; allowed: {MAX_JSON_DEPTH} levels"


class JsonRefused(ValueError):
    """JSON that is valid, and that the server does not take; the message begins with a verb.

    Attributes:
        field: The field of the outermost object that has the fault; None if it is not in one.
    """

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


def twice(key: str) -> JsonRefused:
    """Makes the error for an object that has a key twice."""
    return JsonRefused(f"has the key {shorten(key)} twice in an object; allowed: once", None)


def refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which `json` reads."""
    raise JsonRefused(f"has {name}, which is not JSON; allowed: finite numbers", None)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonRefused(f"has {shorten(text)}, which is too large; allowed: finite numbers", None)
    return value


#: Reads the JSON of a model's output. What it returns can be written as JSON again: NaN, and
#: numbers that float64 does not hold, are a ValueError.
OUTPUT_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite)
read_json: Final = OUTPUT_DECODER.decode


def _decoders(**options: Any) -> tuple[_Decode, _Decode]:
    """Makes what reads a value at a place of a text, and what reads an object as its pairs."""
    return (
        json.JSONDecoder(**options).raw_decode,
        json.JSONDecoder(**options, object_pairs_hook=list).raw_decode,
    )


_Decode = Callable[[str, int], tuple[Any, int]]
# By `is_strict`. They keep nothing of a text: a parser that they pointed back to would stay until
# the garbage collector runs, which holds up the event loop longer, the more parsers there are.
_DECODERS: Final = {False: _decoders(), True: _decoders(parse_constant=refuse_constant)}


class Quota:
    """How many values may still be parsed.

    Attributes:
        left: The number.
    """

    def __init__(self, limit: int = MAX_VALUES) -> None:
        """Starts with all of them."""
        self.left = limit
        self._limit = limit

    def take(self, num_values: int, field: str | None) -> None:
        """Counts values; JsonRefused if there are too many."""
        self.left -= num_values
        if self.left < 0:
            raise JsonRefused(
                f"has too many values; allowed: {self._limit} objects, lists, strings, keys and "
                "other values",
                field,
            )


def parse_json(
    text: str, quota: Quota, *, uncounted: Collection[str] = (), is_strict: bool = True
) -> Any:
    """Parses JSON, and keeps Python's lock for a few milliseconds at a time.

    Args:
        text: The JSON.
        quota: Counts the values.
        uncounted: Fields of the outermost object whose lists of numbers do not count.
        is_strict: Refuse an object with a key twice, NaN and Infinity; otherwise the last value of
            a key counts, as for `json.loads`.

    Returns:
        The value.

    Raises:
        JsonRefused: It has too many levels or values, or is refused because of `is_strict`.
        json.JSONDecodeError: It is not valid.
        ValueError: It has an integer of thousands of digits.
    """
    return _Parser(text, quota, uncounted, is_strict=is_strict).parse()


class _Parser:
    """One text and the containers of it that are open."""

    def __init__(
        self, text: str, quota: Quota, uncounted: Collection[str], *, is_strict: bool
    ) -> None:
        self._text = text
        self._quota = quota
        self._uncounted = uncounted
        self._is_strict = is_strict
        self._decode, self._decode_pairs = _DECODERS[is_strict]
        self._open: list[Any] = []
        self._keys: list[str | None] = []  # of each of them, the key whose value is read
        self._known_keys: dict[str, str] = {}  # a key that comes often takes memory once

    @property
    def _field(self) -> str | None:
        return self._keys[0] if self._keys else None

    def parse(self) -> Any:
        """Returns the value."""
        text, opened = self._text, self._open
        at = self._skip(0)
        while True:
            value, at, is_whole = self._begin_value(at)
            # A value that is whole may end the containers around it.
            while is_whole:
                if not opened:
                    if at != len(text):
                        raise json.JSONDecodeError("Extra data", text, at)
                    return value
                inner = opened[-1]
                if isinstance(inner, list):
                    inner.append(value)
                else:
                    inner[self._keys[-1]] = value
                char = text[at : at + 1]
                if char == ",":
                    at = self._skip(at + 1)
                    if isinstance(inner, dict):
                        at = self._read_key(at)
                    break
                if char != ("]" if isinstance(inner, list) else "}"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
                value, at = opened.pop(), self._skip(at + 1)
                self._keys.pop()

    def _skip(self, at: int) -> int:
        match = _skip_space(self._text, at)
        assert match is not None
        return match.end()

    def _begin_value(self, at: int) -> tuple[Any, int, bool]:
        """Reads a scalar or an empty container, or opens a container.

        Returns:
            The value, where the next character is that is no space, and whether the value is whole.
        """
        text, opened = self._text, self._open
        char = text[at : at + 1]
        if char in ("[", "{"):
            self._quota.take(1, self._field)
            if len(opened) == MAX_JSON_DEPTH:
                raise JsonRefused(TOO_DEEP, self._field)
            if char == "{" and opened and _match_flat(text, at, at + _FLAT_CHARS):
                pairs, at = self._decode_pairs(text, at)
                return self._make_flat(pairs), self._skip(at), True
            made: Any = [] if char == "[" else {}
            at = self._skip(at + 1)
            if text[at : at + 1] == _CLOSING[char]:
                return made, self._skip(at + 1), True
            opened.append(made)
            self._keys.append(None)
            return made, at if char == "[" else self._read_key(at), False
        if opened and isinstance(opened[-1], list):
            at = self._read_numbers(at)
        self._quota.take(1, self._field)
        value, at = self._decode(text, at)
        return value, self._skip(at), True

    def _make_flat(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Makes an object without others in it, and counts what it has."""
        self._quota.take(2 * len(pairs), self._field)
        made: dict[str, Any] = {}
        for key, value in pairs:
            if self._is_strict and key in made:
                raise twice(key)
            made[self._known_keys.setdefault(key, key)] = value
        return made

    def _read_key(self, at: int) -> int:
        """Reads a key of the innermost object; returns where its value begins."""
        text, inner = self._text, self._open[-1]
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError(
                "Expecting property name enclosed in double quotes", text, at
            )
        key, at = self._decode(text, at)
        key = self._known_keys.setdefault(key, key)
        if len(self._keys) == 1:
            self._keys[0] = key  # before the quota, whose error names it
        self._quota.take(1, self._field)
        if self._is_strict and key in inner:
            raise twice(key)
        self._keys[-1] = key
        at = self._skip(at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        return self._skip(at + 1)

    def _read_numbers(self, at: int) -> int:
        """Reads most of a long run of numbers in a list; returns where the rest begins."""
        text = self._text
        while True:
            run = _match_numbers(text, at, at + _NUMBERS_CHARS)
            assert run is not None
            end = text.rfind(",", at, run.end())
            if end <= at:
                return at
            try:
                numbers = json.loads(f"[{text[at:end]}]")
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, text, at + error.pos - 1) from None
            if self._field not in self._uncounted:
                self._quota.take(len(numbers), self._field)
            self._open[-1] += numbers
            at = self._skip(end + 1)
