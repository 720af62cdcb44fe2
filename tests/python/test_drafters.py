# SPDX-License-Identifier: Apache-2.0
"""EAGLE drafters in every layout: what is read, what is detected, every refusal, and converting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eagle_models
import tiny_models
from eagle_models import PICKLE_NAME, EagleSpec
from errors import raises
from paceline import LLM, SamplingParams, _core
from paceline._core import ModelFileError, ModelNotFoundError
from paceline.cli import main
from paceline.loader import (
    DrafterCheckpoint,
    Target,
    detect_method,
    drafter_config,
    load_checkpoint,
    load_drafter,
    open_checkpoint,
    open_drafter,
)
from paceline.loader.convert import convert
from tiny_models import (
    TinySpec,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    read_json,
    write_json,
)

# From eight layers on the default (2, L // 2, L - 3) is in ascending order.
TARGET = TinySpec("llama", seed=40, num_layers=8)
AUX = (2, 4, 5)
SPECS = {
    "eagle": EagleSpec("eagle"),
    "eagle3": EagleSpec("eagle3"),
    "speculators": EagleSpec("speculators", norm_before_residual=True),
}


def target_of(path: Path, dtype: str = "auto") -> Target:
    """What a drafter has to fit, without loading any weights."""
    checkpoint = open_checkpoint(path, dtype)
    family = checkpoint.family
    return Target(path, family.architecture, checkpoint.config, checkpoint.weight_dtype)


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., Path]:
    """Writes a drafter for `TARGET`, or for another target, into a folder of its own."""

    def write(spec: EagleSpec | str = "eagle3", target: TinySpec = TARGET, **changes: Any) -> Path:
        chosen = SPECS[spec] if isinstance(spec, str) else spec
        chosen = replace(chosen, **changes)
        return eagle_models.write(chosen, make(target), tmp_path / "head")

    return write


def opened(path: Path, target: TinySpec = TARGET, **arguments: Any) -> DrafterCheckpoint:
    return open_drafter(path, target_of(make(target)), **arguments)


def edit_layer(path: Path, **changes: Any) -> None:
    """Changes keys of `transformer_layer_config`; `...` removes one."""
    config = read_json(path / "config.json")
    layer = config["transformer_layer_config"] | changes
    config["transformer_layer_config"] = {k: v for k, v in layer.items() if v is not ...}
    write_json(path / "config.json", config)


# ---- what is read ------------------------------------------------------------------------------


def test_eagle(head: Callable[..., Path]) -> None:
    checkpoint = opened(head("eagle"))
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
def test_eagle3(layout: str, head: Callable[..., Path]) -> None:
    checkpoint = opened(head(layout))
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


def test_switches_of_eagle3(head: Callable[..., Path]) -> None:
    path = head(
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


def test_one_norm_before_fc(head: Callable[..., Path]) -> None:
    checkpoint = opened(head("speculators", norm_before_fc=True))
    assert checkpoint.config["drafter"]["norm_before_fc"] is True
    (tensor,) = (t for t in checkpoint.tensors if t.spec.name == "fc_input_norm.weight")
    assert (tensor.source, tensor.spec.shape) == ("input_norm.weight", (192,))


def test_absent_flags(head: Callable[..., Path]) -> None:
    """SafeAILab's files leave norm_before_residual out for false, others for true."""
    path = head("speculators", norm_before_residual=None)
    checkpoint = opened(path)
    assert checkpoint.config["drafter"]["norm_before_residual"] is True
    assert any("norm_before_residual" in note for note in checkpoint.notes)


def test_ids_under_another_key(head: Callable[..., Path]) -> None:
    path = head("eagle3")
    edit_config(path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 7]})
    assert opened(path).config["drafter"]["aux_layers"] == [0, 3, 7]


def test_narrower_head_with_more_layers(head: Callable[..., Path]) -> None:
    path = head("speculators", hidden_size=48, num_layers=2, attention_bias=True, fc_bias=True)
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


def test_rope_of_the_drafter_or_the_target(head: Callable[..., Path]) -> None:
    target = target_of(make(TARGET))
    path = head("eagle")
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


def test_rope_of_a_target_with_two(head: Callable[..., Path]) -> None:
    """The drafter attends to everything, so it takes the rope of the layers that do."""
    spec = TinySpec("gemma3", seed=41, num_layers=9)
    checkpoint = opened(head("eagle3", target=spec, rope_theta=None, aux_layers=AUX), spec)
    target = target_of(make(spec))
    full = next(e["attention"] for e in target.config["layers"] if e["attention"]["window"] == 0)
    assert checkpoint.config["ropes"] == [target.config["ropes"][full["rope"]]]


