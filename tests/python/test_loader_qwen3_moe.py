# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: configurations, names and shapes of tensors, formats of experts, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from hf_configs import QWEN3_MOE
from int4_models import int4_config
from paceline import loader
from paceline._core import ModelFileError
from paceline.loader import families, hf_config
from paceline.loader.checkpoint import open_checkpoint
from quantized_models import quantization_config
from tiny_models import (
    SLIDING,
    TinySpec,
    edit_config,
    edit_section,
    edit_tensors,
    load_tensors,
    make,
    read_json,
    replace_tensor,
)

# As published, with the keys of Coder that nothing reads.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151_645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
LAYER = "model.layers.1."


def translated(config: dict[str, Any]) -> families.Family:
    return families.translate(hf_config.parse_hf_config(config, "x", families.ARCHITECTURES))


def test_30b_a3b_as_published() -> None:
    config = loader.decoder_config(QWEN3_30B_A3B, "bfloat16")
    for layer in config["layers"]:
        assert layer["mlp"] == {
            "num_experts": 128,
            "top_k": 8,
            "intermediate": 768,
            "activation": "silu",
            "has_bias": False,
            "router": "softmax_of_chosen",
            "has_router_bias": False,
            "per_expert": True,
        }
        attention = layer["attention"]
        assert (attention["num_qo_heads"], attention["num_kv_heads"]) == (32, 4)
        assert (attention["head_dim"], attention["has_qk_norm"]) == (128, True)
    assert (len(config["layers"]), config["max_position"]) == (48, 40_960)
    specs = translated(QWEN3_30B_A3B).tensors
    assert sum(math.prod(spec.shape) for spec in specs) == 30_532_122_624
    # Nine in each layer and three for each expert; embeddings, the last norm and the lm_head.
    assert len(specs) == 48 * (9 + 3 * 128) + 3


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk_prob": True}, {"num_experts": 4}, {"decoder_sparse_step": 2}, {"head_dim": 8}],
)
def test_absent_keys_have_the_defaults_of_transformers(changes: dict[str, Any]) -> None:
    import transformers

    sizes = {key: value for key, value in QWEN3_MOE.items() if key != "architectures"} | {
        "num_key_value_heads": 4,  # of which the default depends on other keys here
        "num_experts_per_tok": 3,
        **changes,
    }
    whole = transformers.Qwen3MoeConfig(**sizes).to_dict()
    # Only published files have this key, and transformers reads it from them.
    assert ("head_dim" in whole) == ("head_dim" in changes)
    whole["architectures"] = QWEN3_MOE["architectures"]
    config = loader.decoder_config(sizes | {"architectures": QWEN3_MOE["architectures"]})
    assert config == loader.decoder_config(whole)
    mixture = config["layers"][1]["mlp"]
    assert (mixture["num_experts"], mixture["intermediate"]) == (
        changes.get("num_experts", 128),
        768,
    )
    is_normalised = "norm_topk_prob" in changes
    assert mixture["router"] == ("softmax_of_chosen" if is_normalised else "softmax")
    assert config["layers"][0]["attention"]["head_dim"] == changes.get("head_dim", 16)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"mlp_only_layers": [1, 2]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"decoder_sparse_step": 5}, []),
        ({"num_experts": 0}, []),
        ({"mlp_only_layers": None}, [0, 1, 2, 3]),
    ],
)
def test_layers_are_dense_or_sparse(changes: dict[str, Any], sparse: list[int]) -> None:
    config = QWEN3_MOE | {"num_hidden_layers": 4} | changes
    layers = loader.decoder_config(config)["layers"]
    assert [i for i, layer in enumerate(layers) if "num_experts" in layer["mlp"]] == sparse
    assert {layer["mlp"]["intermediate"] for layer in layers} <= {96, 768}
    names = {spec.name for spec in translated(config).tensors}
    for i in range(4):
        assert (f"layers.{i}.mlp.router.weight" in names) == (i in sparse)
        assert (f"layers.{i}.mlp.gate.weight" in names) == (i not in sparse)


