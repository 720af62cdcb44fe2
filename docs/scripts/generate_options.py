# SPDX-License-Identifier: Apache-2.0
"""Writes what is generated of python/paceline/options.toml, in which each option is written once.

    PYTHONPATH=python python docs/scripts/generate_options.py [--check]

It writes python/paceline/engine_options.py and the parts of cpp/include/paceline/config.h and
paceline.h between two comments that say "generated". `--check` writes nothing, names the files that
are out of date, and then exits with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

from paceline.option_schema import ARGUMENTS, ENGINE, KEYS, SPECULATIVE, Option

ROOT: Final = Path(__file__).resolve().parents[2]
HEADER: Final = ROOT / "cpp/include/paceline/config.h"
C_HEADER: Final = ROOT / "cpp/include/paceline/paceline.h"
TYPES: Final = ROOT / "python/paceline/engine_options.py"
COMMAND: Final = "PYTHONPATH=python python docs/scripts/generate_options.py"

_PART: Final = re.compile(r"(// generated: (\w+)[^\n]*\n).*?([ ]*// end of generated)", re.DOTALL)
_STRUCTS: Final = {"SpeculativeOptions": SPECULATIVE, "ExecutorOptions": ENGINE}
_MAX_LINE: Final = 100
_MAX_INT32: Final = 2**31 - 1
# C++'s types in Python, as the binding converts them; those that have names are enumerations.
_IN_PYTHON: Final = {
    "bool": "bool",
    "double": "float",
    "int32_t": "int",
    "int64_t": "int",
    "uint64_t": "int",
    "std::shared_ptr<HostDrafter>": "object",
}
# Types that a comment of their own explains, with the values that they start with.
_ZEROS: Final = {"bool": "false", "double": "0", "int32_t": "0", "int64_t": "0", "uint64_t": "0"}


def _cpp(option: Option) -> dict[str, Any]:
    assert option.cpp is not None
    return option.cpp


def _initial(option: Option) -> str:
    """The member's initial value: C++'s own, that of Python, or the type's zero."""
    cpp = _cpp(option)
    value = cpp.get("default", option.default)
    if value is None:
        zero = _ZEROS.get(cpp["type"])
        return "" if zero is None else f" = {zero}"
    return f" = {str(value).lower() if isinstance(value, bool) else value}"


def _bounds(option: Option) -> tuple[str, str] | None:
    """The range of the member, if it is checked by itself."""
    cpp = _cpp(option)
    if not cpp.get("check", True) or (option.high is None and option.below is None):
        return None
    # 0 stands for None.
    low = 0 if option.is_optional else option.low
    high = f"largest::{option.name}" if option.below is None else f"Below{{{option.below}}}"
    return str(low), high


