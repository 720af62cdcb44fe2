# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: every family's defaults, published files, both spellings, frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from errors import raises
from hf_configs import GEMMA3, GEMMA4, GPT_OSS_ROPE, LLAMA, LLAMA3_ROPE, QWEN3, YARN_ROPE
from paceline import loader
from paceline._core import ModelFileError
from paceline.loader import families, hf_config
from paceline.loader.rope import RopeSettings, inverse_frequencies
from tiny_configs import to_old_spelling
from tiny_models import FULL, SLIDING, TinySpec, make, read_json

# As published, without the keys that the text part does not use.
GEMMA4_E2B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "sliding_window": 512,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
}
GEMMA4_31B = GEMMA4 | {
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}

GEMMA4_26B_A4B = GEMMA4_31B | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


def test_llama_defaults() -> None:
    config = loader.decoder_config(LLAMA)
    attention = config["layers"][1]["attention"]
    assert attention == {
        "kind": "full",
        "window": 0,
        "num_qo_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "scale": 0.25,
        "soft_cap": 0.0,
        "rope": 0,
        "has_qk_norm": False,
        "has_qkv_bias": False,
        "has_o_bias": False,
    }
    assert config["layers"][0]["mlp"] == {
        "intermediate": 96,
        "activation": "silu",
        "has_bias": False,
    }
    assert {key: config[key] for key in config if key not in ("layers", "ropes")} == {
        "format": "paceline-decoder-1",
        "name": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "max_position": 2048,
        "norm_eps": 1e-5,
        "norm_weight_offset": 0.0,
        "embed_scale": 1.0,
        "logit_soft_cap": 0.0,
        "ties_lm_head": False,
        "has_post_norms": False,
    }
    assert len(config["ropes"]) == 1
    assert config["ropes"][0]["scale"] == 1.0
    assert len(config["ropes"][0]["inv_freq"]) == 8


def test_qwen3_head_dim_is_never_hidden_over_heads() -> None:
    attention = loader.decoder_config(QWEN3)["layers"][0]["attention"]
    assert attention["head_dim"] == 128
    assert attention["has_qk_norm"]
    assert attention["scale"] == 128**-0.5


def test_gemma3_defaults_are_those_of_the_published_files() -> None:
    config = loader.decoder_config(GEMMA3)
    kinds = [layer["attention"]["kind"] for layer in config["layers"]]
    assert kinds == ["sliding"] * 5 + ["full", "sliding"]
    windows = [layer["attention"]["window"] for layer in config["layers"]]
    assert windows == [512] * 5 + [0, 512]
    assert config["vocab_size"] == 262_208
    assert config["layers"][0]["attention"]["num_qo_heads"] == 8
    assert config["layers"][0]["attention"]["scale"] == 1 / 16
    assert config["layers"][0]["mlp"]["activation"] == "gelu_tanh"
    assert config["norm_weight_offset"] == 1.0
    assert config["has_post_norms"]
    assert config["ties_lm_head"]
    assert [layer["attention"]["rope"] for layer in config["layers"]] == [0] * 5 + [1, 0]
    assert config["ropes"][0]["inv_freq"][1] == pytest.approx(10_000 ** (-2 / 256), rel=1e-6)
    assert config["ropes"][1]["inv_freq"][1] == pytest.approx(1_000_000 ** (-2 / 256), rel=1e-6)


def test_gemma3_27b_as_published() -> None:
    """The nested configuration of the file with a vision tower, which omits many keys."""
    config = loader.decoder_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21_504,
                "model_type": "gemma3_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        "bfloat16",
    )
    assert sum(layer["attention"]["kind"] == "full" for layer in config["layers"]) == 10
    assert config["layers"][0]["attention"]["scale"] == 168**-0.5
    assert config["max_position"] == 131_072
    assert config["vocab_size"] == 262_208
    assert config["embed_scale"] == 73.5
    sliding, full = config["ropes"]
    assert sliding["inv_freq"][0] == 1.0
    assert full["inv_freq"][0] == 0.125


