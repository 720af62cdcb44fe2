# SPDX-License-Identifier: Apache-2.0
"""Error messages in the command line's own names: --max-tokens instead of `max_tokens`.

The checks that `LLM` and the command line share name arguments of Python.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from paceline.checks import shorten
from paceline.option_schema import ARGUMENTS

# Text that is left as it is: values, and keys of JSON objects.
_QUOTED: Final = r"""(?<![\w\]])'(?:[^'\\]|\\.)*'(?!\w)|(?<!\w)"(?:[^"\\]|\\.)*"|\{[^{}]*\}"""
# Where a name that is also a word of English, such as `model`, names an argument.
_STARTS: Final = r"(?:(?<=^)|(?<=: )|(?<=; )|(?<= and )|(?<=, but ))"
_GOES_ON: Final = r"(?=\[\d+\]| is | has | = |: )"
_CONFIG: Final = "speculative_config"


def with_flags(message: str, args: argparse.Namespace) -> str:
    """Puts the flags of a command in the place of Python's names of arguments.

    Args:
        message: The message of an error.
        args: The arguments of the command, with its `parser` and its `command_line`.

    Returns:
        The message. An error of a file or of a key of --speculative-config names the option first
        that it was given in.
    """
    flags = _flags(args.parser, shlex.split(args.command_line))
    given = vars(args)
    config = _config_fields() if _CONFIG in flags else frozenset()
    # Where the option is not given, the name is that of a key of --speculative-config.
    names = {
        name: flag
        for name, flag in flags.items()
        if name not in config or given.get(name) is not None
    }
    shown = _replaced(message, names, of_config=given.get(_CONFIG) is None)
    first = re.match(r"\w+(?= is | has | needs |\[)", shown)
    if given.get(_CONFIG) is not None and first is not None and first[0] in config:
        return f"{flags[_CONFIG]}: {shown}"
    return _with_source(shown, args, flags)


def _with_source(message: str, args: argparse.Namespace, flags: Mapping[str, str]) -> str:
    """Names the option first whose value a message shows, if it names no option."""
    if any(flag in message for flag in flags.values()):
        return message
    for name, flag in flags.items():
        value = getattr(args, name, None)
        if not isinstance(value, str) or not value or value == args.parser.get_default(name):
            continue
        if message.startswith((f"{value}:", f"{value}/")):
            return f"{flag} {message}"
        if shorten(value) in message:
            return f"{flag}: {message}"
    return message


def _flags(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, str]:
    """The flag of each option by its name in Python: the one that is given, if there are several.
    The first one, which our own checks name, has it too."""
    flags: dict[str, str] = {}
    typed = {word.partition("=")[0] for word in words}
    for action in parser._actions:
        options = [option for option in action.option_strings if option.startswith("--")]
        if options:
            flag = next((option for option in options if option in typed), options[0])
            flags |= {action.dest: flag} | ({} if flag == options[0] else {options[0]: flag})
    flags |= {o.name: flags[o.dest] for o in ARGUMENTS.values() if o.dest in flags}
    return flags


def _config_fields() -> frozenset[str]:
    import dataclasses

    from paceline.speculative_config import SpeculativeConfig

    return frozenset(field.name for field in dataclasses.fields(SpeculativeConfig))


def _replaced(message: str, names: Mapping[str, str], *, of_config: bool) -> str:
    """Replaces names outside of quotes.

    Args:
        message: The message.
        names: The flags by name.
        of_config: Whether `speculative_config['k']` is what an option of that name makes.
    """
    long = "|".join(re.escape(name) for name in names if "_" in name or name.startswith("--"))
    short = "|".join(re.escape(name) for name in names if name.isalpha())
    key = rf"{_CONFIG}\['(?P<key>{long})'\]" if of_config and long else r"(?P<key>(?!))"
    pattern = (
        rf"{key}|{_QUOTED}|(?<![\w.-])(?P<long>{long or '(?!)'})(?![\w'\"])"
        rf"|{_STARTS}(?P<short>{short or '(?!)'}){_GOES_ON}"
    )

    def flag_of(match: re.Match[str]) -> str:
        name: Any = match["key"] or match["long"] or match["short"]
        return match[0] if name is None else names[name]

    return re.sub(pattern, flag_of, message)
