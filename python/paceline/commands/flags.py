# SPDX-License-Identifier: Apache-2.0
"""Makes the parsers of flags.toml, in which each command and each flag is written once."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from paceline import limits
from paceline.checks import shorten
from paceline.commands.colors import COLOR_CHOICES
from paceline.console import integer, number
from paceline.option_schema import add_options, key_names

_ONE_OF: Final = "one of "
DEFAULT_DEMO: Final = "draft_model"
MAX_REPLICAS: Final = 64

_TABLES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("flags.toml").read_text(encoding="utf-8")
)
_TEXTS: Final = vars(limits) | {
    "COLOR_CHOICES": COLOR_CHOICES,
    "DEFAULT_DEMO": DEFAULT_DEMO,
    "MAX_REPLICAS": MAX_REPLICAS,
    "SPECULATIVE_KEYS": key_names(),
}


class _Repeated(argparse.Action):
    """Collects the values of an option that may be given several times. Those of the command line
    take the place of others, as with every option."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        mark = f"{self.dest} is from the command line"
        before = getattr(namespace, self.dest) if hasattr(namespace, mark) else []
        setattr(namespace, self.dest, [*before, *values])
        setattr(namespace, mark, True)


def _integers(what: str) -> Callable[[str], list[int]]:
    """Returns what reads integers separated by commas; `what` they are, for the message."""

    def read(text: str) -> list[int]:
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{shorten(text)} is not a list of {what}; allowed: integers separated by commas"
            ) from None

    return read


_ACTIONS: Final = {"boolean": argparse.BooleanOptionalAction, "repeated": _Repeated}
# By name of the value; others are strings.
_TYPES: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys("NK", integer),
    **dict.fromkeys("PSTX", number),
    "IDS": _integers("token ids"),
    "LAYERS": _integers("layers"),
}


def add_command(
    commands: Any, name: str, run: Callable[..., int], **texts: object
) -> argparse.ArgumentParser:
    """Adds a command to the subparsers of another one.

    Args:
        commands: The subparsers.
        name: The command's table; its last word is the command's name.
        run: What the command does.
        **texts: What <name> stands for in its texts.
    """
    table = _TABLES["command"][name]
    texts = {**_TEXTS, **table, **texts}
    parser: argparse.ArgumentParser = commands.add_parser(
        name.split()[-1], help=table["help"], description=_filled(table["description"], texts)
    )
    for title, sets in table["groups"].items():
        group = parser.add_argument_group(title) if title else parser
        for one in sets:
            is_exclusive = one.startswith(_ONE_OF)
            inner = group.add_mutually_exclusive_group() if is_exclusive else group
            _add_set(inner, one.removeprefix(_ONE_OF), texts)
    parser.set_defaults(run=run)
    return parser


def _add_set(group: argparse._ActionsContainer, name: str, texts: Mapping[str, Any]) -> None:
    if name.startswith("options."):
        add_options(group, name.removeprefix("options."))
        return
    for usage, entry in _TABLES[name].items():
        keywords = dict(entry) if isinstance(entry, dict) else {"help": entry}
        flags, more = _read_usage(usage, texts)
        keywords = more | keywords
        keywords["action"] = _ACTIONS.get(keywords["action"], keywords["action"])
        text = _filled(keywords["help"], texts)
        is_fixed = keywords.get("required") or not flags[0].startswith("-")
        if not is_fixed and "default: " not in text:
            value = keywords.get("default")
            is_switch = keywords["action"] in ("store_true", "store_false")
            text += f" (default: {'off' if is_switch else 'none' if value is None else value})"
        group.add_argument(*flags, **keywords | {"help": text})


def _read_usage(usage: str, texts: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The spellings of a flag, and the arguments of argparse that its usage stands for."""
    shape, has_default, default = usage.partition(" = ")
    words = shape.split()
    flags = [word for word in words if word.startswith("-")] or words[:1]
    if len(words) == len(flags):
        return flags, {"action": "store_true"}
    is_positional = not flags[0].startswith("-")
    value = words[-1]
    keywords: dict[str, Any] = {"action": "append" if value.endswith("*") else "store"}
    value = value.removesuffix("*")
    if match := re.fullmatch(r"\[(.+?)(\.\.\.)?\]", value):
        value = match[1]
        keywords["nargs"] = "*" if match[2] else "?"
        if not is_positional:
            keywords["const"] = "-"
    elif value.endswith("..."):
        value = value.removesuffix("...")
        keywords["nargs"] = "+"
    if "|" in value or value.startswith("<"):
        keywords["choices"] = tuple(_filled(value, texts, "|").split("|"))
    else:
        keywords |= {"metavar": value, "type": _TYPES.get(value)}
    if has_default:
        read = keywords.get("type") or str
        keywords["default"] = read(_filled(default, texts))
    return flags, keywords


def _filled(text: str, texts: Mapping[str, Any], separator: str = ", ") -> str:
    """A text in one line, with the values of its names."""

    def value_of(match: re.Match[str]) -> str:
        value = texts[match[1]]
        if isinstance(value, str):
            return value
        if isinstance(value, float):
            return f"{value:,.0f}"
        return str(value) if isinstance(value, int) else separator.join(value)

    return re.sub(r"<(\w+)>", value_of, " ".join(text.split()))
