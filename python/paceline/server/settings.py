# SPDX-License-Identifier: Apache-2.0
"""Options from the environment and from a YAML file.

Each option of `paceline serve` can also be the variable PACELINE_<NAME> and a key of the file that
--config names. The command line comes first, then the environment, then the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.checks import check_path, did_you_mean, shorten, wrong_value
from paceline.commands.text_files import MAX_CONFIG_BYTES, read_text_file
from paceline.vllm_arguments import flag_advice

PREFIX: Final = "PACELINE_"
_SWITCHES: Final = {"1": True, "true": True, "0": False, "false": False}


def variables(parser: argparse.ArgumentParser) -> list[str]:
    """The names of the environment variables of a command."""
    return [PREFIX + dest.upper() for dest in _actions(parser)]


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> argparse.Namespace:
    """Reads the options of a command from all three places.

    Args:
        parser: The parser of the command; it has an option --config.
        arguments: Its part of the command line.
        environment: The environment.

    Returns:
        The options.

    Raises:
        ValueError: A variable or a key of the file is wrong. The message names it.
        OSError: The file cannot be read.
    """
    actions = _actions(parser)
    given: dict[str, Any] = {}
    for dest, action in actions.items():
        name = PREFIX + dest.upper()
        if name in environment:
            given[dest] = _convert(action, environment[name], f"the environment variable {name}")
    # Options that are not given keep what the namespace has.
    path = parser.parse_args(arguments, argparse.Namespace(**given)).config
    if path is not None:
        given = _read_file(Path(check_path("--config", path, "a YAML file")), actions) | given
    return parser.parse_args(arguments, argparse.Namespace(**given))


def read_mapping(
    parser: argparse.ArgumentParser, content: Mapping[str, Any], source: str
) -> argparse.Namespace:
    """Reads the options of a command from a mapping alone.

    Args:
        parser: The parser of the command.
        content: As the file has them.
        source: Where they come from, for errors.

    Returns:
        The options.

    Raises:
        ValueError: A key or its value is wrong. The message names it.
    """
    given = _convert_all(content, _actions(parser), source)
    return parser.parse_args([], argparse.Namespace(**given))


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a command."""
    return {
        action.dest: action
        for action in parser._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    }


def _read_file(path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Reads the file; keys have the names of options, with "-" or "_"."""
    import yaml

    try:
        content = yaml.safe_load(read_text_file(path, MAX_CONFIG_BYTES))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} has {shorten(content)}; allowed: one option in each line")
    return _convert_all(content, actions, str(path))


def _convert_all(
    content: Mapping[str, Any], actions: Mapping[str, argparse.Action], source: str
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in content.items():
        dest = str(key).replace("-", "_")
        if dest not in actions or dest == "config":
            names = [name.replace("_", "-") for name in actions if name != "config"]
            advice = flag_advice(dest)
            hint = did_you_mean(str(key), names) if advice is None else f"; {advice.plain}"
            raise ValueError(
                f"{source}: unknown key {shorten(key)}{hint}; allowed: {', '.join(names)}"
            )
        given[dest] = _convert(actions[dest], value, f"{source}: {key}")
    return given


def _convert(action: argparse.Action, value: Any, source: str) -> Any:
    """Converts a value as the parser converts the text of an option."""
    if action.nargs == 0:
        return _switch(action, value, source)
    if action.nargs in ("+", "*"):
        parts = value.split() if isinstance(value, str) else value
        if not isinstance(parts, list) or not parts:
            raise wrong_value(source, value, "one value or several")
        return [_single(action, part, source) for part in parts]
    return _single(action, value, source)


def _single(action: argparse.Action, value: Any, source: str) -> Any:
    if isinstance(value, dict):
        value = json.dumps(value)  # --speculative-config
    if isinstance(value, bool | list) or value is None:
        raise wrong_value(source, value, "a number or a text")
    text = str(value)
    try:
        converted = action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None
    if action.choices is not None and converted not in action.choices:
        raise wrong_value(source, text, ", ".join(map(str, action.choices)))
    return converted


def _switch(action: argparse.Action, value: Any, source: str) -> bool:
    is_on = _SWITCHES.get(str(value).lower())
    if is_on is None:
        raise wrong_value(source, value, "true or false")
    if isinstance(action, argparse.BooleanOptionalAction):
        return is_on
    return is_on if action.const else not is_on
