# SPDX-License-Identifier: Apache-2.0
"""Reads the values of options: lists, and the files that a bench writes."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from paceline.bench.plot import check_can_plot
from paceline.checks import check_path, quoted, shorten, wrong_value
from paceline.limits import MAX_NUM_SEQS

#: The least value of numbers that must be above 0.
ABOVE_ZERO: Final = math.nextafter(0.0, 1.0)

# Options with a file to write, and those of them that are figures.
_OUTPUTS: Final = ("json", "plot", "trace", "out")
_FIGURES: Final = ("plot", "out")

_Number = TypeVar("_Number", int, float)


def parse_list(
    name: str,
    text: str,
    kind: Callable[[str], _Number],
    allowed: str,
    low: float = -math.inf,
    high: float = math.inf,
) -> list[_Number]:
    """Reads numbers separated by commas.

    Args:
        name: The option, for the message.
        text: Its value.
        kind: `int` or `float`.
        allowed: The values allowed, for the message.
        low: The smallest number allowed.
        high: The largest number allowed.

    Raises:
        ValueError: A part is no such number.
    """
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(low <= value <= high for value in values):
        raise wrong_value(name, text, allowed)
    return values


def parse_names(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    """Reads names separated by commas.

    Raises:
        ValueError: One of them is not allowed.
    """
    names = text.split(",")
    if not set(names) <= set(allowed):
        raise wrong_value(name, text, f"a list of {quoted(allowed)}")
    return names


def parse_concurrency(text: str) -> list[int]:
    """Reads --concurrency."""
    allowed = f"integers from 1 to {MAX_NUM_SEQS}, for example 1,16,64"
    return parse_list("concurrency", text, int, allowed, 1, MAX_NUM_SEQS)


def check_outputs(args: argparse.Namespace) -> None:
    """Checks the files of the output before anything runs, since they are written at the end.

    Raises:
        ValueError: One of them cannot be written, or is to be a figure that cannot be drawn.
    """
    for check, names in ((_check_can_write, _OUTPUTS), (check_can_plot, _FIGURES)):
        for name in names:
            path = getattr(args, name, None)
            if path is not None and (name, path) != ("json", "-"):
                check(f"--{name}", path)


def _check_can_write(option: str, path: str) -> None:
    file = Path(check_path(option, path, "a file to write"))
    if file.is_dir():
        reason = "which is a folder"
    elif not file.parent.is_dir():
        reason = f"but there is no folder {shorten(str(file.parent), 200)}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "which may not be written"
    else:
        return
    raise ValueError(
        f"{option} is {shorten(path, 200)}, {reason}; allowed: a file that may be written, in a "
        "folder that exists"
    )