@pytest.mark.parametrize(
    ("hidden", "rounded"),
    [(640, 25.25), (5376, 73.5), (1536, 39.25), (2560, 50.5), (3840, 62.0), (256, 16.0)],
)
def test_gemma3_embed_scale_is_rounded_with_the_dtype(hidden: int, rounded: float) -> None:
    values = GEMMA3 | {"hidden_size": hidden}
    assert loader.decoder_config(values, "bfloat16")["embed_scale"] == rounded
    exact = loader.decoder_config(values, "float32")["embed_scale"]
    assert exact == float(np.float32(math.sqrt(hidden)))
    assert loader.decoder_config(LLAMA, "bfloat16")["embed_scale"] == 1.0


def test_gemma4_e2b_as_published() -> None:
    config = loader.decoder_config(GEMMA4_E2B, "bfloat16")
    assert config["embed_scale"] == 39.25
    assert config["per_layer_inputs"] == {
        "size": 256,
        "vocab_size": 262_144,
        "embed_scale": 16.0,
        "proj_scale": float(np.float32(1536**-0.5)),
        "scale": float(np.float32(2**-0.5)),
        "activation": "gelu_tanh",
    }
    assert config["has_layer_scale"]
    assert config["norm_weight_offset"] == 0.0
    assert config["logit_soft_cap"] == 30.0
    layers = config["layers"]
    assert [layer["mlp"]["intermediate"] for layer in layers] == [6144] * 15 + [12_288] * 20
    attentions = [layer["attention"] for layer in layers]
    assert [a["head_dim"] for a in attentions] == ([256] * 4 + [512]) * 7
    assert {a["scale"] for a in attentions} == {1.0}
    assert [a["window"] for a in attentions] == ([512] * 4 + [0]) * 7
    assert [a.get("kv_source") for a in attentions] == [None] * 15 + ([13] * 4 + [14]) * 4
    assert [a.get("has_v_norm", False) for a in attentions] == [True] * 15 + [False] * 20
    assert not any("k_eq_v" in a for a in attentions)
    assert [a["rope"] for a in attentions] == ([0] * 4 + [1]) * 7
    sliding, full = (rope["inv_freq"] for rope in config["ropes"])
    assert len(sliding) == 128 and min(sliding) > 0
    assert len(full) == 256
    assert full[64:] == [0.0] * 192
    assert full[1] == pytest.approx(1_000_000 ** (-2 / 512), rel=1e-6)
    assert full[63] == pytest.approx(1_000_000 ** (-126 / 512), rel=1e-6)
    specs = families.translate(
        hf_config.parse_hf_config(GEMMA4_E2B, "x", families.ARCHITECTURES)
    ).tensors
    # 17 in each layer, without k, v and the norm on k in the 20 layers that share KV; 5 others.
    assert len(specs) == 35 * 17 + 5 - 20 * 3
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["per_layer.embed.weight"] == (262_144, 8960)
    assert shapes["layers.4.attn.q.weight"] == (4096, 1536)
    assert shapes["layers.4.attn.k.weight"] == (512, 1536)


def test_gemma4_31b_as_published() -> None:
    config = loader.decoder_config(GEMMA4_31B)
    attentions = [layer["attention"] for layer in config["layers"]]
    assert [a["kind"] for a in attentions] == (["sliding"] * 5 + ["full"]) * 10
    assert [a["num_kv_heads"] for a in attentions] == ([16] * 5 + [4]) * 10
    assert [a.get("k_eq_v", False) for a in attentions] == ([False] * 5 + [True]) * 10
    assert "per_layer_inputs" not in config
    specs = families.translate(
        hf_config.parse_hf_config(GEMMA4_31B, "x", families.ARCHITECTURES)
    ).tensors
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["layers.5.attn.q.weight"] == (16_384, 5376)
    assert shapes["layers.5.attn.k.weight"] == (2048, 5376)
    assert "layers.5.attn.v.weight" not in shapes
    assert shapes["layers.5.attn.o.weight"] == (5376, 16_384)
    assert shapes["layers.0.attn.v.weight"] == (4096, 5376)


