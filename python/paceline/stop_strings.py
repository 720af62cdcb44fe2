# SPDX-License-Identifier: Apache-2.0
"""Ends a text at the first of several stop strings, however the text is divided into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes on a growing text up to its first stop string.

    The first stop string is the one that is completed first. If one character completes several,
    it is the longest. So the result depends only on the text.

    Each stop string has a cursor: the length of its longest prefix that the text ends with (the
    algorithm of Knuth, Morris and Pratt). The filter holds back as much text as the largest cursor.
    Not thread-safe.

    Attributes:
        found: The stop string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool) -> None:
        """Starts with an empty text.

        Args:
            stop: The stop strings. None of them may be empty.
            includes_stop: Whether the text ends after the stop string instead of before it.
        """
        self.found: str | None = None
        self._includes_stop = includes_stop
        self._cursors = [_Cursor(string) for string in stop]
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Adds text. Must not be called after a stop string was found.

        Args:
            text: The next piece.
            may_stop: Whether a stop string that ends in this piece ends the text. If not, it is
                ordinary text.

        Returns:
            The text that is now final; may be empty. It never ends with the beginning of a possible
            stop string, unless the text includes stop strings.
        """
        for num_seen, character in enumerate(text, start=1):
            complete = [c.string for c in self._cursors if c.advance(character)]
            if complete and may_stop:
                self.found = max(complete, key=len)
                # The held text contains at least the part of the stop string in earlier pieces.
                whole = self._held + text[:num_seen]
                self._held = ""
                return whole if self._includes_stop else whole[: -len(self.found)]
        self._held += text
        num_held = 0 if self._includes_stop else max(c.num_matched for c in self._cursors)
        num_certain = len(self._held) - num_held
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return certain

    def flush(self) -> str:
        """Ends the text and returns the held text."""
        held, self._held = self._held, ""
        return held


class _Cursor:
    """The length of the longest proper prefix of a string that a growing text ends with."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        # [i]: length of the longest proper prefix that string[:i + 1] also ends with.
        self._fallback = [0] * len(string)
        for i in range(1, len(string)):
            self._fallback[i] = self._extend(self._fallback[i - 1], string[i])

    def advance(self, character: str) -> bool:
        """Adds a character to the text and returns whether the text now ends with the string."""
        self.num_matched = self._extend(self.num_matched, character)
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._fallback[-1]
        return True

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.string[num_matched] != character:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.string[num_matched] == character)
