# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: configurations, three sets of names, formats of published files, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import deepseek_v4_models
from deepseek_v4_models import V4Spec, make, make_saved
from errors import raises
from paceline import _core, loader
from paceline._core import ModelFileError
from paceline.loader import families, hf_config, load_checkpoint, load_pair
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.drafter_checkpoint import open_drafter
from paceline.loader.drafters import Target
from paceline.loader.mtp import translate_mtp
from paceline.loader.section import Section
from tiny_models import copy_checkpoint, edit_config, edit_tensors, load_tensors, read_json

SPEC = V4Spec()
SCALED = V4Spec(has_scales=True, dtype="bfloat16")
# As published.
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160_000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1_048_576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "type": "yarn",
    },
    "rope_theta": 10_000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129_280,
}
FP8 = {"format": "fp8", "scales": [128, 128], "exact_scales": True}
MXFP4 = {"format": "mxfp4"}


def test_deepseek_v4_flash_as_published() -> None:
    config = loader.decoder_config(FLASH, "bfloat16")
    layers = config["layers"]
    assert len(layers) == 43
    assert config["streams"] == {"count": 4, "sinkhorn_iterations": 20, "eps": 1e-6}
    for i, layer in enumerate(layers):
        attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
        ratio = FLASH["compress_ratios"][i]  # type: ignore[index]
        assert attention.pop("compressor", None) == (
            None if ratio == 0 else {"tokens_per_entry": ratio, "overlaps": ratio == 4}
        )
        assert attention.pop("indexer", None) == (
            {"num_heads": 64, "head_dim": 128, "top_k": 512, "q": FP8} if ratio == 4 else None
        )
        assert attention == {
            "kind": "compressed",
            "num_qo_heads": 64,
            "head_dim": 512,
            "rope_head_dim": 64,
            "q_lora_rank": 1024,
            "window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "scale": 512**-0.5,
            "rope": 0 if ratio == 0 else 1,
            **dict.fromkeys(("qkv_a", "q_b", "o_a", "o_b"), FP8),
        }
        expert = {
            "intermediate": 2048, "activation": "clamped_silu", "limit": 10.0, "has_bias": False
        }  # fmt: skip
        assert mlp.pop("has_token_experts", False) == (i < 3)
        assert mlp == {
            **expert,
            "num_experts": 256,
            "top_k": 6,
            "router": "sqrt_softplus",
            "has_router_bias": False,
            "normalises_weights": True,
            "weight_scale": 1.5,
            "gate_up": MXFP4,
            "down": MXFP4,
            "per_expert": True,
            "shared": {**expert, "gate_up": FP8, "down": FP8},
        }
    main, compress = config["ropes"]
    assert (main["scale"], main["interleaved"], len(main["inv_freq"])) == (1.0, True, 32)
    assert main["inv_freq"][1] == pytest.approx(1e4 ** (-1 / 32), rel=1e-6)
    # YaRN without its factor on cosines and sines.
    assert compress["scale"] == 1.0
    assert [compress["inv_freq"][i] for i in (0, 1, 14, 15, 16, 20, 24, 25, 31)] == pytest.approx(
        [1, 0.687656, 0.00528686, 0.00363554, 0.00226562, 0.000296978, 1.95313e-05, 5.37231e-06,
         5.68053e-07], rel=1e-5,
    )  # fmt: skip


def test_tensors_are_those_of_the_published_files() -> None:
    hf = hf_config.parse_hf_config(FLASH, "x", families.ARCHITECTURES)
    specs = families.translate(hf).tensors
    target = Target(Path("x"), hf.architecture, loader.decoder_config(FLASH), "bfloat16")
    layer, _ = translate_mtp(Section(FLASH, "x"), target, None)

    def nbytes(tensors: Any) -> int:
        sizes = {"BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
        # Published files have these in float32.
        floats = ("_mix.", "sinks", "position_bias", "correction")
        return sum(
            math.prod(spec.shape)
            * (4 if any(part in spec.name for part in floats) else sizes[spec.dtypes[0]])
            for spec in tensors
        )

    assert len(specs) + len(layer.tensors) == 69_187
    assert nbytes(specs) == 156_015_698_140
    assert nbytes(layer.tensors) == 3_593_787_756


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    from transformers import DeepseekV4Config

    whole = DeepseekV4Config().to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]}
    assert loader.decoder_config({"architectures": whole["architectures"]}) == (
        loader.decoder_config(whole)
    )


def test_both_spellings_give_the_same_description() -> None:
    published = read_json(make(SPEC) / "config.json")
    saved = read_json(make_saved(SPEC) / "config.json")
    assert "compress_ratios" not in saved and "layer_types" not in published
    assert loader.decoder_config(saved) == loader.decoder_config(published)


