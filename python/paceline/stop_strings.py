# SPDX-License-Identifier: Apache-2.0
"""Ends a text at the first of several stop strings, however the text was cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Lets a growing text through up to its first stop string.

    The first stop string is the one that is complete first; of several that are complete with the
    same character, the longest. So the result is a function of the text alone.

    Every stop string has a cursor: how much of its beginning the text ends with (Knuth, Morris and
    Pratt). The furthest cursor is what has to be held back. Not thread-safe.

    Attributes:
        found: The stop string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool) -> None:
        """Starts with an empty text.

        Args:
            stop: The stop strings; none is empty.
            includes_stop: Whether the text ends after the stop string, or before it.
        """
        self.found: str | None = None
        self._includes_stop = includes_stop
        self._cursors = [_Cursor(string) for string in stop]
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Adds text. Not after a stop string was found.

        Args:
            text: What follows.
            may_stop: Whether a stop string that ends in this piece counts; if not, it is text like
                any other.

        Returns:
            Text that is now certain; may be empty. Never the beginning of what may become a stop
            string, unless stop strings are part of the text anyway.
        """
        for num_seen, character in enumerate(text, start=1):
            complete = [c.string for c in self._cursors if c.advance(character)]
            if complete and may_stop:
                self.found = max(complete, key=len)
                # What was held back is no shorter than the stop string's part in earlier pieces.
                whole = self._held + text[:num_seen]
                self._held = ""
                return whole if self._includes_stop else whole[: -len(self.found)]
        self._held += text
        num_held = 0 if self._includes_stop else max(c.num_matched for c in self._cursors)
        num_certain = len(self._held) - num_held
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return certain

    def flush(self) -> str:
        """Ends the text; returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Cursor:
    """How much of the beginning of a string a growing text ends with; never all of it."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # [i]: how much of the beginning string[:i + 1] ends with, less than all of it.
        self._fallback = [0] * len(string)
        for i in range(1, len(string)):
            self._fallback[i] = self._extend(self._fallback[i - 1], string[i])

    def advance(self, character: str) -> bool:
        """Adds a character to the text; returns whether the text now ends with the string."""
        self.num_matched = self._extend(self.num_matched, character)
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._fallback[-1]
        return True

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.string[num_matched] != character:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.string[num_matched] == character)
