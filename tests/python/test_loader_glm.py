# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash and DeepSeek-V3: configurations, names and shapes of tensors, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from hf_configs import DEEPSEEK_V3, GLM
from paceline import loader
from paceline._core import ModelFileError
from paceline.loader import families, hf_config
from paceline.loader.checkpoint import open_checkpoint
from tiny_configs import DEEPSEEK, to_old_spelling
from tiny_models import (
    TinyLatent,
    TinySpec,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    read_json,
    replace_tensor,
)

# As published.
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154_820, 154_827, 154_829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202_752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154_820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154_880,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
LAYER = "model.layers.1."


def test_glm_4_7_flash_as_published() -> None:
    config = loader.decoder_config(GLM_4_7_FLASH, "bfloat16")
    assert config["layers"][0]["mlp"] == {
        "intermediate": 10_240,
        "activation": "silu",
        "has_bias": False,
    }
    for layer in config["layers"][1:]:
        assert layer["mlp"] == {
            "num_experts": 64,
            "top_k": 4,
            "intermediate": 1536,
            "activation": "silu",
            "has_bias": False,
            "router": "sigmoid",
            "has_router_bias": False,
            "num_groups": 1,
            "top_groups": 1,
            "normalises_weights": True,
            "weight_scale": 1.8,
            "per_expert": True,
            "shared": {"intermediate": 1536, "activation": "silu", "has_bias": False},
        }
    for layer in config["layers"]:
        assert layer["attention"] == {
            "kind": "latent",
            "num_qo_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "scale": 0.0625,
            "rope": 0,
            "latent_norm_eps": 1e-6,
        }
    (rope,) = config["ropes"]
    assert (len(rope["inv_freq"]), rope["scale"], rope["interleaved"]) == (32, 1.0, True)
    assert rope["inv_freq"][1] == pytest.approx(1e6 ** (-1 / 32), rel=1e-6)
    assert (len(config["layers"]), config["norm_eps"]) == (47, 1e-5)


def test_the_epsilon_of_latent_norms_can_be_that_of_other_programs() -> None:
    config = loader.decoder_config(GLM_4_7_FLASH | {"latent_norm_eps": 1e-5})
    assert {layer["attention"]["latent_norm_eps"] for layer in config["layers"]} == {1e-5}


def test_tensors_are_those_of_the_published_files() -> None:
    specs = families.translate(
        hf_config.parse_hf_config(GLM_4_7_FLASH, "x", families.ARCHITECTURES)
    ).tensors
    # Without the 212 tensors and 1,278,094,656 parameters of the layer that predicts more.
    assert len(specs) == 9703 - 212
    assert sum(math.prod(spec.shape) for spec in specs) == 31_221_488_576 - 1_278_094_656


def test_deepseek_v3_scales_scores_as_its_yarn_says() -> None:
    config = loader.decoder_config(DEEPSEEK_V3 | {"rope_scaling": YARN, "rope_theta": 10_000})
    mscale = 0.1 * math.log(40) + 1
    assert config["layers"][0]["attention"]["scale"] == pytest.approx(192**-0.5 * mscale**2)
    assert config["ropes"][0]["scale"] == 1.0
    mixture = config["layers"][3]["mlp"]
    assert (mixture["num_experts"], mixture["top_k"], mixture["weight_scale"]) == (256, 8, 2.5)
    assert (mixture["num_groups"], mixture["top_groups"]) == (8, 4)
    assert ["num_experts" in layer["mlp"] for layer in config["layers"]] == [False] * 3 + [True]


@pytest.mark.parametrize(("config", "name"), [(GLM, "Glm4MoeLite"), (DEEPSEEK_V3, "DeepseekV3")])
@pytest.mark.parametrize(
    "changes", [{}, {"rope_theta": 5e5}, {"q_lora_rank": None}, {"rope_interleave": False}]
)
def test_absent_keys_have_the_defaults_of_transformers(
    config: dict[str, Any], name: str, changes: dict[str, Any]
) -> None:
    import transformers

    sizes = {key: value for key, value in config.items() if key != "architectures"}
    whole = getattr(transformers, f"{name}Config")(**sizes, **changes).to_dict()
    whole["architectures"] = config["architectures"]
    assert loader.decoder_config(config | changes) == loader.decoder_config(whole)
    has_rank = "q_lora_rank" in loader.decoder_config(whole)["layers"][0]["attention"]
    assert has_rank != ("q_lora_rank" in changes)


