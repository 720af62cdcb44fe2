# SPDX-License-Identifier: Apache-2.0
"""Colours the text of a stream by where its tokens come from."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.outputs import StreamChunk, TokenSource

_RESET: Final = "\x1b[0m"
_PLAIN: Final = ""
# By `StreamChunk.token_sources`: the start of the colour.
_COLORS: Final[dict[TokenSource, str]] = {
    "accepted": "\x1b[32m",
    "corrected": "\x1b[31m",
    "bonus": "\x1b[36m",
    "plain": _PLAIN,
}

COLOR_CHOICES: Final = ("auto", "always", "never")


def wants_color(choice: str) -> bool:
    """Returns whether `--color` asks for colours on standard output.

    Args:
        choice: "always", "never", or "auto": if standard output is a terminal, unless the variable
            NO_COLOR is set (https://no-color.org) or TERM is "dumb".
    """
    if choice != "auto":
        return choice == "always"
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def legend() -> str:
    """One line that shows what each colour means."""
    parts: dict[TokenSource, str] = {
        "accepted": "drafted and accepted",
        "corrected": "corrected after a rejected draft",
        "bonus": "bonus after accepted drafts",
        "plain": "without drafts",
    }
    return "tokens: " + ", ".join(_paint(text, _COLORS[source]) for source, text in parts.items())


class TokenColors:
    """Colours the text of one output, chunk by chunk.

    The visible text stays the same. Text that was held back, because a character was incomplete or
    a stop string might have begun, gets the colour of its own token when it comes.
    """

    def __init__(self) -> None:
        """Starts before the first chunk."""
        self._num_shown = 0  # characters
        # Of all tokens so far: where their text begins in the output, and their colours.
        self._offsets: list[int] = []
        self._colors: list[str] = []

    def paint(self, chunk: StreamChunk) -> str:
        """Returns the text of the next chunk with colours."""
        self._offsets += chunk.text_offsets
        self._colors += [_COLORS[source] for source in chunk.token_sources]
        painted = []
        end = self._num_shown + len(chunk.text)
        start = self._num_shown
        while start < end:
            # The last token that begins at or before the character.
            token = bisect_right(self._offsets, start) - 1
            color = self._colors[token] if token >= 0 else _PLAIN
            stop = token + 1
            while stop < len(self._offsets) and self._colors[stop] == color:
                stop += 1  # one run for tokens of one colour
            run_end = min(end, self._offsets[stop]) if stop < len(self._offsets) else end
            text = chunk.text[start - self._num_shown : run_end - self._num_shown]
            painted.append(_paint(text, color))
            start = run_end
        self._num_shown = end
        return "".join(painted)


def _paint(text: str, color: str) -> str:
    """Colours each line by itself, so that a pager or a scrolled terminal keeps its state."""
    if not color:
        return text
    return "\n".join(f"{color}{line}{_RESET}" if line else "" for line in text.split("\n"))
