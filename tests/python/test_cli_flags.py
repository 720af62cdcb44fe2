# SPDX-License-Identifier: Apache-2.0
"""A wrong value of any option of any command is refused by the name that the user typed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import cli
from paceline.commands.flag_names import with_flags
from paceline.console import integer, number

# The arguments that each command needs; they are right.
COMMANDS = {
    "generate": ["x"],
    "chat": [],
    "serve": ["--port", "0"],
    "convert": ["no-such-folder", "no-such-output"],
    "bench latency": ["--demo"],
    "bench pairs": [],
    "bench serve": [],
    "bench compare": ["a.json", "b.json"],
    "bench plot": ["a.json"],
}
HUGE = "9" * 20
NOT_UTF8 = "\udcff"
# Where neither a huge integer, nor NaN, nor text that is not UTF-8 is what can be wrong.
WRONG = {"--goodput": "ttft", "--extra-body": "{", "--logit-bias": "{"}
# Options without a wrong value: an API key of `bench serve` is what the server says it is.
ANYTHING = {"bench serve --api-key", "bench serve --model", "bench serve --label"}


def options() -> Iterator[tuple[str, argparse.Action]]:
    """Each option with a value of each command of `COMMANDS`."""
    for command in COMMANDS:
        parser: Any = cli.build_parser()
        for word in command.split():
            (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
            parser = commands.choices[word]
        for action in parser._actions:
            flags = [option for option in action.option_strings if option.startswith("--")]
            for flag in flags if action.nargs != 0 else ():
                if f"{command} {flag}" not in ANYTHING:
                    yield f"{command} {flag}", action


OPTIONS = dict(options())


def test_the_options_are_found() -> None:
    assert len(OPTIONS) > 150
    assert {"serve --data-parallel-size", "generate --stop", "bench plot --out"} < set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_value_is_refused_by_the_name_of_its_flag(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    for loader in ("llm.load_pair", "bench.latency_command.load", "bench.pairs.command.load"):
        monkeypatch.setattr(f"paceline.{loader}", load)
    command, _, flag = name.rpartition(" ")
    action = OPTIONS[name]
    by_type = HUGE if action.type is integer else "nan" if action.type is number else NOT_UTF8
    argv = [*command.split(), *COMMANDS[command], f"{flag}={WRONG.get(flag, by_type)}"]
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        code = stop.code
    captured = capsys.readouterr()
    assert captured.out == ""
    error = captured.err.splitlines()[-1]
    assert error.startswith("paceline") and "error: " in error
    assert flag in error.partition("; see ")[0], error
    assert code == cli.EXIT_USAGE, error


def test_k_that_an_imposed_acceptance_length_excludes(capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    lengths = ["--num-speculative-tokens", "3,1,5"]
    argv = ["bench", "latency", *lengths, "--speculative-config", json.dumps(config)]
    assert cli.main(argv) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "--num-speculative-tokens has 1, which --speculative-config excludes: " in error
    assert "use --num-speculative-tokens 3,5 " in error


def message_of(message: str, *argv: str) -> str:
    args = cli.build_parser().parse_args(argv)
    args.command_line = "paceline " + " ".join(argv)
    return with_flags(message, args)


def test_values_and_keys_of_json_keep_their_names() -> None:
    for message in (
        "prompt has 'max_tokens' in it",
        "the model is too large; name the drafter and 'num_speculative_tokens' there",
        'line 1 is {"temperature": 3, "max_tokens": 2}',
        "the model's max_tokensize is 3",
    ):
        assert message_of(message, "generate", "x") == message
    shown = message_of("max_tokens is 'max_tokens'", "generate", "x")
    assert shown == "--max-tokens is 'max_tokens'"


def test_a_key_of_the_speculative_config_is_not_a_flag() -> None:
    error = "num_speculative_tokens is 99; allowed: 1 to 16"
    typed = message_of(error, "generate", "x", "--num-speculative-tokens", "99")
    assert typed == "--num-speculative-tokens is 99; allowed: 1 to 16"
    given = message_of(error, "generate", "x", "--model", "m", "--speculative-config", "{}")
    assert given == f"--speculative-config: {error}"


def test_a_file_is_named_with_its_option() -> None:
    typed = message_of("m: no such folder", "generate", "x", "-m", "m")
    assert typed == "--model m: no such folder"
    assert message_of("other: no such folder", "generate", "x", "-m", "m").startswith("other")
