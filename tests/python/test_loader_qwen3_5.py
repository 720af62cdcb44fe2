# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3-Next: configurations, names, shapes and rows of tensors, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen3_5_mtp
from errors import raises
from paceline import LLM, SamplingParams, loader
from paceline._core import ModelFileError
from paceline.loader import convert, families, hf_config
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.drafter_checkpoint import open_drafter
from paceline.loader.load import load_checkpoint, load_pair
from tiny_models import (
    FULL,
    LINEAR,
    QWEN3_5,
    TinySpec,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    replace_tensor,
)

# As published, without the vision tower's keys.
QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248_056,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "layer_types": [FULL if i % 4 == 3 else LINEAR for i in range(64)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248_320,
    },
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
}
QWEN3_6_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248_320,
        "mtp_num_hidden_layers": 1,
    },
}
DENSE = {"architectures": ["Qwen3_5ForCausalLM"]}
MOE = {"architectures": ["Qwen3_5MoeForCausalLM"]}
NEXT = {"architectures": ["Qwen3NextForCausalLM"]}
LAYER = "model.layers.0."


def tensors_of(values: dict[str, Any]) -> Any:
    hf = hf_config.parse_hf_config(values, "x", families.ARCHITECTURES)
    return families.translate(hf).tensors


def test_27b_as_published() -> None:
    config = loader.decoder_config(QWEN3_5_27B, "bfloat16")
    assert (config["norm_weight_offset"], config["ties_lm_head"]) == (1.0, False)
    (rope,) = config["ropes"]
    assert (len(rope["inv_freq"]), rope["scale"]) == (32, 1.0)
    assert rope["inv_freq"][1] == pytest.approx(1e7 ** (-1 / 32), rel=1e-6)
    kinds = [layer["attention"]["kind"] for layer in config["layers"]]
    assert kinds == (["gated_delta"] * 3 + ["full"]) * 16
    assert config["layers"][0]["attention"] == {
        "kind": "gated_delta",
        "num_key_heads": 16,
        "num_value_heads": 48,
        "key_head_dim": 128,
        "value_head_dim": 128,
        "conv_size": 4,
        "norm_eps": 1e-6,
    }
    assert config["layers"][3] == {
        "attention": {
            "kind": "full",
            "window": 0,
            "num_qo_heads": 24,
            "num_kv_heads": 4,
            "head_dim": 256,
            "scale": 0.0625,
            "soft_cap": 0.0,
            "rope": 0,
            "rope_head_dim": 64,
            "has_qk_norm": True,
            "has_qkv_bias": False,
            "has_o_bias": False,
            "has_output_gate": True,
        },
        "mlp": {"intermediate": 17_408, "activation": "silu", "has_bias": False},
    }


def test_35b_as_published() -> None:
    config = loader.decoder_config(QWEN3_6_35B, "bfloat16")
    for layer in config["layers"]:
        assert layer["mlp"] == {
            "intermediate": 512,
            "activation": "silu",
            "has_bias": False,
            "num_experts": 256,
            "top_k": 8,
            "router": "softmax_of_chosen",
            "has_router_bias": False,
            "shared": {"intermediate": 512, "activation": "silu", "has_bias": False},
            "shared_gate": True,
        }


@pytest.mark.parametrize(
    ("values", "num_tensors", "num_parameters"),
    [(QWEN3_5_27B, 851, 26_895_998_464), (QWEN3_6_35B, None, 34_660_610_688)],
)
def test_parameters_are_those_of_the_published_files(
    values: dict[str, Any], num_tensors: int | None, num_parameters: int
) -> None:
    specs = tensors_of(values)
    assert sum(math.prod(spec.shape) for spec in specs) == num_parameters
    if num_tensors is not None:
        assert len({spec.source for spec in specs}) == num_tensors
    # Parts of a tensor are all of it, once each.
    for source in {spec.source for spec in specs}:
        parts = [spec.part for spec in specs if spec.source == source and spec.part is not None]
        rows = [
            group * part.each + part.first + i
            for part in parts
            for group in range(part.groups)
            for i in range(part.count)
        ]
        assert sorted(rows) == list(range(parts[0].stored_rows if parts else 0))


