# SPDX-License-Identifier: Apache-2.0
"""Values of files as they read in error messages: short, whatever a file holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# How many characters of a value, and how many names of a list, a message shows.
_MAX_CHARS: Final = 80
_MAX_NAMED: Final = 5
_MAX_PATH_CHARS: Final = 400


@dataclass(frozen=True)
class UnreadableNumber:
    """A number in a JSON file that Python's numbers do not hold: too long, too large or too small.

    Attributes:
        text: The number as the file spells it.
    """

    text: str

    def __str__(self) -> str:
        if len(self.text) <= _MAX_CHARS:
            return self.text
        return f"{self.text[:20]}... (a number of {len(self.text)} characters)"


# Its iterencode yields piece by piece, so a value is encoded only as far as it is shown.
_ENCODER: Final = json.JSONEncoder(default=str)


def show(value: object) -> str:
    """A JSON value in JSON's own words, shortened."""
    if isinstance(value, UnreadableNumber):
        return str(value)
    if isinstance(value, str):
        value = value[: _MAX_CHARS + 1]
    text = ""
    for piece in _ENCODER.iterencode(value):
        text += piece[: _MAX_CHARS + 1]
        if len(text) > _MAX_CHARS:
            return f"{text[: _MAX_CHARS - 3]}..."
    return text


def quote(text: str) -> str:
    """A string as Python writes it, shortened."""
    shown = repr(text[:_MAX_CHARS])
    return shown if len(text) <= _MAX_CHARS else f"{shown[:-1]}...{shown[-1]}"


def shorten(text: str) -> str:
    """A text without its end where it is long."""
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


def name_some(names: Iterable[str]) -> str:
    """The first names, quoted, and the number of the others."""
    listed = list(names)
    text = ", ".join(map(quote, listed[:_MAX_NAMED]))
    more = len(listed) - _MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text


def model_name(path: Path) -> str:
    """The name of a model in a line of progress: its folder's, or its name on the hub."""
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name or str(path)


def show_path(path: object) -> str:
    """A path on one line; one that is too long for any file system without its middle."""
    text = str(path)
    if not text.isprintable():
        text = repr(text)
    if len(text) <= _MAX_PATH_CHARS:
        return text
    return f"{text[:40]}...{text[-40:]} (a path of {len(text)} characters)"
