# SPDX-License-Identifier: Apache-2.0
"""The site builds strictly, without network, and has every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import markdown_pages

ROOT = Path(__file__).parents[2]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Builds the site as `make docs` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, "-f", config],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )


def test_site_builds_strictly(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {page.name for page in tmp_path.glob("*.html")}
    assert {"index.html", "contributing.html", "training.html"} <= pages
    for page in markdown_pages.pages():
        if page.parent == Path("docs"):
            assert f"{page.stem}.html" in pages

    for page in tmp_path.glob("*.html"):
        html = page.read_text()
        # Nothing is fetched from elsewhere.
        fetched = re.findall(
            r"<(?:link|script|img|iframe)\b[^>]*(?:href|src)=\"?(https?:[^\" >]+)", html
        )
        assert not fetched, page
        # What a page shows or links exists on the site.
        for target in re.findall(r"(?:href|src)=\"([^\"#:]+)(?:#[^\"]*)?\"", html):
            if page.name != "404.html":
                assert (tmp_path / target).exists(), (page.name, target)


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[nowhere](nowhere.md)\n")
    text = (ROOT / "mkdocs.yml").read_text()
    config = text[: text.index("hooks:")] + text[text.index("plugins:") : text.index("\nnav:\n")]
    (tmp_path / "mkdocs.yml").write_text(config.replace("build/site", "site"))
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1 and "nowhere.md" in done.stderr
