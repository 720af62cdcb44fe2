# SPDX-License-Identifier: Apache-2.0
"""The notation in which Gemma 4 writes the arguments of a call, as in call:NAME{key:value,...}.

A string is between two <|"|>, keys are bare or strings, and everything else is as in JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

_QUOTE: Final = '<|"|>'
_MAX_DEPTH: Final = 32
_BARE: Final = re.compile(r"[^,:{}\[\]]+")


class _Malformed(Exception):
    pass


def read_gemma_call(text: str) -> tuple[str, str] | None:
    """Reads a call.

    Args:
        text: What is between the tags of a call.

    Returns:
        The arguments as JSON and the name of the function; None if it is no call.
    """
    found = re.match(r"\s*call:([\w.-]+)", text)
    if found is None:
        return None
    notation = _Notation(text[found.end() :].strip())
    try:
        arguments = notation.value(0)
        notation.check_end()
    except _Malformed:
        return None
    if not isinstance(arguments, dict):
        return None
    return json.dumps(arguments, ensure_ascii=False), found[1]


class _Notation:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def value(self, depth: int) -> Any:
        """Reads one value."""
        if depth > _MAX_DEPTH:
            raise _Malformed
        if self._skip("{"):
            return self._object(depth)
        if self._skip("["):
            items: list[Any] = []
            while not self._skip("]"):
                if items:
                    self._expect(",")
                items.append(self.value(depth + 1))
            return items
        if self._skip(_QUOTE):
            return self._string()
        bare = self._bare()
        try:
            return json.loads(bare)
        except (ValueError, RecursionError):
            return bare

    def check_end(self) -> None:
        """Raises an error if there is more."""
        if self._text[self._at :].strip():
            raise _Malformed

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self._skip("}"):
            if made:
                self._expect(",")
            key = self._string() if self._skip(_QUOTE) else self._bare()
            self._expect(":")
            made[key] = self.value(depth + 1)
        return made

    def _string(self) -> str:
        end = self._text.find(_QUOTE, self._at)
        if end < 0:
            raise _Malformed
        text, self._at = self._text[self._at : end], end + len(_QUOTE)
        return text

    def _bare(self) -> str:
        found = _BARE.match(self._text, self._at)
        if found is None or not found[0].strip():
            raise _Malformed
        self._at = found.end()
        return found[0].strip()

    def _skip(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise _Malformed