@pytest.mark.parametrize("family", DEEPSEEK)
def test_both_spellings_give_the_same_description(family: str) -> None:
    new = read_json(make(TinySpec(family, rope="yarn")) / "config.json")
    old = to_old_spelling(new)
    assert "rope_parameters" in new and "rope_scaling" in old
    assert loader.decoder_config(old) == loader.decoder_config(new)
    renamed = {key: value for key, value in new.items() if key != "n_routed_experts"}
    assert loader.decoder_config(renamed | {"num_local_experts": 8}) == loader.decoder_config(new)


@pytest.mark.parametrize("family", DEEPSEEK)
def test_every_tensor_of_transformers_is_used(family: str) -> None:
    path = make(TinySpec(family, latent=TinyLatent(shared=2)))
    checkpoint = open_checkpoint(path)
    assert {tensor.source for tensor in checkpoint.tensors} == set(load_tensors(path))
    sources = {t.spec.name: (t.source, t.spec.shape) for t in checkpoint.tensors}
    ours, theirs = "layers.1.mlp.", f"{LAYER}mlp."
    assert sources[f"{ours}router.weight"] == (f"{theirs}gate.weight", (8, 64))
    correction = f"{theirs}gate.e_score_correction_bias"
    assert sources[f"{ours}router.correction.bias"] == (correction, (8,))
    assert sources[f"{ours}experts.up.7.weight"] == (f"{theirs}experts.7.up_proj.weight", (40, 64))
    assert sources[f"{ours}shared.down.weight"] == (
        f"{theirs}shared_experts.down_proj.weight",
        (64, 80),
    )
    attention = f"{LAYER}self_attn."
    assert sources["layers.1.attn.kv_a.weight"] == (
        f"{attention}kv_a_proj_with_mqa.weight",
        (40, 64),
    )
    assert sources["layers.1.attn.q_a_norm.weight"] == (f"{attention}q_a_layernorm.weight", (24,))
    assert sources["layers.0.mlp.up.weight"] == ("model.layers.0.mlp.up_proj.weight", (96, 64))


