# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5, with experts too, and Qwen3-Next against transformers, on tiny random checkpoints.

The head counts, head sizes and widths all differ, so that no mix-up of two of them passes.
"""

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
    FULL,
    LINEAR,
    QWEN3_5,
    TinyDelta,
    TinySpec,
    copy_checkpoint,
    describe,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    plain_copy,
    read_json,
    reference_logits,
    save_tensors,
    write_json,
)

pytestmark = pytest.mark.golden

# More than one chunk of attention and of a delta net.
ROWS = 150
DENSE, MOE, NEXT = (TinySpec(family, head_dim=32, top_k=3) for family in QWEN3_5)
HYBRIDS = (DENSE, MOE, NEXT)
FULL_ONLY = tuple(replace(spec, layer_types=(FULL,) * 3) for spec in HYBRIDS)

SPECS = [
    *(replace(spec, seed=seed) for spec in (*FULL_ONLY, *HYBRIDS) for seed in range(2)),
    # Rotations of a whole head, of half of it and of one pair; other head counts; no pairs left.
    *(replace(FULL_ONLY[0], seed=2, partial_rotary=part) for part in (1.0, 0.5, 0.07)),
    replace(FULL_ONLY[0], seed=3, heads=6, kv_heads=1, head_dim=40, tied=True),
    replace(FULL_ONLY[2], seed=4, rope="yarn"),
    # A shared expert as wide as the others joins their products.
    *(
        replace(spec, seed=5, delta=TinyDelta(shared_size=40))
        for spec in (FULL_ONLY[1], HYBRIDS[1])
    ),
    replace(FULL_ONLY[1], seed=6, num_experts=11, top_k=1),
    # Delta nets with as many value heads as key heads, other sizes and taps, and nothing else.
    replace(DENSE, seed=7, delta=TinyDelta(key_heads=3, value_heads=3, key_dim=24, value_dim=8)),
    replace(DENSE, seed=8, delta=TinyDelta(key_heads=1, value_heads=4, taps=2)),
    replace(NEXT, seed=9, delta=TinyDelta(key_heads=4, value_heads=8, dense_layers=())),
    replace(DENSE, seed=10, layer_types=(FULL, LINEAR, LINEAR, FULL, LINEAR)),
    # Storage.
    *(replace(MOE, seed=11, dtype=dtype) for dtype in ("float16", "bfloat16")),
    replace(NEXT, seed=12, shards=3, vocab_size=131),
]


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_logits_equal_transformers(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec, ROWS)
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))


@pytest.mark.parametrize("spec", [*FULL_ONLY[:2], *HYBRIDS], ids=describe)
@pytest.mark.parametrize("length", range(1, 6))
def test_short_prompts(spec: TinySpec, length: int) -> None:
    path, prompt = make(spec), prompt_of(spec, length)
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))


@pytest.mark.parametrize("spec", [*FULL_ONLY[:2], *HYBRIDS], ids=describe)
def test_every_way_to_a_position_gives_its_bits(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec, ROWS)
    whole = logits_of(path, prompt)
    for chunk in (1, 50, 64):
        np.testing.assert_array_equal(logits_of(path, prompt, prefill_chunk_size=chunk), whole)


# ---- forms of checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_prefixes(family: str, prefix: str, tmp_path: Path) -> None:
    """The text part of a multimodal checkpoint is the plain text model."""
    plain = make(TinySpec(family, seed=22, head_dim=32))
    path = copy_checkpoint(plain, tmp_path / "nested")
    config = read_json(path / "config.json")
    tensors = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_tensors(plain).items()
    }
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)  # a drafter, which the target does not read
    if prefix:
        architecture = config.pop("architectures")[0]
        config = {
            "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
            "model_type": family,
            "tie_word_embeddings": False,
            "text_config": config,
            "vision_config": {"depth": 1},
        }
        tensors["model.visual.blocks.0.x.weight"] = torch.zeros(2, 2)
    save_tensors(path, tensors)
    write_json(path / "config.json", config)
    prompt = prompt_of(TinySpec(family))
    np.testing.assert_array_equal(logits_of(path, prompt), logits_of(plain, prompt))


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()


def _split_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        base, which = name.rsplit(".", 1)
        for i, matrix in enumerate(tensors.pop(name)):
            parts = {"down_proj": matrix}
            if which == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, value in parts.items():
                tensors[f"{base}.{i}.{part}.weight"] = value.contiguous()


@pytest.mark.parametrize("spec", [MOE, NEXT], ids=describe)
def test_experts_may_have_tensors_of_their_own(spec: TinySpec, tmp_path: Path) -> None:
    path = copy_checkpoint(make(spec), tmp_path / "split")
    edit_tensors(path, _split_experts)
    prompt = prompt_of(spec)
    np.testing.assert_array_equal(logits_of(path, prompt), logits_of(make(spec), prompt))


def test_a_convolution_may_have_its_taps_before_the_axis_of_one(tmp_path: Path) -> None:
    path = copy_checkpoint(make(DENSE), tmp_path / "taps")

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("conv1d.weight"):
                tensors[name] = _in_memory_order(tensor)

    edit_tensors(path, turn)
    prompt = prompt_of(DENSE)
    np.testing.assert_array_equal(logits_of(path, prompt), logits_of(make(DENSE), prompt))


def test_the_decay_is_float32_from_the_file_on(tmp_path: Path) -> None:
    """A_log has values that bfloat16 cannot hold."""
    spec = replace(DENSE, seed=14)
    path, prompt = copy_checkpoint(make(spec), tmp_path / "narrow"), prompt_of(spec, ROWS)

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("A_log"):
                tensors[name] = tensor.bfloat16()

    edit_tensors(path, narrow)
    # Stored in bfloat16 it is another model, and transformers agrees about both.
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))
    assert np.abs(logits_of(path, prompt) - logits_of(make(spec), prompt)).max() > 1e-3


def test_defaults_of_a_short_configuration(tmp_path: Path) -> None:
    """Without a list of layers every fourth one is full, and a quarter of a head is rotated."""
    path = copy_checkpoint(make(DENSE), tmp_path / "short")
    rope = {"rope_type": "default", "rope_theta": 10_000_000.0}
    edit_config(path, layer_types=..., full_attention_interval=4, rope_parameters=rope)
    prompt = prompt_of(DENSE)
    np.testing.assert_array_equal(logits_of(path, prompt), logits_of(make(DENSE), prompt))


# ---- matrices with scales ----------------------------------------------------------------------

# Parts of stored matrices begin at multiples of 128 rows, and the last block of a matrix is cut.
FP8 = replace(DENSE, seed=15, hidden_size=160, intermediate_size=224, head_dim=128)
FP8_DELTA = TinyDelta(key_dim=64, value_dim=32, expert_size=160, shared_size=96)
FP8_SPECS = [
    replace(spec, quantization=method, exact_scales=is_exact)
    for spec in (
        replace(FP8, delta=FP8_DELTA),
        replace(FP8, family="qwen3_5_moe", delta=FP8_DELTA),
        # A shared expert as wide as the others.
        replace(FP8, family="qwen3_5_moe", delta=replace(FP8_DELTA, shared_size=160)),
        # The rows of each key head: 128 of q and of k, 2 x 64 of v and of z.
        replace(
            FP8,
            family="qwen3_next",
            delta=replace(FP8_DELTA, key_dim=128, value_heads=4, value_dim=64),
        ),
    )
    for method in ("fp8_block", "fp8_row", "fp8_tensor")
    for is_exact in (False, True)
]


@pytest.mark.parametrize("spec", FP8_SPECS, ids=describe)
def test_fp8_equals_dequantised_values(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec, ROWS)
    seen = logits_of(path, prompt)
    assert_close(seen, reference_logits(path, prompt))
    # Multiplication by exact scales rounds nothing; experts with blocks sum block by block.
    if spec.exact_scales and (spec.family == "qwen3_5" or spec.quantization != "fp8_block"):
        plain = logits_of(plain_copy(path), prompt)
        np.testing.assert_array_equal(seen, plain)


@pytest.mark.parametrize("spec", FP8_SPECS[::6], ids=describe)
def test_every_way_to_a_position_gives_its_bits_in_fp8(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec, ROWS)
    whole = logits_of(path, prompt)
    for chunk in (1, 50):
        seen = logits_of(path, prompt, prefill_chunk_size=chunk)
        np.testing.assert_array_equal(seen, whole)


# ---- one wrong fact at a time ------------------------------------------------------------------


def _set_attention(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            if layer["attention"]["kind"] == "full":
                layer["attention"] = layer["attention"] | changes

    return change


def _rotate_whole_head(config: dict[str, Any]) -> None:
    _set_attention(rope_head_dim=32)(config)
    config["ropes"][0]["inv_freq"] = [10_000_000.0 ** (-i / 16) for i in range(16)]


def _rotate_by_head_size(config: dict[str, Any]) -> None:
    config["ropes"][0]["inv_freq"] = [10_000_000.0 ** (-i / 16) for i in range(4)]


WRONG_FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "whole head rotated": _rotate_whole_head,
    "exponents over the whole head": _rotate_by_head_size,
    "norm offset": lambda config: config.update(norm_weight_offset=0.0),
    "scale": _set_attention(scale=8**-0.5),
    "eps": lambda config: config.update(norm_eps=1e-2),
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(FULL_ONLY[0], seed=1)
    check_that_it_shows(spec, WRONG_FACTS[fact], monkeypatch)


def _q_then_gate(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As if all rows of q came before all rows of gates."""
    if not name.endswith("q_proj.weight"):
        return tensor
    return tensor.view(2, 4, 32, -1).transpose(0, 1).reshape(tensor.shape)


