# SPDX-License-Identifier: Apache-2.0
"""The pages of the reference as data, their links, and how they become Markdown.

`reference_python.py` makes entries of docstrings and `reference_headers.py` of the comments in
public headers. Here names in their texts become links to their entries, if they are unique.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

# Code in a text: a span in backticks, a page of docs/, or a word that only code has.
_SPANS: Final = re.compile(
    r"""`(?P<code>[^`]+)`
    | (?<![\w/])docs/(?P<page>[\w-]+\.md)
    | (?P<header>\bpaceline/\w+\.h\b)
    | (?<![\w"'/.\-])(?P<word>
        [A-Za-z]\w*(?:::~?\w+)+(?:\(\))?        # Request::prompt
        | [A-Za-z]\w*(?:\.\w+)*_\w+(?:\(\))?   # max_num_seqs, options.kv_cache_bytes
        | [a-z]\w+\(\)                          # poll()
        | k[A-Z]\w+                             # kCoupled
        | (?P<camel>(?:[A-Z][a-z]+){2,})        # InvalidArgument
      )(?![\w"'\-])""",
    re.VERBOSE,
)
_NAME: Final = re.compile(r"(?P<name>[A-Za-z_][\w.:~]*)(?:\(.*\))?", re.DOTALL)


@dataclass
class Item:
    """A named value: an argument, a field, an attribute or an enumerator.

    Attributes:
        names: Its name, or several with one text.
        text: Its description.
        type: Its type; "" without one.
        default: Its default; "" without one.
        has_anchor: Whether other entries can link it.
        is_link: Whether its name is that of another entry, such as an exception.
    """

    names: list[str]
    text: str
    type: str = ""
    default: str = ""
    has_anchor: bool = False
    is_link: bool = False


@dataclass
class Section:
    """A part of an entry: a text, an example or a list of items; with a title unless that is ""."""

    title: str = ""
    text: str = ""
    example: str = ""
    items: list[Item] = field(default_factory=list)


@dataclass
class Entry:
    """A declaration with its description.

    Attributes:
        names: Its qualified name, or several with one description.
        code: The declaration; "" for none.
        language: Of the code.
        sections: Its description.
        children: Its members that have an entry of their own.
    """

    names: list[str]
    code: str
    language: str
    sections: list[Section]
    children: list[Entry] = field(default_factory=list)

    def has_text(self) -> bool:
        """Says whether something describes the entry."""
        return any(part.text or any(item.text for item in part.items) for part in self.sections)

    def all(self) -> Iterator[Entry]:
        """Lists the entry and those of its members."""
        yield self
        for child in self.children:
            yield from child.all()


@dataclass
class Group:
    """Entries below one heading of a page."""

    title: str
    text: str
    entries: list[Entry]


@dataclass
class Page:
    """A page of the reference.

    Attributes:
        name: Its file on the site.
        title: Its heading.
        language: "python", "cpp" or "shell"; names of other languages are not linked.
        text: What stands above the groups, as Markdown.
        groups: Its entries.
    """

    name: str
    language: str
    title: str
    text: str
    groups: list[Group]

    def entries(self) -> Iterator[Entry]:
        """Lists all entries of the page, members too."""
        for group in self.groups:
            for entry in group.entries:
                yield from entry.all()


def anchor(name: str) -> str:
    """Makes the anchor of a qualified name."""
    name = re.sub(r"__(\w+)__", r"\1", name)  # Markdown would read them as bold
    return re.sub(r"[/ ]", "-", name.replace("::", ".").replace("~", ""))


class Index:
    """Where the names of the pages of one language are.

    A name without its type is linked where it is unique. In Python that holds for what modules
    export, and for attributes whose name has an underscore; other words, such as `config` and
    `to_dict`, are too common to be linked.
    """

    def __init__(self, pages: Iterable[Page]) -> None:
        self._places: dict[str, tuple[str, str]] = {}  # by qualified name, joined with dots
        self._by_last: dict[str, set[str]] = {}
        for page in pages:
            for group in page.groups:
                if group.title.endswith(".h"):
                    self._places[group.title] = (page.name, anchor(group.title))
                for entry in group.entries:
                    self._add(entry.names, page, is_common=False)
                    for member in entry.all():
                        self._add_members(member, page)

    def _add_members(self, entry: Entry, page: Page) -> None:
        for child in entry.children:
            self._add(child.names, page, is_common=page.language == "python")
        for section in entry.sections:
            for item in section.items:
                if item.has_anchor:
                    names = [f"{entry.names[0]}.{name}" for name in item.names]
                    is_common = page.language == "python" and "_" not in item.names[0]
                    self._add(names, page, is_common=is_common)

    def _add(self, names: Iterable[str], page: Page, *, is_common: bool) -> None:
        for name in map(anchor, names):
            self._places.setdefault(name, (page.name, name))
            if not is_common:
                self._by_last.setdefault(name.rpartition(".")[2], set()).add(name)

    def find(self, code: str, page: str, scope: str) -> str | None:
        """Finds the target of a link.

        Args:
            code: What the text has, such as "LLM.stream" or "finish()".
            page: The page that has the text.
            scope: The entry that has the text, whose own names come first.

        Returns:
            The target; None for a name that is unknown or not unique.
        """
        if code in self._places:
            return self._target(code, page)
        match = _NAME.fullmatch(code)
        if match is None:
            return None
        name = anchor(match["name"]).removeprefix("paceline.")
        parts = anchor(scope).split(".")
        for length in range(len(parts), -1, -1):
            qualified = ".".join([*parts[:length], name])
            if qualified in self._places:
                return self._target(qualified, page)
        found = self._by_last.get(name, set())
        here = {one for one in found if self._places[one][0] == page}
        [only] = here if len(here) == 1 else found if len(found) == 1 else [None]
        return None if only is None else self._target(only, page)

    def _target(self, name: str, page: str) -> str:
        where, fragment = self._places[name]
        return f"#{fragment}" if where == page else f"{where}#{fragment}"


class Writer:
    """Writes one page.

    Args:
        page: The page.
        index: The names of all pages.
        guides: The names of the pages in docs/, which texts may link.
    """

    def __init__(self, page: Page, index: Index, guides: Iterable[str]) -> None:
        self._page = page
        self._index = index
        self._guides = frozenset(guides)
        self._anchors: set[str] = set()

    def markdown(self) -> str:
        """Returns the page."""
        parts = [f"# {self._page.title}", self._page.text]
        for group in self._page.groups:
            parts += [f"## {group.title} {{ #{anchor(group.title)} }}", self._prose(group.text)]
            for entry in group.entries:
                parts += self._entry(entry, 3)
        return "\n\n".join(part for part in parts if part) + "\n"

    def _entry(self, entry: Entry, level: int) -> list[str]:
        scope = entry.names[0]
        title = ", ".join(f"`{name}`" for name in entry.names)
        first, *others = (self._new_anchor(name) for name in entry.names)
        parts = [f"{'#' * level} {title} {{ #{first} }}"]
        parts += [f'<a id="{other}"></a>' for other in others]
        if entry.code:
            parts.append(f"```{entry.language}\n{entry.code}\n```")
        own = frozenset(
            name for part in entry.sections for item in part.items for name in item.names
            if not item.has_anchor
        )  # fmt: skip
        for section in entry.sections:
            if section.title:
                parts.append(f"**{section.title}**")
            if section.text:
                parts.append(self._prose(section.text, scope, own))
            if section.example:
                parts.append(f"```pycon\n{section.example}\n```")
            if section.items:
                parts.append("\n".join(self._item(item, scope, own) for item in section.items))
        for child in entry.children:
            parts += self._entry(child, level + 1)
        return parts

    def _item(self, item: Item, scope: str, known: frozenset[str]) -> str:
        names = []
        for name in item.names:
            if item.has_anchor:
                names.append(f"`{name}`{{ #{self._new_anchor(f'{scope}.{name}')} }}")
            else:
                target = self._index.find(name, self._page.name, "") if item.is_link else None
                names.append(f"[`{name}`]({target})" if target else f"`{name}`")
        facts = [f"`{item.type}`"] if item.type else []
        facts += [f"default `{item.default}`"] if item.default else []
        line = f"- **{', '.join(names)}**" + (f" ({', '.join(facts)})" if facts else "")
        text = self._prose(item.text, scope, known | frozenset(item.names))
        if text:
            line += ": " + text.replace("\n", "\n    ")
        return re.sub(r"^ +$", "", line, flags=re.MULTILINE)

    def _new_anchor(self, name: str) -> str:
        """Makes an anchor that the page does not have yet: overloads share a name."""
        made, number = anchor(name), 2
        while made in self._anchors:
            made, number = f"{anchor(name)}-{number}", number + 1
        self._anchors.add(made)
        return made

    def _prose(self, text: str, scope: str = "", known: frozenset[str] = frozenset()) -> str:
        """Makes Markdown of a text: its code becomes spans and links, all else is text."""
        made, end = [], 0
        for span in _SPANS.finditer(text):
            made.append(_escape(text[end : span.start()]))
            made.append(self._span(span, scope, known))
            end = span.end()
        return "".join(made) + _escape(text[end:])

    def _span(self, span: re.Match[str], scope: str, known: frozenset[str]) -> str:
        code = span["code"] or span["word"] or span["header"]
        page = span["page"]
        if code and code.startswith("docs/"):
            page = code.removeprefix("docs/")
        if page:
            return f"[{page}]({page})" if page in self._guides else f"`docs/{page}`"
        code = re.sub(r"\s*\n\s*", " ", code)
        target = None if code in known else self._index.find(code, self._page.name, scope)
        if target is None:
            return code if span["camel"] else f"`{code}`"
        return f"[`{code}`]({target})"


def _escape(text: str) -> str:
    text = re.sub(r"([\\*_\[\]])", r"\\\1", text).replace("<", "&lt;")
    return re.sub(r"^#", r"\\#", text, flags=re.MULTILINE)


def write(pages: list[Page], guides: Iterable[str]) -> dict[str, str]:
    """Writes pages that link each other.

    Args:
        pages: The pages.
        guides: The names of the pages in docs/.

    Returns:
        Markdown by the name of the page.
    """
    guides = list(guides)
    written = {}
    for page in pages:
        index = Index(one for one in pages if one.language == page.language)
        written[page.name] = Writer(page, index, guides).markdown()
    return written