def test_the_correction_does_not_choose_the_dtype() -> None:
    path = make(TinySpec("glm4_moe_lite", dtype="bfloat16"))
    assert str(load_tensors(path)[f"{LAYER}mlp.gate.e_score_correction_bias"].dtype) == (
        "torch.float32"
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.weight_dtype == "bfloat16"
    assert checkpoint.notes == ()


@pytest.mark.parametrize("family", DEEPSEEK)
def test_the_layer_that_predicts_more_is_not_the_targets(
    family: str, copy_of: Callable[..., Path]
) -> None:
    path = copy_of(TinySpec(family))
    before = open_checkpoint(path).tensors

    def add_layer(number: int) -> Callable[[dict[str, Any]], None]:
        def edit(tensors: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.startswith(LAYER)]:
                tensors[name.replace(".1.", f".{number}.", 1)] = tensors[name].clone()
            tensors[f"model.layers.{number}.eh_proj.weight"] = tensors["lm_head.weight"].clone()

        return edit

    edit_tensors(path, add_layer(3))
    assert [t.spec for t in open_checkpoint(path).tensors] == [t.spec for t in before]
    edit_tensors(path, add_layer(4))
    with raises(ModelFileError, "tensors are not part of", "'model.layers.4."):
        open_checkpoint(path)
    edit_config(path, num_nextn_predict_layers=2)
    open_checkpoint(path)
    edit_config(path, num_nextn_predict_layers=0)
    with raises(ModelFileError, "tensors are not part of", "'model.layers.3."):
        open_checkpoint(path)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        (
            ModelFileError,
            {"num_experts_per_tok": 65},
            ('"num_experts_per_tok" is 65', "from 1 to", '"n_routed_experts" (64)'),
        ),
        (
            ModelFileError,
            {"n_routed_experts": 64, "num_local_experts": 32},
            ('"num_local_experts" is 32', 'expected 64, as "n_routed_experts" says'),
        ),
        (
            ModelFileError,
            {"n_group": 5},
            ('"n_group" is 5', 'a divisor of "n_routed_experts" (64)'),
        ),
        (
            ModelFileError,
            {"n_group": 4, "topk_group": 5},
            ('"topk_group" is 5', "an integer from 1 to 4"),
        ),
        (
            ModelFileError,
            {"n_group": 32, "topk_group": 1},
            (
                'key "topk_group": layers[1].mlp.top_groups is 1',
                "groups that together have top_k experts, 4",
            ),
        ),
        (
            ModelFileError,
            {"n_group": 64, "topk_group": 8},
            ('key "n_group": layers[1].mlp.num_groups is 64', "from 1 to 32"),
        ),
        (
            ModelFileError,
            {"moe_intermediate_size": 20},
            ('"moe_intermediate_size": layers[1].mlp.intermediate is 20', "a multiple of 8"),
        ),
        (NotImplementedError, {"scoring_func": "softmax"}, ('"softmax"', "supported: sigmoid")),
        (NotImplementedError, {"topk_method": "greedy"}, ('"greedy"', "supported: noaux_tc")),
        (NotImplementedError, {"moe_layer_freq": 2}, ('"moe_layer_freq" is 2', "supported: 1")),
        (NotImplementedError, {"attention_bias": True}, ('"attention_bias" is true', "false")),
        (
            NotImplementedError,
            {"num_key_value_heads": 4},
            ('"num_key_value_heads" is 4', 'supported: "num_attention_heads" (20)'),
        ),
        (NotImplementedError, {"hidden_act": "relu"}, ('"hidden_act" is "relu"', "silu")),
        (
            NotImplementedError,
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ('"rope_scaling" is', "not support", '"default", "yarn"'),
        ),
        (
            NotImplementedError,
            {"quantization_config": {"quant_method": "fp8"}},
            ('"quantization_config"', "supported: none"),
        ),
        (ModelFileError, {"qk_rope_head_dim": 63}, ('"qk_rope_head_dim" is 63', "an even")),
        (ModelFileError, {"kv_lora_rank": 0}, ('"kv_lora_rank" is 0', "from 1")),
        (
            ModelFileError,
            {"kv_lora_rank": 5000},
            ('key "kv_lora_rank": layers[0].attention.kv_lora_rank is 5000', "allowed"),
        ),
        (ModelFileError, {"routed_scaling_factor": 0}, ('"routed_scaling_factor" is 0', "above 0")),
        (ModelFileError, {"norm_topk_prob": 1}, ('"norm_topk_prob" is 1', "true or false")),
        (
            ModelFileError,
            {"mlp_layer_types": ["dense", "sparse"]},
            ('"mlp_layer_types" has 2 entries', 'expected 3, as "num_hidden_layers" says'),
        ),
        (
            NotImplementedError,
            {"mlp_layer_types": ["dense", "sparse", "moe"]},
            ('"mlp_layer_types" is', "a list of dense, sparse"),
        ),
        (
            ModelFileError,
            {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 2},
            ('"first_k_dense_replace" is 2', '"mlp_layer_types" says, which lists 1 dense layers'),
        ),
    ],
)
def test_refused_keys(kind: type[Exception], changes: dict[str, Any], parts: Any) -> None:
    with raises(kind, "here.json", *parts):
        loader.decoder_config(GLM | changes, source="here.json")


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        # Ranks that disagree.
        (
            replace_tensor(f"{LAYER}self_attn.kv_a_proj_with_mqa.weight", lambda t: t[:36]),
            (
                "kv_a_proj_with_mqa.weight' has shape [36, 64]; expected [40, 64]",
                "kv_lora_rank + qk_rope_head_dim, hidden_size of",
            ),
        ),
        (
            replace_tensor(f"{LAYER}self_attn.kv_b_proj.weight", lambda t: t[:, :16]),
            ("kv_b_proj.weight' has shape [176, 16]; expected [176, 32]", "v_head_dim), kv_lora_"),
        ),
        (
            replace_tensor(f"{LAYER}self_attn.q_b_proj.weight", lambda t: t[:, :20]),
            ("q_b_proj.weight' has shape [128, 20]; expected [128, 24]", "q_lora_rank of"),
        ),
        (
            replace_tensor(f"{LAYER}self_attn.o_proj.weight", lambda t: t[:, :64]),
            ("o_proj.weight' has shape [64, 64]; expected [64, 80]", "_heads * v_head_dim of"),
        ),
        (
            replace_tensor(f"{LAYER}mlp.gate.e_score_correction_bias", lambda t: t[:4]),
            ("e_score_correction_bias' has shape [4]; expected [8] (n_routed_experts of",),
        ),
        (
            replace_tensor(f"{LAYER}mlp.experts.3.down_proj.weight", lambda t: t[:, :32]),
            ("experts.3.down_proj.weight' has shape [64, 32]; expected [64, 40]",),
        ),
        (
            lambda tensors: tensors.pop(f"{LAYER}mlp.experts.7.up_proj.weight"),
            ("1 tensor is missing: 'model.layers.1.mlp.experts.7.up_proj.weight'",),
        ),
        (
            lambda tensors: tensors.update(
                {f"{LAYER}mlp.experts.8.up_proj.weight": tensors["lm_head.weight"].clone()}
            ),
            ("1 tensor is not part of", "mlp.experts.8.up_proj.weight'"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("glm4_moe_lite"))
    edit_tensors(path, edit)
    with raises(ModelFileError, f"{path / 'model.safetensors'}: ", *parts):
        open_checkpoint(path)
