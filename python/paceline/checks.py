# SPDX-License-Identifier: Apache-2.0
"""Checks that arguments of all kinds share."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

_P = ParamSpec("_P")


def quoted(names: tuple[str, ...] | list[str]) -> str:
    """Joins names for a message: 'a', 'b'."""
    return ", ".join(repr(name) for name in names)


def check_int(key: str, value: Any, low: int, high: int | None = None) -> int:
    """Checks that a value is an integer in [low, high].

    Args:
        key: Its name, for the message.
        value: What was given. A bool, a float and a string are no integers.
        low: Least value allowed.
        high: Greatest value allowed; None = no bound.

    Returns:
        The value as an int.

    Raises:
        ValueError: Not an integer or out of range.
    """
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{key} is {value!r} ({type(value).__name__}); allowed: {allowed}"
        ) from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{key} is {number}; allowed: {allowed}")
    return number


def check_choice(
    key: str, value: Any, allowed: tuple[str, ...], later: tuple[str, ...] = ()
) -> str:
    """Checks that a value is one of some names.

    Args:
        key: Its name, for the message.
        value: What was given.
        allowed: Names that work.
        later: Names that are known and do not work yet.

    Returns:
        The value.

    Raises:
        NotImplementedError: One of `later`.
        ValueError: Anything else that is not allowed.
    """
    if isinstance(value, str) and value in allowed:
        return value
    if isinstance(value, str) and value in later:
        raise NotImplementedError(
            f"{key} {value!r} is not there yet; this version has: {quoted(allowed)}"
        )
    raise ValueError(f"{key} is {value!r}; allowed: {quoted(allowed)}")


def check_keywords(owner: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Names what exists when a keyword that other engines take does not.

    Raises:
        TypeError: One of `given` is not in `allowed`.
    """
    for key in given:
        if key not in allowed:
            raise TypeError(
                f"{owner} has no parameter {key!r} in this version; it has: {', '.join(allowed)}"
            )


def checks_keywords(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates an `__init__` so that it refuses unknown keywords as `check_keywords` does."""
    owner = init.__qualname__.split(".")[0]
    allowed = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        check_keywords(owner, kwargs, allowed)
        init(*args, **kwargs)

    return checked
