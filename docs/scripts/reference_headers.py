# SPDX-License-Identifier: Apache-2.0
"""Reads the reference of the C++ and C interfaces from the comments of the public headers.

It knows the form that clang-format gives them: a comment stands before a declaration or behind it
on its line, and belongs to the uncommented declarations below as well, up to an empty line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reference_markdown import Entry, Group, Item, Page, Section

HEADERS: Final = Path(__file__).resolve().parents[2] / "cpp/include/paceline"
C_HEADER: Final = "paceline.h"
# In the order of use; others follow by name.
_ORDER: Final = ("model.h", "executor.h", "config.h", "request.h", "guide.h", "error.h", "log.h")

_SKIPPED: Final = re.compile(r'#|namespace \w+ \{|extern "C" \{|\}  // namespace|\}$|// ----')
_TYPE: Final = re.compile(
    r"(?:typedef )?(?P<kind>struct|class|enum class|enum)(?: PACELINE_API)?(?: (?P<name>\w+))?"
    r"[^;{(]*\{",
)
_FUNCTION: Final = re.compile(r"(?P<name>~?\w+|operator\W+)\(")
# What has a name and neither a body nor arguments.
_ALIAS: Final = re.compile(
    r"using (\w+) = |typedef [^{]*?\(\*(\w+)\)|typedef struct \w+ (\w+);|#define (\w+)|class (\w+);"
)
_PRIVATE: Final = re.compile(r"friend |using (\w+)::\1;|struct \w+;|template ")
_ATTRIBUTES: Final = re.compile(r"\[\[nodiscard\]\] |PACELINE_API ")
_INDENT: Final = "  "
_MAX_LINE: Final = 80


@dataclass
class Declaration:
    """A declaration in a scope.

    Attributes:
        code: Its lines without comments.
        text: Its comment; "" without one.
        heading: The comment above it, if `text` is another one on its line; it then begins a group.
        is_joined: Whether the comment is that of the declaration before it.
    """

    code: list[str]
    text: str
    heading: str = ""
    is_joined: bool = False
    trailing: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """The code on one line, without the body."""
        return re.sub(r"\s+", " ", " ".join(self.code)).strip()


def _split(line: str) -> tuple[str, str | None]:
    """Divides a line into code and comment."""
    code, mark, comment = line.partition("//")
    return code.rstrip(), comment.removeprefix(" ").rstrip() if mark else None


def _is_complete(code: list[str]) -> bool:
    text = " ".join(code)
    if text.count("(") != text.count(")") or text.count("{") != text.count("}"):
        return False
    return text.endswith((";", "}")) or bool(re.fullmatch(r"\s*(public|private):", text))


def declarations(lines: list[str], indent: str = "") -> list[Declaration]:
    """Lists the declarations of a scope, in order."""
    found: list[Declaration] = []
    comment: list[str] = []
    current: Declaration | None = None
    last: Declaration | None = None
    for line in lines:
        code, remark = _split(line)
        if current is not None:
            current.code.append(code)
            if remark is not None:
                current.trailing.append(remark)
            current.inner.append(line)
        elif not line.strip():
            comment, last = [], None
            continue
        elif not code.strip():
            assert remark is not None
            if last is not None and last.trailing and not line.startswith(f"{indent}//"):
                last.text += f"\n{remark}"  # goes on below the line of its declaration
            elif not line.strip().startswith("// ----"):
                comment.append(remark)
            continue
        elif _SKIPPED.match(line.strip()) and not line.strip().startswith("#define"):
            continue
        else:
            current = Declaration([code], "\n".join(comment), inner=[line])
            if remark is not None:
                current.trailing.append(remark)
        if line.strip().startswith("#define") or _is_complete(current.code):
            _describe(current, last)
            found.append(current)
            last, current, comment = current, None, []
    return found


def _describe(declaration: Declaration, last: Declaration | None) -> None:
    """Chooses the comment of a declaration: above it, on its line, or that of the one before."""
    is_type = _TYPE.match(declaration.line) is not None
    if declaration.trailing and not is_type:
        declaration.heading = declaration.text
        declaration.text = "\n".join(declaration.trailing)
    elif (
        last is not None
        and (last.text and not last.trailing and _TYPE.match(last.line) is None)
        and not (declaration.text or is_type)
    ):
        declaration.text, declaration.is_joined = last.text, True


def _body(declaration: Declaration) -> list[str]:
    """Returns the lines between the braces of a type."""
    text = "\n".join(declaration.inner)
    inside = text[text.index("{") + 1 : text.rindex("}")]
    return inside.strip("\n").splitlines()


def _public(members: list[Declaration], kind: str) -> Iterator[Declaration]:
    is_public = kind != "class"
    for member in members:
        if member.line in ("public:", "private:"):
            is_public = member.line == "public:"
        elif is_public and not _PRIVATE.match(member.line):
            yield member


def _close(text: str, start: int) -> int:
    """Returns the place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"no closing bracket: {text}")


