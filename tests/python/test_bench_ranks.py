# SPDX-License-Identifier: Apache-2.0
"""The floors of several GPUs: what a rank reads, by sizes written out, and its exchanges."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_work import kv_bytes_read
from paceline.bench import floor, models
from paceline.bench.rank_costs import exchange_seconds, rank_part
from paceline.bench.workload import Workload
from paceline.loader import decoder_config, drafter_config
from paceline.loader.drafters import Target

WORK = Workload(1, 256, 256)


class FixedSpeed(floor.Speed):
    """Reads at a fixed speed."""

    def __init__(self, speed: float) -> None:
        super().__init__("cuda", 1)
        self.speed = speed

    def of(self, num_bytes: int) -> float:
        return self.speed


def on_gpu(name: str, config: dict[str, Any]) -> models.BenchModel:
    """A model of this description without weights."""
    loaded: Any = SimpleNamespace(
        config=config,
        model=SimpleNamespace(device="cuda", weight_dtype="bfloat16", has_parts=False),
    )
    return models.BenchModel(name, loaded)


def target_of(name: str) -> models.BenchModel:
    return on_gpu(name, decoder_config(models.named_config(name), "bfloat16", name))


def drafter_of(name: str, target: models.BenchModel, **kind: Any) -> models.BenchModel:
    architecture = models.named_config(target.name)["architectures"][0]
    facts = Target(Path(target.name), architecture, target.config, "bfloat16")
    return on_gpu(name, drafter_config(models.named_config(name), facts, source=name, **kind))


def floors(target: models.BenchModel, draft: models.BenchModel | None, k: int, n: int) -> Any:
    """The floors at 1 TB/s of an iteration that takes 10 ms."""
    row: Any = SimpleNamespace(
        workload=WORK,
        target_experts=8.0 if target.costs.num_experts else None,
        draft_experts=None,
        num_draft_tokens=k,
        is_adaptive=False,
        may_stop_early=False,
        iteration_ms=10.0,
    )
    found: dict[str, float] = {}

    def keep(_: Any, **changes: float) -> None:
        found.update(changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floor, "replace", keep)
        floor.with_floor(row, target, draft, FixedSpeed(1e12), num_gpus=n)
    return SimpleNamespace(**found)


def test_a_rank_reads_its_rows_and_waits_for_exchanges() -> None:
    model = target_of("qwen3-8b")
    kv = kv_bytes_read(model.config, WORK.mean_context, 2)
    whole = model.costs.all_bytes + kv
    assert floors(model, None, 0, 1).floor_ms == pytest.approx(whole / 1e9)
    for n in (2, 4, 8):
        found = floors(model, None, 0, n)
        # 36 layers of four exchanges, and the logits.
        assert found.floor_ms == pytest.approx(whole / n / 1e9 + 145 * 4.8e-3)
        assert found.additive_floor_ms >= found.floor_ms
        assert found.floor_share == pytest.approx(found.floor_ms / 10)
    # docs/tensor-parallel.md: 0.70 ms.
    assert exchange_seconds(rank_part(model, 2, is_whole=False)) == pytest.approx(0.7e-3, rel=0.01)


def test_ranks_repeat_heads_of_keys_and_have_some_things_whole() -> None:
    sizes = {}
    for n in (1, 8):
        part = rank_part(target_of("qwen3-30b-a3b"), n, is_whole=False)
        sizes[n] = {matrix.name: matrix.num_bytes for matrix in part.costs.matrices}
    # 32 heads of queries and 4 of keys and values, of 128; a rank has 4 and one each.
    assert sizes[1]["layers.0.attn.qkv"] == (32 + 2 * 4) * 128 * 2048 * 2
    assert sizes[8]["layers.0.attn.qkv"] == (4 + 2 * 1) * 128 * 2048 * 2
    assert sizes[8]["layers.0.attn.o"] * 8 == sizes[1]["layers.0.attn.o"]
    # The router is whole; of every expert a rank has its rows.
    assert sizes[8]["layers.0.mlp.router"] == sizes[1]["layers.0.mlp.router"]
    assert sizes[8]["layers.0.mlp.experts.down"] * 8 == sizes[1]["layers.0.mlp.experts.down"]
    model, ranked = (rank_part(target_of("qwen3-30b-a3b"), n, is_whole=False) for n in (1, 8))
    # A quarter of the keys, since there are four heads.
    assert 4 * kv_bytes_read(ranked.config, 100, 2) == kv_bytes_read(model.config, 100, 2)
    # Latent entries and recurrent states are whole, and so is what makes them.
    for name in ("glm-4.7-flash", "qwen3.8-27b"):
        model, ranked = (rank_part(target_of(name), n, is_whole=False) for n in (1, 2))
        layers = zip(model.config["layers"], ranked.config["layers"], strict=True)
        for whole, part in layers:
            if whole["attention"]["kind"] not in ("full", "sliding"):
                sizes_of_both = [kv_bytes_read({"layers": [one]}, 100, 2) for one in (whole, part)]
                assert sizes_of_both[0] == sizes_of_both[1] > 0


def test_a_drafter_is_whole_but_for_logits_of_the_target() -> None:
    target = target_of("qwen3-8b")
    eagle = drafter_of("qwen3-8b-eagle3", target)
    one, two = (floors(target, eagle, 3, n) for n in (1, 2))
    alone, shared = (floors(target, None, 0, n) for n in (1, 2))
    # It has an lm_head of its own, so its passes cost as much on every rank.
    of_rows = 4 / 1e9  # the target verifies four rows instead of one, which costs no bytes
    assert two.floor_ms - shared.floor_ms == pytest.approx(
        one.floor_ms - alone.floor_ms, abs=of_rows
    )
    glm = target_of("glm-4.7-flash")
    mtp = drafter_of("glm-4.7-flash", glm, method="mtp")
    part = rank_part(mtp, 2, is_whole=True)
    sizes = [{m.name: m.num_bytes for m in of.costs.matrices} for of in (mtp, part)]
    assert sizes[0].pop("lm_head") == 2 * sizes[1].pop("lm_head")
    assert sizes[0] == sizes[1]
    assert exchange_seconds(part) == pytest.approx(4.8e-6)
    passes = floor.iteration_passes(glm, mtp, 3, WORK, (8.0, 8.0))
    ranked = rank_part(glm, 2, is_whole=False)
    waits = floor._exchanges(ranked, part, passes)
    num_layers = len(glm.config["layers"])
    assert waits == pytest.approx((4 * num_layers + 1 + 3) * 4.8e-6)


def test_a_dense_mlp_beside_a_mixture_exchanges_as_well() -> None:
    model = target_of("gemma4-26b-a4b")
    num_layers = len(model.config["layers"])
    part = rank_part(model, 2, is_whole=False)
    assert exchange_seconds(part) == pytest.approx((6 * num_layers + 1) * 4.8e-6)
    assert rank_part(model, 1, is_whole=False) is model and exchange_seconds(model) == 0