def test_the_number_of_experts_has_two_names() -> None:
    renamed = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    expected = loader.decoder_config(QWEN3_30B_A3B | {"num_experts": 64})
    assert loader.decoder_config(renamed | {"num_local_experts": 64}) == expected


def test_every_tensor_of_transformers_is_used() -> None:
    path = make(TinySpec("qwen3_moe", num_layers=3, dense_layers=(0,)))
    checkpoint = open_checkpoint(path)
    assert {tensor.source for tensor in checkpoint.tensors} == set(load_tensors(path))
    sources = {t.spec.name: (t.source, t.spec.shape) for t in checkpoint.tensors}
    ours, theirs = "layers.1.mlp.", f"{LAYER}mlp."
    assert sources[f"{ours}router.weight"] == (f"{theirs}gate.weight", (8, 64))
    assert sources[f"{ours}experts.up.7.weight"] == (f"{theirs}experts.7.up_proj.weight", (24, 64))
    assert sources[f"{ours}experts.down.0.weight"] == (
        f"{theirs}experts.0.down_proj.weight",
        (64, 24),
    )
    assert sources["layers.0.mlp.up.weight"] == ("model.layers.0.mlp.up_proj.weight", (96, 64))


@pytest.mark.parametrize("method", ["fp8_block", "fp8_row", "fp8_tensor"])
def test_scales_of_experts(method: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("qwen3_moe", quantization=method, expert_size=160, hidden_size=192))
    checkpoint = open_checkpoint(path)
    shapes = {t.spec.name: t.spec.shape for t in checkpoint.tensors}
    name = "layers.1.mlp.experts.gate.3"
    assert shapes[f"{name}.weight"] == (160, 192)
    expected = {"fp8_block": (2, 2), "fp8_row": (160, 1), "fp8_tensor": (1,)}
    assert shapes[f"{name}.scales"] == expected[method]
    assert "layers.1.mlp.router.scales" not in shapes
    scales = {"fp8_block": [128, 128], "fp8_row": "row", "fp8_tensor": "tensor"}[method]
    mixture = checkpoint.config["layers"][1]["mlp"]
    assert mixture["gate_up"] == mixture["down"] == {"format": "fp8", "scales": scales}
    # As published: the router by its name, and layers whose experts all have no scales.
    key = "modules_to_not_convert" if method == "fp8_block" else "ignore"
    experts = [
        f"model.layers.0.mlp.experts.{e}.{which}_proj" for e in range(8) for which in ("gate", "up")
    ]
    excluded = ["lm_head", "model.layers.0.mlp.gate", *experts]
    values = read_json(path / "config.json")["quantization_config"] | {key: excluded}
    edit_config(path, quantization_config=values)
    layers = loader.decoder_config(read_json(path / "config.json"))["layers"]
    assert ["gate_up" in layer["mlp"] for layer in layers] == [False, True]
    assert ["down" in layer["mlp"] for layer in layers] == [True, True]
    edit_section(path, "quantization_config", **{key: excluded[:-1]})
    with raises(
        NotImplementedError, f'"quantization_config.{key}"', "all or none of gate_proj, up_proj"
    ):
        open_checkpoint(path)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        (
            ModelFileError,
            {"num_experts_per_tok": 129},
            ('"num_experts_per_tok" is 129', "from 1 to", '"num_experts" (128)'),
        ),
        (
            ModelFileError,
            {"num_experts": 64, "num_local_experts": 32},
            ('"num_local_experts" is 32', 'expected 64, as "num_experts" says'),
        ),
        (
            ModelFileError,
            {"moe_intermediate_size": 20},
            ('"moe_intermediate_size": layers[0].mlp.intermediate is 20', "a multiple of 8"),
        ),
        (ModelFileError, {"decoder_sparse_step": 0}, ('"decoder_sparse_step" is 0', "from 1")),
        (ModelFileError, {"norm_topk_prob": 1}, ('"norm_topk_prob" is 1', "true or false")),
        *(
            (ModelFileError, {"mlp_only_layers": value}, ('"mlp_only_layers" is', "layers, 0 to 1"))
            for value in ([2], [-1], [True], ["0"], 1)
        ),
        (NotImplementedError, {"hidden_act": "relu"}, ('"hidden_act" is "relu"', "silu")),
        (NotImplementedError, {"use_sliding_window": True}, ('"use_sliding_window" is true',)),
        (
            NotImplementedError,
            {"layer_types": [SLIDING] * 2},
            ('"layer_types"[0]', "Qwen3MoeForCausalLM", "supported: full_attention"),
        ),
        (
            NotImplementedError,
            {"quantization_config": quantization_config("mxfp4")},
            ('"quantization_config.quant_method" is "mxfp4"', "supported: fp8, compressed-tensors"),
        ),
        (
            NotImplementedError,
            {"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}},
            (
                '"quantization_config.quant_method" is "bitsandbytes"',
                "supported: fp8, compressed-tensors",
            ),
        ),
    ],
)
def test_refused_keys(kind: type[Exception], changes: dict[str, Any], parts: Any) -> None:
    with raises(kind, "here.json", *parts):
        loader.decoder_config(QWEN3_MOE | changes, source="here.json")


