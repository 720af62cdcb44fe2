# SPDX-License-Identifier: Apache-2.0
"""Each option of each command has a help that says its meaning, its range and its default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from paceline import cli
from paceline.console import integer, number


def parsers(
    parser: argparse.ArgumentParser | None = None,
) -> Iterator[argparse.ArgumentParser]:
    """All parsers of the command line."""
    parser = parser or cli.build_parser()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from parsers(choice)


COMMANDS = {parser.prog: parser for parser in parsers()}
OPTIONS = {
    f"{command} {(action.option_strings or [action.metavar])[-1]}": action
    for command, parser in COMMANDS.items()
    for action in parser._actions
    if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
}


def test_the_commands_are_found() -> None:
    assert {"paceline generate", "paceline chat", "paceline convert", "paceline doctor"} < set(
        COMMANDS
    )
    benches = ("latency", "pairs", "serve", "compare", "plot")
    assert {f"paceline bench {name}" for name in benches} < set(COMMANDS)
    assert len(OPTIONS) > 50


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_description(command: str) -> None:
    parser = COMMANDS[command]
    assert parser.description and parser.description.endswith(".")
    assert len(parser.format_help()) > 100  # each % of a help text is written as %%


def test_options_have_a_help() -> None:
    assert [name for name, action in OPTIONS.items() if len(action.help or "") < 10] == []


def test_helps_name_the_default() -> None:
    lacking = []
    for name, action in OPTIONS.items():
        text = action.help or ""
        if not action.option_strings or action.required or isinstance(action, cli._VersionAction):
            continue
        stated = re.search(r"default: ([^,;)]+(,[\d.,]+)?)", text)
        if stated is None:
            lacking.append(f"{name}: no default")
        elif action.nargs == 0:
            is_on = isinstance(action, argparse.BooleanOptionalAction) and action.default
            if stated[1] != ("on" if is_on else "off"):
                lacking.append(f"{name}: a switch is off by default, unless it has a --no- form")
        elif action.default is not None:
            default = f"{action.default:g}" if isinstance(action.default, float) else action.default
            if stated[1] != str(default):
                lacking.append(f"{name}: {stated[1]} is not {default}")
    assert lacking == []


def test_helps_name_the_values_allowed() -> None:
    ranges = re.compile(r">= ?\d|> ?\d|-?\d to |above \d")
    lacking = [
        name
        for name, action in OPTIONS.items()
        if action.type in (integer, number) and not ranges.search(action.help or "")
    ]
    lacking += [
        name
        for name, action in OPTIONS.items()
        if action.choices and not all(str(c) in (action.help or "") for c in action.choices)
    ]
    assert lacking == []