def _closed_shared_gate(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0 if name.endswith("shared_expert_gate.weight") else tensor


def _repeated_key_heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As if value head j had key head j mod 2, not j div 3: with the value heads in that order."""
    delta = TinyDelta()
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    keys = 2 * delta.key_heads * delta.key_dim
    if name.endswith(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
        return tensor[order]
    if name.endswith("in_proj_z.weight"):
        return tensor.view(6, delta.value_dim, -1)[order].reshape(tensor.shape)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = tensor[keys:].view(6, delta.value_dim, -1)[order].reshape(tensor[keys:].shape)
        return torch.cat([tensor[:keys], values])
    if name.endswith("out_proj.weight"):
        return tensor.view(-1, 6, delta.value_dim)[:, order].reshape(tensor.shape)
    return tensor


def _plain_gated_norm(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As if the norm of a delta net were (1 + w), too."""
    return tensor + 1 if name.endswith("linear_attn.norm.weight") else tensor


def test_a_router_that_is_not_normalised_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

    def forward(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
        top = logits.softmax(-1).topk(router.top_k)
        return logits, top.values, top.indices

    monkeypatch.setattr(Qwen3_5MoeTopKRouter, "forward", forward)
    path, prompt = copy_checkpoint(make(FULL_ONLY[1]), tmp_path / "wrong"), prompt_of(MOE)
    with pytest.raises(AssertionError, match="transformers has"):
        assert_close(logits_of(path, prompt), reference_logits(path, prompt))


WRONG_TENSORS = {
    "q then gate": (FULL_ONLY[0], _q_then_gate),
    "gate of the shared expert": (FULL_ONLY[1], _closed_shared_gate),
    "key heads repeated": (DENSE, _repeated_key_heads),
    "norm of a delta net": (DENSE, _plain_gated_norm),
}


@pytest.mark.parametrize("fact", WRONG_TENSORS)
def test_a_wrong_tensor_shows(fact: str, tmp_path: Path) -> None:
    spec, change = WRONG_TENSORS[fact]
    path, prompt = make(spec), prompt_of(spec)
    expected = reference_logits(path, prompt)
    check_that_a_tensor_shows(path, prompt, expected, change, tmp_path)