def test_a_relative_with_pictures_is_refused() -> None:
    architecture = "Qwen3VLMoeForConditionalGeneration"
    with raises(NotImplementedError, architecture, "is not supported", "Qwen3MoeForCausalLM"):
        loader.decoder_config(QWEN3_MOE | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            replace_tensor(f"{LAYER}mlp.experts.3.down_proj.weight", lambda t: t[:, :16]),
            (
                "experts.3.down_proj.weight' has shape [64, 16]; expected [64, 24]",
                "hidden_size, moe_intermediate_size of",
            ),
        ),
        (
            replace_tensor(f"{LAYER}mlp.gate.weight", lambda t: t[:4]),
            ("mlp.gate.weight' has shape [4, 64]; expected [8, 64] (num_experts, hidden",),
        ),
        (
            lambda tensors: tensors.pop(f"{LAYER}mlp.experts.7.up_proj.weight"),
            ("1 tensor is missing: 'model.layers.1.mlp.experts.7.up_proj.weight'",),
        ),
        (
            lambda tensors: tensors.update(
                {f"{LAYER}mlp.shared_expert.up_proj.weight": tensors["lm_head.weight"].clone()}
            ),
            ("1 tensor is not part of", "mlp.shared_expert.up_proj.weight'"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("qwen3_moe"))
    edit_tensors(path, edit)
    with raises(ModelFileError, f"{path / 'model.safetensors'}: ", *parts):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        int4_config("awq") | {"modules_to_not_convert": ["mlp.gate", "lm_head"]},
        int4_config("gptq") | {"dynamic": {"-:.*mlp.gate": {}}},
        int4_config("w4a16_asym") | {"ignore": ["lm_head", "re:.*mlp.gate.*"]},
    ],
)
def test_lists_of_modules_may_name_the_router_alone(change: dict[str, Any]) -> None:
    """Its name is the beginning of that of a dense layer's matrix."""
    value = QWEN3_30B_A3B | {"quantization_config": change}
    for layer in loader.decoder_config(value)["layers"]:
        assert layer["mlp"]["gate_up"]["format"] == layer["mlp"]["down"]["format"] == "int4"


def test_experts_without_end_are_refused_at_once() -> None:
    with raises(ModelFileError, '"num_experts" is 2000000000', "1 to 1024"):
        loader.decoder_config(QWEN3_30B_A3B | {"num_experts": 2 * 10**9})
