# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3-Next with fp8 matrices: scales, their parts, refusals, MTP layers."""

from __future__ import annotations

import time
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
from paceline.loader import families, hf_config
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.drafter_checkpoint import open_drafter
from quantized_models import METHODS, quantization_config
from test_loader_qwen3_5 import (
    DENSE,
    MOE,
    NEXT,
    QWEN3_5_27B,
    QWEN3_6_35B,
    expect_same_weights_everywhere,
)
from tiny_models import (
    QWEN3_5,
    TinyDelta,
    TinySpec,
    copy_checkpoint,
    edit_section,
    edit_tensors,
    load_tensors,
    make,
    plain_copy,
)

BLOCK = {"format": "fp8", "scales": [128, 128]}
ROW = {"format": "fp8", "scales": "row"}
LAYER = "model.layers.0."

SPECS = {
    family: TinySpec(
        family,
        quantization="fp8_block",
        head_dim=128,
        intermediate_size=160,
        delta=TinyDelta(key_dim=128, value_heads=4, value_dim=64, expert_size=160, shared_size=96),
    )
    for family in QWEN3_5
}


def published(layers: int, prefix: str, *, has_experts: bool) -> dict[str, Any]:
    """The key as in published files, which name every module without scales."""
    names = [f"{prefix}embed_tokens", "lm_head", "model.visual.blocks.0.attn.qkv", "mtp.fc"]
    for i in range(layers):
        layer = f"{prefix}layers.{i}."
        names += [f"{layer}linear_attn.{one}" for one in ("conv1d", "in_proj_a", "in_proj_b")]
        if has_experts:
            names += [f"{layer}mlp.gate", f"{layer}mlp.shared_expert_gate"]
    if has_experts:
        names += ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
    return quantization_config("fp8_block") | {"modules_to_not_convert": names}


DENSE_FP8 = QWEN3_5_27B | {
    "quantization_config": published(64, "model.language_model.", has_experts=False)
}
MOE_FP8 = QWEN3_6_35B | {
    "quantization_config": published(40, "model.language_model.", has_experts=True)
}
NEXT_FP8 = NEXT | {
    "quantization_config": quantization_config("fp8_block")
    | {
        "modules_to_not_convert": [
            f"model.layers.{i}.{name}"
            for i in range(48)
            for name in ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
        ]
    }
}


def layer_of(values: dict[str, Any], index: int) -> Any:
    return loader.decoder_config(values)["layers"][index]


def test_every_linear_of_a_published_file_has_scales() -> None:
    recurrent, full = layer_of(DENSE_FP8, 0), layer_of(DENSE_FP8, 3)
    assert (recurrent["attention"]["in"], recurrent["attention"]["o"]) == (BLOCK, BLOCK)
    assert (full["attention"]["qkv"], full["attention"]["o"]) == (BLOCK, BLOCK)
    for layer in (recurrent, full):
        assert (layer["mlp"]["gate_up"], layer["mlp"]["down"]) == (BLOCK, BLOCK)
    mlp = layer_of(MOE_FP8, 0)["mlp"]
    assert mlp["per_expert"]
    for unit in (mlp, mlp["shared"]):
        assert (unit["gate_up"], unit["down"]) == (BLOCK, BLOCK)
    assert layer_of(NEXT_FP8, 0)["attention"]["in"] == BLOCK


def test_scales_of_the_published_files_have_their_shapes() -> None:
    hf = hf_config.parse_hf_config(DENSE_FP8, "config.json", families.ARCHITECTURES)
    specs = {spec.name: spec for spec in families.translate(hf).tensors}
    part = specs["layers.0.attn.v.scales"]
    assert part.source == "layers.0.linear_attn.in_proj_qkv.weight_scale_inv"
    assert (part.stored_shapes, part.shape) == (((80, 40),), (48, 40))
    gate = specs["layers.3.attn.gate.scales"]
    assert gate.source == "layers.3.self_attn.q_proj.weight_scale_inv"
    assert (gate.stored_shapes, gate.shape) == (((96, 40),), (48, 40))
    plain = [name for name, spec in specs.items() if spec.dtypes != ("F8_E4M3",)]
    of_layers = {name.split(".", 2)[2] for name in plain if name.startswith("layers.")}
    assert {name for name in of_layers if name.endswith(".weight")} == {
        "attn_norm.weight", "mlp_norm.weight", "attn.q_norm.weight", "attn.k_norm.weight",
        "attn.a.weight", "attn.b.weight",
    }  # fmt: skip


def test_the_largest_file_is_read_in_seconds() -> None:
    text = QWEN3_6_35B["text_config"] | {"num_experts": 512, "num_hidden_layers": 60}
    config = MOE_FP8 | {
        "text_config": text,
        "quantization_config": published(60, "model.language_model.", has_experts=True),
    }
    begin = time.process_time()
    loader.decoder_config(config)
    assert time.process_time() - begin < 20


def rows(ignore: list[str]) -> dict[str, Any]:
    return quantization_config("fp8_row") | {"ignore": ["lm_head", *ignore]}