def test_three_sets_of_names_give_the_same_weights() -> None:
    published = load_checkpoint(make(SPEC), progress=False)
    saved = load_checkpoint(make_saved(SPEC), progress=False)
    assert published.model.arena() == saved.model.arena()
    config = Section(read_json(make_saved(SPEC) / "config.json"), "config")
    state = deepseek_v4_models.model(SPEC).state_dict()
    joined = load_checkpoint(loader.StateDict(config, state, "state_dict"), progress=False)
    # Experts lie in another order there: gate and up of an expert side by side, in both forms.
    assert joined.model.arena() == saved.model.arena()


def test_formats_of_published_files(tmp_path: Path) -> None:
    path = make(SCALED)
    stored = load_tensors(path)
    assert {str(t.dtype) for t in stored.values()} >= {
        "torch.float8_e4m3fn", "torch.float8_e8m0fnu", "torch.int8", "torch.int64"
    }  # fmt: skip
    opened = open_checkpoint(path)
    assert opened.weight_dtype == "bfloat16"
    target, draft = load_pair(path, path, method="mtp", progress=False)
    assert draft is not None
    folder = convert(path, tmp_path / "out", method="mtp", progress=False)
    read = _core.load_model_folder(str(folder))
    assert bytes(read.target.arena()) == bytes(target.model.arena())
    assert read.draft is not None
    assert bytes(read.draft.arena()) == bytes(draft.model.arena())


def test_the_mtp_layer_is_not_the_targets() -> None:
    names = {tensor.source for tensor in open_checkpoint(make(SPEC)).tensors}
    assert not any(name.startswith("mtp.") for name in names)
    layer = open_drafter(make(SPEC), open_checkpoint(make(SPEC)).as_target(), "mtp")
    more = {tensor.source for tensor in layer.tensors}
    assert names | more == set(load_tensors(make(SPEC)))
    assert layer.config["drafter"]["norm_output"] is False
    sources = {tensor.spec.name: tensor.source for tensor in layer.tensors}
    assert sources["fc.weight"] == "mtp.0.e_proj.weight"
    assert sources["fc_hidden.weight"] == "mtp.0.h_proj.weight"
    assert sources["end_mix.matrix"] == "mtp.0.hc_head_fn"
    assert sources["layers.0.attn.kv_norm.weight"] == "mtp.0.attn.kv_norm.weight"


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        (
            ModelFileError,
            {"compress_ratios": [0, 4]},
            ('"compress_ratios" has 2 entries', 'expected 43, as "num_hidden_layers"', "or 44"),
        ),
        (
            NotImplementedError,
            {"compress_ratios": [8] * 43},
            ('"compress_ratios" has 8', "supported: 0, 4, 128"),
        ),
        (ModelFileError, {"compress_ratios": 4}, ('"compress_ratios" is 4', "a list of 0, 4, 128")),
        (
            ModelFileError,
            {"layer_types": ["sliding_attention"] * 43},
            ('"compress_ratios" is', 'what "layer_types" says'),
        ),
        (
            ModelFileError,
            {"compress_ratios": None, "layer_types": ["sliding_attention"]},
            ('"layer_types" has 1 entries', "expected 43"),
        ),
        (
            ModelFileError,
            {"mlp_layer_types": ["moe"] * 43},
            ('"num_hash_layers" is 3', 'what "mlp_layer_types" says'),
        ),
        (
            ModelFileError,
            {"index_topk": 600, "max_position_embeddings": 2048},
            ('key "index_topk": layers[2].attention.indexer.top_k is 600', "1 to 512", "entries"),
        ),
        (
            ModelFileError,
            {"index_n_heads": 6},
            ('key "index_n_heads"', "num_heads is 6", "a multiple of 4"),
        ),
        (
            ModelFileError,
            {"num_experts_per_tok": 257},
            ('"num_experts_per_tok" is 257', '"n_routed_experts" (256)'),
        ),
        (ModelFileError, {"o_groups": 7}, ('key "o_groups"', "divisors of num_qo_heads, 64")),
        (ModelFileError, {"hc_mult": 1}, ('key "hc_mult": streams.count is 1', "2 to 8")),
        (ModelFileError, {"qk_rope_head_dim": 63}, ('"qk_rope_head_dim" is 63', "an even number")),
        (
            ModelFileError,
            {"partial_rotary_factor": 0.5},
            ('"qk_rope_head_dim" is 64', 'expected 256, as "partial_rotary_factor" says'),
        ),
        (
            ModelFileError,
            {"compress_rates": {"heavily_compressed_attention": 64}, "compress_rate_hca": 128},
            ('"compress_rate_hca" is 128', "expected 64"),
        ),
        (NotImplementedError, {"scoring_func": "sigmoid"}, ('"sigmoid"', "sqrtsoftplus")),
        (NotImplementedError, {"n_shared_experts": 2}, ('"n_shared_experts" is 2', "supported: 1")),
        (NotImplementedError, {"num_key_value_heads": 2}, ('"num_key_value_heads" is 2', "1")),
        (NotImplementedError, {"norm_topk_prob": False}, ('"norm_topk_prob" is false', "true")),
        (NotImplementedError, {"expert_dtype": "fp8"}, ('"expert_dtype" is "fp8"', "fp4")),
        (
            NotImplementedError,
            {"rope_scaling": {"type": "linear", "factor": 2}},
            ('"rope_scaling.type" is "linear"', "default, yarn"),
        ),
    ],
)
def test_refused_keys(kind: type[Exception], changes: dict[str, Any], parts: Any) -> None:
    with raises(kind, "here.json", *parts):
        loader.decoder_config(FLASH | changes, source="here.json")


