# SPDX-License-Identifier: Apache-2.0
"""The heads of block drafters: Markov heads of three types, and the confidence head."""

from __future__ import annotations

from pathlib import Path

import pytest

from block_checks import SPECS, TARGET, drafter, greedy
from drafter_checks import ENGINE, PROMPTS, outputs, plain_outputs
from paceline import LLM, SamplingParams
from tiny_models import edit_tensors, load_tensors, make


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
            "x": {"draft_stop_threshold": threshold, "adaptive": False},
        }
        with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
            generated = llm.generate(PROMPTS, greedy())
        assert [o.outputs[0].token_ids for o in generated] == plain_outputs(TARGET)[: len(PROMPTS)]
        return sum(o.metrics.speculative_decoding["num_draft_tokens"] for o in generated)

    without = num_drafts(0.0, None)
    assert 0 < num_drafts(0.5, None) < without
    assert num_drafts(0.5, 50.0) == without
    assert num_drafts(0.5, -50.0) == 0


@pytest.mark.parametrize(
    ("layout", "confidence"), [("deepseek", "token"), ("z-lab", "hidden"), ("deepseek", "")]
)
def test_drafts_end_early_with_every_driver(layout: str, confidence: str, tmp_path: Path) -> None:
    path = drafter(layout, tmp_path, confidence=confidence)
    k = SPECS[layout].max_drafts

    def num_drafts(driver: str, threshold: float) -> list[int]:
        nested = {"draft_driver": driver, "draft_stop_threshold": threshold, "adaptive": False}
        config = {"model": str(path), "num_speculative_tokens": k, "x": nested}
        with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
            generated = llm.generate(PROMPTS, greedy())
        assert [o.outputs[0].token_ids for o in generated] == plain_outputs(TARGET)[: len(PROMPTS)]
        return [o.metrics.speculative_decoding["num_draft_tokens"] for o in generated]

    threshold = 0.5 if confidence else 0.1
    expected = num_drafts("while", threshold)
    assert 0 < sum(expected) < sum(num_drafts("while", 0.0))
    for driver in ("unrolled", "replay", "eager"):
        assert num_drafts(driver, threshold) == expected, driver


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