def test_positions_are_those_of_the_target(head: Callable[..., Path]) -> None:
    checkpoint = opened(head("eagle", max_position=100))
    assert checkpoint.config["max_position"] == 2048
    assert any("100 positions" in note for note in checkpoint.notes)


def test_a_sliding_window_of_its_own(head: Callable[..., Path]) -> None:
    path = head("speculators")
    edit_layer(path, layer_types=["sliding_attention"], sliding_window=7)
    attention = opened(path).config["layers"][0]["attention"]
    assert (attention["kind"], attention["window"]) == ("sliding", 7)


def test_offsets_become_ids(head: Callable[..., Path]) -> None:
    path = head("eagle3")
    tensors = load_tensors(path)
    checkpoint = opened(path)
    assert checkpoint.draft_to_target is not None
    assert checkpoint.draft_to_target.dtype == np.int32
    marked = torch.nonzero(tensors["t2d"]).flatten().tolist()
    assert sorted(checkpoint.draft_to_target.tolist()) == marked
    expected = [row + int(offset) for row, offset in enumerate(tensors["d2t"])]
    assert checkpoint.draft_to_target.tolist() == expected


def test_mask_may_be_absent(head: Callable[..., Path]) -> None:
    path = head("eagle3")
    edit_tensors(path, lambda tensors: tensors.pop("t2d"))
    assert opened(path).draft_to_target is not None


def test_prefix(head: Callable[..., Path]) -> None:
    """Some converters put "model." before every name but the lm_head's."""
    path = head("eagle3")

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


def test_dtype_is_that_of_the_target(head: Callable[..., Path]) -> None:
    path = head("eagle", dtype="float16")
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
def test_method_is_detected(layout: str, head: Callable[..., Path]) -> None:
    path = head(layout)
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
    layout: str, method: str, sign: str, head: Callable[..., Path]
) -> None:
    found = SPECS[layout].method
    with raises(ValueError, f"is '{method}'", f"'{found}'", sign, f"allowed: '{found}'"):
        detect_method(head(layout), method)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_draft_model_is_no_eagle(method: str) -> None:
    with raises(ValueError, f"is '{method}'", "'draft_model'", "no tensor 'fc.weight'"):
        detect_method(make(TARGET), method)


def test_configuration_and_tensors_contradict(head: Callable[..., Path]) -> None:
    path = head("eagle")
    edit_config(path, architectures=["LlamaForCausalLMEagle3"])
    with raises(ModelFileError, "'eagle3'", "'fc.weight'", "'eagle'"):
        detect_method(path)


def test_other_speculators(head: Callable[..., Path]) -> None:
    path = head("speculators")
    edit_config(path, speculators_model_type="hass")
    with raises(NotImplementedError, "speculators_model_type", '"hass"', "supported: eagle3"):
        detect_method(path)


def test_llm_detects(head: Callable[..., Path]) -> None:
    """The named method reaches the loader; nothing is loaded for one that does not fit."""
    config = {"method": "eagle", "model": str(head("eagle3")), "num_speculative_tokens": 2}
    with raises(ValueError, "speculative_config['method'] is 'eagle'", "'eagle3'"):
        LLM(make(TARGET), speculative_config=config, show_progress=False)


