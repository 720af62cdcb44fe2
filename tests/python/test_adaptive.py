# SPDX-License-Identifier: Apache-2.0
"""An engine that chooses the number of drafts ends where speculation pays, or does not."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.demo import find_demo

PROMPT = list(range(5, 45))
# Runs of a request until the choice is the best one; other work on the machine may delay it.
RUNS = 20


@pytest.mark.parametrize(("length", "best"), [(1.0, 0), (5.0, 4)])
def test_the_choice_follows_acceptance(length: float, best: int) -> None:
    """Either no draft is accepted, or all are, by a target that is much larger than the drafter."""
    demo = find_demo("draft_model")
    config = demo.speculative_config(4) | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
        "x": {"adaptive": True},
    }
    params = SamplingParams(max_tokens=800, ignore_eos=True, seed=1)
    choice: dict[str, Any] = {}
    with LLM(demo.target, speculative_config=config, max_num_seqs=2, device="cpu") as llm:
        for _ in range(RUNS):
            llm.generate(PROMPT, params)
            choice = llm.stats()["speculative_decoding"]["adaptive"]
            iterations = {of["num_drafts"]: of["num_iterations"] for of in choice["by_num_drafts"]}
            if choice["num_drafts"] == best and iterations[best] > 0.5 * sum(iterations.values()):
                break
    assert choice["num_drafts"] == best
    assert list(iterations) == [0, 1, 2, 4]
    assert iterations[best] > 0.5 * sum(iterations.values())
    assert all((share < 0.5) == (length == 1) for share in choice["acceptance"][:1])
    of_best = next(of for of in choice["by_num_drafts"] if of["num_drafts"] == best)
    assert of_best["expected_ms"] > 0
    assert of_best["expected_tokens"] == pytest.approx(length, rel=0.3)
