# SPDX-License-Identifier: Apache-2.0
"""Reads options.toml, which has each option of an engine and each key of `speculative_config`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar

from paceline.checks import check_bool, check_choice, check_finite, check_int, quoted, shorten
from paceline.console import integer, integers, number

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
    below: int | None = None
    choices: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    values: str = ""
    unit: str | None = None
    doc: str = ""
    methods: tuple[str, ...] = ()
    reason: str = ""
    nested: bool = False
    is_key: bool = False
    cpp: dict[str, Any] | None = None
    c: bool = False
    cli: dict[str, Any] | None = None

    @property
    def is_optional(self) -> bool:
        """Returns whether None is allowed, which is 0 in C++."""
        return (self.type or "").endswith("| None")

    @property
    def kind(self) -> str:
        """Its type without None."""
        return (self.type or "").partition(" ")[0]

    @property
    def key(self) -> str:
        """How messages call it: a key of `speculative_config` or an argument."""
        if not self.is_key:
            return self.name
        return f"speculative_config{'[' + repr('x') + ']' if self.nested else ''}[{self.name!r}]"

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
        if self.values:
            return self.text(self.values)
        off = " (off)" if self.low == self.default == 0 else ""
        lower = f"from {self.low}{off}" if self.above is None else f"above {self.above},"
        upper = "to" if self.above is None else "at most"
        end = self.high if self.below is None else f"below {self.below}"
        return f"{self.unit or 'a number'} {lower} {upper} {end}" + (
            ", or None" if self.is_optional else ""
        )

    def text(self, template: str) -> str:
        """Fills bounds, default and choices into a text, in one line."""
        line = " ".join(template.split())
        named = [f'"{choice}"' for choice in self.choices]
        choices = " or ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))
        return line.format(low=self.low, high=self.high, default=self.default, choices=choices)

    @property
    def described(self) -> str:
        """What it does, for readers of Python."""
        return ('Under "x". ' if self.nested else "") + self.text(self.doc)

    def check(self, value: Any) -> Any:
        """Checks a value of Python by itself and returns it with its type.

        Paths, revisions and the choices of the machine, such as a device, have checks of their own.

        Raises:
            ValueError: It is not allowed.
            NotImplementedError: It is one of `later`.
        """
        if self.is_optional and value is None:
            return value
        if self.choices:
            return check_choice(self.key, value, self.choices, self.later)
        match self.kind:
            case "bool":
                return check_bool(self.key, value)
            case "int":
                return check_int(self.key, value, self.low or 0, self.high)
            case "float":
                return self._check_number(value)
            case "list[int]":
                return self._check_numbers(value)
            case "Callable[[list[int]]," if not callable(value):
                raise ValueError(f"{self.key} is {shorten(value)}; allowed: {self.allowed}")
        return value

    def _check_numbers(self, value: Any) -> list[int]:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or len(set(map(repr, value))) < len(value):
            raise ValueError(f"{self.key} is {shorten(value)}; allowed: {self.allowed}")
        return [
            check_int(f"{self.key}[{i}]", v, self.low or 0, self.high) for i, v in enumerate(value)
        ]

    def _check_number(self, value: Any) -> float:
        found = check_finite(self.key, value, self.allowed)
        is_low = found < (self.low or 0) if self.above is None else found <= self.above
        is_high = found > self.high if self.high is not None else False
        if is_low or is_high or (self.below is not None and found >= self.below):
            raise ValueError(f"{self.key} is {shorten(value)}; allowed: {self.allowed}")
        return found

    def check_method(self, value: Any, method: str | None) -> None:
        """Checks that a method accepts the key, for keys that C++ does not have.

        The others are checked by check_methods in cpp/src/executor/option_checks.cc.

        Args:
            value: The key's value; None: not given.
            method: The method; None: the checkpoint will tell it.

        Raises:
            ValueError: The method does not accept it.
        """
        if value is None or method is None or not self.methods or method in self.methods:
            return
        reason = f", {self.reason}" if self.reason else ""
        raise ValueError(
            f"{self.key} is {shorten(value)}, but method is {method!r}{reason}; allowed: only "
            f"with {quoted(self.methods)}, otherwise leave it out"
        )

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Adds the flag to a command."""
        cli = self.cli or {}
        kind = self.kind
        keywords: dict[str, Any] = {"default": self.default}
        if kind == "bool":
            keywords["action"] = argparse.BooleanOptionalAction if self.default else "store_true"
        else:
            types: dict[str, Callable[[str], Any]]
            types = {"int": integer, "float": number, "list[int]": integers}
            keywords["type"] = types.get(kind, str)
            keywords["metavar"] = cli.get("metavar")
        stated = {None: "none", True: "on", False: "off"}.get(self.default, self.default)
        first = self.doc.partition(". ")[0].rstrip(".")
        values = "" if kind in ("bool", "str") else f"; {self.allowed}".removesuffix(", or None")
        derived = f"{first[:1].lower()}{first[1:]}{values} (default: {stated})"
        text = cli.get("help", derived.replace("%", "%%"))
        names = [self.flag, *([cli["alias"]] if "alias" in cli else [])]
        group.add_argument(*names, help=self.text(text), **keywords)


def _read(table: str) -> dict[str, Option]:
    entries = tomllib.loads(SCHEMA.read_text(encoding="utf-8"))[table]
    is_key = table == "speculative"
    options = {}
    for name, entry in entries.items():
        lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
        options[name] = Option(name, **entry | lists, is_key=is_key)
    return options


#: The options of [engine] and [speculative], by name.
ENGINE: Final = _read("engine")
SPECULATIVE: Final = _read("speculative")
#: The keys of `speculative_config`.
KEYS: Final = {name: option for name, option in SPECULATIVE.items() if option.type is not None}
#: The arguments of `LLM` that are options of the engine.
ARGUMENTS: Final = {name: option for name, option in ENGINE.items() if option.type is not None}


def key_names() -> str:
    """Lists the keys of `speculative_config` that JSON can have."""
    names = [
        name for name, option in KEYS.items() if not option.nested and option.name != "drafter"
    ]
    nested = [name for name, option in KEYS.items() if option.nested]
    return f"{', '.join(names)}, and in an object x {', '.join(nested)}"


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


def argument_docs(indent: str = "", options: Mapping[str, Option] = ARGUMENTS) -> str:
    """The lines of a docstring that describe arguments, or the keys of `speculative_config`."""
    return "\n".join(
        textwrap.fill(
            f"{option.name}: {option.described}",
            88 + len(indent),
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
        )
        for option in options.values()
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