def test_gemma4_26b_a4b_as_published() -> None:
    config = loader.decoder_config(GEMMA4_26B_A4B)
    for layer in config["layers"]:
        assert layer["mlp"] == {
            "dense": {"intermediate": 2112, "activation": "gelu_tanh", "has_bias": False},
            "mixture": {
                "num_experts": 128,
                "top_k": 8,
                "intermediate": 704,
                "activation": "gelu_tanh",
                "has_bias": False,
                "router": "softmax_of_chosen",
                "has_router_bias": False,
                "logit_scale": float(np.float32(2816**-0.5)),
                "has_expert_scales": True,
            },
        }
    specs = families.translate(
        hf_config.parse_hf_config(GEMMA4_26B_A4B, "x", families.ARCHITECTURES)
    ).tensors
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["layers.5.mlp.gate.weight"] == (2112, 2816)
    assert shapes["layers.5.mlp.experts.gate_up.weight"] == (128, 1408, 2816)
    assert shapes["layers.5.mlp.experts.down.weight"] == (128, 2816, 704)
    assert shapes["layers.5.mlp.router.expert_scales"] == (128,)


def test_gemma4_defaults_are_those_of_transformers() -> None:
    for architecture, window, positions in (
        ("Gemma4ForCausalLM", 512, 131_072),
        ("Gemma4UnifiedForCausalLM", 1024, 262_144),
    ):
        values = GEMMA4 | {"architectures": [architecture], "num_global_key_value_heads": 1}
        config = loader.decoder_config(values)
        attentions = [layer["attention"] for layer in config["layers"]]
        # The last layer is a full one even where the pattern says otherwise.
        assert [a["kind"] for a in attentions] == ["sliding"] * 5 + ["full"] * 2
        assert attentions[0]["window"] == window
        assert attentions[5]["head_dim"] == 512
        assert attentions[5]["num_kv_heads"] == 2, "the key counts only beside attention_k_eq_v"
        assert config["max_position"] == positions
        assert config["logit_soft_cap"] == 0.0
        assert config["ties_lm_head"]
    whole = {key: GEMMA4[key] for key in GEMMA4 if key != "hidden_size_per_layer_input"}
    assert loader.decoder_config(whole)["per_layer_inputs"]["size"] == 256


@pytest.mark.parametrize("k_eq_v", [False, True])
def test_both_spellings_of_gemma4_give_the_same_description(k_eq_v: bool) -> None:
    new = read_json(make(TinySpec("gemma4", k_eq_v=k_eq_v)) / "config.json")
    old = to_old_spelling(new)
    assert "per_layer_config" in new and "global_head_dim" not in new
    assert "per_layer_config" not in old and old["global_head_dim"] == 32
    assert loader.decoder_config(old) == loader.decoder_config(new)
    assert loader.decoder_config(new | old) == loader.decoder_config(new)
    with raises(ModelFileError, "per_layer_config", "global_head_dim", "layer 2", "(2, 64)"):
        loader.decoder_config(new | old | {"global_head_dim": 64, "attention_k_eq_v": False})


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_both_spellings_give_the_same_description(family: str, rope: str) -> None:
    new = read_json(make(TinySpec(family, rope=rope)) / "config.json")
    old = to_old_spelling(new)
    assert "rope_parameters" in new
    assert "rope_parameters" not in old
    assert loader.decoder_config(old) == loader.decoder_config(new)


def test_old_gemma3_spelling_scales_full_layers_only() -> None:
    values = GEMMA3 | {
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 20_000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "sliding_window_pattern": 2,
        "head_dim": 4,
    }
    config = loader.decoder_config(values)
    assert [layer["attention"]["kind"] for layer in config["layers"]] == [
        "sliding",
        "full",
    ] * 3 + ["sliding"]
    sliding, full = config["ropes"]
    assert sliding["inv_freq"] == pytest.approx([1.0, 20_000**-0.5], rel=1e-6)
    assert full["inv_freq"] == pytest.approx([0.5, 500_000**-0.5 / 2], rel=1e-6)


def test_layers_with_equal_ropes_share_one() -> None:
    same = {"rope_type": "default", "rope_theta": 10_000.0}
    config = loader.decoder_config(GEMMA3 | {"rope_parameters": {FULL: same, SLIDING: same}})
    assert len(config["ropes"]) == 1


