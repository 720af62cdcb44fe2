# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: the reference, and pages and sources outside of docs/, become part of the site.

Links on the pages are relative to the file in the repository, so that they work there. For the
site, this file gives every linked file of the repository a place and rewrites the links: README.md
is the first page, other pages outside of docs/ get a name of their own, and sources are copied.
The pages of the reference exist on the site only: they are made of docstrings, of the comments in
public headers, of options.toml and of the options of the command line.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import reference_cli
import reference_headers
import reference_markdown
import reference_options
import reference_python

ROOT: Final = Path(__file__).resolve().parents[2]

# Pages outside of docs/, and their names on the site.
PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "python/paceline/demo/NOTICE.md": "notice.md",
    "python/training/README.md": "training.md",
}
_REPOSITORY_PATHS: Final = {name: path for path, name in PAGES.items()}

_LINK: Final = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s#]+)((?:#[^()\s]*)?\))")
_SOURCE: Final = re.compile(r'(<(?:a|img)\b[^>]*?\b(?:href|src)=")([^"#]+)((?:#[^"]*)?")')
_FENCE: Final = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def place_of(path: str) -> str:
    """The place on the site of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" + (".txt" if path.endswith((".c", ".cc", ".py")) else "")


def rewrite(markdown: str, page: str) -> tuple[str, set[str]]:
    """Rewrites the links of a page.

    Args:
        markdown: Its text.
        page: Its path in the repository.

    Returns:
        The text for the site, and the linked files of the repository that are outside of docs/.
    """
    outside: set[str] = set()
    folder = posixpath.dirname(place_of(page))

    def replace(link: re.Match[str]) -> str:
        if "://" in link[2]:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
        if (ROOT / path).is_dir():
            raise PluginError(f"{page}: {link[2]} is a folder; link one of its files")
        if not path.startswith("docs/") and path not in PAGES:
            outside.add(path)
        return link[1] + posixpath.relpath(place_of(path), folder or ".") + link[3]

    parts = _FENCE.split(markdown)
    for number in range(0, len(parts), 2):  # the odd ones are fenced blocks
        for pattern in (_LINK, _SOURCE):
            parts[number] = pattern.sub(replace, parts[number])
    return "".join(parts), outside


def reference() -> dict[str, str]:
    """Makes the pages of the reference, as Markdown by name."""
    parts = (reference_python, reference_options, reference_cli, reference_headers)
    pages = [page for part in parts for page in part.pages()]
    guides = [path.name for path in (ROOT / "docs").glob("*.md")]
    return reference_markdown.write(pages, guides)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of docs/, and the sources that any page links."""
    linked: set[str] = set()
    for path, name in PAGES.items():
        text, outside = rewrite((ROOT / path).read_text(), path)
        files.append(File.generated(config, name, content=text))
        linked |= outside
    for file in list(files.documentation_pages()):
        if file.src_uri not in _REPOSITORY_PATHS:
            linked |= rewrite(file.content_string, f"docs/{file.src_uri}")[1]
    for path in sorted(linked):
        if (ROOT / path).is_file():  # otherwise the strict build reports the link
            content = (ROOT / path).read_bytes()
            files.append(File.generated(config, place_of(path), content=content))
    for name, text in reference().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of pages in docs/; `on_files` has done the others."""
    if page.file.generated_by is not None:
        return markdown
    return rewrite(markdown, f"docs/{page.file.src_uri}")[0]
