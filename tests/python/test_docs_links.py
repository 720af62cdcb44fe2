# SPDX-License-Identifier: Apache-2.0
"""Links, anchors and images of all pages."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import markdown_pages
from markdown_pages import ROOT, anchors, links, pages


def problem(page: Path, target: str) -> str | None:
    """What is wrong with a link of a page; None if nothing is."""
    parts = urlsplit(target)
    if parts.scheme:
        # Nothing is fetched: only the form is checked.
        is_well_formed = parts.scheme == "https" and re.fullmatch(r"[\w.-]+\.[a-z]+", parts.netloc)
        return None if is_well_formed else "not https://host/..."
    if target.startswith("/"):
        return "a path from the root works neither in the repository nor on the site"
    path = ROOT / page if not parts.path else (ROOT / page).parent / parts.path
    if not path.exists():
        return "no such file"
    if not path.resolve().is_relative_to(ROOT):
        return "outside of the repository"
    if parts.fragment:
        if path.suffix != ".md":
            return "an anchor of a file that is no page"
        if parts.fragment not in anchors(path.resolve().relative_to(ROOT)):
            return "no such heading"
    return None


def test_links_resolve() -> None:
    wrong = [
        f"{page}:{line}: {target}: {problem(page, target)}"
        for page in pages()
        for line, target in links(page)
        if problem(page, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_page_is_checked() -> None:
    names = {str(page) for page in pages()}
    assert {"README.md", "docs/performance.md", "python/training/README.md"} <= names
    # Reference links would not be seen.
    for page in pages():
        assert not re.search(r"^\[[^\]]+\]: ", markdown_pages.prose(page), re.MULTILINE), page


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("docs/no-such-page.md", "no such file"),
        ("docs/performance.md#no-such-heading", "no such heading"),
        ("#no-such-heading", "no such heading"),
        ("http://example.org", "not https://host/..."),
        ("https://nowhere", "not https://host/..."),
        ("/docs/performance.md", "a path from the root works neither in the repository nor"),
        ("https://example.org/a?b", None),
        ("docs/performance.md#one-h200", None),
    ],
)
def test_a_wrong_link_is_found(target: str, expected: str | None) -> None:
    found = problem(Path("README.md"), target)
    assert found is None if expected is None else found is not None and found.startswith(expected)


def test_quickstart_lists_every_example() -> None:
    listed = {target for _, target in links(Path("docs/quickstart.md"))}
    examples = [
        path
        for path in (ROOT / "examples").rglob("*")
        if path.suffix in (".c", ".cc", ".py")
        and (path.stem == "main" or not (path.parent / "main.cc").exists())
    ]
    assert len(examples) >= 8
    for path in examples:
        assert f"../{path.relative_to(ROOT)}" in listed
