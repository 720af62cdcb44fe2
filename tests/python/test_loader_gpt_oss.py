# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS checkpoints: configurations, names and shapes of tensors, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from hf_configs import GPT_OSS, GPT_OSS_ROPE
from paceline import loader
from paceline._core import ModelFileError
from paceline.loader import families, hf_config
from paceline.loader.checkpoint import open_checkpoint
from quantized_models import quantization_config
from tiny_configs import to_old_spelling
from tiny_models import (
    FULL,
    SLIDING,
    TinySpec,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    read_json,
    replace_tensor,
    write_json,
)

# As published, in the spelling of transformers 4.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200_002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 12,
    "max_position_embeddings": 131_072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199_999,
    "quantization_config": quantization_config("mxfp4"),
    "rms_norm_eps": 1e-5,
    "rope_scaling": GPT_OSS_ROPE,
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": [SLIDING, FULL] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
MXFP4 = TinySpec("gpt_oss", quantization="mxfp4")
LAYER = "model.layers.0."


def test_gpt_oss_20b_as_published() -> None:
    config = loader.decoder_config(GPT_OSS_20B, "bfloat16")
    attentions = [layer["attention"] for layer in config["layers"]]
    assert [a["kind"] for a in attentions] == ["sliding", "full"] * 12
    assert [a["window"] for a in attentions] == [128, 0] * 12
    assert attentions[1] == {
        "kind": "full",
        "window": 0,
        "num_qo_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "scale": 0.125,
        "soft_cap": 0.0,
        "rope": 0,
        "has_qk_norm": False,
        "has_qkv_bias": True,
        "has_o_bias": True,
        "has_sinks": True,
    }
    assert config["layers"][23]["mlp"] == {
        "num_experts": 32,
        "top_k": 4,
        "intermediate": 2880,
        "activation": "swiglu_oai",
        "alpha": 1.702,
        "limit": 7.0,
        "has_bias": True,
        "router": "softmax_of_chosen",
        "has_router_bias": True,
        "interleaved": True,
        "gate_up": {"format": "mxfp4"},
        "down": {"format": "mxfp4"},
    }
    (rope,) = config["ropes"]
    assert rope["scale"] == pytest.approx(0.1 * math.log(32) + 1, rel=1e-7)
    assert rope["inv_freq"][9] == pytest.approx(0.0317057, rel=5e-6)
    assert (config["embed_scale"], config["logit_soft_cap"]) == (1.0, 0.0)
    assert (config["ties_lm_head"], config["max_position"]) == (False, 131_072)


@pytest.mark.parametrize(
    ("config", "num_tensors", "nbytes"),
    [(GPT_OSS_20B, 459, 13_761_264_768), (GPT_OSS_120B, 687, 65_248_815_744)],
)
def test_tensors_are_those_of_the_published_files(
    config: dict[str, Any], num_tensors: int, nbytes: int
) -> None:
    hf = hf_config.parse_hf_config(config, "x", families.ARCHITECTURES)
    specs = families.translate(hf).tensors
    assert len(specs) == num_tensors
    assert sum(math.prod(s.shape) * (1 if s.dtypes == ("U8",) else 2) for s in specs) == nbytes


