# SPDX-License-Identifier: Apache-2.0
"""Checks that arguments of all kinds share, and how error messages show a value.

A value that is wrong raises ValueError; a value that other engines take and Paceline does not yet,
NotImplementedError. Each message names the argument, the value and the values allowed.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from paceline.vllm_arguments import advice_end, is_harmless, refused_too

# Linux: bytes of one name and of a whole path.
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 4095

# What names a model, for messages.
MODEL: Final = "the folder of a checkpoint, or the name of a model on the hub"

_MAX_REVISION: Final = 200
_MAX_SHOWN: Final = 60
# Python converts no integer of more than 4,300 digits to text.
_MAX_SHOWN_BITS: Final = 4096


# Parameters that are not for callers.
_NO_KEYWORDS: Final = ("self", "unknown")


class _Shortener(reprlib.Repr):
    """A `repr` of few elements and few levels, which cannot overflow the stack."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxarray = self.maxdict = limit
        self.maxset = self.maxfrozenset = self.maxdeque = limit

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= self.limit else repr(x[: self.limit]) + "..."

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= self.limit else repr(x[: self.limit]) + "..."

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() <= _MAX_SHOWN_BITS:
            return repr(x)
        return f"an integer of about {x.bit_length() * 30103 // 100000} digits"

    def repr_instance(self, x: Any, level: int) -> str:
        return " ".join(repr(x).split())


def shorten(value: Any, limit: int = _MAX_SHOWN) -> str:
    """Shows a value in a message.

    Args:
        value: Any object.
        limit: Maximum characters, not counting the "..." of a shortened value.

    Returns:
        Its `repr` or the beginning of that, in one line; its type if `repr` raises.
    """
    try:
        text = _Shortener(limit).repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit + 3 else text[:limit] + "..."


def quoted(names: tuple[str, ...] | list[str]) -> str:
    """Joins names for a message: 'a', 'b'."""
    return ", ".join(repr(name) for name in names)


def wrong_value(name: str, value: Any, allowed: str) -> ValueError:
    """The error about a value that is not allowed: its name, the value, and what is allowed."""
    return ValueError(f"{name} is {shorten(value)}; allowed: {allowed}")


def wrong_type(name: str, value: Any, allowed: str) -> ValueError:
    """The same with the value's type, where another type is expected."""
    return ValueError(f"{name} is {shorten(value)} ({type(value).__name__}); allowed: {allowed}")


def check_int(key: str, value: Any, low: int, high: int | None = None) -> int:
    """Checks that a value is an integer in [low, high].

    Args:
        key: Its name, for the message.
        value: The value. A bool, a float and a string are not integers.
        low: Smallest value allowed.
        high: Largest value allowed; None = no limit.

    Returns:
        The value as an int.

    Raises:
        ValueError: It is not an integer, or out of range.
    """
    # Each request of a server has a dozen of them.
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise wrong_type(key, value, allowed) from None
    if number < low or (high is not None and number > high):
        raise wrong_value(key, number, allowed)
    return number


def check_bool(key: str, value: Any) -> bool:
    """Checks that a value is True or False; ValueError, with its name `key`, for anything else."""
    if not isinstance(value, bool):
        raise wrong_value(key, value, "True or False")
    return value


def check_finite(key: str, value: Any, allowed: str) -> float:
    """Checks that a value is a finite number.

    Args:
        key: Its name, for the message.
        value: The value.
        allowed: The values allowed, for the message.

    Raises:
        ValueError: It is not a number, or infinite or NaN.
    """
    try:
        is_finite = not isinstance(value, bool) and math.isfinite(value)
    except (TypeError, OverflowError):  # no number, or an integer beyond all floats
        is_finite = False
    if not (is_finite and isinstance(value, int | float)):
        raise wrong_value(key, value, allowed)
    return float(value)


def check_choice(
    key: str, value: Any, allowed: tuple[str, ...], later: tuple[str, ...] = ()
) -> str:
    """Checks that a value is one of the allowed names.

    Args:
        key: Its name, for the message.
        value: The value.
        allowed: The allowed names.
        later: Names that are known but not supported yet.

    Returns:
        The value.

    Raises:
        NotImplementedError: It is one of `later`.
        ValueError: It is another value that is not allowed.
    """
    if isinstance(value, str) and value in allowed:
        return value
    if isinstance(value, str) and value in later:
        raise NotImplementedError(
            f"{key} {value!r} is not supported yet; this version has: {quoted(allowed)}"
        )
    raise wrong_value(key, value, quoted(allowed))


def check_text(name: str, value: Any, allowed: str = "a string") -> str:
    """Checks that a value is a string of valid Unicode, as tokenizers and C++ need.

    Args:
        name: Its name, for the message.
        value: The value. Bytes are refused, and so are lone surrogates, which Python makes of
            command line arguments that are not valid UTF-8.
        allowed: The allowed values, for the message.

    Returns:
        The value.

    Raises:
        ValueError: Not a string, or not valid Unicode.
    """
    if not isinstance(value, str):
        raise wrong_type(name, value, f"{allowed}{bytes_advice(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has {value[error.start]!r} at character {error.start}, half of a surrogate "
            "pair; allowed: valid Unicode (on a command line, UTF-8)"
        ) from None
    return value


