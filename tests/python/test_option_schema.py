# SPDX-License-Identifier: Apache-2.0
"""Each option of options.toml is in C++, in the binding, in `LLM` and on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from errors import raises
from paceline import LLM, AsyncLLM, EngineConfig, _core, cli, option_schema
from paceline.engine_options import EngineArguments
from paceline.loader import load_checkpoint
from paceline.option_schema import ARGUMENTS, ENGINE, SPECULATIVE, Option
from paceline.startup import executor_options

ROOT = Path(__file__).parents[2]
STRUCTS = {"ExecutorOptions": ENGINE, "SpeculativeOptions": SPECULATIVE}
IN_CPP = {
    option.name: option
    for options in STRUCTS.values()
    for option in options.values()
    if option.cpp is not None and option.cpp["type"] not in STRUCTS
}


def load_generator() -> Any:
    """Imports docs/scripts/generate_options.py."""
    spec = importlib.util.spec_from_file_location(
        "docs_generate_options", ROOT / "docs/scripts/generate_options.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def parser_of(command: str) -> argparse.ArgumentParser:
    for action in cli.build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: argparse.ArgumentParser = action.choices[command]
            return found
    raise AssertionError("the command line has no commands")


def test_generated_files_are_up_to_date() -> None:
    generator = load_generator()
    stale = [str(path.relative_to(ROOT)) for path in generator.outdated()]
    assert not stale, f"{stale}; run: {generator.COMMAND}"


def test_the_c_interface_has_its_options_once() -> None:
    text = (ROOT / "cpp/include/paceline/paceline.h").read_text("utf-8")
    struct = text[
        text.index("typedef struct paceline_options {") : text.index("} paceline_options;")
    ]
    code = re.sub(r"//.*", "", struct)
    in_c = [option.name for option in IN_CPP.values() if option.c]
    assert len(in_c) == 18 and "hang_timeout_s" in in_c
    for name in in_c:
        assert len(re.findall(rf"\b{name}[,;]", code)) == 1, name
    header = (ROOT / "cpp/include/paceline/config.h").read_text("utf-8")
    assert re.findall(r"visit\(given\.(\w+)", header) == [o.name for o in _in_order() if o.c]


def _in_order() -> list[Option]:
    return [*ENGINE.values(), *SPECULATIVE.values()]


def test_a_stale_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = load_generator()
    changed = {**ENGINE, "block_size": dataclasses.replace(ENGINE["block_size"], high=512)}
    monkeypatch.setitem(generator._STRUCTS, "ExecutorOptions", changed)
    assert list(generator.outdated()) == [generator.HEADER]
    assert "Tokens per KV block, 1..512." in generator.header(generator.HEADER)


def test_the_binding_has_the_options_of_the_schema(target_dir: Path) -> None:
    model = load_checkpoint(target_dir).model
    found = _core.default_options(model, None, {})
    assert set(found) == set(IN_CPP)
    for name, option in IN_CPP.items():
        default = (option.cpp or {}).get("default", option.default)
        if isinstance(default, bool | int) and default:
            assert found[name] == default, name


@pytest.mark.parametrize(
    "name", [name for name, option in IN_CPP.items() if option.high and option.high < 2**31 - 1]
)
def test_cpp_refuses_what_is_beyond_the_largest_value(target_dir: Path, name: str) -> None:
    option = IN_CPP[name]
    assert option.high is not None
    beyond = option.high + 1
    with raises(ValueError, f"{name} is {beyond}; allowed: "):
        _core.Executor(load_checkpoint(target_dir).model, None, {name: beyond})


@pytest.mark.parametrize("function", [LLM.__init__, AsyncLLM.__init__, LLM, AsyncLLM])
def test_llm_shows_each_argument(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    for option in ARGUMENTS.values():
        shown = parameters[option.name]
        assert (shown.default, shown.annotation) == (option.default, option.type)
        assert shown.kind is shown.KEYWORD_ONLY


@pytest.mark.parametrize("documented", [LLM.__init__, AsyncLLM.__init__, EngineConfig])
def test_docstrings_describe_each_argument(documented: object) -> None:
    doc = " ".join((inspect.getdoc(documented) or "").split())
    lines = (inspect.getdoc(documented) or "").splitlines()
    for option in ARGUMENTS.values():
        assert f"{option.name}: {option.text(option.doc)}" in doc
    assert max(map(len, lines)) <= 92
    assert "**engine" not in doc


def test_types_and_values_are_those_of_the_schema() -> None:
    assert list(EngineArguments.__annotations__) == list(ARGUMENTS)
    assert dataclasses.asdict(EngineConfig()) == {o.name: o.default for o in ARGUMENTS.values()}
    given = executor_options(EngineConfig(hang_timeout_s=2, max_num_seqs=3), None)
    assert {name for name, option in ARGUMENTS.items() if option.cpp} <= set(given)
    assert (given["hang_timeout_s"], given["max_num_seqs"], given["kv_cache_bytes"]) == (2, 3, 0)


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_the_command_line_has_the_flags(command: str) -> None:
    actions = {flag: a for a in parser_of(command)._actions for flag in a.option_strings}
    for option in ARGUMENTS.values():
        if option.cli is None or (command != "serve" and "commands" in option.cli):
            continue
        action = actions[option.flag]
        assert (action.dest, action.default) == (option.dest, option.default)
    args = parser_of("serve").parse_args(["--hang-timeout", "5", "--block-size", "8"])
    assert option_schema.given_options(args, "serve")["hang_timeout_s"] == 5
    assert option_schema.given_options(args, "all")["block_size"] == 8


def test_a_flag_without_a_help_gets_one() -> None:
    parser = argparse.ArgumentParser()
    doc = "Largest share, in %, of a step. It has {low} to {high}."
    Option("my_share", "0.1.0", "int", 5, low=1, high=9, unit="steps", doc=doc, cli={}).add_to(
        parser
    )
    Option("my_pause_s", "0.1.0", "float | None", above=0, high=9, doc="A pause.", cli={}).add_to(
        parser
    )
    text = " ".join(parser.format_help().split())
    assert "largest share, in %, of a step; steps from 1 to 9 (default: 5)" in text
    assert "a pause; a number above 0, at most 9 (default: none)" in text
    assert parser.parse_args(["--my-share", "7", "--my-pause-s", "0.5"]).my_pause_s == 0.5


def test_each_entry_says_since_when() -> None:
    def parsed(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", version)[:3]))

    for option in (ENGINE | SPECULATIVE).values():
        assert parsed("0.1.0") <= parsed(option.since) <= parsed(paceline.__version__), option.name
        assert option.type is None or option.doc, option.name
