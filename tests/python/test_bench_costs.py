# SPDX-License-Identifier: Apache-2.0
"""What a pass reads and computes: bytes and operations of models, and their additive floor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_work import (
    all_parameters,
    attention_flops,
    iteration_work,
    kv_bytes_read,
    logit_parameters,
    row_parameters,
)
from paceline.bench import floor, latency, models
from paceline.bench.costs import (
    Matrix,
    MatrixCosts,
    matrix_costs,
)
from paceline.bench.workload import Workload
from paceline.loader import decoder_config, drafter_config
from paceline.loader.drafters import Target


def test_draft_heads_that_ship_as_configurations() -> None:
    configs = Path(models.__file__).parent / "configs"
    read = {path.stem: json.loads(path.read_text()) for path in configs.glob("*.json")}

    def described(target: str, draft_head: str) -> dict[str, Any]:
        config = decoder_config(read[target], "bfloat16")
        facts = Target(Path(target), read[target]["architectures"][0], config, "bfloat16")
        return drafter_config(read[draft_head], facts, source=draft_head)

    eagle3 = described("qwen3-8b", "qwen3-8b-eagle3")
    # fc, the layer with its doubled qkv input, and 32,000 rows of lm_head.
    layer = 6144 * 8192 + 4096 * 4096 + 3 * 4096 * 12288
    assert all_parameters(matrix_costs(eagle3, "bfloat16")) == 4096 * 12288 + layer + 32000 * 4096
    assert eagle3["drafter"]["aux_layers"] == [2, 18, 33]
    eagle = described("llama-3-8b", "llama-3-8b-eagle")
    layer = (4096 + 2 * 1024 + 4096) * 4096 + 3 * 4096 * 14336
    assert all_parameters(matrix_costs(eagle, "bfloat16")) == 2 * 4096**2 + layer + 128256 * 4096


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_layers", "num_full", "kv_bytes_per_token"),
    [
        # Parameters with the lm_head, less the norms, and bytes of KV in bfloat16.
        ("qwen3-8b", 7_568_097_280, 36, 36, 147_456),
        ("gemma3-27b", 27_007_991_808, 62, 10, 507_904),
        ("gemma3-270m", 268_042_240, 18, 3, 18_432),
    ],
)
def test_named_configurations(
    name: str, num_parameters: int, num_layers: int, num_full: int, kv_bytes_per_token: int
) -> None:
    assert models.is_config_name(name)
    config = decoder_config(models.named_config(name), "bfloat16", name)
    costs = matrix_costs(config, "bfloat16")
    assert (all_parameters(costs), costs.all_bytes) == (num_parameters, 2 * num_parameters)
    kinds = [layer["attention"]["kind"] for layer in config["layers"]]
    assert (len(kinds), kinds.count("full")) == (num_layers, num_full)
    assert kv_bytes_read(config, 1, 2) == kv_bytes_per_token


def test_a_window_bounds_what_is_read() -> None:
    config = decoder_config(models.named_config("gemma3-270m"), "bfloat16")
    layer_bytes = 2 * 1 * 256 * 2
    assert kv_bytes_read(config, 1000, 2) == layer_bytes * (15 * 512 + 3 * 1000)
    assert attention_flops(config, 1000) == 4 * 4 * 256 * (15 * 512 + 3 * 1000)


def test_latent_attention_reads_one_entry_per_token() -> None:
    attention = {
        "kind": "latent",
        "num_qo_heads": 20,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    config = {"layers": [{"attention": attention}] * 47}  # GLM-4.7-Flash
    assert kv_bytes_read(config, 1, 2) == 54_144
    assert attention_flops(config, 1000) == 47 * 1000 * 20 * 2 * (576 + 512)


def test_bytes_and_arithmetic_of_an_iteration(config_dir: Path) -> None:
    model = models.load(str(config_dir), dummy=True)
    body, lm_head = row_parameters(model.costs), logit_parameters(model.costs)
    assert lm_head == 128 * 64
    # In each of three layers q, k, v and o of 4, 2, 2 and 4 heads, and an MLP.
    assert body == 3 * (64 * 12 * 16 + 3 * 64 * 96)
    assert model.costs.all_bytes == 4 * (body + lm_head)
    workload = Workload(concurrency=5, input_len=20, output_len=8)
    assert workload.mean_context == 24
    attention = attention_flops(model.config, 24)
    plain = iteration_work(model, None, 0, workload).flops
    assert plain == 5 * (2 * body + attention + 2 * lm_head)
    k = 3
    speculative = iteration_work(model, model, k, workload).flops
    rows = 2 * (
        k + 1
    )  # target: k + 1 verified; drafter: 2 in the first pass, then 1 in each of k - 1
    assert speculative == 5 * (rows * (2 * body + attention) + (k + 1 + k) * 2 * lm_head)
    kv = kv_bytes_read(model.config, 24, 4)
    assert kv == 2 * 2 * 16 * 4 * (8 + 8 + 24)
    assert iteration_work(model, model, k, workload).kv_bytes == 5 * (1 + k) * kv


class CostedModel(models.BenchModel):
    """A model with other costs than its own."""

    @property
    def costs(self) -> MatrixCosts:  # type: ignore[override]
        return MatrixCosts((Matrix("all", 1400, 700), Matrix("lm_head", 600, 300, True)))


@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [
        ("draft_model", 2 + 2),
        ("eagle", 4 + 2),
        ("eagle3", 4 + 2),
        ("mtp", 4 + 2),
        ("gemma4_mtp", 1 + 2),
    ],
)
def test_rows_of_a_drafter(config_dir: Path, kind: str, num_rows: int) -> None:
    # With k = 3: rows of the first pass, then one row in each of two more.
    model = models.load(str(config_dir), dummy=True)
    workload = Workload(concurrency=5, input_len=20, output_len=8)
    drafter = {} if kind == "draft_model" else {"drafter": {"kind": kind}}
    draft = CostedModel("draft", replace(model.loaded, config=model.config | drafter))
    alone = iteration_work(model, None, 3, workload).flops
    added = iteration_work(model, draft, 3, workload).flops - alone
    row = 2 * 700 + attention_flops(model.config, 24)
    assert added == 5 * (num_rows * row + 3 * 2 * 300)
    # Prompt lookup verifies and computes nothing else.
    assert alone == 4 * iteration_work(model, None, 0, workload).flops


@pytest.mark.parametrize(("anchors", "num_rows"), [(True, 3), (False, 4)])
def test_passes_of_a_block_drafter(config_dir: Path, anchors: bool, num_rows: int) -> None:
    """One pass over a block with k = 3, behind the context of four tokens and before the chain."""
    model = models.load(str(config_dir), dummy=True)
    workload = Workload(concurrency=5, input_len=20, output_len=8)
    block = {"drafter": {"kind": "dspark", "block": {"samples_from_anchor": anchors}}}

    class Drafter(models.BenchModel):
        @property
        def costs(self) -> MatrixCosts:  # type: ignore[override]
            sizes = {"fc": 800, "layers.0.attn.qkv": 600, "layers.0.mlp.down": 400}
            heads = {"lm_head": 200, "markov": 60, "markov.mix": 40}
            return MatrixCosts(
                (
                    *(Matrix(name, size, size // 2) for name, size in sizes.items()),
                    *(Matrix(name, size, size // 2, True) for name, size in heads.items()),
                )
            )

    draft = Drafter("draft", replace(model.loaded, config=model.config | block))
    attention = model.config["layers"][0]["attention"]
    kv_heads = 2 * attention["num_kv_heads"]
    kv = 600 * kv_heads / (attention["num_qo_heads"] + kv_heads)
    num_bytes = floor.work_of(floor._block_passes(draft, None, 4, 3, 1, 0.0, 2)).weight_bytes
    assert num_bytes == int(800 + kv + 600 + 400 + 200 + 3 * 100)
    flops = (
        4 * (800 + kv)
        + num_rows * (600 + 400 + attention_flops(model.config, 24))
        + 3 * (200 + 100)
    )
    alone = iteration_work(model, None, 3, workload).flops
    assert iteration_work(model, draft, 3, workload).flops - alone == int(5 * flops)
    assert iteration_work(model, draft, 0, workload) == iteration_work(model, None, 0, workload)
    # The floor has the same passes: the target's, and the three parts of the draft.
    [row] = latency.measure(model, None, None, [replace(workload, output_len=4)], rounds=1)
    row = replace(row, num_draft_tokens=3, workload=workload)
    _, *parts = floor._passes(model, draft, row)
    assert [op.name for ops in parts for op in ops if "attention" not in op.name] == [
        "fc", "layers.0.attn.kv", "layers.0.attn.qkv", "layers.0.mlp.down", "lm_head",
        *["markov", "markov.mix"] * 3,
    ]  # fmt: skip
    assert sum(op.flops for ops in parts for op in ops) == 5 * flops
    kv_bytes = sum(op.num_bytes for op in parts[1] if "attention" in op.name)
    one = iteration_work(model, None, 3, workload).kv_bytes
    assert iteration_work(model, draft, 3, workload).kv_bytes - one == kv_bytes == one
    adaptive = replace(row, may_stop_early=True, is_adaptive=True)
    assert len(floor._passes(model, draft, adaptive)) == 1
    prompts = floor._prompt_passes(model, draft, row)
    assert prompts[1][0].flops == 5 * 20 * 800 and len(prompts) == 1 + 2 + 3


def test_the_additive_floor_of_a_known_pair() -> None:
    """Qwen3-8B with EAGLE-3, k = 3, at 4.45 TB/s and 790 TFLOP/s, as computed by hand."""
    raw = models.named_config("qwen3-8b")
    config = decoder_config(raw, "bfloat16")
    facts = Target(Path("qwen3-8b"), raw["architectures"][0], config, "bfloat16")
    head = drafter_config(models.named_config("qwen3-8b-eagle3"), facts, source="head")

    def operations(described: dict[str, Any], rows: int, logit_rows: int) -> Any:
        class Described:
            config, costs = described, matrix_costs(described, "bfloat16")

        return floor.pass_operations(Described(), None, rows, logit_rows, 64, [512.0], 2)  # type: ignore[arg-type]

    ops = [*operations(config, 4, 4), *operations(head, 4, 1), *operations(head, 1, 1) * 2]
    by_kind: dict[str, float] = {}
    for op in ops:
        kind = op.name.rpartition(".")[2]
        seconds = max(op.num_bytes / 4.45e12, op.flops / 790e12)
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds * 1e6
    # 36 layers of 256 rows and a draft step of 64: 2 x 256 x 24576 x 4096 / 790e12 is 65.2 us.
    draft_layer = 24576 * 4096 * 2
    gate_up = 36 * 65.242 + 65.242 + 2 * draft_layer / 4.45e6
    assert by_kind["gate_up"] == pytest.approx(gate_up, rel=1e-3)
    # Attention reads 64 sequences of 512 tokens: 8 heads of keys and values of 128.
    layer = 64 * 512 * 2 * 8 * 128 * 2 / 4.45e6
    assert by_kind["attention"] == pytest.approx((36 + 3) * layer, rel=1e-6)
    assert sum(by_kind.values()) == pytest.approx(6673, abs=1)