def bytes_advice(value: Any) -> str:
    """The end of a message about a value that should be a string: advice if it is bytes."""
    return "; decode the bytes first" if isinstance(value, bytes | bytearray | memoryview) else ""


def check_path(name: str, value: Any, what: str = "the folder of a checkpoint") -> str:
    """Checks that a value can be a path, without looking at the file system.

    Args:
        name: Its name, for the message.
        value: The value: a string or a path-like object.
        what: The kind of file or folder, for the message.

    Returns:
        The path.

    Raises:
        ValueError: Not a string, empty, not valid UTF-8, or longer than the system allows.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    allowed = f"{what}, as a string or a path-like object"
    if not isinstance(path, str) or not path:
        raise wrong_type(name, value, f"{allowed}{bytes_advice(value)}")
    check_text(name, path)
    if "\0" in path:
        raise ValueError(f"{name} is {shorten(path)}, which has a null character; allowed: {what}")
    longest = max(len(part.encode()) for part in path.split("/"))
    if longest > _MAX_NAME_BYTES or len(path.encode()) > _MAX_PATH_BYTES:
        raise ValueError(
            f"{name} is {shorten(path)}, a path of {len(path.encode())} bytes with a name of "
            f"{longest}; allowed: at most {_MAX_PATH_BYTES} bytes, {_MAX_NAME_BYTES} a name"
        )
    return path


def check_revision(name: str, value: Any) -> None:
    """Checks that a value can be a revision of a model on the hub; None = the default branch.

    Raises:
        ValueError: It is no string, or not the name of a git branch, tag or commit.
    """
    if value is None:
        return
    is_name = isinstance(value, str) and re.fullmatch(r"\w[\w./@+-]*", value, re.ASCII)
    if not is_name or ".." in value or len(value) > _MAX_REVISION:
        raise ValueError(
            f"{name} is {shorten(value)}; allowed: a branch, a tag or a commit of a model on the "
            "hub, or None for the default branch"
        )


def parse_json(
    name: str, text: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parses JSON from a user.

    Args:
        name: Its name, for the message.
        text: The JSON.
        object_pairs_hook: As for `json.loads`.

    Returns:
        The value.

    Raises:
        ValueError: It is invalid, nested too deeply, or has an integer of thousands of digits.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        reason = "it is nested too deeply"
    except json.JSONDecodeError as error:
        reason = str(error)
    except ValueError:
        reason = "an integer in it has thousands of digits"
    raise ValueError(f"{name} is not valid JSON: {reason}: {shorten(text)}")


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar name, if there is one."""
    near = difflib.get_close_matches(given[:100], list(names), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def check_keywords(owner: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Refuses unknown keywords, lists the known ones, and says what to do instead of vLLM's.

    Raises:
        TypeError: One of `given` is not in `allowed`.
    """
    for key in given:
        if key not in allowed:
            raise TypeError(
                f"{owner} has no parameter {shorten(key)} in this version; it has: "
                f"{', '.join(allowed)}{advice_end(owner, key) or did_you_mean(key, allowed)}"
            )


def check_unknown(
    owner: str,
    function: Callable[..., object],
    unknown: Mapping[str, object],
    known: Mapping[str, object] | None = None,
) -> None:
    """Refuses what a function has received in its `**unknown: Never`, except for values of vLLM's
    arguments that change nothing.

    That parameter lets a function list its other keywords in its own error, and type checkers
    refuse every argument for it.

    Args:
        owner: What the function is called in the message.
        function: The function.
        unknown: The unknown keywords with their values.
        known: Keywords that vLLM takes with more values; those are refused in the same error.

    Raises:
        TypeError: There are others. The message says of each what to do instead.
    """
    refused = [key for key in unknown if not is_harmless(owner, key, unknown[key])]
    more = refused_too(owner, known or {})
    if not refused and len(more) < 2:  # one of `known` has an error of its own, which says more
        return
    parameters = inspect.signature(function).parameters
    allowed = [key for key in parameters if key not in _NO_KEYWORDS]
    if not more and len(refused) == 1:
        check_keywords(owner, refused, allowed)
    advice = {
        key: advice_end(owner, key) or did_you_mean(key, allowed) or "; there is no such parameter"
        for key in refused
    } | {key: f"; {text}" for key, text in more.items()}
    values = {**(known or {}), **unknown}
    listed = "\n".join(
        f"  {key}={shorten(values[key])}: {text.removeprefix('; ')}" for key, text in advice.items()
    )
    raise TypeError(
        f"{owner} does not take these arguments in this version:\n{listed}\n"
        f"it has: {', '.join(allowed)}"
    )
