# SPDX-License-Identifier: Apache-2.0
"""Makes the reference of the command line from its parsers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Final
from unittest import mock

from paceline.cli import build_parser
from reference_markdown import Entry, Group, Page

_WIDTH: Final = "100"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Lists a parser and those of its commands, in order."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from parsers(choice)


def _entry(parser: argparse.ArgumentParser) -> Entry:
    # The terminal of a build has neither a say in the width nor in colors.
    with mock.patch.dict(os.environ, {"COLUMNS": _WIDTH, "NO_COLOR": "1"}):
        text = parser.format_help().rstrip()
    return Entry([parser.prog], text, "text", [])


def pages() -> list[Page]:
    """Makes the page of the command line."""
    return [
        Page(
            "reference-cli.md",
            "shell",
            "Command line reference",
            "What each command prints with `--help`.",
            [Group("Commands", "", [_entry(parser) for parser in parsers(build_parser())])],
        )
    ]