@pytest.mark.parametrize(
    ("config", "name"), [(DENSE, "Qwen3_5Text"), (MOE, "Qwen3_5MoeText"), (NEXT, "Qwen3Next")]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 6, "full_attention_interval": 3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_absent_keys_have_the_defaults_of_transformers(
    config: dict[str, Any], name: str, changes: dict[str, Any]
) -> None:
    import transformers

    whole = getattr(transformers, f"{name}Config")(**changes).to_dict()
    whole["architectures"] = config["architectures"]
    assert loader.decoder_config(config | changes) == loader.decoder_config(whole)


def test_old_spellings_of_the_rotation() -> None:
    new = DENSE | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        }
    }
    old = DENSE | {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert loader.decoder_config(old) == loader.decoder_config(new)
    assert loader.decoder_config(new)["layers"][3]["attention"]["rope_head_dim"] == 128


@pytest.mark.parametrize("family", QWEN3_5)
def test_every_tensor_of_transformers_is_used(family: str) -> None:
    path = make(TinySpec(family, head_dim=32))
    checkpoint = open_checkpoint(path)
    assert {tensor.source for tensor in checkpoint.tensors} == set(load_tensors(path))
    assert checkpoint.nbytes == sum(
        tensor.numel() * tensor.element_size() for tensor in load_tensors(path).values()
    )


def test_rows_are_those_of_the_names() -> None:
    """Weights of a model are the rows of the stored tensors that their names say."""
    path = make(TinySpec("qwen3_5", head_dim=32))
    stored = load_tensors(path)
    found = {
        t.spec.name: np.frombuffer(b"".join(t.chunks()), np.float32).reshape(t.spec.shape)
        for t in open_checkpoint(path).tensors
    }
    both = stored["model.layers.3.self_attn.q_proj.weight"].view(4, 2, 32, 64).numpy()
    np.testing.assert_array_equal(found["layers.3.attn.q.weight"], both[:, 0].reshape(128, 64))
    np.testing.assert_array_equal(found["layers.3.attn.gate.weight"], both[:, 1].reshape(128, 64))
    joined = stored[f"{LAYER}linear_attn.in_proj_qkv.weight"].numpy()
    for name, rows in (("q", slice(0, 32)), ("k", slice(32, 64)), ("v", slice(64, 208))):
        np.testing.assert_array_equal(found[f"layers.0.attn.{name}.weight"], joined[rows])


def test_interleaved_projections_are_split_by_key_head() -> None:
    path = make(TinySpec("qwen3_next", head_dim=32))
    stored = load_tensors(path)
    found = {
        t.spec.name: np.frombuffer(b"".join(t.chunks()), np.float32).reshape(t.spec.shape)
        for t in open_checkpoint(path).tensors
    }
    # Two key heads: 16 rows of q, 16 of k, 3 heads of 24 of v, and the same of z.
    groups = stored[f"{LAYER}linear_attn.in_proj_qkvz.weight"].view(2, 176, 64).numpy()
    for name, rows in (
        ("q", slice(0, 16)),
        ("k", slice(16, 32)),
        ("v", slice(32, 104)),
        ("z", slice(104, 176)),
    ):
        np.testing.assert_array_equal(
            found[f"layers.0.attn.{name}.weight"], groups[:, rows].reshape(-1, 64)
        )
    pairs = stored[f"{LAYER}linear_attn.in_proj_ba.weight"].view(2, 6, 64).numpy()
    np.testing.assert_array_equal(found["layers.0.attn.b.weight"], pairs[:, :3].reshape(6, 64))
    np.testing.assert_array_equal(found["layers.0.attn.a.weight"], pairs[:, 3:].reshape(6, 64))


def expect_same_weights_everywhere(path: Path, folder: Path) -> None:
    """A checkpoint gives the same bytes as files, as a state dict and converted to `folder`."""
    from paceline import _core
    from paceline.loader import StateDict

    loaded = load_checkpoint(path, progress=False)
    read = _core.load_model_folder(str(convert.convert(path, folder, progress=False))).target
    assert bytes(read.arena()) == bytes(loaded.model.arena())
    assert loaded.hf_config is not None
    memory = StateDict(loaded.hf_config, load_tensors(path), "state_dict")
    assert bytes(load_checkpoint(memory, progress=False).model.arena()) == bytes(
        loaded.model.arena()
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "spec",
    [TinySpec("qwen3_5_moe", layer_types=(FULL,) * 2), TinySpec("qwen3_next")],
    ids=["full", "hybrid"],
)
def test_files_state_dicts_and_folders_give_the_same_weights(
    spec: TinySpec, dtype: str, tmp_path: Path
) -> None:
    expect_same_weights_everywhere(make(replace(spec, dtype=dtype, head_dim=32)), tmp_path / "out")


def test_the_decay_does_not_choose_the_dtype() -> None:
    path = make(TinySpec("qwen3_5", dtype="bfloat16"))
    assert str(load_tensors(path)[f"{LAYER}linear_attn.A_log"].dtype) == "torch.float32"
    checkpoint = open_checkpoint(path)
    assert (checkpoint.weight_dtype, checkpoint.notes) == ("bfloat16", ())


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "base", "changes", "parts"),
    [
        (
            ModelFileError,
            DENSE,
            {"layer_types": [LINEAR, FULL], "num_hidden_layers": 3},
            ('"layer_types" has 2 entries', 'expected 3, as "num_hidden_layers" says'),
        ),
        (
            NotImplementedError,
            DENSE,
            {"layer_types": ["sliding_attention"], "num_hidden_layers": 1},
            ('"layer_types"[0] is', "sliding_attention", "linear_attention, full_attention"),
        ),
        (
            NotImplementedError,
            DENSE,
            {"linear_conv_kernel_dim": 1},
            ('"linear_conv_kernel_dim" is 1', "supported: 2 or more taps"),
        ),
        (
            ModelFileError,
            DENSE,
            {"linear_num_value_heads": 40},
            ('"linear_num_value_heads" is 40', 'a multiple of "linear_num_key_heads" (16)'),
        ),
        (
            ModelFileError,
            DENSE,
            {"num_key_value_heads": 3},
            ('"num_key_value_heads" is 3', 'a divisor of "num_attention_heads" (16)'),
        ),
        (
            ModelFileError,
            DENSE,
            {"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 11]}},
            ('"rope_parameters.mrope_section" is [11, 11, 11]', "3 integers whose sum is 32"),
        ),
        (
            ModelFileError,
            DENSE,
            {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 16]}},
            ('"rope_parameters.mrope_section" is [16, 16]', "3 integers whose sum is 32"),
        ),
        (
            ModelFileError,
            DENSE,
            {"head_dim": 6},
            ('"partial_rotary_factor" is 0.25', '1 of "head_dim" (6)', "an even number from 2"),
        ),
        (
            ModelFileError,
            DENSE,
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            ('"rope_parameters.partial_rotary_factor" is 0.25', "expected 0.5"),
        ),
        (
            NotImplementedError,
            DENSE,
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            ('"rope_parameters" is', '"default", "yarn"'),
        ),
        (NotImplementedError, DENSE, {"hidden_act": "gelu_pytorch_tanh"}, ('"hidden_act"', "silu")),
        (NotImplementedError, DENSE, {"attention_bias": True}, ('"attention_bias" is true',)),
        (NotImplementedError, DENSE, {"attn_output_gate": False}, ('"attn_output_gate" is false',)),
        (
            NotImplementedError,
            DENSE,
            {"output_gate_type": "sigmoid"},
            ('"output_gate_type" is "sigmoid"', "supported: swish, silu"),
        ),
        (NotImplementedError, DENSE, {"layer_scale": 0.1}, ('"layer_scale" is 0.1', "no such key")),
        (
            NotImplementedError,
            DENSE,
            {"mamba_ssm_dtype": "bfloat16"},
            ('"mamba_ssm_dtype" is "bfloat16"', "supported: float32"),
        ),
        (
            ModelFileError,
            MOE,
            {"num_experts_per_tok": 257},
            ('"num_experts_per_tok" is 257', 'from 1 to "num_experts" (256)'),
        ),
        (NotImplementedError, MOE, {"norm_topk_prob": False}, ('"norm_topk_prob" is false',)),
        (
            NotImplementedError,
            MOE,
            {"mlp_only_layers": [1]},
            ('"mlp_only_layers" is [1]', "experts in every layer"),
        ),
        (
            ModelFileError,
            NEXT,
            {"mlp_only_layers": [48]},
            ('"mlp_only_layers" is [48]', "a list of layers from 0 to 47"),
        ),
    ],
)
def test_refused_keys(
    kind: type[Exception], base: dict[str, Any], changes: dict[str, Any], parts: Any
) -> None:
    with raises(kind, "here.json", *parts):
        loader.decoder_config(base | changes, source="here.json")