def _comment(option: Option) -> list[str]:
    doc = _cpp(option).get("doc") or re.sub(r"\bNone\b", "0", option.doc)
    if not doc:
        return []
    return textwrap.wrap(
        option.text(doc),
        100,
        initial_indent="  // ",
        subsequent_indent="  // ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _members(options: dict[str, Option]) -> str:
    lines = []
    for option in options.values():
        if option.cpp is not None:
            lines += _comment(option)
            lines.append(f"  {option.cpp['type']} {option.name}{_initial(option)};")
    return "\n".join(lines)


def _structs() -> str:
    return "\n\n".join(
        f"struct {name} {{\n{_members(options)}\n}};" for name, options in _STRUCTS.items()
    )


def _largest() -> str:
    lines = [
        f"inline constexpr {option.cpp['type']} {option.name} = {option.high};"
        for options in _STRUCTS.values()
        for option in options.values()
        if option.cpp is not None and option.high is not None and 1 < option.high < _MAX_INT32
    ]
    return "\n".join(lines)


def _names() -> str:
    """The names of enumerators. Their order in the schema is that in C++."""
    lines = []
    for option in SPECULATIVE.values():
        if option.cpp is not None and option.choices:
            enum = re.sub(r"std::optional<(\w+)>", r"\1", option.cpp["type"])
            lines += [
                "template <>",
                f"constexpr std::array<const char*, {len(option.choices)}> "
                f"option_names<{enum}> = {{",
                *(f'    "{choice}",' for choice in option.choices),
                "};",
            ]
    return "\n".join(lines)


def _literals(text: str) -> str:
    """A text as string literals below one another, as clang-format divides it."""
    width = _MAX_LINE - len('        ""')
    lines = [""]
    for word in re.findall(r"\S+ ?", text):
        if len(lines[-1] + word) > width:
            lines.append("")
        lines[-1] += word
    return "\n        ".join(f'"{line}"' for line in lines)


def _methods() -> str:
    """Options of which the schema says that only some methods accept them."""
    calls = []
    for option in SPECULATIVE.values():
        if option.cpp is not None and option.methods:
            methods = ", ".join(f"'{method}'" for method in option.methods)
            words = [f'"{option.name}"', f"o.{option.name}", f'"{option.reason}"', f'"{methods}"']
            line = f"  visit({', '.join(words)});"
            if len(line) > _MAX_LINE:
                line = f"  visit({', '.join(words[:3])},\n        {_literals(methods)});"
            calls.append(line)
    body = "\n".join(calls)
    return (
        "template <class Visit>\n"
        "void visit_methods(const SpeculativeOptions& o, const Visit& visit) {\n"
        f"{body}\n}}"
    )


def _visit() -> str:
    functions = []
    for struct, options in _STRUCTS.items():
        calls = []
        for option in options.values():
            if option.cpp is None:
                continue
            if option.cpp["type"] in _STRUCTS:
                calls.append(f"  visit_options(o.{option.name}, visit);")
                continue
            words = [f'visit("{option.name}"', f"o.{option.name}", *(_bounds(option) or ())]
            calls.append(
                textwrap.fill(
                    ", ".join(words) + ");",
                    100,
                    initial_indent="  ",
                    subsequent_indent="        ",
                    break_long_words=False,
                )
            )
        body = "\n".join(calls)
        functions.append(
            f"template <class Options, class Visit>\n"
            f"  requires std::is_same_v<std::remove_const_t<Options>, {struct}>\n"
            f"void visit_options(Options& o, const Visit& visit) {{\n{body}\n}}"
        )
    return "\n\n".join(functions)


def _c_fields() -> str:
    """The fields of paceline_options that do not stand there by hand."""
    by_hand = _PART.sub("", C_HEADER.read_text())
    lines = []
    for options in _STRUCTS.values():
        for option in options.values():
            if option.c and not re.search(rf"\b{option.name}[,;]", by_hand):
                lines += [*_comment(option), f"  {_cpp(option)['type']} {option.name};"]
    return "\n".join(lines)


def _given() -> str:
    lines = []
    for options, member in ((ENGINE, "o"), (SPECULATIVE, "o.speculative")):
        for name in (option.name for option in options.values() if option.c):
            lines.append(f"  visit(given.{name}, {member}.{name});")
    body = "\n".join(lines)
    return (
        "template <class Given, class Visit>\n"
        "void visit_given(const Given& given, ExecutorOptions& o, const Visit& visit) {\n"
        f"{body}\n}}"
    )


_PARTS: Final = {
    "c_fields": _c_fields,
    "given": _given,
    "structs": _structs,
    "largest": _largest,
    "methods": _methods,
    "names": _names,
    "visit": _visit,
}


def header(path: Path) -> str:
    """A header with its generated parts renewed."""
    return _PART.sub(lambda part: f"{part[1]}{_PARTS[part[2]]()}\n{part[3]}", path.read_text())


def _python_type(cpp: str) -> str:
    inner = re.fullmatch(r"std::optional<(.+)>", cpp)
    if inner is not None:
        return f"{_python_type(inner[1])} | None"
    return _IN_PYTHON.get(cpp, "str")


def types() -> str:
    """The module with the types of the arguments."""
    fields = "\n".join(
        f"    {option.name}: {option.type} = {_python(option.default)}"
        for option in ARGUMENTS.values()
    )
    keys = "\n".join(f"    {option.name}: {option.type}" for option in ARGUMENTS.values())
    speculative = "\n".join(
        f"    {option.name}: {option.type} = {_python(option.default)}" for option in KEYS.values()
    )
    of_executor = "\n".join(
        f"    {option.name}: {_python_type(option.cpp['type'])}"
        for options in (SPECULATIVE, ENGINE)
        for option in options.values()
        if option.cpp is not None and option.cpp["type"] not in _STRUCTS
    )
    return f'''# SPDX-License-Identifier: Apache-2.0
"""The types of the engine's options. Generated from options.toml; do not edit.

Run {COMMAND}.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TypedDict


class EngineArguments(TypedDict, total=False):
    """The fields of `EngineConfig`, for the types of functions that pass them on."""

{keys}


class ExecutorOptions(TypedDict):
    """The options of `_core.Executor`, as it reports them."""

{of_executor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFields:
    """The values of an `EngineConfig`, which describes them; not checked yet."""

{fields}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeKeys:
    """The values of a `SpeculativeConfig`, which describes them; not checked yet."""

{speculative}
'''


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def outdated() -> dict[Path, str]:
    """The files that differ from what the schema says, with what they should be."""
    wanted = {path: header(path) for path in (HEADER, C_HEADER)} | {TYPES: types()}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text
    }


def main() -> int:
    """Renews or checks the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    check = parser.parse_args().check
    stale = outdated()
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'renewed'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