@pytest.mark.parametrize("changes", [{}, {"rope_theta": 10_000.0}])
def test_absent_keys_have_the_defaults_of_transformers(changes: dict[str, Any]) -> None:
    from transformers import GptOssConfig

    sizes = {key: value for key, value in GPT_OSS.items() if key != "architectures"}
    whole = GptOssConfig(**sizes, **changes).to_dict()
    assert whole["layer_types"] == [SLIDING, FULL, SLIDING]
    assert whole["rope_parameters"]["rope_type"] == "yarn"
    whole["architectures"] = GPT_OSS["architectures"]
    assert loader.decoder_config(GPT_OSS | changes) == loader.decoder_config(whole)


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_both_spellings_give_the_same_description(quantization: str | None) -> None:
    new = read_json(make(TinySpec("gpt_oss", quantization=quantization)) / "config.json")
    old = to_old_spelling(new)
    assert "rope_parameters" in new and "rope_scaling" in old
    assert loader.decoder_config(old) == loader.decoder_config(new)
    renamed = {key: value for key, value in new.items() if key != "num_local_experts"}
    assert loader.decoder_config(renamed | {"num_experts": 8}) == loader.decoder_config(new)


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_every_tensor_of_transformers_is_used(quantization: str | None) -> None:
    path = make(TinySpec("gpt_oss", quantization=quantization, tied=True))
    checkpoint = open_checkpoint(path)
    assert {tensor.source for tensor in checkpoint.tensors} == set(load_tensors(path))
    sources = {t.spec.name: (t.source, t.spec.shape) for t in checkpoint.tensors}
    ours, theirs = "layers.0.mlp.experts.", f"{LAYER}mlp.experts."
    assert sources[f"{ours}down.bias"] == (f"{theirs}down_proj_bias", (8, 64))
    assert sources["layers.0.attn.sinks"] == (f"{LAYER}self_attn.sinks", (4,))
    assert sources["layers.0.mlp.router.weight"] == (f"{LAYER}mlp.router.weight", (8, 64))
    if quantization is None:
        assert sources[f"{ours}gate_up.weight"] == (f"{theirs}gate_up_proj", (8, 64, 192))
        assert sources[f"{ours}down.weight"] == (f"{theirs}down_proj", (8, 96, 64))
        assert checkpoint.config["layers"][0]["mlp"]["transposed"]
    else:
        blocks = f"{theirs}gate_up_proj_blocks"
        assert sources[f"{ours}gate_up.weight"] == (blocks, (8, 192, 2, 16))
        scales = f"{theirs}gate_up_proj_scales"
        assert sources[f"{ours}gate_up.scales"] == (scales, (8, 192, 2))
        assert "transposed" not in checkpoint.config["layers"][0]["mlp"]


def test_experts_do_not_choose_the_dtype() -> None:
    checkpoint = open_checkpoint(make(TinySpec(**vars(MXFP4) | {"dtype": "bfloat16"})))
    assert checkpoint.weight_dtype == "bfloat16"
    # Biases of experts have two dimensions, and are no matrices.
    assert checkpoint.stored_dtypes == {"BF16": 12, "U8": 4}
    assert checkpoint.notes == ()


def test_all_stop_tokens_of_the_generation_settings(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("gpt_oss", eos_token_id=2))
    write_json(path / "generation_config.json", {"eos_token_id": [102, 99, 112]})
    assert open_checkpoint(path).eos_token_ids == (102, 99, 112)


