# SPDX-License-Identifier: Apache-2.0
"""Reads options.toml, in which each option of an engine is written once."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar

from paceline.checks import check_bool, check_finite, check_int, shorten
from paceline.console import integer, number

if TYPE_CHECKING:
    from paceline.engine_options import EngineArguments

_Function = TypeVar("_Function", bound=Callable[..., Any])

SCHEMA: Final = Path(__file__).with_name("options.toml")


@dataclasses.dataclass(frozen=True)
class Option:
    """An entry of options.toml, which explains the fields."""

    name: str
    since: str
    type: str | None = None
    default: Any = None
    low: int | None = None
    above: int | None = None
    high: int | None = None
    unit: str | None = None
    doc: str = ""
    cpp: dict[str, Any] | None = None
    c: bool = False
    cli: dict[str, Any] | None = None

    @property
    def is_optional(self) -> bool:
        """Returns whether None is allowed, which is 0 in C++."""
        return (self.type or "").endswith("| None")

    @property
    def flag(self) -> str:
        """The flag of the command line."""
        return str((self.cli or {}).get("flag", "--" + self.name.replace("_", "-")))

    @property
    def dest(self) -> str:
        """The flag's name in a namespace, in the environment and in the file of --config."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def allowed(self) -> str:
        """The values allowed, for a message about a number."""
        lower = f"from {self.low}" if self.above is None else f"above {self.above},"
        upper = "to" if self.above is None else "at most"
        return f"{self.unit or 'a number'} {lower} {upper} {self.high}" + (
            ", or None" if self.is_optional else ""
        )

    def text(self, template: str) -> str:
        """Fills bounds and default into a text, in one line."""
        line = " ".join(template.split())
        return line.format(low=self.low, high=self.high, default=self.default)

    def check(self, value: Any) -> Any:
        """Checks a value of Python and returns it with its type. Strings have checks of their own.

        Raises:
            ValueError: It is not allowed.
        """
        kind = (self.type or "").partition(" ")[0]
        if (self.is_optional and value is None) or kind == "str":
            return value
        if kind == "bool":
            return check_bool(self.name, value)
        if kind == "int":
            return check_int(self.name, value, self.low or 0, self.high)
        found = check_finite(self.name, value, self.allowed)
        is_low = found < (self.low or 0) if self.above is None else found <= self.above
        if is_low or (self.high is not None and found > self.high):
            raise ValueError(f"{self.name} is {shorten(value)}; allowed: {self.allowed}")
        return found

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Adds the flag to a command."""
        cli = self.cli or {}
        kind = (self.type or "").partition(" ")[0]
        keywords: dict[str, Any] = {"default": self.default}
        if kind == "bool":
            keywords["action"] = argparse.BooleanOptionalAction if self.default else "store_true"
        else:
            keywords["type"] = {"int": integer, "float": number}.get(kind, str)
            keywords["metavar"] = cli.get("metavar")
        stated = {None: "none", True: "on", False: "off"}.get(self.default, self.default)
        first = self.doc.partition(". ")[0].rstrip(".")
        values = "" if kind in ("bool", "str") else f"; {self.allowed}".removesuffix(", or None")
        derived = f"{first[:1].lower()}{first[1:]}{values} (default: {stated})"
        text = cli.get("help", derived.replace("%", "%%"))
        group.add_argument(self.flag, help=self.text(text), **keywords)


def _read() -> tuple[tuple[Option, ...], tuple[Option, ...]]:
    tables = tomllib.loads(SCHEMA.read_text(encoding="utf-8"))
    engine, speculative = (
        tuple(Option(name, **entry) for name, entry in tables[table].items())
        for table in ("engine", "speculative")
    )
    return engine, speculative


#: The options of [engine] and [speculative], by name.
ENGINE, SPECULATIVE = ({option.name: option for option in table} for table in _read())
#: The arguments of `LLM` that are options of the engine.
ARGUMENTS: Final = {name: option for name, option in ENGINE.items() if option.type is not None}


def largest(name: str) -> int:
    """Returns the largest value of an integer option."""
    high = (ENGINE | SPECULATIVE)[name].high
    assert high is not None, f"options.toml: {name} has no `high`"
    return high


def split_unknown(engine: Any) -> tuple[EngineArguments, dict[str, Any]]:
    """Divides the `**engine` of a function into options and what no option is."""
    options: Any = {key: value for key, value in engine.items() if key in ARGUMENTS}
    return options, {key: value for key, value in engine.items() if key not in ARGUMENTS}


def add_options(group: argparse._ActionsContainer, commands: str) -> None:
    """Adds the flags of the engine to a command.

    Args:
        group: The group of the command's options.
        commands: "all": those that `generate`, `chat` and `serve` have; "serve": the server's own.
    """
    for option in ARGUMENTS.values():
        if option.cli is not None and option.cli.get("commands", "all") == commands:
            option.add_to(group)


def given_options(args: argparse.Namespace, commands: str) -> dict[str, Any]:
    """Reads the flags that `add_options` has added as arguments of `LLM`."""
    return {
        option.name: getattr(args, option.dest)
        for option in ARGUMENTS.values()
        if option.cli is not None and option.cli.get("commands", "all") == commands
    }


def argument_docs(indent: str = "") -> str:
    """The lines of a docstring that describe the arguments."""
    return "\n".join(
        textwrap.fill(
            f"{option.name}: {option.text(option.doc)}",
            88 + len(indent),
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
        )
        for option in ARGUMENTS.values()
    )


def lists_options(function: _Function) -> _Function:
    """Gives a function with `**engine` the options as keywords, for `help`, editors and errors.

    They stand before its last keyword. In its docstring they take the place of the line `**engine`.
    """
    signature = inspect.signature(function)
    *named, last, _ = signature.parameters.values()
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.type,
        )
        for option in ARGUMENTS.values()
    ]
    unknown = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD, annotation="Never")
    parameters = [*named, *options, last, unknown]
    shown: Any = function
    shown.__signature__ = signature.replace(parameters=parameters)
    shown.__annotations__ = {
        p.name: p.annotation for p in parameters if p.annotation is not p.empty
    } | {"unknown": Never, "return": None}
    doc = inspect.cleandoc(function.__doc__ or "")
    shown.__doc__ = re.sub(r"(?m)^ *\*\*engine:.*", lambda _: argument_docs("    "), doc)
    return function