@pytest.mark.parametrize(
    ("value", "attention", "mlp", "shared"),
    [
        (rows(["re:.*linear_attn.*", "re:.*shared_expert_gate$"]), (None, None), ROW, ROW),
        (
            rows(["re:.*linear_attn.in_proj_[ab]$", "re:.*shared_expert.*"]),
            (ROW, ROW),
            ROW,
            None,
        ),
        (
            rows(["re:.*linear_attn.in_proj.*", "re:.*mlp.experts.*", "re:.*shared_expert_gate"]),
            (None, ROW),
            None,
            ROW,
        ),
    ],
)
def test_modules_that_are_left_out(
    value: dict[str, Any], attention: tuple[Any, Any], mlp: Any, shared: Any
) -> None:
    layer = layer_of(MOE | {"quantization_config": value}, 0)
    assert (layer["attention"].get("in"), layer["attention"].get("o")) == attention
    assert layer["mlp"].get("gate_up") == layer["mlp"].get("down") == mlp
    assert layer["mlp"]["shared"].get("gate_up") == shared


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("family", QWEN3_5)
def test_every_tensor_is_used(family: str, method: str) -> None:
    path = make(replace(SPECS[family], quantization=method))
    checkpoint = open_checkpoint(path)
    assert {tensor.source for tensor in checkpoint.tensors} == set(load_tensors(path))


def test_scales_are_those_of_the_rows() -> None:
    path = make(replace(SPECS["qwen3_next"], hidden_size=160))
    stored = load_tensors(path)
    found = {
        t.spec.name: np.frombuffer(b"".join(t.chunks()), np.float32).reshape(t.spec.shape)
        for t in open_checkpoint(path).tensors
        if t.spec.name.endswith(".scales")
    }
    # By key head a block of q, one of k, one of both heads of v, and one of z.
    groups = stored[f"{LAYER}linear_attn.in_proj_qkvz.weight_scale_inv"].view(2, 4, 2).numpy()
    for i, name in enumerate("qkvz"):
        np.testing.assert_array_equal(found[f"layers.0.attn.{name}.scales"], groups[:, i])
    heads = stored["model.layers.3.self_attn.q_proj.weight_scale_inv"].view(4, 2, 2).numpy()
    for i, name in enumerate(("q", "gate")):
        np.testing.assert_array_equal(found[f"layers.3.attn.{name}.scales"], heads[:, i])


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("family", QWEN3_5)
def test_files_state_dicts_and_folders_give_the_same_weights(
    family: str, method: str, tmp_path: Path
) -> None:
    path = make(replace(SPECS[family], quantization=method, dtype="bfloat16"))
    assert open_checkpoint(path).weight_dtype == "bfloat16"
    expect_same_weights_everywhere(path, tmp_path / "out")


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "value", "parts"),
    [
        (
            DENSE,
            rows(["re:.*in_proj_[ab]$", "re:.*layers.0.linear_attn.in_proj_z"]),
            (
                '"quantization_config.ignore" leaves out linear_attn.in_proj_z of layer 0',
                "all or none of linear_attn.in_proj_qkv, linear_attn.in_proj_z",
            ),
        ),
        (
            DENSE,
            rows(["re:.*in_proj_b$"]),
            ('"quantization_config.ignore" is', "leaves out layers.0.linear_attn.in_proj_a"),
        ),
        (
            DENSE,
            quantization_config("fp8_block"),
            (
                '"quantization_config.modules_to_not_convert" is null',
                "leaves out layers.0.linear_attn.in_proj_b",
            ),
        ),
        (
            NEXT,
            quantization_config("fp8_block"),
            ("leaves out layers.0.linear_attn.in_proj_ba",),
        ),
        (
            MOE,
            rows(["re:.*in_proj_[ab]$"]),
            ("leaves out layers.0.mlp.shared_expert_gate",),
        ),
        (
            MOE,
            rows(["re:.*in_proj_[ab]$", "re:.*shared_expert_gate", "re:.*experts.3.up_proj"]),
            ("all or none of gate_proj, up_proj of the experts of layer 0",),
        ),
        (
            DENSE | {"linear_key_head_dim": 96, "linear_num_key_heads": 2},
            published(32, "model.", has_experts=False),
            ('"linear_key_head_dim" is 96', "q and k have a multiple of 128 rows (192 here)"),
        ),
        (
            NEXT | {"linear_value_head_dim": 96},
            NEXT_FP8["quantization_config"],
            ('"linear_value_head_dim" is 96', "v and z of a key head", "(192 here)"),
        ),
        (
            DENSE | {"head_dim": 192},
            published(32, "model.", has_experts=False),
            ('"head_dim" is 192', "q and the gate of a head", "(192 here)"),
        ),
        (
            DENSE,
            {"quant_method": "gptq", "bits": 4},
            ('"quantization_config.quant_method" is "gptq"', "fp8, compressed-tensors"),
        ),
        (
            DENSE,
            published(32, "model.", has_experts=False) | {"weight_block_size": [64, 64]},
            ('"quantization_config.weight_block_size" is [64, 64]', "[128, 128]"),
        ),
        (
            DENSE,
            quantization_config("fp8_row") | {"ignore": ["re:.*in_proj_[ab]$"]},
            ('"quantization_config.ignore" is', 'a list with "lm_head"'),
        ),
    ],
)
def test_refused_keys(base: dict[str, Any], value: dict[str, Any], parts: Any) -> None:
    with raises(NotImplementedError, "here.json", *parts):
        loader.decoder_config(base | {"quantization_config": value}, source="here.json")


