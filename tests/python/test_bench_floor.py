# SPDX-License-Identifier: Apache-2.0
"""The least time of an iteration, with which `paceline bench latency` compares."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_work import iteration_work, kv_bytes_read, logit_parameters
from paceline import _core, cli
from paceline.bench import floor, latency, models
from paceline.bench.workload import Workload


class FixedSpeed(floor.Speed):
    """Reads at a fixed speed, and twice as fast what fits in a cache."""

    def __init__(self, speed: float, cache_bytes: int = 0, rate: float = 1e30) -> None:
        super().__init__("cpu", 1)
        self.speed, self.cache_bytes, self.rate = speed, cache_bytes, rate

    def arithmetic(self, *, is_bfloat16: bool) -> float:
        assert not is_bfloat16  # the dtype of the weights
        return self.rate

    def of(self, num_bytes: int) -> float:
        return self.speed * (2 if num_bytes <= self.cache_bytes else 1)


def measured(config_dir: Path, **changes: Any) -> tuple[models.BenchModel, latency.Measurement]:
    model = models.load(str(config_dir), dummy=True)
    [row] = latency.measure(model, None, None, [Workload(1, 4, 4)], rounds=1)
    assert row.floor_ms is None and row.start_to_first_token_s is None
    return model, replace(row, **changes)


def test_the_passes_add_up(config_dir: Path) -> None:
    model, row = measured(config_dir, iteration_ms=10.0, num_draft_tokens=3)
    one_pass = model.costs.all_bytes + kv_bytes_read(model.config, 6, 4)
    plain = floor.with_floor(row, model, None, FixedSpeed(1e9))
    assert plain.floor_ms == pytest.approx(one_pass / 1e9 * 1e3)
    assert plain.floor_share == pytest.approx(one_pass / 1e9 * 1e2)
    # The drafter reads its bytes in each of its passes, from where they fit.
    small = replace(model, loaded=replace(model.loaded, config=model.config | {"vocab_size": 1}))
    draft_pass = small.costs.all_bytes + kv_bytes_read(model.config, 6, 4)
    assert draft_pass < one_pass
    cached = FixedSpeed(1e9, cache_bytes=int(draft_pass))
    drafted = floor.with_floor(row, model, small, cached)
    assert drafted.floor_ms == pytest.approx((one_pass + 3 * draft_pass / 2) / 1e9 * 1e3)
    # With a stop threshold, one pass of the drafter is all that is certain.
    stopped = floor.with_floor(replace(row, may_stop_early=True), model, small, cached)
    assert stopped.floor_ms == pytest.approx((one_pass + draft_pass / 2) / 1e9 * 1e3)
    # An engine that chooses may do without it.
    adaptive = replace(row, may_stop_early=True, is_adaptive=True)
    plain = floor.with_floor(adaptive, model, small, cached)
    assert plain.floor_ms == pytest.approx(one_pass / 1e9 * 1e3)


def test_the_additive_floor_takes_one_operation_after_the_other(config_dir: Path) -> None:
    k, work = 3, Workload(5, 4, 4)
    model, row = measured(config_dir, iteration_ms=10.0, num_draft_tokens=k, workload=work)
    # Where the passes are bound by reading alone or by arithmetic alone, nothing could overlap.
    for speed in (FixedSpeed(1e9), FixedSpeed(1e30, rate=1e9)):
        bounded = floor.with_floor(row, model, model, speed)
        assert bounded.additive_floor_ms == pytest.approx(bounded.floor_ms)
        assert bounded.additive_floor_share == pytest.approx(bounded.additive_floor_ms / 10.0)
    # In between, some operations read longer and others compute longer.
    target, *drafted = floor._passes(model, model, row)
    assert drafted[1] == drafted[2] and len(drafted) == k
    num_bytes, flops = (sum(getattr(op, name) for op in target) for name in ("num_bytes", "flops"))
    rate = 1e9 * flops / num_bytes
    both = floor.with_floor(row, model, model, FixedSpeed(1e9, rate=rate))
    expected = sum(
        max(op.num_bytes / 1e9, op.flops / rate) for ops in (target, *drafted) for op in ops
    )
    assert both.additive_floor_ms == pytest.approx(expected * 1e3)
    assert both.floor_ms is not None and both.additive_floor_ms > 1.005 * both.floor_ms


def test_a_pass_takes_the_longer_of_reading_and_computing(config_dir: Path) -> None:
    k, work = 3, Workload(5, 4, 4)
    model, row = measured(config_dir, iteration_ms=10.0, num_draft_tokens=k, workload=work)
    computing = floor.with_floor(row, model, model, FixedSpeed(1e30, rate=1e9))
    flops = iteration_work(model, model, k, work).flops
    assert computing.floor_ms == pytest.approx(flops / 1e9 * 1e3)
    # The target's four rows take longer than reading, the drafter's single rows do not.
    target = iteration_work(model, None, k, work).flops
    one_row = iteration_work(model, None, 0, work).flops
    first = 2 * one_row - 5 * 2 * logit_parameters(model.costs)
    one_pass = model.costs.all_bytes + int(5 * kv_bytes_read(model.config, 6, 4))
    rate, limit = 1e9, first / 1e9 * 1.01
    mixed = floor.with_floor(row, model, model, FixedSpeed(one_pass / limit, rate=rate))
    assert mixed.floor_ms == pytest.approx((target / rate + k * limit) * 1e3)
    # Prompt lookup may find nothing: one row is certain.
    lookup = floor.with_floor(
        replace(row, may_stop_early=True), model, None, FixedSpeed(1e30, rate=rate)
    )
    assert lookup.floor_ms == pytest.approx(one_row / rate * 1e3)


def test_a_gpu_also_computes(config_dir: Path) -> None:
    model, row = measured(config_dir, iteration_ms=10.0)
    flops = iteration_work(model, None, 0, row.workload).flops

    class OnGpu:
        device, weight_dtype = "cuda", "bfloat16"

    loaded = replace(model.loaded, model=OnGpu())  # type: ignore[arg-type]
    gpu = replace(model, loaded=loaded)
    num_bytes = gpu.costs.all_bytes + kv_bytes_read(gpu.config, 6, 2)
    fast = floor.with_floor(row, gpu, None, FixedSpeed(1e30))
    assert fast.floor_ms == pytest.approx(flops / 790e12 * 1e3)
    slow = floor.with_floor(row, gpu, None, FixedSpeed(num_bytes / 10e-3))
    assert slow.floor_ms == pytest.approx(10.0) and slow.floor_share == pytest.approx(1.0)


def test_each_size_is_read_at_its_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    speeds = iter([9.0, 10.0, 8.0, 20.0, 20.0, 20.0, 30.0, 30.0, 30.0, 5.0, 40.0])

    def measure(num_threads: int, num_bytes: int) -> float:
        asked.append((num_threads, num_bytes))
        return next(speeds)

    monkeypatch.setattr(_core, "measure_read_bandwidth", measure)
    speed = floor.Speed("cpu", 2)
    assert [speed.memory, speed.of(1 << 40), speed.of(1000), speed.of(1003)] == [10, 10, 20, 20]
    assert speed.of(33) == 30
    # Never more bytes than asked for: they could need a larger cache.
    assert asked == [(2, 512 << 20)] * 3 + [(2, 992)] * 3 + [(2, 32)] * 3
    rates = iter([7.0, 8.0])
    monkeypatch.setattr(_core, "measure_arithmetic", lambda num_threads, is_bfloat16: next(rates))
    assert speed.arithmetic(is_bfloat16=False) == speed.arithmetic(is_bfloat16=False) == 7
    assert speed.arithmetic(is_bfloat16=True) == 8
    speed.forget()
    assert [speed.of(33), speed.of(33), speed.memory] == [30, 30, 10]  # the best so far
    assert len(asked) == 10  # `memory` alone does not measure again
    assert [speed.of(1 << 40), speed.memory] == [40, 40]


def test_a_gpu_reads_at_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "measure_cuda_read_bandwidth", lambda: 7.0)
    speed = floor.Speed("cuda", 0)
    assert speed.memory == speed.of(5) == 7


def test_models_that_leave_no_room_leave_the_last_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> float:
        raise MemoryError("the bandwidth test")

    monkeypatch.setattr(_core, "measure_cuda_read_bandwidth", lambda: 7.0)
    speed = floor.Speed("cuda", 0)
    assert speed.memory == 7
    speed.forget()
    monkeypatch.setattr(_core, "measure_cuda_read_bandwidth", refuse)
    assert speed.of(5) == speed.memory == 7
    with pytest.raises(MemoryError, match="the bandwidth test"):
        _ = floor.Speed("cuda", 0).memory


def test_without_ops_there_is_no_floor(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "latency", "--demo", "--host-only", "--rounds", "1", "--concurrency", "1"]
    assert cli.main([*argv, "--output-len", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["floor_ms"], row["floor_share"]) for row in rows} == {(None, None)}


def best(measure: Callable[[], float]) -> float:
    """The best of three, since other processes may take the core meanwhile."""
    return max(measure() for _ in range(3))


@pytest.mark.serial
@pytest.mark.parametrize("num_bytes", [1 << 14, 1 << 16])
def test_this_machine_reads_faster_from_its_caches(num_bytes: int) -> None:
    """By turns, since the core may be another program's for longer than three measurements take."""
    in_cache = in_memory = 0.0
    end = time.monotonic() + 10
    for turn in itertools.count():
        in_cache = max(in_cache, _core.measure_read_bandwidth(1, num_bytes))
        in_memory = max(in_memory, _core.measure_read_bandwidth(1, 1 << 28))
        if turn >= 2 and (in_cache > 1.2 * in_memory or time.monotonic() > end):
            break
    assert in_cache > 1.2 * in_memory > 0


@pytest.mark.serial
def test_this_machine_computes() -> None:
    plain, bfloat16 = (
        best(lambda kind=kind: _core.measure_arithmetic(1, is_bfloat16=kind))
        for kind in (False, True)
    )
    assert plain > 1e9 and bfloat16 > 0.5 * plain
