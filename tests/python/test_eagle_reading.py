# SPDX-License-Identifier: Apache-2.0
"""EAGLE draft heads (methods "eagle" and "eagle3"): reading and telling them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_pair import AUX, SPECS, TARGET, opened, target_of
from errors import raises
from paceline import LLM
from paceline._core import ModelFileError, ModelNotFoundError
from paceline.loader import detect_method, drafter_config, open_drafter
from tiny_models import (
    TinySpec,
    edit_config,
    edit_section,
    edit_tensors,
    load_tensors,
    make,
    read_json,
)


def test_eagle(draft_head: Callable[..., Path]) -> None:
    checkpoint = opened(draft_head("eagle"))
    config = checkpoint.config
    assert checkpoint.kind == "eagle"
    assert config["drafter"] == {
        "kind": "eagle",
        "target_hidden_size": 64,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "has_fc_bias": False,
        "has_attn_norm": False,
        "has_final_norm": False,
        "owns_embedding": True,
        "owns_lm_head": False,
        "draft_vocab_size": 128,
    }
    assert (config["name"], config["vocab_size"], config["ties_lm_head"]) == ("eagle", 128, False)
    assert checkpoint.draft_to_target is None
    assert {t.spec.name: t.source for t in checkpoint.tensors} == {
        "embed.weight": "embed_tokens.weight",
        "fc.weight": "fc.weight",
        "layers.0.mlp_norm.weight": "layers.0.post_attention_layernorm.weight",
        **{
            f"layers.0.{ours}.weight": f"layers.0.{theirs}.weight"
            for ours, theirs in {
                "attn.q": "self_attn.q_proj",
                "attn.k": "self_attn.k_proj",
                "attn.v": "self_attn.v_proj",
                "attn.o": "self_attn.o_proj",
                "mlp.gate": "mlp.gate_proj",
                "mlp.up": "mlp.up_proj",
                "mlp.down": "mlp.down_proj",
            }.items()
        },
    }


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_eagle3(layout: str, draft_head: Callable[..., Path]) -> None:
    checkpoint = opened(draft_head(layout))
    assert checkpoint.kind == "eagle3"
    assert checkpoint.config["drafter"] == {
        "kind": "eagle3",
        "target_hidden_size": 64,
        "aux_layers": [2, 4, 5],
        "norm_before_residual": layout == "speculators",
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "has_fc_bias": False,
        "has_attn_norm": True,
        "has_final_norm": True,
        "owns_embedding": True,
        "owns_lm_head": True,
        "draft_vocab_size": 96,
    }
    prefix = "midlayer." if layout == "eagle3" else "layers.0."
    sources = {t.spec.name: t.source for t in checkpoint.tensors}
    assert sources["layers.0.hidden_norm.weight"] == f"{prefix}hidden_norm.weight"
    assert sources["layers.0.attn_norm.weight"] == f"{prefix}input_layernorm.weight"
    shapes = {t.spec.name: t.spec.shape for t in checkpoint.tensors}
    assert shapes["fc.weight"] == (64, 192)
    assert shapes["layers.0.attn.q.weight"] == (64, 128)
    assert shapes["layers.0.attn.k.weight"] == (32, 128)
    assert shapes["layers.0.mlp.gate.weight"] == (80, 64)
    assert shapes["lm_head.weight"] == (96, 64)


def test_switches_of_eagle3(draft_head: Callable[..., Path]) -> None:
    path = draft_head(
        "speculators",
        aux_layers=(1, 6),
        num_aux=2,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=True,
        owns_embedding=False,
        layer_type="qwen3",
        draft_vocab_size=None,
    )
    checkpoint = opened(path)
    drafter = checkpoint.config["drafter"]
    assert (drafter["aux_layers"], drafter["fc_norm"]) == ([1, 6], True)
    assert (drafter["norm_output"], drafter["norm_before_fc"]) == (True, False)
    assert (drafter["owns_embedding"], drafter["draft_vocab_size"]) == (False, 128)
    assert checkpoint.config["layers"][0]["attention"]["has_qk_norm"] is True
    assert checkpoint.draft_to_target is None
    names = {t.spec.name: t.spec.shape for t in checkpoint.tensors}
    assert names["fc_norm.1.weight"] == (64,)
    assert names["layers.0.attn.q_norm.weight"] == (16,)
    assert "embed.weight" not in names


def test_one_norm_before_fc(draft_head: Callable[..., Path]) -> None:
    checkpoint = opened(draft_head("speculators", norm_before_fc=True))
    assert checkpoint.config["drafter"]["norm_before_fc"] is True
    (tensor,) = (t for t in checkpoint.tensors if t.spec.name == "fc_input_norm.weight")
    assert (tensor.source, tensor.spec.shape) == ("input_norm.weight", (192,))


@pytest.mark.parametrize(
    ("has_input_norm", "draft_ids", "theta"), [(True, 64, 10_000.0), (False, 32, 500_000.0)]
)
def test_published_layouts_for_gpt_oss(
    has_input_norm: bool, draft_ids: int, theta: float, draft_head: Callable[..., Path]
) -> None:
    """With a norm before fc and more draft ids, and the older ones without it."""
    target = TinySpec("gpt_oss", seed=42, num_layers=8, quantization="mxfp4")
    path = draft_head(
        "speculators",
        target=target,
        norm_before_fc=has_input_norm,
        norm_before_residual=True,
        draft_vocab_size=draft_ids,
        rope_theta=theta,
    )
    checkpoint = opened(path, target)
    drafter = checkpoint.config["drafter"]
    assert (drafter["norm_before_fc"], drafter["draft_vocab_size"]) == (has_input_norm, draft_ids)
    assert (drafter["norm_before_residual"], drafter["aux_layers"]) == (True, [2, 4, 5])
    sources = [tensor.source for tensor in checkpoint.tensors]
    assert ("input_norm.weight" in sources) is has_input_norm
    # The drafter's own rope, without the target's YaRN; no sinks, and a dense MLP.
    (rope,) = checkpoint.config["ropes"]
    assert rope["scale"] == 1.0
    assert rope["inv_freq"][1] == pytest.approx(theta ** (-2 / 16), rel=1e-6)
    (layer,) = checkpoint.config["layers"]
    assert "has_sinks" not in layer["attention"] and "num_experts" not in layer["mlp"]


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_published_layouts_for_qwen3_moe(layout: str, draft_head: Callable[..., Path]) -> None:
    """SpecForge's files name outputs of layers; those of `speculators` name the target's class."""
    target = TinySpec("qwen3_moe", seed=42, num_layers=8)
    path = draft_head(layout, target=target, fc_norm=layout == "speculators")
    if layout == "eagle3":
        ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
        edit_config(path, architectures=["LlamaForCausalLMEagle3"], eagle_config=ids)
    else:
        verifier: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"]}
        edit_config(path, speculators_config={"verifier": verifier})
    checkpoint = opened(path, target)
    assert checkpoint.config["drafter"]["aux_layers"] == [2, 4, 5]
    assert checkpoint.config["drafter"]["fc_norm"] is (layout == "speculators")
    assert "num_experts" not in checkpoint.config["layers"][0]["mlp"]
    if layout == "speculators":
        verifier["architectures"] = ["Qwen3ForCausalLM"]
        edit_config(path, speculators_config={"verifier": verifier})
        with raises(ValueError, "was made for another target", "'Qwen3MoeForCausalLM'"):
            opened(path, target)


def test_absent_flags(draft_head: Callable[..., Path]) -> None:
    """An absent norm_before_residual is false in SafeAILab's files and true in others."""
    path = draft_head("speculators", norm_before_residual=None)
    checkpoint = opened(path)
    assert checkpoint.config["drafter"]["norm_before_residual"] is True
    assert any("norm_before_residual" in note for note in checkpoint.notes)


