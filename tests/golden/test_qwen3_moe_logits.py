# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE against transformers, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logits_golden import (
    assert_close,
    check_that_a_tensor_shows,
    check_that_it_shows,
    logits_of,
    prompt_of,
)
from tiny_models import (
    TinySpec,
    copy_checkpoint,
    describe,
    edit_tensors,
    load_tensors,
    make,
    reference_logits,
)

pytestmark = pytest.mark.golden

QWEN3_MOE = TinySpec("qwen3_moe")
HEADS = ((4, 4, 16), (4, 2, 32), (4, 1, 64))  # query heads, kv heads, head size

SPECS = [
    *(
        replace(QWEN3_MOE, seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for seed, (heads, kv_heads, head_dim) in enumerate(HEADS)
    ),
    # Weights that sum to 1 or less, and the two ways to say which layers have a mixture.
    *(
        replace(
            QWEN3_MOE, seed=3, num_layers=4, top_k=3, head_dim=32,
            normalises=normalises, sparse_step=step, dense_layers=dense,
        )
        for normalises in (True, False)
        for step, dense in ((1, ()), (1, (1,)), (2, ()), (2, (3,)), (5, ()))
    ),
    # One expert a token, all of them, and numbers that are no powers of two.
    replace(QWEN3_MOE, seed=4, top_k=1, normalises=False),
    replace(QWEN3_MOE, seed=5, top_k=8, normalises=False),
    replace(QWEN3_MOE, seed=6, num_experts=11, top_k=3, hidden_size=72, intermediate_size=90),
    replace(QWEN3_MOE, seed=7, tied=True, attention_bias=True),
    *(replace(QWEN3_MOE, seed=8, rope=rope, old_spelling=True) for rope in ("linear", "yarn")),
    *(replace(QWEN3_MOE, seed=9, dtype=dtype) for dtype in ("float16", "bfloat16")),
    replace(QWEN3_MOE, seed=10, shards=3, vocab_size=131, prefix=""),
    # Scales for blocks, of which gate and up have parts; for rows; and one for a matrix.
    *(
        replace(
            QWEN3_MOE, seed=11, quantization=quantization, hidden_size=192, expert_size=160,
            num_layers=3, dense_layers=(1,),
        )
        for quantization in ("fp8_block", "fp8_row", "fp8_tensor")
    ),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_logits_equal_transformers(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec)
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))


@pytest.mark.parametrize("quantization", [None, "fp8_block"])
def test_every_way_to_a_position_gives_its_bits(quantization: str | None) -> None:
    spec = replace(QWEN3_MOE, seed=12, quantization=quantization, expert_size=32, normalises=False)
    path, prompt = make(spec), prompt_of(spec, 120)
    whole = logits_of(path, prompt)
    for chunk in (1, 50):
        np.testing.assert_array_equal(logits_of(path, prompt, prefill_chunk_size=chunk), whole)


def join_experts(tensors: dict[str, torch.Tensor]) -> None:
    """The experts of a file as transformers 5 has them in memory."""
    for gate in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        base = gate.removesuffix("0.gate_proj.weight")
        experts = range(sum(name.startswith(base) for name in tensors) // 3)

        def stack(which: str, base: str = base, experts: range = experts) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{base}{e}.{which}_proj.weight") for e in experts])

        tensors[f"{base}gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1)
        tensors[f"{base}down_proj"] = stack("down")


def test_joined_experts_give_the_same_bits(tmp_path: Path) -> None:
    spec = replace(QWEN3_MOE, seed=13, num_layers=3, dense_layers=(0,))
    path, prompt = copy_checkpoint(make(spec), tmp_path / "joined"), prompt_of(spec)
    edit_tensors(path, join_experts)
    np.testing.assert_array_equal(logits_of(path, prompt), logits_of(make(spec), prompt))


# ---- one wrong fact at a time ------------------------------------------------------------------


def _set_mixtures(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            if "num_experts" in layer["mlp"]:
                layer["mlp"] = layer["mlp"] | changes

    return change


def _scale_scores(config: dict[str, Any]) -> None:
    for layer in config["layers"]:
        layer["attention"] = layer["attention"] | {"scale": 1.0}


WRONG_FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "one expert less": _set_mixtures(top_k=3),
    "weights of all experts": _set_mixtures(router="softmax"),
    "activation": _set_mixtures(activation="gelu_tanh"),
    "scale of scores": _scale_scores,
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_it_shows(replace(QWEN3_MOE, seed=1), WRONG_FACTS[fact], monkeypatch)


def test_normalised_weights_show(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(QWEN3_MOE, seed=1, normalises=False)
    check_that_it_shows(spec, _set_mixtures(router="softmax_of_chosen"), monkeypatch)


_OTHER_HALF = {"gate_proj": "up_proj", "up_proj": "gate_proj"}


def test_gate_and_up_exchanged_show(tmp_path: Path) -> None:
    spec = replace(QWEN3_MOE, seed=1)
    path, prompt = make(spec), prompt_of(spec)
    tensors = load_tensors(path)

    def exchange(name: str, tensor: torch.Tensor) -> torch.Tensor:
        which = name.split(".")[-2]
        if ".experts." not in name or which not in _OTHER_HALF:
            return tensor
        return tensors[name.replace(which, _OTHER_HALF[which])]

    check_that_a_tensor_shows(path, prompt, reference_logits(path, prompt), exchange, tmp_path)