def _is_special(line: str, owner: str) -> bool:
    """Says whether it is a constructor, a destructor or an assignment, which need no text."""
    return (
        "= delete" in line
        or "operator=" in line
        or bool(re.match(rf"(explicit |virtual )?~?{owner}\(", line))
    )


def _names_of_field(line: str) -> list[str]:
    before = re.split(r" = |;|\[", re.sub(r"<.*>", "", line))[0]
    first, *others = before.split(",")
    return [first.split()[-1].lstrip("*"), *(one.strip() for one in others)]


def _field(member: Declaration) -> Item:
    names = _names_of_field(member.line)
    type_ = re.split(rf"\b{names[0]}\b", member.line)[0].strip()
    size = re.search(r"\[(\w+)\];", member.line)
    default = member.line.partition(" = ")[2].rstrip(";").strip()
    type_ += f"[{size[1]}]" if size else ""
    return Item(names, member.text, type_, default, has_anchor=True)


def _enumerators(declaration: Declaration) -> list[Section]:
    """Lists the values of an enumeration, which commas end."""
    lines = [re.sub(r",(?=\s*(//|$))", ";", line) for line in _body(declaration)]
    if lines and not lines[-1].strip().startswith("//"):
        code, remark = _split(lines[-1])
        code = code if code.rstrip().endswith(";") else f"{code.rstrip()};"
        lines[-1] = code + (f"  // {remark}" if remark is not None else "")
    sections = [Section("Values")]
    for member in declarations(lines, _INDENT):
        for one in member.line.rstrip(";").split(","):
            name, _, value = one.strip().partition(" = ")
            _add(sections, Item([name], member.text, value, has_anchor=True), member.heading)
    return sections


def _add(sections: list[Section], item: Item, heading: str) -> None:
    """Appends an item, below the comment that begins its group if there is one."""
    if heading:
        sections.append(Section(text=heading))
    sections[-1].items.append(item)


def _parameter_sections(code: str, text: str) -> list[Section]:
    """Makes a list of the lines of a comment that begin with a parameter."""
    parameters = set(re.findall(r"(\w+)(?: = [^,)]+)?(?=[,)])", code.partition("(")[2]))
    sections = [Section()]
    for line in text.splitlines():
        match = re.match(r"(\w+): (.*)", line)
        if match and match[1] in parameters:
            if not sections[-1].items:
                sections.append(Section("Parameters"))
            sections[-1].items.append(Item([match[1]], match[2]))
        elif sections[-1].items and line and not line.startswith(("Throws ", "Returns ")):
            sections[-1].items[-1].text += f"\n{line.strip()}"
        else:
            if sections[-1].items:
                sections.append(Section())
            sections[-1].text += f"{line}\n"
    for section in sections:
        section.text = section.text.strip("\n")
    return [section for section in sections if section.text or section.items]


def _function(member: Declaration, scope: str) -> Entry:
    line = _ATTRIBUTES.sub("", member.line)
    match = _FUNCTION.search(line)
    assert match is not None, line
    opening = match.end() - 1
    closing = _close(line, opening)
    head, arguments = line[:opening], line[opening + 1 : closing]
    end = re.match(r"( const)?( noexcept)?", line[closing + 1 :])
    assert end is not None
    if closing + len(end[0]) > _MAX_LINE:
        arguments = ",\n".join(f"    {one}" for one in _split_commas(arguments))
        arguments = f"\n{arguments}"
    code = f"{head}({arguments}){end[0]};"
    return Entry([scope + match["name"]], code, "cpp", _parameter_sections(code, member.text))