def test_missing_folder(tmp_path: Path) -> None:
    with raises(ModelNotFoundError, tmp_path / "absent", "no such folder"):
        detect_method(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with raises(ModelNotFoundError, "config.json"):
        detect_method(tmp_path / "empty")


# ---- made for another target -------------------------------------------------------------------


@pytest.mark.parametrize("layout", SPECS)
def test_another_vocabulary(layout: str, head: Callable[..., Path]) -> None:
    path = head(layout, target=replace(TARGET, vocab_size=144))
    with raises(ValueError, "made for another target", '"', "vocab_size", "is 144", "128 ids"):
        opened(path)


def test_another_hidden_size(head: Callable[..., Path]) -> None:
    path = head("eagle", target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "made for another target", '"hidden_size" is 48', "of 64"):
        opened(path)


def test_another_hidden_size_by_the_width_of_fc(head: Callable[..., Path]) -> None:
    path = head("eagle3", target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "'fc.weight' has 144 columns", "hidden size of 64", "a multiple"):
        opened(path)


def test_another_hidden_size_by_the_number_of_states(head: Callable[..., Path]) -> None:
    path = head("eagle3", target=replace(TARGET, hidden_size=128))
    with raises(ValueError, "384 columns", "6 hidden states", "64 wide", "3 layers, [2, 4, 5]"):
        opened(path)


def test_another_hidden_size_as_stated(head: Callable[..., Path]) -> None:
    path = head("speculators", target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "made for another target", '"target_hidden_size" is 48', "of 64"):
        opened(path)


def test_borrowed_embeddings_of_another_width(head: Callable[..., Path]) -> None:
    path = head("speculators", hidden_size=48, owns_embedding=False)
    with raises(ValueError, '"transformer_layer_config.hidden_size" is 48', "64", "embeddings"):
        opened(path)


def test_another_architecture(head: Callable[..., Path]) -> None:
    path = head("speculators", target=replace(TARGET, family="qwen3"))
    with raises(
        ValueError,
        "speculators_config.verifier.architectures",
        "['Qwen3ForCausalLM'] (some/target)",
        "'LlamaForCausalLM'",
    ):
        opened(path)


def test_one_family_under_two_names(head: Callable[..., Path]) -> None:
    spec = TinySpec("gemma3", seed=41, num_layers=9)
    path = head("speculators", target=spec, aux_layers=AUX)
    config = read_json(path / "config.json")
    verifier = config["speculators_config"]["verifier"]
    verifier["architectures"] = ["Gemma3ForConditionalGeneration"]
    write_json(path / "config.json", config)
    assert opened(path, spec).kind == "eagle3"


@pytest.mark.parametrize("ids", [[2, 4, 8], [-1, 2, 3], [2, 2, 3], [5, 4, 2]])
def test_layers_that_the_target_has_not(ids: list[int], head: Callable[..., Path]) -> None:
    path = head("eagle3")
    edit_config(path, eagle_aux_hidden_state_layer_ids=ids)
    with raises(ValueError, "eagle_aux_hidden_state_layer_ids", ids, "8 layers", "0 to 7"):
        opened(path)


def test_default_layers_of_a_small_target(head: Callable[..., Path]) -> None:
    target = replace(TARGET, num_layers=4)
    with raises(ValueError, "[2, 2, 1] by default", "4 layers", "0 to 3, in ascending order"):
        opened(head("eagle3", target=target), target)


# ---- damaged or contradictory ------------------------------------------------------------------


@pytest.mark.parametrize("layout", SPECS)
def test_missing_tensors(layout: str, head: Callable[..., Path]) -> None:
    path = head(layout)
    name = f"{SPECS[layout].first_layer}self_attn.k_proj.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with raises(ModelFileError, "1 tensor is missing", name):
        opened(path)


def test_stated_kind_without_its_tensors(head: Callable[..., Path]) -> None:
    path = head("speculators")
    edit_tensors(path, lambda tensors: tensors.pop("fc.weight"))
    with raises(ModelFileError, "missing", "'fc.weight'"):
        opened(path)


def test_misshapen_tensors(head: Callable[..., Path]) -> None:
    path = head("eagle3")
    name = "midlayer.self_attn.q_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    with raises(ModelFileError, name, "[64, 64]", "expected [64, 128]", "2 * hidden_size"):
        opened(path)


def test_unexpected_tensors(head: Callable[..., Path]) -> None:
    path = head("eagle")
    edit_tensors(path, lambda tensors: tensors.update({"layers.0.gate.weight": torch.ones(2)}))
    with raises(ModelFileError, "not part of", "'layers.0.gate.weight'"):
        opened(path)


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "rows": ("speculators", {"draft_vocab_size": 80}, ('"draft_vocab_size" is 80', "96 rows")),
    "input_norm": (
        "speculators",
        {"norm_before_fc": True},
        ('"norm_before_fc" is true', "'input_norm.weight' is not in the weights"),
    ),
    "fc_norm": (
        "speculators",
        {"fc_norm": True},
        ('"fc_norm" is true', "'fc_norm.0.weight' is not in the weights"),
    ),
    "fc bias": ("eagle", {"bias": True}, ('"bias" is true', "'fc.bias' is not in the weights")),
    "qkv bias": (
        "eagle",
        {"attention_bias": True},
        ('"attention_bias" is true', "'self_attn.q_proj.bias' is not in the weights"),
    ),
    "q norm": (
        "eagle",
        {"model_type": "qwen3"},
        ("\"model_type\" is 'qwen3'", "self_attn.q_norm.weight", "are not in the weights"),
    ),
    "number of layers": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        ("192 columns", "3 hidden states", "names 2 layers, [1, 2]"),
    ),
    "no list": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": "2,4,5"},
        ('"eagle_aux_hidden_state_layer_ids" is "2,4,5"', "a list of layers"),
    ),
    "no flag": ("speculators", {"norm_before_residual": 1}, ('"norm_before_residual" is 1',)),
    "scaling without a base": (
        "eagle",
        {"rope_theta": ..., "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ('"rope_theta" is missing', "the base that the scaling belongs to"),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions(case: str, head: Callable[..., Path]) -> None:
    layout, changes, parts = CONTRADICTIONS[case]
    path = head(layout)
    edit_config(path, **changes)
    with raises(ModelFileError if "columns" not in parts[0] else ValueError, *parts):
        opened(path)


def test_refusals_list_what_is_supported(head: Callable[..., Path]) -> None:
    path = head("speculators")
    edit_layer(path, model_type="qwen2")
    with raises(NotImplementedError, "transformer_layer_config.model_type", '"qwen2"', "qwen3"):
        opened(path)
    edit_layer(path, model_type="llama", quantization_config={"bits": 4})
    with raises(NotImplementedError, "quantization_config"):
        opened(path)


def test_eagle_of_two_layers(head: Callable[..., Path]) -> None:
    path = head("eagle")
    edit_config(path, num_hidden_layers=2)
    with raises(NotImplementedError, '"num_hidden_layers" is 2', "1 layer"):
        opened(path)


def test_rope_of_other_heads(head: Callable[..., Path]) -> None:
    path = head("eagle", rope_theta=None, head_dim=32)
    with raises(ModelFileError, '"rope_theta" is missing', "16 elements", "have 32"):
        opened(path)


def _offset(tensors: dict[str, Any], row: int, value: int) -> None:
    tensors["d2t"][row] = value


MAPS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "beyond": (lambda t: _offset(t, 3, 125), ("'d2t'[3] is 125", "128", "0 to 127")),
    "below": (lambda t: _offset(t, 3, -4), ("'d2t'[3] is -4", "-1")),
    "wraps": (lambda t: _offset(t, 3, 2**63 - 1), ("'d2t'[3] is 9223372036854775807",)),
    "twice": (
        lambda t: _offset(t, 1, int(t["d2t"][0]) - 1),
        ("rows 0 and 1", "the same token id"),
    ),
    "short": (lambda t: t.update(d2t=t["d2t"][:-1].clone()), ("[95]", "expected [96]")),
    "floats": (lambda t: t.update(d2t=t["d2t"].float()), ("stored as F32", "I64")),
    "absent": (lambda t: t.pop("d2t"), ("'d2t' is not in the weights", "96 rows", "128 ids")),
    "other mask": (lambda t: t.update(t2d=~t["t2d"]), ("'t2d'", "marks 32 ids", "reaches 96")),
    "short mask": (
        lambda t: t.update(t2d=t["t2d"][:-1].clone()),
        ("'t2d'", "[127]", "shape [128]"),
    ),
    "no head": (lambda t: t.pop("lm_head.weight"), ('"draft_vocab_size" is 96', "lm_head", "128")),
}


@pytest.mark.parametrize("case", MAPS)
def test_bad_vocabulary_maps(case: str, head: Callable[..., Path]) -> None:
    change, parts = MAPS[case]
    path = head("eagle3")
    edit_tensors(path, change)
    with raises(ModelFileError, *parts):
        opened(path)


def test_map_without_a_head(head: Callable[..., Path]) -> None:
    path = head("eagle3")
    edit_config(path, draft_vocab_size=...)
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with raises(ModelFileError, "'d2t' is in the weights, but 'lm_head.weight' is not"):
        opened(path)


# ---- a configuration alone ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", SPECS)
def test_description_without_weights(layout: str, head: Callable[..., Path]) -> None:
    """For made-up weights: the same but for the embeddings, which a configuration is silent on."""
    path = head(layout, norm_before_fc=layout == "speculators")
    target = target_of(make(TARGET))
    hf_config = read_json(path / "config.json")
    expected = opened(path).config
    expected["drafter"] = expected["drafter"] | {"owns_embedding": False}
    assert drafter_config(hf_config, target, method=SPECS[layout].method) == expected


def test_description_without_weights_needs_a_kind(head: Callable[..., Path]) -> None:
    target = target_of(make(TARGET))
    hf_config = read_json(head("eagle") / "config.json")
    with raises(ValueError, "method is None", "None", "'eagle', 'eagle3', 'gemma4_mtp'"):
        drafter_config(hf_config, target)
    with raises(ValueError, "'draft_model'"):
        drafter_config(hf_config, target, method="draft_model")


# ---- pickles and converting --------------------------------------------------------------------


def test_pickle_is_not_loaded(head: Callable[..., Path]) -> None:
    path = head("eagle", is_pickle=True, dtype="float16")
    for call in (
        lambda: detect_method(path),
        lambda: opened(path),
        lambda: convert(path, path.parent / "out", progress=False),
        lambda: convert(make(TARGET), path.parent / "out", path, progress=False),
    ):
        with raises(ModelFileError, PICKLE_NAME, "paceline convert --allow-pickle", path):
            call()
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_pickle_is_converted(layout: str, head: Callable[..., Path], tmp_path: Path) -> None:
    path = head(layout, is_pickle=True, dtype="float16")
    out = tmp_path / "out"
    assert main(["convert", "--allow-pickle", "--quiet", str(path), str(out)]) == 0
    assert sorted(entry.name for entry in out.iterdir()) == ["config.json", "model.safetensors"]
    expected = torch.load(path / PICKLE_NAME, weights_only=True)
    written = load_tensors(out)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    assert opened(out).kind == SPECS[layout].method


def test_pickle_of_no_drafter(tmp_path: Path) -> None:
    path = tiny_models.copy_checkpoint(make(TARGET), tmp_path / "model")
    torch.save(load_tensors(path), path / PICKLE_NAME)
    (path / "model.safetensors").unlink()
    with raises(NotImplementedError, PICKLE_NAME, "not an EAGLE drafter", "model.safetensors"):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)
    assert not (tmp_path / "out").exists()


