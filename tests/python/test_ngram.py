# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup (method "ngram") needs no model and changes no token."""

from __future__ import annotations

import json

import pytest

from drafter_checks import ENGINE, outputs, plain_outputs
from errors import raises
from paceline import LLM
from paceline.cli import main
from paceline.loader import load_checkpoint
from tiny_models import TinySpec, make

TARGET = TinySpec("llama", seed=40)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (5, 5)])
def test_ngram(lengths: tuple[int, int]) -> None:
    config = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": lengths[0],
        "prompt_lookup_max": lengths[1],
    }
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        assert llm.draft is None
        seen = llm._executor.options
        assert (seen["prompt_lookup_min"], seen["prompt_lookup_max"]) == lengths
        assert outputs(llm) == plain_outputs(TARGET)
        assert llm._executor.check_integrity() == ""


def test_ngram_of_a_loaded_target() -> None:
    target = load_checkpoint(make(TARGET), progress=False)
    config = {"method": "ngram", "num_speculative_tokens": 2}
    engine = {key: value for key, value in ENGINE.items() if key != "show_progress"}
    with LLM.from_loaded(target, speculative_config=config, **engine) as llm:
        assert outputs(llm) == plain_outputs(TARGET)
    with raises(
        ValueError, "both or neither, except that methods 'ngram' and 'custom' have no draft"
    ):
        LLM.from_loaded(target, target, speculative_config=config)


def test_demo_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "def f(x):\n", "--demo", "ngram", "--compare", "--json"]
    assert main([*argv, "--max-tokens", "24"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plain"]["is_same"] is True
    assert report["draft_model"] is None
    assert report["configured"]["method"] == "ngram"
