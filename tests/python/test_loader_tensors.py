# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint: names, required and optional tensors, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from errors import raises
from paceline._core import ModelFileError
from paceline.loader.checkpoint import open_checkpoint
from tiny_models import TinySpec, edit_config, edit_tensors, make

NORM = "model.norm.weight"


def test_missing_tensors(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    edit_tensors(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with raises(
        ModelFileError,
        path / "model.safetensors",
        "1 tensor is missing: 'model.layers.1.mlp.up_proj.weight'",
        "LlamaForCausalLM",
    ):
        open_checkpoint(path)


def test_many_missing_tensors_are_counted(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    edit_config(path, num_hidden_layers=5)
    with raises(ModelFileError, "27 tensors are missing", "'model.layers.2.", "and 22 more"):
        open_checkpoint(path)


def test_missing_lm_head_hints_at_tying(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with raises(ModelFileError, "'lm_head.weight'", '"tie_word_embeddings": true'):
        open_checkpoint(path)


def test_unknown_prefix(copy_of: Callable[..., Path]) -> None:
    path = copy_of()

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"decoder.{name}"] = tensors.pop(name)

    edit_tensors(path, rename)
    with raises(
        ModelFileError, "'model.embed_tokens.weight'", "there are 'decoder.", "allowed prefixes"
    ):
        open_checkpoint(path)


def test_wrong_shape(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    edit_config(path, num_key_value_heads=1)
    with raises(
        ModelFileError,
        path / "model.safetensors",
        "tensor 'model.layers.0.self_attn.k_proj.weight' has shape [32, 64]",
        "expected [16, 64]",
        "num_key_value_heads * head_dim, hidden_size of",
        "config.json",
    ):
        open_checkpoint(path)


def test_unexpected_tensors(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(attention_bias=True))
    edit_config(path, attention_bias=False)
    with raises(
        ModelFileError,
        path / "model.safetensors",
        "8 tensors are not part of LlamaForCausalLM",
        "config.json",
        "'model.layers.0.self_attn.k_proj.bias'",
        "and 3 more",
    ):
        open_checkpoint(path)


def test_harmless_tensors_are_ignored(copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of(TinySpec(tied=True))

    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(path, add)
    names = [tensor.spec.name for tensor in open_checkpoint(path).tensors]
    assert "lm_head.weight" not in names


def test_tied_lm_head_that_differs(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(tied=True))

    def add(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    edit_tensors(path, add)
    with raises(
        ModelFileError,
        path / "model.safetensors",
        "'lm_head.weight' differs from 'model.embed_tokens.weight'",
        '"tie_word_embeddings"',
        "is true",
    ):
        open_checkpoint(path)


def test_vision_tensors_are_ignored_for_gemma3_only(copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of()
    edit_tensors(path, lambda tensors: tensors.update({"vision_tower.w": torch.zeros(2)}))
    with raises(ModelFileError, "1 tensor is not part of LlamaForCausalLM", "'vision_tower.w'"):
        open_checkpoint(path)


def test_unsupported_stored_dtype(copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of()
    edit_tensors(path, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float64)}))
    with raises(
        NotImplementedError,
        path / "model.safetensors",
        f"'{NORM}' is stored as F64",
        "supported: BF16, F16, F32",
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_prefixes(family: str, prefix: str) -> None:
    checkpoint = open_checkpoint(make(TinySpec(family, prefix=prefix)))
    sources = {tensor.spec.name: tensor.source for tensor in checkpoint.tensors}
    assert sources["embed.weight"] == f"{prefix}embed_tokens.weight"
    assert sources["layers.1.attn.q.weight"] == f"{prefix}layers.1.self_attn.q_proj.weight"


def test_name_map_of_gemma3() -> None:
    checkpoint = open_checkpoint(make(TinySpec("gemma3", attention_bias=True)))
    sources = {tensor.spec.name: tensor.source for tensor in checkpoint.tensors}
    assert {name: source for name, source in sources.items() if name.startswith("layers.2.")} == {
        "layers.2.attn_norm.weight": "model.layers.2.input_layernorm.weight",
        "layers.2.attn_post_norm.weight": "model.layers.2.post_attention_layernorm.weight",
        "layers.2.mlp_norm.weight": "model.layers.2.pre_feedforward_layernorm.weight",
        "layers.2.mlp_post_norm.weight": "model.layers.2.post_feedforward_layernorm.weight",
        "layers.2.attn.q_norm.weight": "model.layers.2.self_attn.q_norm.weight",
        "layers.2.attn.k_norm.weight": "model.layers.2.self_attn.k_norm.weight",
        **{
            f"layers.2.attn.{x}.{part}": f"model.layers.2.self_attn.{x}_proj.{part}"
            for x in "qkvo"
            for part in ("weight", "bias")
        },
        **{
            f"layers.2.mlp.{x}.weight": f"model.layers.2.mlp.{x}_proj.weight"
            for x in ("gate", "up", "down")
        },
    }
    assert len(sources) == 2 + 3 * 17


def test_name_map_of_gemma4() -> None:
    checkpoint = open_checkpoint(make(TinySpec("gemma4", k_eq_v=True)))
    sources = {tensor.spec.name: tensor.source for tensor in checkpoint.tensors}

    def of(prefix: str) -> set[str]:
        return {name.removeprefix(prefix) for name in sources if name.startswith(prefix)}

    everywhere = of("layers.3.")
    assert everywhere == {
        "attn_norm.weight", "attn_post_norm.weight", "mlp_norm.weight", "mlp_post_norm.weight",
        "attn.q.weight", "attn.q_norm.weight", "attn.o.weight", "mlp.gate.weight", "mlp.up.weight",
        "mlp.down.weight", "per_layer.gate.weight", "per_layer.proj.weight",
        "per_layer.norm.weight", "scale",
    }  # fmt: skip
    assert of("layers.0.") - everywhere == {"attn.k.weight", "attn.v.weight", "attn.k_norm.weight"}
    assert of("layers.2.") - everywhere == {"attn.k.weight", "attn.k_norm.weight"}
    assert of("layers.5.") == everywhere
    assert sources["layers.3.scale"] == "model.layers.3.layer_scalar"
    assert sources["per_layer.embed.weight"] == "model.embed_tokens_per_layer.weight"
    assert sources["per_layer.proj.weight"] == "model.per_layer_model_projection.weight"
    assert sources["per_layer.norm.weight"] == "model.per_layer_projection_norm.weight"
    layer = "model.layers.3."
    assert sources["layers.3.per_layer.gate.weight"] == f"{layer}per_layer_input_gate.weight"
    assert sources["layers.3.per_layer.proj.weight"] == f"{layer}per_layer_projection.weight"
    assert sources["layers.3.per_layer.norm.weight"] == f"{layer}post_per_layer_input_norm.weight"


def test_unused_kv_of_gemma4_is_ignored_where_it_is_unused(copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of(TinySpec("gemma4", k_eq_v=True))
    edit_tensors(
        path, lambda t: t.update({"model.layers.5.self_attn.k_proj.weight": torch.zeros(32, 64)})
    )
    open_checkpoint(path)
    name = "model.layers.2.self_attn.v_proj.weight"  # of a layer whose v is its k
    edit_tensors(path, lambda t: t.update({name: torch.zeros(32, 64)}))
    with raises(ModelFileError, "1 tensor is not part of Gemma4ForCausalLM", name):
        open_checkpoint(path)


def test_name_map_of_gemma4_with_experts() -> None:
    checkpoint = open_checkpoint(make(TinySpec("gemma4", has_experts=True)))
    sources = {tensor.spec.name: tensor.source for tensor in checkpoint.tensors}
    layer = "model.layers.3."
    assert {
        name.removeprefix("layers.3.mlp."): source.removeprefix(layer)
        for name, source in sources.items()
        if name.startswith("layers.3.mlp.")
    } == {
        "gate.weight": "mlp.gate_proj.weight",
        "up.weight": "mlp.up_proj.weight",
        "down.weight": "mlp.down_proj.weight",
        "dense_norm.weight": "post_feedforward_layernorm_1.weight",
        "router_norm.weight": "router.scale",
        "expert_norm.weight": "pre_feedforward_layernorm_2.weight",
        "mixture_norm.weight": "post_feedforward_layernorm_2.weight",
        "router.weight": "router.proj.weight",
        "router.expert_scales": "router.per_expert_scale",
        "experts.gate_up.weight": "experts.gate_up_proj",
        "experts.down.weight": "experts.down_proj",
    }


@pytest.mark.parametrize(
    "spec",
    [*map(TinySpec, tiny_models.FAMILIES), TinySpec("gemma4", has_experts=True)],
    ids=tiny_models.describe,
)
def test_every_tensor_of_transformers_is_used(spec: TinySpec) -> None:
    path = make(replace(spec, tied=False, attention_bias=True))
    sources = {tensor.source for tensor in open_checkpoint(path).tensors}
    assert sources == set(tiny_models.load_tensors(path))


# ---- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "asked", "expected", "notes"),
    [
        ("bfloat16", "auto", "bfloat16", 0),
        ("bfloat16", "float32", "float32", 0),
        ("bfloat16", "bfloat16", "bfloat16", 0),
        ("float16", "auto", "float32", 1),
        ("float32", "auto", "float32", 0),
        ("float32", "bfloat16", "bfloat16", 1),
    ],
)
def test_weight_dtype(stored: str, asked: str, expected: str, notes: int) -> None:
    checkpoint = open_checkpoint(make(TinySpec(dtype=stored)), asked)
    assert checkpoint.weight_dtype == expected
    assert len(checkpoint.notes) == notes


def test_float16_is_not_narrowed() -> None:
    path = make(TinySpec(dtype="float16"))
    with raises(
        ValueError,
        "dtype is 'bfloat16'",
        "'model.embed_tokens.weight'",
        path / "model.safetensors",
        "stored as F16",
        "allowed: 'auto' or 'float32'",
    ):
        open_checkpoint(path, "bfloat16")


def test_one_wide_matrix_makes_all_float32(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(dtype="bfloat16"))
    edit_tensors(path, lambda t: t.update({NORM: t[NORM].float()}))
    assert open_checkpoint(path).weight_dtype == "bfloat16", "norms are float32 anyway"
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].float()}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.weight_dtype == "float32"
    assert checkpoint.stored_dtypes == {"BF16": 15, "F32": 1}
    assert "BF16 and F32" in checkpoint.notes[0]
    assert "lossless" in checkpoint.notes[0]


@pytest.mark.parametrize("dtype", ["float16", "bf16", "int8", None, 32])
def test_bad_dtype(dtype: Any) -> None:
    with raises(ValueError, f"dtype is {dtype!r}", "allowed: 'auto', 'float32', 'bfloat16'"):
        open_checkpoint(make(TinySpec()), dtype)