class _Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickle_runs_nothing(head: Callable[..., Path], tmp_path: Path) -> None:
    path = head("eagle", is_pickle=True)
    marker = tmp_path / "marker"
    torch.save({"fc.weight": _Harmful(marker)}, path / PICKLE_NAME)
    with raises(ModelFileError, PICKLE_NAME, "weights-only"):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ([torch.ones(2)], "list"),
        ({}, "dict"),
        ({"fc.weight": 3}, "'fc.weight' is int"),
        ({"fc.weight": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"fc.weight": torch.ones(1).expand(10**9)}, "more than the file's"),
    ],
)
def test_pickle_of_other_things(
    contents: Any, part: str, head: Callable[..., Path], tmp_path: Path
) -> None:
    path = head("eagle", is_pickle=True)
    torch.save(contents, path / PICKLE_NAME)
    with raises(ModelFileError, PICKLE_NAME, part):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)


def test_damaged_pickle(head: Callable[..., Path], tmp_path: Path) -> None:
    path = head("eagle", is_pickle=True)
    file = path / PICKLE_NAME
    contents = file.read_bytes()
    file.write_bytes(contents[: len(contents) // 2])
    with raises(ModelFileError, PICKLE_NAME, "zip"):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)


def written_header(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


@pytest.mark.parametrize("is_pickle", [False, True])
def test_pair_is_converted(is_pickle: bool, head: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = head("eagle3", is_pickle=is_pickle, dtype="float16")
    target = make(replace(TARGET, dtype="bfloat16"))
    out = convert(target, tmp_path / "out", path, 3, allow_pickle=is_pickle, progress=False)
    contents = read_json(out / "paceline.json")
    assert contents["draft"]["dtype"] == "bfloat16", "the target's"
    assert contents["draft"]["config"]["drafter"]["draft_vocab_size"] == 96
    source = torch.load(path / PICKLE_NAME, weights_only=True) if is_pickle else load_tensors(path)
    written = load_file(out / "draft.safetensors")
    expected_ids = source["d2t"] + torch.arange(96)
    assert torch.equal(written["draft_to_target"], expected_ids.int())
    assert torch.equal(written["fc.weight"], source["fc.weight"].bfloat16()), "rounded once"
    assert written["final_norm.weight"].dtype == torch.float16
    assert "t2d" not in written
    assert written_header(out / "draft.safetensors")["draft_to_target"]["dtype"] == "I32"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_rounding_of_every_half() -> None:
    from paceline.loader.convert import _half_to_bfloat16

    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    expected = torch.from_numpy(halves.copy()).bfloat16()
    data = bytearray(_half_to_bfloat16(memoryview(halves.tobytes())))
    seen = torch.frombuffer(data, dtype=torch.bfloat16)
    is_number = ~torch.isnan(expected)
    assert torch.equal(seen[is_number], expected[is_number])
    assert torch.isnan(seen[~is_number]).all()


def test_drafter_is_no_target(head: Callable[..., Path], tmp_path: Path) -> None:
    with raises(ModelFileError, "missing", "EAGLE drafter and no target", "--draft"):
        convert(head("eagle"), tmp_path / "out", progress=False)


# ---- in the engine -----------------------------------------------------------------------------

ENGINE: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_bytes": 16 << 20, "show_progress": False}
PROMPTS = [[5, 17, 90, 3], [44] * 7, list(range(2, 40)), [9]]


def outputs(llm: LLM) -> list[list[int]]:
    """What two temperatures give."""
    tokens = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=7)
        tokens += [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    return tokens


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with LLM(make(TARGET), **ENGINE) as llm:
        return outputs(llm)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("layout", SPECS)
def test_output_is_that_of_plain_decoding(
    layout: str, is_named: bool, head: Callable[..., Path], plain: list[list[int]]
) -> None:
    method = SPECS[layout].method
    config: dict[str, Any] = {"model": str(head(layout)), "num_speculative_tokens": 3}
    if is_named:
        config["method"] = method
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        assert llm.speculative_config is not None
        assert llm.speculative_config.method == method
        assert llm.capabilities()["configured"]["method"] == method
        assert outputs(llm) == plain
        assert llm._executor.check_integrity() == ""


@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (5, 5)])
def test_ngram(lengths: tuple[int, int], plain: list[list[int]]) -> None:
    config = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": lengths[0],
        "prompt_lookup_max": lengths[1],
    }
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        assert llm.draft is None
        assert (llm._executor.options["ngram_min"], llm._executor.options["ngram_max"]) == lengths
        assert outputs(llm) == plain
        assert llm._executor.check_integrity() == ""