def _cut(name: str, rows: int) -> Any:
    return lambda tensors: tensors.update({name: tensors[name][:rows].clone()})


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            _cut("layers.0.ffn.gate.tid2eid", 100),
            ("tid2eid' has shape [100, 2]; expected [128, 2] (vocab_size, num_experts_per_tok of",),
        ),
        (
            lambda tensors: tensors["layers.0.ffn.gate.tid2eid"][7].fill_(3),
            ("tid2eid'[7, 0] and [7, 1] are both 3", "each expert once in a row"),
        ),
        (
            lambda tensors: tensors["layers.0.ffn.gate.tid2eid"][5, 1].fill_(8),
            ("tid2eid'[5, 1] is 8; allowed: 0 to 7 (experts)",),
        ),
        (
            _cut("layers.2.attn.compressor.ape", 4),
            ("ape' has shape [4, 32]; expected [8, 32]", "the layer's compress ratio"),
        ),
        (_cut("layers.1.hc_attn_fn", 20), ("hc_attn_fn' has shape [20, 256]; expected [24, 256]",)),
        (
            lambda tensors: tensors.pop("layers.1.attn.indexer.wq_b.weight"),
            ("1 tensor is missing: 'layers.1.attn.indexer.wq_b.weight'",),
        ),
        (
            lambda tensors: tensors.update({"mtp.1.norm.weight": tensors["norm.weight"].clone()}),
            ("tensor 'mtp.1.norm.weight' is of another MTP layer than 'mtp.0.*'", "'mtp'"),
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if name[:4] == "mtp."],
            ("there are no tensors 'mtp.0.*'", "method 'mtp'", "as published"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, tmp_path: Path) -> None:
    path = copy_checkpoint(make(SPEC), tmp_path / "model")
    edit_tensors(path, edit)
    with raises(ModelFileError, f"{path / 'model.safetensors'}: ", *parts):
        load_pair(path, path, method="mtp", progress=False)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("layers.0.attn.wq_a.scale", "is nan; allowed: finite"),
        ("layers.1.ffn.experts.0.w1.scale", "is 255, which is NaN; allowed: 0 to 254"),
    ],
)
def test_scales_that_are_no_numbers(name: str, seen: str, tmp_path: Path) -> None:
    """In fp8 matrices and in fp4 experts, whose scales are bytes with an exponent alone."""
    import torch

    path = copy_checkpoint(make(SCALED), tmp_path / "model")
    edit_tensors(path, lambda tensors: tensors[name].view(torch.uint8)[0, 0].fill_(255))
    with raises(ModelFileError, f"{path / 'model.safetensors'}: tensor '{name}'[0, 0] {seen}"):
        load_checkpoint(path, progress=False)


def test_another_number_of_mtp_layers(tmp_path: Path) -> None:
    path = copy_checkpoint(make(SPEC), tmp_path / "model")
    edit_config(path, num_nextn_predict_layers=2, compress_ratios=...)
    with raises(NotImplementedError, '"num_nextn_predict_layers" is 2', "supported: 1 layer"):
        open_drafter(path, open_checkpoint(make(SPEC)).as_target(), "mtp")


def test_a_feedback_after_the_norm_is_refused() -> None:
    with raises(ValueError, "['draft_feedback'] is 'normed'", "several residual streams", "'raw'"):
        load_pair(make(SPEC), make(SPEC), method="mtp", draft_feedback="normed", progress=False)


def test_the_library_refuses_what_streams_cannot_have() -> None:
    config = loader.decoder_config(FLASH)
    for changes, parts in (
        ({"has_post_norms": True}, ("streams is", "no such key with has_post_norms")),
        ({"norm_weight_offset": 1.0}, ("streams is", "norm_weight_offset other than 0")),
    ):
        with raises(ValueError, *parts):
            _core.check_decoder_config(json.dumps(config | changes))