def test_ties_at_both_levels_must_agree() -> None:
    with raises(
        ModelFileError,
        '"text_config.tie_word_embeddings" is false',
        'expected true, as "tie_word_embeddings" at the top says',
    ):
        loader.decoder_config(QWEN3_5_27B | {"tie_word_embeddings": True})
    text = {k: v for k, v in QWEN3_5_27B["text_config"].items() if k != "tie_word_embeddings"}
    outer = QWEN3_5_27B | {"tie_word_embeddings": True, "text_config": text}
    assert loader.decoder_config(outer)["ties_lm_head"]


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            lambda tensors: tensors.pop(f"{LAYER}linear_attn.A_log"),
            ("1 tensor is missing: 'model.layers.0.linear_attn.A_log'", "Qwen3_5ForCausalLM needs"),
        ),
        (
            replace_tensor(f"{LAYER}linear_attn.conv1d.weight", lambda t: t[:, :, :3]),
            (
                "conv1d.weight' has shape [208, 1, 3]; expected [208, 1, 4] or [208, 4, 1]",
                "linear_conv_kernel_dim of",
            ),
        ),
        (
            replace_tensor(f"{LAYER}linear_attn.in_proj_qkv.weight", lambda t: t[:200]),
            ("in_proj_qkv.weight' has shape [200, 64]; expected [208, 64] (2 * linear_num_key",),
        ),
        (
            replace_tensor("model.layers.3.self_attn.q_proj.weight", lambda t: t[:128]),
            (
                "q_proj.weight' has shape [128, 64]; expected [256, 64]",
                "(2 * num_attention_heads * head_dim, hidden_size of",
            ),
        ),
        (
            lambda tensors: tensors.update(
                {f"{LAYER}linear_attn.x": tensors["model.norm.weight"].clone()}
            ),
            ("1 tensor is not part of", "linear_attn.x'"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("qwen3_5", head_dim=32))
    edit_tensors(path, edit)
    with raises(ModelFileError, f"{path / 'model.safetensors'}: ", *parts):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (-math.inf, "-inf")])