def _split_commas(arguments: str) -> list[str]:
    """Divides arguments at the commas that stand in no brackets."""
    parts, depth = [""], 0
    for sign in arguments:
        depth += (sign in "(<{") - (sign in ")>}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def entries(
    lines: list[str], scope: str = "", kind: str = "struct"
) -> tuple[list[Entry], list[Section]]:
    """Makes the entries of a scope.

    Args:
        lines: Its lines.
        scope: The type whose members they are, with "::"; "" outside.
        kind: "class" where members are private at first.

    Returns:
        The types and functions, and the fields.
    """
    made: list[Entry] = []
    fields = [Section("Fields")]
    owner = scope.removesuffix("::").rpartition("::")[2]
    for member in _public(declarations(lines, _INDENT * scope.count("::")), kind):
        line = member.line
        found = _TYPE.match(line)
        alias = _ALIAS.match(line)
        if found is not None:
            made.append(_type(member, found, scope))
        elif alias is not None:
            name = scope + next(filter(None, alias.groups()))
            if all(name not in one.names for one in made):
                code = line.partition(" __attribute__")[0]
                made.append(Entry([name], code, "cpp", [Section(text=member.text)]))
        elif _FUNCTION.search(re.sub(r"(?<!operator)=.*|std::function<.*", "", line)):
            is_described = bool(member.text) and not member.is_joined
            if is_described or not _is_special(line, owner):
                _add_function(made, _function(member, scope), is_joined=member.is_joined)
        elif member.is_joined and fields[-1].items:
            fields[-1].items[-1].names += _field(member).names
        else:
            _add(fields, _field(member), member.heading)
    return made, [section for section in fields if section.items]


def _add_function(made: list[Entry], entry: Entry, *, is_joined: bool) -> None:
    """Appends a function; to the entry before it, if both have one comment."""
    if not is_joined:
        made.append(entry)
        return
    made[-1].code += f"\n{entry.code}"
    if entry.names[0] not in made[-1].names:
        made[-1].names += entry.names


def _type(member: Declaration, found: re.Match[str], scope: str) -> Entry:
    code = _ATTRIBUTES.sub("", member.line).partition("{")[0].removeprefix("typedef ").rstrip()
    text = [Section(text=member.text)] if member.text else []
    if found["kind"].startswith("enum"):
        values = _enumerators(member)
        name = scope + (found["name"] or values[0].items[0].names[0])
        return Entry([name], code, "cpp", text + values)
    name = scope + found["name"]
    members, fields = entries(_body(member), f"{name}::", found["kind"])
    return Entry([name], code, "cpp", text + fields, members)


def read_header(name: str) -> Group:
    """Makes the entries of a header."""
    lines = (HEADERS / name).read_text().splitlines()
    first = next(
        (number for number, line in enumerate(lines) if re.match(r"#include|namespace|#if", line)),
        len(lines),
    )
    head = [_split(line)[1] for line in lines[:first] if line.startswith("//")]
    text = "\n".join(one for one in head if one is not None and "SPDX" not in one)
    if name == "export.h":  # its one comment is that of the macro
        return Group(f"paceline/{name}", "", entries(lines)[0])
    return Group(f"paceline/{name}", text, entries(lines[first:])[0])


def header_names() -> list[str]:
    """Lists the public headers of C++, in the order of the page."""
    found = {path.name for path in HEADERS.glob("*.h")} - {C_HEADER}
    return [name for name in _ORDER if name in found] + sorted(found - set(_ORDER))


def pages() -> list[Page]:
    """Makes the pages of the C++ and C interfaces."""
    return [
        Page(
            "reference-cpp.md",
            "cpp",
            "C++ reference",
            "The public headers, all in namespace `paceline`. [Embedding](embedding.md) introduces "
            "them with a program. This page is made from their comments.",
            [read_header(name) for name in header_names()],
        ),
        Page(
            "reference-c.md",
            "cpp",
            "C reference",
            "The C interface. [Embedding](embedding.md#c) introduces it with a program. This "
            "page is made from the comments of the header.",
            [read_header(C_HEADER)],
        ),
    ]
