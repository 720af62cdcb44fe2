# SPDX-License-Identifier: Apache-2.0
"""Divides docstrings in Google's style into their sections."""

from __future__ import annotations

import inspect
import re
from typing import Final

from reference_markdown import Item, Section

# Titles of sections of docstrings, and how the pages call them.
_TITLES: Final = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
    "Example": "Example",
}
_WITH_ITEMS: Final = ("Args", "Attributes", "Raises")


def parse_docstring(text: str | None) -> dict[str, str]:
    """Divides a docstring in Google's style into its sections; the text before them is ""."""
    sections = {"": ""}
    name = ""
    for line in inspect.cleandoc(text or "").splitlines():
        if line.removesuffix(":") in _TITLES and line.endswith(":"):
            name = line.removesuffix(":")
            sections[name] = ""
        else:
            if line and not line.startswith(" "):
                name = ""  # a section ends where its indentation does
            sections[name] += line + "\n"
    return {name: _dedent(body) for name, body in sections.items()}


def _dedent(text: str) -> str:
    return inspect.cleandoc("\n" + text.strip("\n")) if text.strip() else ""


def parse_items(text: str) -> list[Item]:
    """Divides a section into items, which begin with "name: "."""
    items = []
    for part in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        if part.strip():
            name, _, rest = part.partition(":")
            first, _, more = rest.strip().partition("\n")
            items.append(Item([name.strip()], f"{first}\n{_dedent(more)}".strip()))
    return items


def sections_of(text: str | None) -> list[Section]:
    """Makes sections of a docstring."""
    made = []
    for name, body in parse_docstring(text).items():
        if name == "Example":
            made.append(Section(_TITLES[name], example=body))
        elif name in _WITH_ITEMS:
            made.append(Section(_TITLES[name], items=parse_items(body)))
            for item in made[-1].items:
                item.is_link = name == "Raises"
        elif body:
            made.append(Section(_TITLES.get(name, ""), text=body))
    return [section for section in made if section.text or section.items or section.example]