def test_ngram_of_a_loaded_target(plain: list[list[int]]) -> None:
    target = load_checkpoint(make(TARGET), progress=False)
    config = {"method": "ngram", "num_speculative_tokens": 2}
    engine = {key: value for key, value in ENGINE.items() if key != "show_progress"}
    with LLM.from_loaded(target, speculative_config=config, **engine) as llm:
        assert outputs(llm) == plain
    with raises(ValueError, "belong together"):
        LLM.from_loaded(target, target, speculative_config=config)


def test_loaded_drafter_of_another_target(head: Callable[..., Path]) -> None:
    target = load_checkpoint(make(TARGET), progress=False)
    other = load_checkpoint(make(replace(TARGET, dtype="bfloat16")), progress=False)
    draft = load_drafter(head("eagle3"), target, progress=False)
    assert draft.method == "eagle3"
    config = {"model": "head", "num_speculative_tokens": 2}
    with raises(ValueError, "weight dtype", "'float32'", "'bfloat16'"):
        LLM.from_loaded(other, draft, speculative_config=config)
    with raises(ValueError, "is 'eagle'", "'eagle3'"):
        LLM.from_loaded(target, draft, speculative_config=config | {"method": "eagle"})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_both_ways_give_the_same_bytes(
    layout: str, target_dtype: str, dtype: str, head: Callable[..., Path], tmp_path: Path
) -> None:
    path = head(layout, dtype=dtype)
    target = make(replace(TARGET, dtype=target_dtype))
    out = convert(target, tmp_path / "out", path, progress=False)
    folder = _core.load_model_folder(str(out))
    assert folder.draft is not None
    loaded = load_drafter(path, load_checkpoint(target, progress=False), progress=False)
    assert bytes(folder.draft.arena()) == bytes(loaded.model.arena())


def test_demo_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "def f(x):\n", "--demo", "ngram", "--compare", "--json"]
    assert main([*argv, "--max-tokens", "24"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plain"]["is_same"] is True
    assert report["draft_model"] is None
    assert report["configured"]["method"] == "ngram"
