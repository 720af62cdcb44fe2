# SPDX-License-Identifier: Apache-2.0
"""`LLM.stats`: what the engine has counted, in plain JSON types and constant size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=400)


@pytest.fixture
def fresh(target_dir: Path, speculative_config: dict[str, Any]) -> Any:
    with LLM(target_dir, speculative_config=speculative_config, max_num_seqs=2) as llm:
        yield llm


def test_counts_are_the_sums_of_the_requests(fresh: LLM) -> None:
    params = [SamplingParams(seed=i, n=1 + i % 2, max_tokens=12 + i) for i in range(4)]
    outputs = fresh.generate([[5 + i] * 20 for i in range(4)], params)
    stats = fresh.stats()
    samples = [sample for output in outputs for sample in output.outputs]
    assert stats["num_finished"] == len(samples) == 6
    assert stats["num_running"] == stats["num_waiting"] == stats["num_failed"] == 0
    assert stats["num_output_tokens"] == sum(len(sample.token_ids) for sample in samples)
    # The second output of a prompt takes over all of it but the last token, or computes it anew.
    assert stats["num_prompt_tokens"] + stats["num_cached_tokens"] == 6 * 20
    assert stats["num_iterations"] > 0 and stats["uptime_s"] > 0
    speculative = stats["speculative_decoding"]
    metrics = [output.metrics.speculative_decoding or {} for output in outputs]
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert speculative[name] == sum(one[name] for one in metrics) > 0
    length = 1 + speculative["num_accepted_draft_tokens"] / speculative["num_spec_steps"]
    assert speculative["mean_acceptance_length"] == length
    assert speculative["num_spec_tokens"] == len(speculative["acceptance_per_position"]) == 4


def test_the_load_and_the_use_of_the_pool(fresh: LLM) -> None:
    idle = fresh.stats()
    assert all(group["held_blocks"] == 0 for group in idle["kv_groups"])
    with fresh.stream([[5] * 60] * 3, LONG) as stream:
        next(stream)
        busy = fresh.stats()
    assert (busy["num_running"], busy["num_waiting"]) == (2, 1)
    assert 0 == idle["kv_cache_usage"] < busy["kv_cache_usage"] <= 1
    report = fresh.memory_report()["groups"]
    for name, group in zip(report, busy["kv_groups"], strict=True):
        assert {key: group[key] for key in ("owner", "kind", "window")} == {
            key: name[key] for key in ("owner", "kind", "window")
        }
        assert 0 < group["held_blocks"] <= group["max_blocks"]


def test_the_size_does_not_depend_on_what_has_run(fresh: LLM) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(entry) for key, entry in value.items()}
        return [shape(entry) for entry in value] if isinstance(value, list) else None

    before = fresh.stats()
    assert json.loads(json.dumps(before)) == before
    fresh.generate("a", LONG)
    assert shape(fresh.stats()) == shape(before)


def test_stats_without_a_drafter_and_of_a_closed_llm(target_dir: Path) -> None:
    with LLM(target_dir, max_num_seqs=1) as llm:
        llm.generate("a", SamplingParams(max_tokens=2))
        assert llm.stats()["speculative_decoding"] is None
        assert llm.stats()["num_output_tokens"] == 2
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.stats()
