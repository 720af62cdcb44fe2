# SPDX-License-Identifier: Apache-2.0
"""EAGLE draft heads that fit another target, are damaged, or contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_pair import AUX, SPECS, TARGET, opened
from errors import raises
from paceline._core import ModelFileError
from tiny_models import TinySpec, edit_config, edit_section, edit_tensors, read_json, write_json


@pytest.mark.parametrize("layout", SPECS)
def test_another_vocabulary(layout: str, draft_head: Callable[..., Path]) -> None:
    path = draft_head(layout, target=replace(TARGET, vocab_size=144))
    with raises(ValueError, "made for another target", '"', "vocab_size", "is 144", "128 ids"):
        opened(path)


def test_another_hidden_size(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle", target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "made for another target", '"hidden_size" is 48', "of 64"):
        opened(path)


@pytest.mark.parametrize("target", [TARGET, TinySpec("gpt_oss", num_layers=8)])
def test_another_hidden_size_by_the_width_of_fc(
    target: TinySpec, draft_head: Callable[..., Path]
) -> None:
    path = draft_head("eagle3", target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "'fc.weight' has 144 columns", "hidden size of 64", "a multiple"):
        opened(path, target)


def test_another_hidden_size_by_the_number_of_states(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle3", target=replace(TARGET, hidden_size=128))
    with raises(
        ValueError, "384 columns", "6 times the hidden size of", "(64)", "3 layers, [2, 4, 5]"
    ):
        opened(path)


def test_another_hidden_size_as_stated(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators", target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "made for another target", '"target_hidden_size" is 48', "of 64"):
        opened(path)


@pytest.mark.parametrize("norm_before_fc", [True, False])
def test_another_hidden_size_than_that_of_gpt_oss(
    norm_before_fc: bool, draft_head: Callable[..., Path]
) -> None:
    spec = TinySpec("gpt_oss", seed=42, num_layers=8)
    path = draft_head(
        "speculators", target=replace(spec, hidden_size=96), norm_before_fc=norm_before_fc
    )
    seen = ('"target_hidden_size" is 96', "has a hidden size of 64")
    with raises(ValueError, str(path / "config.json"), "made for another target", *seen):
        opened(path, spec)


def test_borrowed_embeddings_of_another_width(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators", hidden_size=48, owns_embedding=False)
    with raises(ValueError, '"transformer_layer_config.hidden_size" is 48', "64", "embeddings"):
        opened(path)


def test_another_architecture(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators", target=replace(TARGET, family="qwen3"))
    with raises(
        ValueError,
        "speculators_config.verifier.architectures",
        '["Qwen3ForCausalLM"] (some/target)',
        "'LlamaForCausalLM'",
    ):
        opened(path)


def test_one_family_under_two_names(draft_head: Callable[..., Path]) -> None:
    spec = TinySpec("gemma3", seed=41, num_layers=9)
    path = draft_head("speculators", target=spec, aux_layers=AUX)
    config = read_json(path / "config.json")
    verifier = config["speculators_config"]["verifier"]
    verifier["architectures"] = ["Gemma3ForConditionalGeneration"]
    write_json(path / "config.json", config)
    assert opened(path, spec).kind == "eagle3"


@pytest.mark.parametrize("ids", [[2, 4, 8], [-1, 2, 3], [2, 2, 3], [5, 4, 2]])
def test_layers_that_the_target_lacks(ids: list[int], draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle3")
    edit_config(path, eagle_aux_hidden_state_layer_ids=ids)
    with raises(ValueError, "eagle_aux_hidden_state_layer_ids", ids, "8 layers", "0 to 7"):
        opened(path)


def test_default_layers_of_a_small_target(draft_head: Callable[..., Path]) -> None:
    target = replace(TARGET, num_layers=4)
    with raises(ValueError, "[2, 2, 1] by default", "4 layers", "0 to 3, in ascending order"):
        opened(draft_head("eagle3", target=target), target)


# ---- damaged or contradictory ------------------------------------------------------------------


@pytest.mark.parametrize("layout", SPECS)
def test_missing_tensors(layout: str, draft_head: Callable[..., Path]) -> None:
    path = draft_head(layout)
    name = f"{SPECS[layout].first_layer}self_attn.k_proj.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with raises(ModelFileError, "1 tensor is missing", name):
        opened(path)


def test_stated_kind_without_its_tensors(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators")
    edit_tensors(path, lambda tensors: tensors.pop("fc.weight"))
    with raises(ModelFileError, "missing", "'fc.weight'"):
        opened(path)


def test_misshapen_tensors(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle3")
    name = "midlayer.self_attn.q_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    with raises(ModelFileError, name, "[64, 64]", "expected [64, 128]", "2 * hidden_size"):
        opened(path)


def test_unexpected_tensors(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle")
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
        ("192 columns", "3 times the hidden size", "names 2 layers, [1, 2]"),
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
def test_contradictions(case: str, draft_head: Callable[..., Path]) -> None:
    layout, changes, parts = CONTRADICTIONS[case]
    path = draft_head(layout)
    edit_config(path, **changes)
    with raises(ModelFileError if "columns" not in parts[0] else ValueError, *parts):
        opened(path)


def test_refusals_list_what_is_supported(draft_head: Callable[..., Path]) -> None:
    path = draft_head("speculators")
    layer = "transformer_layer_config"
    edit_section(path, layer, model_type="qwen2")
    with raises(NotImplementedError, "transformer_layer_config.model_type", '"qwen2"', "qwen3"):
        opened(path)
    edit_section(path, layer, model_type="llama", quantization_config={"bits": 4})
    with raises(NotImplementedError, "quantization_config"):
        opened(path)


def test_eagle_of_two_layers(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle")
    edit_config(path, num_hidden_layers=2)
    with raises(NotImplementedError, '"num_hidden_layers" is 2', "1 layer"):
        opened(path)


def test_rope_of_other_heads(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle", rope_theta=None, head_dim=32)
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
    "absent": (lambda t: t.pop("d2t"), ("'d2t' is not in the weights", "96 rows", "128 token ids")),
    "other mask": (lambda t: t.update(t2d=~t["t2d"]), ("'t2d'", "marks 32 ids", "reaches 96")),
    "short mask": (
        lambda t: t.update(t2d=t["t2d"][:-1].clone()),
        ("'t2d'", "[127]", "shape [128]"),
    ),
    "no lm_head": (
        lambda t: t.pop("lm_head.weight"),
        ('"draft_vocab_size" is 96', "lm_head", "128"),
    ),
}


@pytest.mark.parametrize("case", MAPS)
def test_bad_vocabulary_maps(case: str, draft_head: Callable[..., Path]) -> None:
    change, parts = MAPS[case]
    path = draft_head("eagle3")
    edit_tensors(path, change)
    with raises(ModelFileError, *parts):
        opened(path)


def test_map_without_an_lm_head(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle3")
    edit_config(path, draft_vocab_size=...)
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    with raises(ModelFileError, "'d2t' is in the weights, but 'lm_head.weight' is not"):
        opened(path)
