# SPDX-License-Identifier: Apache-2.0
"""Reads the Markdown pages of the repository: their code blocks, headings, links and images."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folders with pages of others, or with what a build made.
_SKIPPED = {"build", "dist", "node_modules", "site", "third_party"}

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>\S*)(?P<rest>.*)$")
_MARKER = re.compile(r"^ *<!-- test: (?P<how>\S+)(?: (?P<why>.+?))? -->$")
_HEADING = re.compile(r"^(#{1,6}) (?P<text>.+?)\s*$")
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+(?:\([^()]*\))?)\)"
)
_TAG = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"(?P<target>[^\"]+)\"")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The page, relative to the repository.
        line: The line of the fence, from 1.
        language: The word after the fence; "" without one.
        code: The text between the fences, without the indentation of the fence.
        how: The word of the marker `<!-- test: HOW WHY -->` on the line before the fence; None
            without a marker.
        why: The rest of the marker; None without one.
    """

    page: Path
    line: int
    language: str
    code: str
    how: str | None
    why: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages, relative to the repository, in order."""
    found = []
    for path in sorted(ROOT.rglob("*.md")):
        parts = path.relative_to(ROOT).parts
        if not any(part in _SKIPPED or part.startswith(".") for part in parts[:-1]):
            found.append(Path(*parts))
    return found


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        ValueError: A fence is not closed.
    """
    found: list[Block] = []
    opened: re.Match[str] | None = None
    start, code, before = 0, [], ""
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, start, code = fence, number, []
            marker = _MARKER.match(before)
        elif opened is not None and fence and fence["ticks"] == opened["ticks"]:
            if fence["language"]:
                raise ValueError(f"{page}:{number}: a fence opens inside the block of line {start}")
            found.append(
                Block(
                    page,
                    start,
                    opened["language"],
                    "".join(f"{text.removeprefix(opened['indent'])}\n" for text in code),
                    marker["how"] if marker else None,
                    marker["why"] if marker else None,
                )
            )
            opened = None
        elif opened is not None:
            code.append(line)
        before = line
    if opened is not None:
        raise ValueError(f"{page}:{start}: the block is not closed")
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks and its code spans, with as many lines."""
    lines, fence = [], None
    for line in (ROOT / page).read_text().splitlines():
        found = _FENCE.match(line)
        if fence is None and found:
            fence = found["ticks"]
            lines.append("")
        elif fence is not None:
            if found and found["ticks"] == fence:
                fence = None
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site (`pymdownx.slugs`) make it."""
    text = _LINK.sub(lambda link: link["text"], heading).replace("`", "")
    text = re.sub(r"[^\w\- ]", "", text.strip().lower())
    return text.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page."""
    found: set[str] = set()
    for line in prose(page).splitlines():
        heading = _HEADING.match(line)
        if heading:
            name, number = slug(heading["text"]), 0
            while (name if not number else f"{name}-{number}") in found:
                number += 1
            found.add(name if not number else f"{name}-{number}")
    return found


def links(page: Path) -> list[tuple[int, str]]:
    """The targets of links and images of a page, with their lines."""
    found = []
    for number, line in enumerate(prose(page).splitlines(), 1):
        line = re.sub(r"`[^`]*`", lambda span: "`" + " " * (len(span[0]) - 2) + "`", line)
        for pattern in (_LINK, _TAG):
            found += [(number, match["target"]) for match in pattern.finditer(line)]
    return found