def test_rope_parameters_by_layer_type_in_a_model_with_one_type() -> None:
    nested = {FULL: {"rope_type": "default", "rope_theta": 500_000.0}}
    config = loader.decoder_config(QWEN3 | {"rope_parameters": nested})
    assert config == loader.decoder_config(QWEN3 | {"rope_theta": 500_000.0})


def test_null_counts_as_absent() -> None:
    nulls = dict.fromkeys(
        ("rope_scaling", "head_dim", "num_key_value_heads", "quantization_config", "layer_types")
    )
    assert loader.decoder_config(LLAMA | nulls) == loader.decoder_config(LLAMA)


def test_biases_and_activations() -> None:
    config = loader.decoder_config(
        LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}
    )
    layer = config["layers"][0]
    assert layer["attention"]["has_qkv_bias"]
    assert layer["attention"]["has_o_bias"]
    assert layer["mlp"] == {"intermediate": 96, "activation": "gelu_tanh", "has_bias": True}


def test_model_type_stands_in_for_architectures() -> None:
    values = {key: value for key, value in QWEN3.items() if key != "architectures"}
    assert loader.decoder_config(values | {"model_type": "qwen3"})["name"] == "qwen3"


# ---- frequencies -------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("theta", [10_000.0, 150_000.0, 500_000.0, 1_000_000.0, 123_456.7])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3_ROPE,
        LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 100},
        GPT_OSS_ROPE,
        YARN_ROPE,
        # A factor without effect; no original length; limits beyond the head.
        YARN_ROPE | {"factor": 1.0, "beta_fast": 4.5, "beta_slow": 4.5, "truncate": False},
        {"rope_type": "yarn", "factor": 7.3, "attention_factor": 1.1, "mscale": 0.0},
        YARN_ROPE | {"original_max_position_embeddings": 1, "mscale": 0.7, "mscale_all_dim": 1.3},
    ],
    ids=lambda scaling: f"{scaling['rope_type']}{scaling.get('factor', '')}",
)
def test_frequencies_equal_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int
) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    scale = 1.0
    if scaling["rope_type"] == "default":
        expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
        expected = frequencies.numpy()
    rope = loader.decoder_config(
        LLAMA
        | {
            "head_dim": head_dim,
            "max_position_embeddings": 131_072,
            "rope_parameters": scaling | {"rope_theta": theta},
        }
    )["ropes"][0]
    values = np.array(rope["inv_freq"], np.float32)
    assert [float(value) for value in values] == rope["inv_freq"], "not float32 values"
    assert rope["scale"] == float(np.float32(scale))
    # torch's float32 power is sometimes off by one unit; llama3's blend amplifies that.
    np.testing.assert_allclose(values, expected, rtol=5e-7, atol=0)
    # All other values have the same bits.
    powers = (theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).numpy()
    plain = inverse_frequencies(RopeSettings(theta=theta), head_dim)
    is_same_power = np.array(plain, np.float32) == np.float32(1.0) / powers
    np.testing.assert_array_equal(values[is_same_power], expected[is_same_power])
    # With the bases of published models nearly all do.
    if theta != 123_456.7:
        assert is_same_power.mean() >= 0.9


def test_frequencies_of_gpt_oss() -> None:
    values = LLAMA | {"head_dim": 64, "rope_theta": 150_000.0, "rope_scaling": GPT_OSS_ROPE}
    (rope,) = loader.decoder_config(values)["ropes"]
    expected = {
        0: 1.0,
        1: 0.689044,
        7: 0.0737446,
        8: 0.0508133,
        9: 0.0317057,
        12: 0.00679496,
        17: 0.000129319,
        18: 3.83088e-05,
        31: 3.02351e-07,
    }
    assert {i: rope["inv_freq"][i] for i in expected} == pytest.approx(expected, rel=5e-6)
    assert rope["scale"] == float(np.float32(1.3465735903))


def test_frequencies_by_hand() -> None:
    assert inverse_frequencies(RopeSettings(theta=10_000.0), 4) == [
        1.0,
        float(np.float32(0.01)),
    ]
    assert inverse_frequencies(RopeSettings("linear", 10_000.0, 4.0), 2) == [0.25]