def test_other_layouts_in_the_repository_are_ignored(copy_of: Callable[..., Path]) -> None:
    path = copy_of(MXFP4)
    for folder in ("original", "metal"):
        (path / folder).mkdir()
        (path / folder / "model.safetensors").write_bytes(b"another layout")
        (path / folder / "config.json").write_text("{}")
    open_checkpoint(path)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        (
            ModelFileError,
            {"num_experts_per_tok": 9, "num_local_experts": 8},
            ('"num_experts_per_tok" is 9', "from 1 to", '"num_local_experts" (8)'),
        ),
        (ModelFileError, {"num_local_experts": 0}, ('"num_local_experts" is 0', "from 1")),
        (
            ModelFileError,
            {"num_local_experts": 2000},
            ('"num_local_experts" is 2000', "1 to 1024"),
        ),
        (
            ModelFileError,
            {"num_local_experts": 8, "num_experts": 16},
            ('"num_experts" is 16', 'expected 8, as "num_local_experts" says'),
        ),
        (
            ModelFileError,
            {"num_experts_per_tok": 4, "experts_per_token": 2},
            ('"experts_per_token" is 2', 'expected 4, as "num_experts_per_tok" says'),
        ),
        (NotImplementedError, {"hidden_act": "gelu"}, ('"hidden_act" is "gelu"', "silu")),
        (ModelFileError, {"swiglu_limit": 0}, ('"swiglu_limit" is 0', "above 0")),
        (ModelFileError, {"swiglu_alpha": "x"}, ('"swiglu_alpha" is "x"', "above 0")),
        (ModelFileError, {"layer_types": [FULL]}, ('"layer_types" has 1 entries', "expected 3")),
        (
            ModelFileError,
            {"intermediate_size": 72, "quantization_config": quantization_config("mxfp4")},
            ('"intermediate_size" is 72', "a multiple of 32, as mxfp4"),
        ),
        (
            NotImplementedError,
            {"quantization_config": quantization_config("fp8_block")},
            ('"quantization_config.quant_method" is "fp8"', "supported: mxfp4"),
        ),
        (
            NotImplementedError,
            {
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": ["model.layers.2.mlp"],
                }
            },
            (
                '"quantization_config.modules_to_not_convert" is ["model.layers.2.mlp"]',
                "without the experts of any layer",
            ),
        ),
    ],
)
def test_refused_keys(kind: type[Exception], changes: dict[str, Any], parts: Any) -> None:
    with raises(kind, "here.json", *parts):
        loader.decoder_config(GPT_OSS | changes, source="here.json")


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            replace_tensor(f"{LAYER}mlp.experts.gate_up_proj_scales", lambda t: t[:, :, :1]),
            (
                "gate_up_proj_scales' has shape [8, 192, 1]; expected [8, 192, 2]",
                "num_local_experts, 2 * intermediate_size, hidden_size / 32 of",
            ),
        ),
        (
            replace_tensor(f"{LAYER}mlp.experts.down_proj_blocks", lambda t: t[:, :, :2]),
            ("down_proj_blocks' has shape [8, 64, 2, 16]; expected [8, 64, 3, 16]",),
        ),
        (
            replace_tensor(f"{LAYER}mlp.experts.down_proj_scales", lambda t: t[:4]),
            ("down_proj_scales' has shape [4, 64, 3]; expected [8, 64, 3]", "num_local_experts"),
        ),
        (
            replace_tensor(f"{LAYER}mlp.router.weight", lambda t: t[:4]),
            ("router.weight' has shape [4, 64]; expected [8, 64] (num_local_experts, hidden_size",),
        ),
        (
            replace_tensor(f"{LAYER}mlp.experts.down_proj_blocks", lambda t: t.float()),
            ("down_proj_blocks' is stored as F32; expected U8", '"quantization_config"'),
        ),
        (
            lambda tensors: tensors.pop(f"{LAYER}self_attn.sinks"),
            ("1 tensor is missing: 'model.layers.0.self_attn.sinks'", "GptOssForCausalLM"),
        ),
        (
            lambda tensors: tensors.pop(f"{LAYER}mlp.experts.down_proj_scales"),
            ("1 tensor is missing", "down_proj_scales'"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(MXFP4)
    edit_tensors(path, edit)
    with raises(ModelFileError, path / "model.safetensors", *parts):
        open_checkpoint(path)


def test_another_number_of_experts_than_the_configuration_says(
    copy_of: Callable[..., Path],
) -> None:
    path = copy_of(MXFP4)
    edit_config(path, num_local_experts=16)
    with raises(
        ModelFileError, "has shape [8, 64]; expected [16, 64]", "num_local_experts", "config.json"
    ):
        open_checkpoint(path)


def test_experts_of_the_other_layout(copy_of: Callable[..., Path], tmp_path: Path) -> None:
    path = copy_of(MXFP4)
    edit_config(path, quantization_config=...)
    with raises(ModelFileError, "gate_up_proj'", 'needs a "quantization_config" (mxfp4)'):
        open_checkpoint(path)
    edit_config(path, quantization_config=quantization_config("mxfp4"))
    stored = load_tensors(make(TinySpec("gpt_oss")))
    edit_tensors(path, lambda tensors: (tensors.clear(), tensors.update(stored)))
    with raises(ModelFileError, "_blocks'", 'may have no "quantization_config"'):
        open_checkpoint(path)
