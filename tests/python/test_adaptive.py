# SPDX-License-Identifier: Apache-2.0
"""An engine that chooses the number of drafts ends where speculation pays, or does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.demo import find_demo

PROMPT = list(range(5, 45))
# At most as many runs of a request until the choice is a good one; other work on the machine may
# delay it.
RUNS = 60


def test_the_default_depends_on_the_acceptance_method(
    target_dir: Path, speculative_config: dict[str, Any]
) -> None:
    def is_adaptive(**changes: Any) -> bool:
        config = {key: speculative_config[key] for key in ("model", "num_speculative_tokens")}
        with LLM(target_dir, speculative_config=config | changes, max_num_seqs=2) as llm:
            choice = llm.stats()["speculative_decoding"]["adaptive"]
            assert llm.capabilities()["configured"]["adaptive"] == (choice is not None)
            return choice is not None

    assert is_adaptive()
    assert not is_adaptive(x={"adaptive": False})
    for method in ("standard", "block"):
        assert not is_adaptive(rejection_sample_method=method)
        assert is_adaptive(rejection_sample_method=method, x={"adaptive": True})
    imposed = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    assert not is_adaptive(**imposed)
    custom = {"method": "custom", "drafter": lambda ids: ids[-1:], "num_speculative_tokens": 1}
    with LLM(target_dir, speculative_config=custom, max_num_seqs=2) as llm:
        assert llm.stats()["speculative_decoding"]["adaptive"] is None


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "eagle3"])
def test_a_drafter_misses_prompts_while_no_drafts_pay(
    pair_of: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    """No draft is accepted. The drafter has KV of few of the prompts that follow."""
    target, draft = pair_of(kind)
    config = {
        "model": str(draft),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 1.0,
        "x": {"adaptive": True},
    }
    engine: dict[str, Any] = {
        "max_num_seqs": 16, "max_model_len": 256, "kv_cache_bytes": 64 << 20, "device": "cpu",
    }  # fmt: skip
    with LLM(target, speculative_config=config, **engine) as llm:

        def cached_blocks(owner: str) -> int:
            groups = llm.stats()["kv_groups"]
            return sum(group["cached_blocks"] for group in groups if group["owner"] == owner)

        for run in range(RUNS):
            llm.generate([PROMPT] * 16, SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
            choice = llm.stats()["speculative_decoding"]["adaptive"]
            if choice["num_drafts"] == 0 and run >= 3:
                break
        before = {owner: cached_blocks(owner) for owner in ("target", "draft")}
        prompts = [[(i * 7 + j * 3) % 90 + 5 for j in range(160)] for i in range(64)]
        for first in range(0, 64, 16):
            batch = prompts[first : first + 16]
            llm.generate(batch, SamplingParams(max_tokens=15, ignore_eos=True, seed=1))
        added = {owner: cached_blocks(owner) - count for owner, count in before.items()}
        assert llm._executor.check_integrity() == ""
    assert added["target"] == 64 * 160 // 16
    # One of eight, or of sixteen, so that the engine still learns which drafts would be accepted.
    assert 0 < added["draft"] < added["target"] / 2


@pytest.mark.parametrize(("length", "good"), [(1.0, {0}), (5.0, {2, 4})])
def test_the_choice_follows_acceptance(length: float, good: set[int]) -> None:
    """Either no draft is accepted, or all are, by a target that is much larger than the drafter."""
    demo = find_demo("draft_model")
    config = demo.speculative_config(4) | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
        "x": {"adaptive": True},
    }
    params = SamplingParams(max_tokens=800, ignore_eos=True, seed=1)
    choice: dict[str, Any] = {}
    share = 0.0  # of good choices in the newest run
    before: dict[int, int] = {}
    with LLM(demo.target, speculative_config=config, max_num_seqs=2, device="cpu") as llm:
        for _ in range(RUNS):
            llm.generate(PROMPT, params)
            choice = llm.stats()["speculative_decoding"]["adaptive"]
            total = {of["num_drafts"]: of["num_iterations"] for of in choice["by_num_drafts"]}
            iterations = {k: count - before.get(k, 0) for k, count in total.items()}
            share = sum(iterations[k] for k in good) / sum(iterations.values())
            before = total
            if choice["num_drafts"] in good and share > 0.5:
                break
    assert choice["num_drafts"] in good
    assert share > 0.5
    assert list(iterations) == [0, 1, 2, 4]
    assert (choice["acceptance"][0] < 0.5) == (length == 1)
    chosen = next(of for of in choice["by_num_drafts"] if of["num_drafts"] == choice["num_drafts"])
    assert chosen["expected_ms"] > 0
    assert chosen["expected_tokens"] == pytest.approx(
        min(length, 1 + chosen["num_drafts"]), rel=0.3
    )
