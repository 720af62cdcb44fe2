# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants (method "gemma4_mtp"): reading and recognising them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import eagle_models
from assistant_models import AssistantSpec
from assistant_pair import CENTROIDS, DENSE, ORDERING, TARGET, opened
from eagle_models import EagleSpec
from errors import raises
from paceline import LLM
from paceline._core import ModelFileError
from paceline.loader import detect_method, open_checkpoint
from paceline.loader.convert import convert
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
    write_json,
)


def test_name_map(assistant: Callable[..., Path]) -> None:
    path = assistant(attention_bias=True)
    checkpoint = opened(path)
    assert checkpoint.kind == "gemma4_mtp"
    assert checkpoint.draft_to_target is None
    sources = {tensor.spec.name: tensor.source for tensor in checkpoint.tensors}
    assert {k: v for k, v in sources.items() if not k.startswith(("layers.0.", "layers.1."))} == {
        "fc.weight": "pre_projection.weight",
        "feedback.weight": "post_projection.weight",
        "final_norm.weight": "model.norm.weight",
        "lm_head.weight": "model.embed_tokens.weight",
        "centroids.weight": CENTROIDS,
        **{
            f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}"
            for i in (2, 3)
            for ours, theirs in {
                "attn_norm.weight": "input_layernorm.weight",
                "attn_post_norm.weight": "post_attention_layernorm.weight",
                "mlp_norm.weight": "pre_feedforward_layernorm.weight",
                "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
                "attn.q.weight": "self_attn.q_proj.weight",
                "attn.q.bias": "self_attn.q_proj.bias",
                "attn.q_norm.weight": "self_attn.q_norm.weight",
                "attn.o.weight": "self_attn.o_proj.weight",
                "attn.o.bias": "self_attn.o_proj.bias",
                "mlp.gate.weight": "mlp.gate_proj.weight",
                "mlp.up.weight": "mlp.up_proj.weight",
                "mlp.down.weight": "mlp.down_proj.weight",
                "scale": "layer_scalar",
            }.items()
        },
    }
    assert {*sources.values(), ORDERING} == set(load_tensors(path))
    shapes = {tensor.spec.name: tensor.spec.shape for tensor in checkpoint.tensors}
    assert shapes["fc.weight"] == (32, 128)
    assert shapes["feedback.weight"] == (64, 32)
    assert shapes["layers.0.attn.q.weight"] == (64, 32)
    assert shapes["layers.3.attn.q.weight"] == (128, 32)
    assert shapes["lm_head.weight"] == (128, 32)
    assert shapes["centroids.weight"] == (16, 32)


@pytest.mark.parametrize("target", [TARGET, DENSE, replace(DENSE, unified=True)])
def test_both_spellings_give_the_same_description(
    target: TinySpec, assistant: Callable[..., Path]
) -> None:
    path = assistant(target=target)
    new = read_json(path / "config.json")
    assert "per_layer_config" in new["text_config"]
    before = opened(path, target)
    text = to_old_spelling(new["text_config"])
    assert "per_layer_config" not in text and text["global_head_dim"] == 32
    write_json(path / "config.json", new | {"text_config": text})
    after = opened(path, target)
    assert (after.config, after.family.tensors) == (before.config, before.family.tensors)
    full = after.config["layers"][-1]["attention"]
    assert (full["num_kv_heads"], full["head_dim"]) == (1, 32)
    architecture = "Gemma4UnifiedAssistant" if target.unified else "Gemma4Assistant"
    assert after.family.architecture == f"{architecture}ForCausalLM"


def test_an_lm_head_without_clusters(assistant: Callable[..., Path]) -> None:
    checkpoint = opened(assistant(AssistantSpec(), DENSE), DENSE)
    assert "centroids" not in checkpoint.config["drafter"]
    assert checkpoint.token_ordering is None
    assert checkpoint.ids == {}
    assert "centroids.weight" not in {tensor.spec.name for tensor in checkpoint.tensors}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_token_ordering(dtype: torch.dtype, assistant: Callable[..., Path]) -> None:
    path = assistant()
    ordering = load_tensors(path)[ORDERING]
    edit_tensors(path, lambda tensors: tensors.update({ORDERING: ordering.to(dtype)}))
    checkpoint = opened(path)
    assert checkpoint.token_ordering is not None
    assert checkpoint.token_ordering.dtype == np.int32
    assert checkpoint.token_ordering.tolist() == ordering.tolist()
    assert list(checkpoint.ids) == ["token_ordering"]


@pytest.mark.parametrize("layer_types", [(FULL,), (SLIDING, FULL), (FULL, SLIDING, FULL)])
def test_layer_patterns(layer_types: tuple[str, ...], assistant: Callable[..., Path]) -> None:
    attentions = [
        layer["attention"] for layer in opened(assistant(layer_types=layer_types)).config["layers"]
    ]
    kinds = {FULL: "full", SLIDING: "sliding"}
    assert [attention["kind"] for attention in attentions] == [kinds[x] for x in layer_types]
    assert all(attention["reads_target"] for attention in attentions)
    for key in ("has_v_norm", "k_eq_v", "kv_source"):
        assert not any(key in attention for attention in attentions)