def test_a_decay_that_is_not_finite(
    name: str, value: float, shown: str, copy_of: Callable[..., Path]
) -> None:
    source = f"{LAYER}linear_attn.{name}"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[source][3] = value

    path = copy_of(TinySpec("qwen3_5"))
    edit_tensors(path, spoil)
    with raises(
        ModelFileError,
        f"{path / 'model.safetensors'}: tensor '{source}'[3] is {shown}; allowed: finite numbers",
        "download or convert it again",
    ):
        load_checkpoint(path, progress=False)
    with raises(ModelFileError, f"tensor '{source}'[3] is {shown}; allowed: finite numbers"):
        LLM(path, device="cpu", show_progress=False)


# ---- MTP ----------------------------------------------------------------------------------------


@pytest.fixture
def with_layer(tmp_path: Path) -> Callable[..., Path]:
    def write(family: str = "qwen3_5", **options: Any) -> Path:
        spec = TinySpec(family, head_dim=32, layer_types=(FULL,) * 2)
        return qwen3_5_mtp.write(spec, tmp_path / "mtp", **options)

    return write


@pytest.mark.parametrize("family", QWEN3_5)
@pytest.mark.parametrize("is_split", [False, True])
def test_every_tensor_of_the_layer_is_used(
    family: str, is_split: bool, with_layer: Callable[..., Path]
) -> None:
    path = with_layer(family, is_split=is_split)
    target = open_checkpoint(path)
    drafter = open_drafter(path, target.as_target(), "mtp")
    stored = {name for name in load_tensors(path) if name.startswith("mtp.")}
    assert {tensor.source for tensor in drafter.tensors} == stored
    sources = {tensor.spec.name: tensor.source for tensor in drafter.tensors}
    assert sources["fc_norm.0.weight"] == "mtp.pre_fc_norm_embedding.weight"
    assert sources["fc_norm.1.weight"] == "mtp.pre_fc_norm_hidden.weight"
    assert sources["final_norm.weight"] == "mtp.norm.weight"
    assert sources["layers.0.attn.gate.weight"] == "mtp.layers.0.self_attn.q_proj.weight"
    config = drafter.config
    (layer,) = config["layers"]
    assert layer["attention"] == target.config["layers"][-1]["attention"]
    assert config["drafter"]["norm_output"]
    assert not config["drafter"]["owns_embedding"] and not config["drafter"]["owns_lm_head"]