def test_ids_under_another_key_are_of_outputs(draft_head: Callable[..., Path]) -> None:
    """SpecForge's [1, L // 2 - 1, L - 4] are the default (2, L // 2, L - 3) of inputs."""
    path = draft_head("eagle3")
    edit_config(path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]})
    assert opened(path).config["drafter"]["aux_layers"] == [1, 4, 7]


def test_narrower_head_with_more_layers(draft_head: Callable[..., Path]) -> None:
    path = draft_head(
        "speculators", hidden_size=48, num_layers=2, attention_bias=True, fc_bias=True
    )
    checkpoint = opened(path)
    config = checkpoint.config
    assert (config["hidden_size"], config["drafter"]["target_hidden_size"]) == (48, 64)
    shapes = {t.spec.name: t.spec.shape for t in checkpoint.tensors}
    assert shapes["fc.weight"] == (48, 192)
    assert shapes["fc.bias"] == (48,)
    assert shapes["layers.0.attn.q.weight"] == (64, 96)
    assert shapes["layers.1.attn.q.weight"] == (64, 48)
    assert shapes["layers.1.attn.q.bias"] == (64,)
    assert "layers.1.hidden_norm.weight" not in shapes
    assert config["layers"][1]["attention"]["has_o_bias"] is True


def test_rope_of_the_drafter_or_the_target(draft_head: Callable[..., Path]) -> None:
    target = target_of(make(TARGET))
    path = draft_head("eagle")
    assert open_drafter(path, target).config["ropes"] != target.config["ropes"]
    edit_config(path, rope_theta=...)
    checkpoint = open_drafter(path, target)
    assert checkpoint.config["ropes"] == target.config["ropes"]
    assert any("rope_theta" in note for note in checkpoint.notes)
    # Null counts as absent; the newer spelling is read as well.
    edit_config(path, rope_theta=None, rope_scaling=None)
    assert open_drafter(path, target).config["ropes"] == target.config["ropes"]
    edit_config(path, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    assert open_drafter(path, target).config["ropes"] == target.config["ropes"]


def test_rope_of_a_target_with_two(draft_head: Callable[..., Path]) -> None:
    """The draft head has full layers, so it uses the rope of the target's full layers."""
    spec = TinySpec("gemma3", seed=41, num_layers=9)
    checkpoint = opened(draft_head("eagle3", target=spec, rope_theta=None, aux_layers=AUX), spec)
    target = target_of(make(spec))
    full = next(e["attention"] for e in target.config["layers"] if e["attention"]["window"] == 0)
    assert checkpoint.config["ropes"] == [target.config["ropes"][full["rope"]]]


def test_positions_are_those_of_the_target(draft_head: Callable[..., Path]) -> None:
    checkpoint = opened(draft_head("eagle", max_position=100))
    assert checkpoint.config["max_position"] == 2048
    assert any("100 positions" in note for note in checkpoint.notes)


def test_a_draft_head_may_have_a_sliding_window(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators")
    edit_section(
        path, "transformer_layer_config", layer_types=["sliding_attention"], sliding_window=7
    )
    attention = opened(path).config["layers"][0]["attention"]
    assert (attention["kind"], attention["window"]) == ("sliding", 7)


def test_offsets_become_ids(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle3")
    tensors = load_tensors(path)
    checkpoint = opened(path)
    assert checkpoint.draft_to_target is not None
    assert checkpoint.draft_to_target.dtype == np.int32
    marked = torch.nonzero(tensors["t2d"]).flatten().tolist()
    assert sorted(checkpoint.draft_to_target.tolist()) == marked
    expected = [row + int(offset) for row, offset in enumerate(tensors["d2t"])]
    assert checkpoint.draft_to_target.tolist() == expected


def test_mask_may_be_absent(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle3")
    edit_tensors(path, lambda tensors: tensors.pop("t2d"))
    assert opened(path).draft_to_target is not None


def test_prefix(draft_head: Callable[..., Path]) -> None:
    """Some converters write "model." before every name but that of the lm_head."""
    path = draft_head("eagle3")

    def prefix(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if not name.startswith(("lm_head", "d2t", "t2d")):
                tensors[f"model.{name}"] = tensors.pop(name)

    before = opened(path)
    edit_tensors(path, prefix)
    after = opened(path)
    assert after.config == before.config
    assert {t.source for t in after.tensors} - {"lm_head.weight"} == {
        f"model.{t.source}" for t in before.tensors if t.spec.name != "lm_head.weight"
    }


def test_dtype_is_that_of_the_target(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle", dtype="float16")
    wide = open_drafter(path, target_of(make(TARGET)))
    assert (wide.weight_dtype, wide.stored_dtypes) == ("float32", {"F16": 9})
    narrow = open_drafter(path, target_of(make(replace(TARGET, dtype="bfloat16"))))
    assert narrow.weight_dtype == "bfloat16"
    assert any("F16" in note and "rounded to bfloat16" in note for note in narrow.notes)
    assert {t.spec.name for t in narrow.tensors if narrow.is_narrowed(t)} == {
        t.spec.name for t in narrow.tensors if t.spec.is_matrix
    }


# ---- detection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SPECS)
def test_method_is_detected(layout: str, draft_head: Callable[..., Path]) -> None:
    path = draft_head(layout)
    expected = SPECS[layout].method
    assert detect_method(path) == expected
    assert detect_method(path, expected) == expected
    assert opened(path, method=expected).kind == expected


def test_draft_model_is_detected() -> None:
    assert detect_method(make(TARGET)) == "draft_model"


@pytest.mark.parametrize(
    ("layout", "method", "sign"),
    [
        ("eagle", "eagle3", "fc.weight"),
        ("eagle", "draft_model", "fc.weight"),
        ("eagle3", "eagle", "midlayer.hidden_norm.weight"),
        ("eagle3", "draft_model", "midlayer.hidden_norm.weight"),
        ("speculators", "eagle", "layers.0.hidden_norm.weight"),
    ],
)
def test_method_that_does_not_fit(
    layout: str, method: str, sign: str, draft_head: Callable[..., Path]
) -> None:
    found = SPECS[layout].method
    with raises(ValueError, f"is '{method}'", f"'{found}'", sign, f"allowed: '{found}'"):
        detect_method(draft_head(layout), method)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_draft_model_is_no_eagle(method: str) -> None:
    with raises(ValueError, f"is '{method}'", "'draft_model'", "no tensor 'fc.weight'"):
        detect_method(make(TARGET), method)


def test_configuration_and_tensors_contradict(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle")
    edit_config(path, architectures=["LlamaForCausalLMEagle3"])
    with raises(ModelFileError, "'eagle3'", "'fc.weight'", "'eagle'"):
        detect_method(path)


def test_other_speculators(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators")
    edit_config(path, speculators_model_type="hass")
    with raises(NotImplementedError, "speculators_model_type", '"hass"', "supported: eagle3"):
        detect_method(path)


def test_llm_detects(draft_head: Callable[..., Path]) -> None:
    """The loader receives the named method; nothing is loaded if it does not fit."""
    config = {"method": "eagle", "model": str(draft_head("eagle3")), "num_speculative_tokens": 2}
    with raises(ValueError, "speculative_config['method'] is 'eagle'", "'eagle3'"):
        LLM(make(TARGET), speculative_config=config, show_progress=False)


def test_missing_folder(tmp_path: Path) -> None:
    with raises(ModelNotFoundError, tmp_path / "absent", "no such folder"):
        detect_method(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with raises(ModelNotFoundError, "config.json"):
        detect_method(tmp_path / "empty")


# ---- a configuration alone ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", SPECS)
def test_description_without_weights(layout: str, draft_head: Callable[..., Path]) -> None:
    """For dummy weights: the same description, except for embeddings, which it cannot name."""
    path = draft_head(layout, norm_before_fc=layout == "speculators")
    target = target_of(make(TARGET))
    hf_config = read_json(path / "config.json")
    expected = opened(path).config
    expected["drafter"] = expected["drafter"] | {"owns_embedding": False}
    assert drafter_config(hf_config, target, method=SPECS[layout].method) == expected


def test_description_without_weights_needs_a_kind(draft_head: Callable[..., Path]) -> None:
    target = target_of(make(TARGET))
    hf_config = read_json(draft_head("eagle") / "config.json")
    with raises(ValueError, "method is None", "None", "'eagle', 'eagle3', 'mtp', 'gemma4_mtp'"):
        drafter_config(hf_config, target)
    with raises(ValueError, "'draft_model'"):
        drafter_config(hf_config, target, method="draft_model")
