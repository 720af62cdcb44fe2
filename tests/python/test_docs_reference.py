# SPDX-License-Identifier: Apache-2.0
"""The reference has an entry with text for every public name, and each page stands in the nav."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import docstring_sections
import paceline
import reference_headers
import reference_markdown
import reference_python
import site_pages
from markdown_pages import ROOT
from paceline import loader
from reference_markdown import Entry, Group, Item, Page, Section

PYTHON = {
    name: entry
    for page in reference_python.pages()
    for entry in page.entries()
    for name in entry.names
}
HEADERS = ROOT / "cpp/include/paceline"
CPP = {
    (group.title, name): entry
    for page in reference_headers.pages()
    for group in page.groups
    for entry in group.entries
    for name in entry.names
}
# A declaration at the beginning of a line, or in one line of a namespace.
DECLARATIONS = re.compile(
    r"^(?:typedef )?(?:struct|class|enum class|enum)(?: PACELINE_API)? (\w+)[^;\n]*\{"
    r"|^enum \{ (\w+)"
    r"|^using (\w+) ="
    r"|^typedef struct \w+ (\w+);"
    r"|^typedef void \(\*(\w+)\)"
    r"|^(?:\[\[nodiscard\]\] )?(?:constexpr|PACELINE_API)\s[^;{=]*?(\w+)\(",
    re.MULTILINE,
)


def declared() -> set[tuple[str, str]]:
    """What the public headers declare, by header."""
    found = set()
    for path in HEADERS.glob("*.h"):
        code = re.sub(r"//.*", "", path.read_text())
        for names in DECLARATIONS.findall(code):
            found.add((f"paceline/{path.name}", next(filter(None, names))))
    return found


@pytest.mark.parametrize("name", paceline.__all__)
def test_a_name_of_the_package_has_text(name: str) -> None:
    assert PYTHON[name].has_text()


def test_names_of_the_loader_have_text() -> None:
    assert [
        name for name in loader.__all__ if not PYTHON[f"paceline.loader.{name}"].has_text()
    ] == []


@pytest.mark.parametrize(
    "name", ["LLM", "AsyncLLM", "SamplingParams", "Tokenizer", "RequestStream"]
)
def test_members_have_entries(name: str) -> None:
    listed = {item.names[0] for part in PYTHON[name].sections for item in part.items}
    listed |= {child.names[0].rpartition(".")[2] for child in PYTHON[name].children}
    cls = getattr(paceline, name)
    members = {one for base in cls.__mro__[:-1] for one in vars(base) if not one.startswith("_")}
    if name == "RequestStream":
        assert "close" in members
    assert {one for one in members if getattr(cls, one).__doc__} <= listed


def test_headers_have_text() -> None:
    found = declared()
    assert len(found) > 70 and ("paceline/executor.h", "Executor") in found
    assert ("paceline/paceline.h", "paceline_poll") in found
    assert found <= set(CPP)
    assert [name for name in sorted(found) if not CPP[name].has_text()] == []


def test_fields_of_a_header() -> None:
    (section,) = [part for part in CPP["paceline/request.h", "RequestEvent"].sections if part.items]
    event = {name: item for item in section.items for name in item.names}
    assert event["token_ids"].type == "std::vector<int32_t>"
    assert event["token_ids"].text == "emitted by this iteration"
    assert event["finish_reason"].default == "FinishReason::kNone"
    # One comment for two fields.
    options = CPP["paceline/paceline.h", "paceline_options"]
    assert ["prompt_lookup_min", "prompt_lookup_max"] in [
        item.names for part in options.sections for item in part.items
    ]
    # A comment that goes on below its line.
    c_options = CPP["paceline/paceline.h", "paceline_options"]
    [length] = [
        item
        for part in c_options.sections
        for item in part.items
        if item.names == ["max_model_len"]
    ]
    assert length.text.endswith("if the memory has room for it")


def test_functions_of_a_header() -> None:
    members = {one.names[0]: one for one in CPP["paceline/executor.h", "Executor"].all()}
    made = members["Executor::Executor"]
    assert made.code.endswith("    const Progress& progress = {});")
    assert "Executor::Impl" not in members
    put = next(
        one
        for one in CPP["paceline/model.h", "ModelBuilder"].children
        if len(one.sections) > 1 and "put" in one.code
    )
    listed = [item.names[0] for part in put.sections for item in part.items]
    assert listed == ["dtype", "shape", "strides", "data"]
    bytes_of = CPP["paceline/dtype.h", "dtype_bytes"]
    assert bytes_of.code == "constexpr int64_t dtype_bytes(DType dtype);"


def test_arguments_have_types_and_defaults() -> None:
    [arguments] = [part for part in PYTHON["LLM"].sections if part.title == "Arguments"]
    by_name = {item.names[0]: item for item in arguments.items}
    assert (by_name["max_num_seqs"].type, by_name["max_num_seqs"].default) == ("int", "64")
    assert [part.title for part in PYTHON["LLM.generate"].sections] == [
        "",
        "Arguments",
        "Returns",
        "Raises",
    ]
    assert PYTHON["SamplingParams"].sections[-2].items[0].default == "1"


def test_a_section_ends_with_its_indentation() -> None:
    parsed = docstring_sections.parse_docstring("A.\n\nArgs:\n    x: One\n        of two.\n\nB.")
    assert parsed == {"": "A.\n\nB.", "Args": "x: One\n    of two."}


def test_names_become_links_where_unique() -> None:
    text = "`Other`, `other.run`, `width`, `max_width`, `docs/server.md`, `none_such`, a*b"
    other = Entry(
        ["Other"],
        "",
        "",
        [
            Section(
                "Attributes",
                items=[
                    Item(["width"], "", has_anchor=True),
                    Item(["max_width"], "", has_anchor=True),
                ],
            )
        ],
        [Entry(["Other.run"], "", "", [])],
    )
    pages = [
        Page(
            "one.md",
            "python",
            "One",
            "",
            [Group("g", "", [Entry(["use"], "", "", [Section(text=text)])])],
        ),
        Page("two.md", "python", "Two", "", [Group("g", "", [other])]),
    ]
    written = reference_markdown.write(pages, ["server.md"])
    assert written["one.md"].splitlines()[-1] == (
        "[`Other`](two.md#Other), `other.run`, `width`, [`max_width`](two.md#Other.max_width), "
        "[server.md](server.md), `none_such`, a\\*b"
    )
    assert "{ #Other.run }" in written["two.md"]


def test_every_page_is_in_the_nav_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    listed = [
        page
        for entry in nav
        for pages in entry.values()
        for page in (pages if isinstance(pages, list) else [pages])
    ]
    exist = {path.name for path in Path(ROOT / "docs").glob("*.md")}
    exist |= set(site_pages.PAGES.values()) | set(site_pages.reference())
    assert sorted(listed) == sorted(exist)