def test_the_factor_on_embeddings_is_the_targets(assistant: Callable[..., Path]) -> None:
    target = replace(TARGET, hidden_size=72)
    path = assistant(target=target)
    assert opened(path, target).config["embed_scale"] == float(np.float32(math.sqrt(72)))
    rounded = replace(target, dtype="bfloat16")
    assert opened(path, rounded).config["embed_scale"] == 8.5


@pytest.mark.parametrize("cap", [0.0, 12.5])
def test_the_cap_is_that_of_the_assistant(cap: float, assistant: Callable[..., Path]) -> None:
    """The assistant's own soft cap is used, not the target's, which is 30."""
    assert opened(assistant(logit_soft_cap=cap)).config["logit_soft_cap"] == cap


def test_positions_are_those_of_the_target(assistant: Callable[..., Path]) -> None:
    checkpoint = opened(assistant(max_position=100))
    assert checkpoint.config["max_position"] == 2048
    assert any("100 positions" in note for note in checkpoint.notes)


def test_dtype_is_that_of_the_target(assistant: Callable[..., Path]) -> None:
    path = assistant(dtype="float16")
    assert opened(path).weight_dtype == "float32"
    narrow = opened(path, replace(TARGET, dtype="bfloat16"))
    assert narrow.weight_dtype == "bfloat16"
    assert any("F16" in note and "rounded to bfloat16" in note for note in narrow.notes)
    assert {"fc.weight", "lm_head.weight", "centroids.weight"} <= {
        tensor.spec.name for tensor in narrow.tensors if narrow.is_narrowed(tensor)
    }


def test_a_copy_of_the_tied_table_is_left_out(assistant: Callable[..., Path]) -> None:
    path = assistant()
    table = load_tensors(path)["model.embed_tokens.weight"]
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    before = opened(path)
    assert "lm_head.weight" not in {tensor.source for tensor in before.tensors}
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": table + 1}))
    with raises(ModelFileError, "'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        opened(path)


def test_unused_keys_and_values_are_left_out(assistant: Callable[..., Path]) -> None:
    """Layers that read the target's KV have unused k and v; transformers ignores them as well."""
    path = assistant()
    name = "model.layers.3.self_attn.k_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    opened(path)
    name = "model.layers.4.self_attn.k_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    with raises(ModelFileError, "not part of Gemma4AssistantForCausalLM", name):
        opened(path)


def test_shards(assistant: Callable[..., Path]) -> None:
    checkpoint = opened(assistant(shards=3))
    assert len({tensor.shard.path.name for tensor in checkpoint.tensors}) == 3
    assert checkpoint.token_ordering is not None


# ---- detection ---------------------------------------------------------------------------------


def test_method_is_detected(assistant: Callable[..., Path]) -> None:
    path = assistant()
    assert detect_method(path) == "gemma4_mtp"
    assert detect_method(path, "gemma4_mtp") == "gemma4_mtp"


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_an_assistant_is_no_other_drafter(method: str, assistant: Callable[..., Path]) -> None:
    with raises(
        ValueError, f"is '{method}'", "'gemma4_mtp'", "tensor 'pre_projection.weight'", "allowed"
    ):
        detect_method(assistant(), method)


def test_other_drafters_are_no_assistants(tmp_path: Path) -> None:
    with raises(ValueError, "'gemma4_mtp'", "'draft_model'", "no tensor 'pre_projection.weight'"):
        detect_method(make(TARGET), "gemma4_mtp")
    draft_head = eagle_models.write(EagleSpec("eagle"), make(TinySpec("llama")), tmp_path / "head")
    with raises(ValueError, "'gemma4_mtp'", "'eagle'", "tensor 'fc.weight'"):
        detect_method(draft_head, "gemma4_mtp")


def test_configuration_and_tensors_contradict(
    assistant: Callable[..., Path], tmp_path: Path
) -> None:
    draft_head = eagle_models.write(EagleSpec("eagle"), make(TinySpec("llama")), tmp_path / "head")
    edit_config(draft_head, architectures=["Gemma4AssistantForCausalLM"])
    with raises(ModelFileError, "'gemma4_mtp'", "'fc.weight'", "'eagle'"):
        detect_method(draft_head)
    path = assistant()
    edit_config(path, architectures=["LlamaForCausalLMEagle3"])
    with raises(ModelFileError, "'eagle3'", "'pre_projection.weight'", "'gemma4_mtp'"):
        detect_method(path)
    edit_config(path, architectures=["SomeModel"])
    with raises(NotImplementedError, "'SomeModel'", "Gemma4AssistantForCausalLM"):
        opened(path)


def test_stated_kind_without_its_tensors(assistant: Callable[..., Path]) -> None:
    path = assistant()
    edit_tensors(path, lambda tensors: tensors.pop("pre_projection.weight"))
    with raises(ModelFileError, "1 tensor is missing", "'pre_projection.weight'"):
        opened(path)


def test_an_assistant_is_no_target(assistant: Callable[..., Path], tmp_path: Path) -> None:
    path = assistant()
    for call in (
        lambda: open_checkpoint(path),
        lambda: LLM(path, show_progress=False),
        lambda: convert(path, tmp_path / "out", progress=False),
    ):
        with raises(
            NotImplementedError,
            "Gemma4AssistantForCausalLM",
            "a draft head (gemma4_mtp)",
            "--draft",
        ):
            call()
    edit_config(path, architectures=["SomeModel"])
    with raises(NotImplementedError, "'SomeModel'", "not supported"):
        open_checkpoint(path)
