# SPDX-License-Identifier: Apache-2.0
"""Benches of mixtures of experts: which experts are counted, read and reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_models
from bench_work import drafting, kv_bytes_read, logit_parameters, pass_bytes, row_parameters
from paceline import _core, cli
from paceline.bench import floor, latency, models
from paceline.bench.workload import Workload
from tiny_models import TinySpec

pytestmark = pytest.mark.usefixtures("quick_machine")

GPT_OSS = TinySpec("gpt_oss", seed=31, num_experts=8, top_k=3)


def measured(
    folder: Path | str, work: Workload, k: int = 0, draft: Path | None = None
) -> tuple[models.BenchModel, latency.Measurement]:
    target = models.load(str(folder), dummy=False, show_progress=False)
    drafter = speculation = None
    if draft is not None:
        drafter = models.load(str(draft), dummy=False, show_progress=False)
        speculation = drafting(k)
    (row,) = latency.measure(target, drafter, speculation, [work], rounds=1)
    return target, row


def test_only_experts_that_have_rows_are_counted(tmp_path: Path) -> None:
    path = tiny_models.with_fixed_routing(tiny_models.make(GPT_OSS), tmp_path / "fixed", [1, 4, 6])
    work = Workload(5, 9, 12)
    target, row = measured(path, work)
    assert (row.target_experts, row.draft_experts) == (3.0, None)
    costs = target.costs
    expert = 4 * (2 * 96 * 64 + 64 * 96)
    assert (costs.num_experts, costs.expert_bytes) == (8, 2 * expert)
    assert row.weight_bytes == costs.shared_bytes + 3 * costs.expert_bytes
    assert row.iteration_bytes == row.weight_bytes + row.kv_bytes
    # Every row computes three experts, whichever they are.
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 8 * 64 + 3 * (3 * 96 * 64)
    assert (row_parameters(costs), logit_parameters(costs)) == (2 * layer, 128 * 64)
    # The floor follows: one pass that reads these bytes.
    speed = floor.Speed("cpu", 1)
    bounded = floor.with_floor(row, target, None, speed)
    num_bytes = row.weight_bytes + 5 * kv_bytes_read(target.config, work.mean_context, 4)
    assert bounded.floor_ms == pytest.approx(num_bytes / 40e9 * 1e3)


def test_the_experts_of_target_and_drafter_are_counted_apart(tmp_path: Path) -> None:
    path = tiny_models.with_fixed_routing(tiny_models.make(GPT_OSS), tmp_path / "target", [1, 4, 6])
    small = tiny_models.make(replace(GPT_OSS, num_layers=3, num_experts=6, top_k=2))
    draft = tiny_models.with_fixed_routing(small, tmp_path / "draft", [0, 5])
    target, row = measured(path, Workload(3, 9, 12), k=3, draft=draft)
    assert (row.target_experts, row.draft_experts) == (3.0, 2.0)
    draft_costs = models.load(str(draft), dummy=False).costs
    expected = pass_bytes(target.costs, 3.0) + 3 * pass_bytes(draft_costs, 2.0)
    assert row.weight_bytes == expected
    passes = floor._passes(target, models.load(str(draft), dummy=False), row)
    num_bytes = [sum(op.num_bytes for op in ops) for ops in passes]
    assert num_bytes[1:] == [num_bytes[1]] * 3
    assert sum(num_bytes) - row.weight_bytes == pytest.approx(row.kv_bytes, abs=4)


def test_the_engine_counts_every_pass(tmp_path: Path) -> None:
    """Layers and experts of all iterations, prompts included, as `stats()` adds them up."""
    path = tiny_models.with_fixed_routing(tiny_models.make(GPT_OSS), tmp_path / "fixed", [1, 4, 6])
    target = models.load(str(path), dummy=False)
    work = Workload(2, 9, 12)
    executor = latency.make_executor(target, target, drafting(3), work)
    try:
        assert executor.add_requests([_core.Request([1, 2, 3], max_tokens=12, temperature=0.0)], [])
        while not any(event.finish_reason for event in executor.poll(1000)):
            pass
        assert executor.check_integrity() == ""  # no iteration is in flight
        stats, times = executor.stats(), executor.iteration_times()
        executor.reset_stats()
        assert executor.stats()["num_target_experts_hit"] == 0
    finally:
        executor.close()
    iterations = stats["num_iterations"]
    assert stats["num_target_mixture_layers"] == 2 * iterations
    assert stats["num_draft_mixture_layers"] == 2 * 3 * iterations
    for model in ("target", "draft"):
        assert sum(times[f"{model}_experts_hit"]) == stats[f"num_{model}_experts_hit"]
        assert sum(times[f"{model}_mixture_layers"]) == stats[f"num_{model}_mixture_layers"]
    # An iteration without rows of a model hits none of its experts.
    assert set(times["target_experts_hit"]) <= {0, 2 * 3}
    assert stats["num_target_experts_hit"] > 2 * 3 * (iterations - 3)


def test_uniform_routing_hits_as_many_experts_as_chance_does(tmp_path: Path) -> None:
    """Dummy weights route nearly uniformly: E (1 - (1 - k / E)^T) experts have rows."""
    spec = replace(GPT_OSS, num_experts=32, top_k=4, num_layers=4, vocab_size=512)
    source = tiny_models.make(replace(spec, tokenizer_size=0))
    config = tmp_path / "config.json"
    config.write_text((source / "config.json").read_text())
    target = models.load(str(tmp_path), dummy=True)
    for c in (1, 4, 16):
        work = Workload(c, 4, 40, {"temperature": 1.0})
        (row,) = latency.measure(target, None, None, [work], rounds=2)
        expected = 32 * (1 - (1 - 4 / 32) ** c)
        assert row.target_experts == pytest.approx(expected, rel=0.04), c


def test_reports_have_the_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_models.with_fixed_routing(tiny_models.make(GPT_OSS), tmp_path / "fixed", [1, 4, 6])
    out = tmp_path / "bench.json"
    argv = ["bench", "latency", "--model", str(path), "--concurrency", "2", "--input-len", "5"]
    argv += ["--output-len", "8", "--rounds", "1", "--json", str(out)]
    speculative = {"model": str(path), "num_speculative_tokens": 2}
    assert cli.main([*argv, "--speculative-config", json.dumps(speculative)]) == 0
    plain, drafted = json.loads(out.read_text())["rows"]
    assert (plain["target_experts"], plain["draft_experts"]) == (3.0, None)
    assert (drafted["target_experts"], drafted["draft_experts"]) == (3.0, 3.0)
    printed = capsys.readouterr().out.splitlines()
    heading = next(line for line in printed if line.startswith("configuration"))
    assert heading.endswith("experts")
    assert next(line for line in printed if line.startswith("plain")).endswith(" 3.0")
    assert next(line for line in printed if line.startswith("k=2")).endswith(" 3.0 / 3.0")


def test_dense_models_have_no_experts(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "latency", "--demo", "--rounds", "1", "--concurrency", "1"]
    assert cli.main([*argv, "--output-len", "8"]) == 0
    assert "experts" not in capsys.readouterr().out
