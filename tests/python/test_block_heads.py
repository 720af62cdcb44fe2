# SPDX-License-Identifier: Apache-2.0
"""The heads of block drafters: Markov heads of three types, and the confidence head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from block_checks import SPECS, TARGET, drafter, greedy, opened
from drafter_checks import ENGINE, PROMPTS, outputs, plain_outputs
from errors import raises
from paceline import LLM, SamplingParams
from paceline._core import ModelFileError, check_decoder_config
from tiny_models import edit_config, edit_tensors, load_tensors, make


@pytest.mark.parametrize(
    ("layout", "confidence"), [("deepseek", "token"), ("rnn", "hidden"), ("z-lab", "hidden")]
)
def test_a_confidence_head_ends_drafts_before_one(
    layout: str, confidence: str, tmp_path: Path
) -> None:
    path = drafter(layout, tmp_path, confidence=confidence)
    spec = SPECS[layout]

    def num_drafts(threshold: float, bias: float | None) -> int:
        if bias is not None:
            edit_tensors(path, lambda tensors: tensors["confidence_head.proj.bias"].fill_(bias))
        config = {
            "model": str(path),
            "num_speculative_tokens": spec.max_drafts,
            "x": {
                "draft_driver": "while", "draft_stop_threshold": threshold, "adaptive": False,
            },
        }  # fmt: skip
        with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
            generated = llm.generate(PROMPTS, greedy())
        assert [o.outputs[0].token_ids for o in generated] == plain_outputs(TARGET)[: len(PROMPTS)]
        return sum(o.metrics.speculative_decoding["num_draft_tokens"] for o in generated)

    without = num_drafts(0.0, None)
    assert 0 < num_drafts(0.5, None) < without
    assert num_drafts(0.5, 50.0) == without
    assert num_drafts(0.5, -50.0) == 0


def test_weight_updates_of_heads(tmp_path: Path) -> None:
    path = drafter("rnn", tmp_path)
    config = {"model": str(path), "num_speculative_tokens": 4, "x": {"adaptive": False}}
    params = SamplingParams(temperature=0.0, max_tokens=24)

    def accepted(llm: LLM) -> list[int]:
        return [
            o.metrics.speculative_decoding["num_accepted_draft_tokens"]
            for o in llm.generate(PROMPTS, params)
        ]

    other = load_tensors(drafter("rnn", tmp_path / "other", seed=5))
    target = load_tensors(make(TARGET))
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        before = accepted(llm)
        llm.update_weights(target, draft_state_dict=other)
        assert outputs(llm) == plain_outputs(TARGET)
        after = accepted(llm)
    updated = {"model": str(tmp_path / "other" / "drafter")}
    with LLM(make(TARGET), speculative_config=config | updated, **ENGINE) as llm:
        assert accepted(llm) == after != before


@pytest.mark.parametrize(
    ("layout", "edit", "error", "seen"),
    [
        (
            "deepseek",
            lambda path: edit_config(path, markov_head_type="cubic"),
            NotImplementedError,
            ("markov_head_type", "cubic", "vanilla, gated and rnn"),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, markov_head_type="gated"),
            ModelFileError,
            ("markov_head.gate_proj.weight",),
        ),
        (
            "gated",
            lambda path: edit_config(path, markov_head_type="vanilla"),
            ModelFileError,
            ("markov_head.gate_proj",),
        ),
        (
            "rnn",
            lambda path: edit_tensors(
                path, lambda t: t.update({"markov_head.joint_proj.weight": torch.ones(16, 80)})
            ),
            ModelFileError,
            ("markov_head.joint_proj.weight", "[16, 80]", "[24, 80]", "3 * markov_rank"),
        ),
        (
            "gated",
            lambda path: edit_tensors(path, lambda t: t.pop("markov_head.gate_proj.bias")),
            ModelFileError,
            ("markov_head.gate_proj.bias",),
        ),
        (
            "deepseek",
            lambda path: edit_config(path, enable_confidence_head=True),
            ModelFileError,
            ('"enable_confidence_head" is true', "'confidence_head.proj.weight'", "or false"),
        ),
        (
            "gated",
            lambda path: edit_config(path, confidence_head_with_markov=False),
            ModelFileError,
            ("'confidence_head.proj.weight' has 72 columns", "expected 64", "is false"),
        ),
        (
            "rnn",
            lambda path: edit_config(path, confidence_head_with_markov=True),
            ModelFileError,
            ("has 64 columns", "expected 72", "hidden_size + markov_rank", "is true"),
        ),
        (
            "gated",
            lambda path: edit_tensors(path, lambda t: t.pop("confidence_head.proj.bias")),
            ModelFileError,
            ("confidence_head.proj.bias",),
        ),
    ],
)
def test_refusals(
    layout: str, edit: Any, error: type[Exception], seen: tuple[str, ...], tmp_path: Path
) -> None:
    path = drafter(layout, tmp_path)
    edit(path)
    with raises(error, *seen):
        opened(path)


@pytest.mark.parametrize(
    ("layout", "heads", "seen"),
    [
        (
            "gated",
            {"markov": {"kind": "cubic", "rank": 8}},
            ("drafter.block.markov.kind", "'cubic'", "'vanilla', 'gated', 'rnn'"),
        ),
        ("rnn", {"markov": {"kind": "rnn", "rank": 65}}, ("drafter.block.markov.rank", "65", "64")),
        (
            "z-lab",
            {"confidence": {"reads_token": True}},
            ("drafter.block.confidence.reads_token", "true", "false where kind is 'dflash'"),
        ),
        ("gated", {"confidence": {}}, ("drafter.block.confidence", "reads_token")),
    ],
)
def test_descriptions_that_are_refused(
    layout: str, heads: dict[str, Any], seen: tuple[str, ...], tmp_path: Path
) -> None:
    config = opened(drafter(layout, tmp_path)).config
    config["drafter"]["block"] |= heads
    with raises(ValueError, *seen):
        check_decoder_config(json.dumps(config))