@pytest.mark.parametrize("family", QWEN3_5)
def test_a_converted_folder_has_the_layer_as_its_drafter(family: str, tmp_path: Path) -> None:
    from paceline import _core

    path = qwen3_5_mtp.write(TinySpec(family, head_dim=32), tmp_path / "model")
    folder = convert.convert(
        path, tmp_path / "out", num_speculative_tokens=2, method="mtp", progress=False
    )
    read = _core.load_model_folder(str(folder))
    target, draft = load_pair(path, path, method="mtp", progress=False)
    assert read.draft is not None and draft is not None
    assert bytes(read.target.arena()) == bytes(target.model.arena())
    assert bytes(read.draft.arena()) == bytes(draft.model.arena())


@pytest.mark.parametrize("family", QWEN3_5)
def test_the_output_is_that_of_plain_decoding(family: str, tmp_path: Path) -> None:
    path = qwen3_5_mtp.write(TinySpec(family, head_dim=32), tmp_path / "model")
    prompts = [[5], [1, 2, 3], list(range(40)), list(range(30, 100))]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24)

    def outputs(config: dict[str, Any] | None) -> list[list[int]]:
        engine: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 192}
        with LLM(path, speculative_config=config, show_progress=False, **engine) as llm:
            return [one.outputs[0].token_ids for one in llm.generate(prompts, params)]

    plain = outputs(None)
    for k in (1, 5):
        assert outputs({"method": "mtp", "num_speculative_tokens": k}) == plain
    raw = {"method": "mtp", "num_speculative_tokens": 3, "x": {"draft_feedback": "raw"}}
    assert outputs(raw) == plain
    assert outputs({"method": "ngram", "num_speculative_tokens": 3}) == plain
    assert outputs({"model": str(path), "num_speculative_tokens": 3}) == plain


def test_an_absent_layer(with_layer: Callable[..., Path]) -> None:
    path = with_layer()
    target = open_checkpoint(path).as_target()

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    edit_tensors(path, drop)
    with raises(
        ModelFileError,
        "there are no tensors 'mtp.*'",
        'which key "mtp_num_hidden_layers" of',
        "as published",
    ):
        open_drafter(path, target, "mtp")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"mtp_num_hidden_layers": 2}, ('"mtp_num_hidden_layers" is 2', "1 layer")),
        ({"mtp_num_hidden_layers": 0}, ('"mtp_num_hidden_layers" is 0', "1 layer")),
        (
            {"mtp_use_dedicated_embeddings": True},
            ('"mtp_use_dedicated_embeddings" is true', "supported: false"),
        ),
    ],
)
def test_refused_keys_of_the_layer(
    changes: dict[str, Any], parts: Any, with_layer: Callable[..., Path]
) -> None:
    path = with_layer()
    target = open_checkpoint(path).as_target()
    edit_config(path, **changes)
    with raises(NotImplementedError, *parts):
        open_drafter(path, target, "mtp")