def test_joined_experts_with_scales(copy_of: Callable[..., Path]) -> None:
    """transformers has them in memory; no published file does."""
    import torch

    path = copy_of(SPECS["qwen3_5_moe"])

    def join(tensors: dict[str, Any]) -> None:
        base = f"{LAYER}mlp.experts."
        for kind in ("weight", "weight_scale_inv"):
            gate, up, down = (
                torch.stack([tensors.pop(f"{base}{e}.{name}_proj.{kind}") for e in range(8)])
                for name in ("gate", "up", "down")
            )
            suffix = kind.removeprefix("weight")
            tensors[f"{base}gate_up_proj{suffix}"] = torch.cat([gate, up], 1)
            tensors[f"{base}down_proj{suffix}"] = down

    edit_tensors(path, join)
    with raises(
        ModelFileError,
        "48 tensors are missing",
        "joined in 'model.layers.0.mlp.experts.gate_up_proj'",
        "experts with scales have tensors of their own",
    ):
        open_checkpoint(path)


def test_a_matrix_that_is_plain_in_spite_of_the_rule(copy_of: Callable[..., Path]) -> None:
    path = copy_of(SPECS["qwen3_5"])
    edit_section(path, "quantization_config", modules_to_not_convert=["in_proj_a", "in_proj_b"])
    name = f"{LAYER}linear_attn.in_proj_b.weight"

    def narrow(tensors: dict[str, Any]) -> None:
        import torch

        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_tensors(path, narrow)
    with raises(NotImplementedError, f"tensor '{name}' is stored as F8_E4M3", "BF16, F16, F32"):
        open_checkpoint(path)


# ---- MTP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN3_5)
def test_the_layer_has_scales_too(family: str, tmp_path: Path) -> None:
    path = qwen3_5_mtp.write(SPECS[family], tmp_path / "model")
    drafter = open_drafter(path, open_checkpoint(path).as_target(), "mtp")
    stored = {name for name in load_tensors(path) if name.startswith("mtp.")}
    assert {tensor.source for tensor in drafter.tensors} == stored
    (layer,) = drafter.config["layers"]
    assert (layer["attention"]["qkv"], layer["mlp"]["down"]) == (BLOCK, BLOCK)


@pytest.mark.parametrize("family", QWEN3_5)
@pytest.mark.parametrize("is_plain", [False, True])
def test_drafts_are_those_of_the_values(family: str, is_plain: bool, tmp_path: Path) -> None:
    """With exact scales, the target and its drafts are those of the dequantised checkpoint.

    The rule of some files says nothing about their layer, which is plain.
    """
    spec = replace(SPECS[family], exact_scales=True)
    path = qwen3_5_mtp.write(spec, tmp_path / "model")
    plain = plain_copy(copy_checkpoint(path, tmp_path / f"{family}-{is_plain}-{tmp_path.name}"))
    if is_plain:
        values = load_tensors(plain)

        def widen(tensors: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.startswith("mtp.")]:
                del tensors[name]
            tensors |= {name: t for name, t in values.items() if name.startswith("mtp.")}

        edit_tensors(path, widen)

    def outcome(model: Path, k: int) -> tuple[list[Any], int]:
        config = {"method": "mtp", "num_speculative_tokens": k, "x": {"adaptive": False}}
        options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 1, "max_model_len": 192}
        prompts = [[1, 2, 3], list(range(40))]
        with LLM(
            model, speculative_config=config if k else None, show_progress=False, **options
        ) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=3.0, seed=7, max_tokens=40))
        metrics = [one.metrics.speculative_decoding or {} for one in outputs]
        accepted = sum(metric.get("num_accepted_draft_tokens", 0) for metric in metrics)
        return [one.outputs[0].token_ids for one in outputs], accepted

    tokens, accepted = outcome(path, 3)
    assert (tokens, accepted) == outcome(plain, 3)
    assert tokens == outcome(path, 0)[0]
    assert accepted > 0


def test_an_fc_with_scales(tmp_path: Path) -> None:
    path = qwen3_5_mtp.write(SPECS["qwen3_5"], tmp_path / "model")
    target = open_checkpoint(path).as_target()
    edit_section(path, "quantization_config", modules_to_not_convert=["in_proj_a", "in_proj_b"])
    with raises(
        NotImplementedError,
        '"quantization_config.modules_to_not_convert" is',
        "a list that leaves out fc",
    ):
        open_drafter(path, target, "mtp")
