# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants (method "gemma4_mtp"): what is read, every refusal, converting, running."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import assistant_models
import eagle_models
import tiny_models
from assistant_models import AssistantSpec
from eagle_models import EagleSpec
from errors import raises
from paceline import LLM, SamplingParams, _core
from paceline._core import ModelFileError
from paceline.bench import models as bench_models
from paceline.loader import (
    DrafterCheckpoint,
    Target,
    decoder_config,
    detect_method,
    drafter_config,
    families,
    load_checkpoint,
    load_drafter,
    open_checkpoint,
    open_drafter,
)
from paceline.loader.convert import convert
from paceline.loader.gemma4_assistant import translate_assistant
from paceline.loader.hf_config import Section, parse_hf_config
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

TARGET = TinySpec("gemma4", seed=70, kv_heads=1, logit_soft_cap=30.0)
DENSE = TinySpec("gemma4", seed=71, k_eq_v=True, shared_layers=0, per_layer_size=0)
CLUSTERS = AssistantSpec(centroids=(16, 3))
ORDERING = "masked_embedding.token_ordering"
CENTROIDS = "masked_embedding.centroids.weight"


def target_of(spec: TinySpec) -> Target:
    """What a drafter has to fit, without loading any weights."""
    checkpoint = open_checkpoint(make(spec))
    family = checkpoint.family
    return Target(checkpoint.path, family.architecture, checkpoint.config, checkpoint.weight_dtype)


@pytest.fixture
def assistant(tmp_path: Path) -> Callable[..., Path]:
    """Writes an assistant for `TARGET`, or for another target, into a folder of its own."""

    def write(spec: AssistantSpec = CLUSTERS, target: TinySpec = TARGET, **changes: Any) -> Path:
        return assistant_models.write(
            replace(spec, **changes), make(target), tmp_path / "assistant"
        )

    return write


def opened(path: Path, target: TinySpec = TARGET, **arguments: Any) -> DrafterCheckpoint:
    return open_drafter(path, target_of(target), **arguments)


def edit_text(path: Path, **changes: Any) -> None:
    """Changes keys of `text_config`; `...` removes one."""
    config = read_json(path / "config.json")
    text = config["text_config"] | changes
    config["text_config"] = {key: value for key, value in text.items() if value is not ...}
    write_json(path / "config.json", config)


# ---- as published ------------------------------------------------------------------------------

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}
E2B_ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "audio_token_id": 258_881,
    "backbone_hidden_size": 1536,
    "centroid_intermediate_top_k": 32,
    "dtype": "bfloat16",
    "image_token_id": 258_880,
    "model_type": "gemma4_assistant",
    "num_centroids": 2048,
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 256,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2048,
        "is_encoder_decoder": False,
        "layer_types": [SLIDING] * 3 + [FULL],
        "max_position_embeddings": 131_072,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 4,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 4,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPES,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 0,
    },
    "tie_word_embeddings": True,
    "use_ordered_embeddings": True,
}


def published(size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of a target and its assistant, but for what text has no use for."""
    hidden, layers, heads, kv_heads, full_kv_heads, window, shared = {
        "E2B": (1536, 35, 8, 1, None, 512, 20),
        "E4B": (2560, 42, 8, 2, None, 512, 18),
        "12B": (3840, 48, 16, 8, 1, 1024, 0),
        "31B": (5376, 60, 32, 16, 4, 1024, 0),
    }[size]
    is_small = full_kv_heads is None
    pattern = [SLIDING] * (4 if size == "E2B" else 5) + [FULL]
    name, prefix = ("Gemma4", "gemma4")
    if size == "12B":
        name, prefix = ("Gemma4Unified", "gemma4_unified")
    common = {
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_kv_heads,
        "attention_k_eq_v": not is_small,
        "sliding_window": window,
        "max_position_embeddings": 131_072 if is_small else 262_144,
    }
    target = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": prefix,
        "text_config": common
        | {
            "hidden_size": hidden,
            "intermediate_size": 6144,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "layer_types": pattern * (layers // len(pattern)),
            "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": 256 if is_small else 0,
        },
    }
    assistant = copy.deepcopy(E2B_ASSISTANT)
    assistant |= {
        "architectures": [f"{name}AssistantForCausalLM"],
        "model_type": f"{prefix}_assistant",
        "backbone_hidden_size": hidden,
        "use_ordered_embeddings": is_small,
    }
    assistant["text_config"] |= common | {
        "hidden_size": 256 if is_small else 1024,
        "intermediate_size": 2048 if is_small else 8192,
        "num_attention_heads": 4 if is_small else heads,
    }
    return target, assistant


def target_as_published(size: str) -> Target:
    hf_config = published(size)[0]
    config = decoder_config(hf_config, "bfloat16")
    return Target(Path(size), hf_config["architectures"][0], config, "bfloat16")


def test_e2b_as_published() -> None:
    assert published("E2B")[1] == E2B_ASSISTANT
    target = target_as_published("E2B")
    config = drafter_config(E2B_ASSISTANT, target)
    assert {key: config[key] for key in config if key not in ("layers", "ropes")} == {
        "format": "paceline-decoder-1",
        "name": "gemma4_mtp",
        "vocab_size": 262_144,
        "hidden_size": 256,
        "max_position": 131_072,
        "norm_eps": 1e-6,
        "norm_weight_offset": 0.0,
        "embed_scale": 39.25,
        "logit_soft_cap": 0.0,
        "ties_lm_head": False,
        "has_post_norms": True,
        "has_layer_scale": True,
        "drafter": {
            "kind": "gemma4_mtp",
            "target_hidden_size": 1536,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "has_fc_bias": False,
            "has_attn_norm": True,
            "has_final_norm": True,
            "owns_embedding": False,
            "owns_lm_head": True,
            "draft_vocab_size": 262_144,
            "centroids": {"count": 2048, "top": 32},
        },
    }
    assert config["layers"][3] == {
        "attention": {
            "kind": "full",
            "window": 0,
            "num_qo_heads": 4,
            "num_kv_heads": 1,
            "head_dim": 512,
            "scale": 1.0,
            "soft_cap": 0.0,
            "rope": 1,
            "has_qk_norm": True,
            "has_qkv_bias": False,
            "has_o_bias": False,
            "reads_target": True,
        },
        "mlp": {"intermediate": 2048, "activation": "gelu_tanh", "has_bias": False},
    }
    assert [layer["attention"]["window"] for layer in config["layers"]] == [512] * 3 + [0]
    assert config["ropes"] == target.config["ropes"]


@pytest.mark.parametrize(
    ("size", "num_tensors", "num_parameters", "step_mib"),
    [
        ("E2B", 49, 77_731_332, 22.3),
        ("E4B", 49, 78_517_764, 23.8),
        ("12B", 48, 422_856_964, 806.5),
        ("31B", 48, 469_518_596, 895.5),
    ],
)
def test_sizes_as_published(
    size: str, num_tensors: int, num_parameters: int, step_mib: float
) -> None:
    """Every tensor but the order of tokens, and what one step reads of them."""
    hf_config = published(size)[1]
    family, notes = translate_assistant(Section(hf_config, size), target_as_published(size))
    assert notes == []
    assert len(family.tensors) == num_tensors
    assert sum(math.prod(spec.shape) for spec in family.tensors) == num_parameters
    step = 2 * bench_models.count_matrix_parameters(family.config) / 2**20
    assert step == pytest.approx(step_mib, abs=0.1)


@pytest.mark.parametrize("size", ["E2B", "12B"])
def test_matrices_of_the_target_are_counted(size: str) -> None:
    """Shared KV, keys as values and per-layer embeddings, whose table is only looked up."""
    hf_config = published(size)[0]
    specs = families.translate(parse_hf_config(hf_config, size, families.ARCHITECTURES)).tensors
    matrices = [spec for spec in specs if spec.is_matrix and spec.name != "per_layer.embed.weight"]
    expected = sum(math.prod(spec.shape) for spec in matrices)
    assert bench_models.count_matrix_parameters(target_as_published(size).config) == expected


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    config = copy.deepcopy(E2B_ASSISTANT)
    for key in ("num_centroids", "centroid_intermediate_top_k", "tie_word_embeddings"):
        del config[key]
    for key in (
        "layer_types", "rope_parameters", "vocab_size", "head_dim", "global_head_dim",
        "num_kv_shared_layers", "hidden_size_per_layer_input", "final_logit_softcapping",
        "sliding_window", "rms_norm_eps", "max_position_embeddings", "hidden_activation",
    ):  # fmt: skip
        del config["text_config"][key]
    target = target_as_published("E2B")
    assert drafter_config(config, target) == drafter_config(E2B_ASSISTANT, target)
    # 0 shared layers are what some files say for all of them.
    config["text_config"]["num_kv_shared_layers"] = 0
    assert drafter_config(config, target) == drafter_config(E2B_ASSISTANT, target)


def test_model_type_stands_in_for_architectures() -> None:
    config = {key: value for key, value in E2B_ASSISTANT.items() if key != "architectures"}
    target = target_as_published("E2B")
    assert drafter_config(config, target) == drafter_config(E2B_ASSISTANT, target)


# ---- what is read ------------------------------------------------------------------------------


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
def test_both_spellings_say_the_same(target: TinySpec, assistant: Callable[..., Path]) -> None:
    path = assistant(target=target)
    new = read_json(path / "config.json")
    assert "per_layer_config" in new["text_config"]
    before = opened(path, target)
    text = tiny_models.to_old_spelling(new["text_config"])
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
def test_a_cap_of_its_own(cap: float, assistant: Callable[..., Path]) -> None:
    """Not the target's, which is 30."""
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
    """Of layers that read the target's; transformers drops them as well."""
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
    head = eagle_models.write(EagleSpec("eagle"), make(TinySpec("llama")), tmp_path / "head")
    with raises(ValueError, "'gemma4_mtp'", "'eagle'", "tensor 'fc.weight'"):
        detect_method(head, "gemma4_mtp")


def test_configuration_and_tensors_contradict(
    assistant: Callable[..., Path], tmp_path: Path
) -> None:
    head = eagle_models.write(EagleSpec("eagle"), make(TinySpec("llama")), tmp_path / "head")
    edit_config(head, architectures=["Gemma4AssistantForCausalLM"])
    with raises(ModelFileError, "'gemma4_mtp'", "'fc.weight'", "'eagle'"):
        detect_method(head)
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
            NotImplementedError, "Gemma4AssistantForCausalLM", "a drafter (gemma4_mtp)", "--draft"
        ):
            call()
    edit_config(path, architectures=["SomeModel"])
    with raises(NotImplementedError, "'SomeModel'", "not supported"):
        open_checkpoint(path)


# ---- made for another target -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_another_family(family: str, assistant: Callable[..., Path]) -> None:
    target = TinySpec(family)
    architecture = target_of(target).architecture
    with raises(
        ValueError, "made for another target", "'Gemma4AssistantForCausalLM'", "Gemma 4 target",
        f"is '{architecture}'", "Gemma4ForCausalLM",
    ):  # fmt: skip
        opened(assistant(), target)


def test_another_hidden_size(assistant: Callable[..., Path]) -> None:
    path = assistant(target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "another target", '"backbone_hidden_size" is 48', "size of 64"):
        opened(path)


def test_another_vocabulary(assistant: Callable[..., Path]) -> None:
    path = assistant(target=replace(TARGET, vocab_size=144))
    with raises(ValueError, "another target", '"text_config.vocab_size" is 144', "128 ids"):
        opened(path)


def test_a_layer_with_nothing_to_read(assistant: Callable[..., Path]) -> None:
    target = replace(TARGET, layer_types=(FULL,) * 4)
    with raises(
        ValueError, "layer 0 of the drafter", "'sliding'", "no layer to read", make(target),
        "are of kind 'full'",
    ):  # fmt: skip
        opened(assistant(), target)


def test_a_later_layer_with_nothing_to_read(assistant: Callable[..., Path]) -> None:
    target = replace(TARGET, layer_types=(FULL,) * 4)
    path = assistant(layer_types=(FULL, SLIDING, FULL))
    with raises(ValueError, "layer 1 of the drafter", "'sliding'", "no layer to read"):
        opened(path, target)


SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "window": (
        {"window": 16},
        ("layer 0 of the drafter", "a window of 8", "layer 1 of", "'sliding'", "has 16"),
    ),
    "heads": (
        {"kv_heads": 2},
        ("layer 0 of the drafter", "key and value heads: 1", "layer 1 of", "has 2"),
    ),
    "head size": (
        {"head_dim": 24, "full_head_dim": 32},
        ("layer 0 of the drafter", "a head size of 16", "layer 1 of", "has 24"),
    ),
    "head size of full layers": (
        {"full_head_dim": 48},
        ("layer 3 of the drafter", "a head size of 32", "layer 2 of", "'full'", "has 48"),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_layer_of_another_shape(case: str, assistant: Callable[..., Path]) -> None:
    """The layer that is read is the last that owns its KV: of six layers the last three share."""
    changes, parts = SHAPES[case]
    with raises(ValueError, "another target", *parts):
        opened(assistant(), replace(TARGET, **changes))


def test_full_layers_with_fewer_heads(assistant: Callable[..., Path]) -> None:
    path = assistant(AssistantSpec(), DENSE)
    with raises(ValueError, "layer 3", "key and value heads: 1", "layer 5", "has 2"):
        opened(path, replace(DENSE, full_kv_heads=2))


# ---- damaged, contradictory or not supported ---------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "post_projection.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.layer_scalar",
        "model.layers.3.self_attn.q_norm.weight",
    ],
)
def test_missing_tensors(name: str, assistant: Callable[..., Path]) -> None:
    path = assistant()
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with raises(ModelFileError, "1 tensor is missing", repr(name), "Gemma4AssistantForCausalLM"):
        opened(path)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("pre_projection.weight", (32, 64), "[32, 128] (hidden_size, 2 * backbone_hidden_size"),
        ("post_projection.weight", (32, 64), "[64, 32] (backbone_hidden_size, hidden_size"),
        ("model.embed_tokens.weight", (127, 32), "[128, 32] (vocab_size, hidden_size"),
        (CENTROIDS, (8, 32), "[16, 32] (num_centroids, hidden_size"),
        ("model.layers.3.self_attn.q_norm.weight", (16,), "[32] (the layer's head_dim"),
    ],
)
def test_misshapen_tensors(
    name: str, shape: tuple[int, ...], expected: str, assistant: Callable[..., Path]
) -> None:
    path = assistant()
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with raises(ModelFileError, name, list(shape), f"expected {expected}"):
        opened(path)


ORDERINGS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "beyond": (lambda t: t[ORDERING].__setitem__(5, 128), ("[5] is 128", "ids from 0 to 127")),
    "below": (lambda t: t[ORDERING].__setitem__(5, -1), ("[5] is -1", "ids from 0 to 127")),
    "twice": (
        lambda t: t[ORDERING].__setitem__(7, int(t[ORDERING][3])),
        ("in places 3 and 7", "every id once"),
    ),
    "zeros": (lambda t: t[ORDERING].zero_(), ("id 0 in places 0 and 1", "every id once")),
    "short": (lambda t: t.update({ORDERING: t[ORDERING][1:].clone()}), ("[127]", "[128]")),
    "floats": (lambda t: t.update({ORDERING: t[ORDERING].float()}), ("stored as F32", "I64")),
    "absent": (lambda t: t.pop(ORDERING), (CENTROIDS, repr(ORDERING), "both or none")),
}


@pytest.mark.parametrize("case", ORDERINGS)
def test_bad_orders_of_tokens(case: str, assistant: Callable[..., Path]) -> None:
    change, parts = ORDERINGS[case]
    path = assistant()
    edit_tensors(path, change)
    with raises(ModelFileError, ORDERING if case != "absent" else "", *parts):
        opened(path)


CLUSTER_KEYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "not said": (
        {"use_ordered_embeddings": ...},
        ('"use_ordered_embeddings" is missing', "false", "is in the weights"),
    ),
    "denied": ({"use_ordered_embeddings": False}, ("is false", "is in the weights")),
    "no flag": ({"use_ordered_embeddings": 1}, ('"use_ordered_embeddings" is 1', "true or false")),
    "no divisor": (
        {"num_centroids": 24},
        ('"num_centroids" is 24', 'a divisor of "text_config.vocab_size" (128)'),
    ),
    "too many": ({"num_centroids": 256}, ('"num_centroids" is 256', "a divisor of")),
    "more than there are": (
        {"centroid_intermediate_top_k": 17},
        ('"centroid_intermediate_top_k" is 17', "1 to 16"),
    ),
}


@pytest.mark.parametrize("case", CLUSTER_KEYS)
def test_bad_keys_of_clusters(case: str, assistant: Callable[..., Path]) -> None:
    changes, parts = CLUSTER_KEYS[case]
    path = assistant()
    edit_config(path, **changes)
    with raises(ModelFileError, "config.json", *parts):
        opened(path)


def test_clusters_that_are_not_there(assistant: Callable[..., Path]) -> None:
    path = assistant(AssistantSpec())
    clusters = {"num_centroids": 16, "centroid_intermediate_top_k": 3}
    edit_config(path, use_ordered_embeddings=True, **clusters)
    with raises(ModelFileError, '"use_ordered_embeddings" is true', "is not in the weights"):
        opened(path)
    # Without any weights there is nothing to contradict.
    config = drafter_config(read_json(path / "config.json"), target_of(TARGET))
    assert config["drafter"]["centroids"] == {"count": 16, "top": 3}


TEXT_KEYS: dict[str, tuple[type[Exception], dict[str, Any], tuple[str, ...]]] = {
    "mixture": (NotImplementedError, {"enable_moe_block": True}, ("enable_moe_block", "true")),
    "wide": (NotImplementedError, {"use_double_wide_mlp": True}, ("use_double_wide_mlp", "false")),
    "per-layer inputs": (
        NotImplementedError,
        {"hidden_size_per_layer_input": 8},
        ('"text_config.hidden_size_per_layer_input" is 8', "supported: 0"),
    ),
    "own KV": (
        NotImplementedError,
        {"num_kv_shared_layers": 3},
        ('"text_config.num_kv_shared_layers" is 3', "supported: 4"),
    ),
    "quantised": (
        NotImplementedError,
        {"quantization_config": {"bits": 4}},
        ("quantization_config", "none"),
    ),
    "both ways": (
        NotImplementedError,
        {"use_bidirectional_attention": "all"},
        ("use_bidirectional_attention", "vision"),
    ),
    "rope": (
        NotImplementedError,
        {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}},
        ("yarn", "default, proportional"),
    ),
    "activation": (NotImplementedError, {"hidden_activation": "relu"}, ("relu", "gelu")),
    "last layer": (
        ModelFileError,
        {"layer_types": [SLIDING] * 4},
        ("ends with 'sliding_attention'", "full_attention"),
    ),
    "layers": (ModelFileError, {"layer_types": [FULL]}, ("1 entries", "expected 4")),
    "no width": (ModelFileError, {"hidden_size": ...}, ('"text_config.hidden_size" is missing',)),
}


@pytest.mark.parametrize("case", TEXT_KEYS)
def test_text_keys(case: str, assistant: Callable[..., Path]) -> None:
    kind, changes, parts = TEXT_KEYS[case]
    path = assistant()
    edit_text(path, **changes)
    with raises(kind, "config.json", *parts):
        opened(path)


def test_top_keys(assistant: Callable[..., Path]) -> None:
    path = assistant()
    edit_config(path, tie_word_embeddings=False)
    with raises(NotImplementedError, '"tie_word_embeddings" is false', "embed_tokens"):
        opened(path)
    edit_config(path, tie_word_embeddings=True, quantization_config={"quant_method": "x"})
    with raises(NotImplementedError, "quantization_config", "none (weights in BF16, F16 or F32)"):
        opened(path)
    edit_config(path, quantization_config=..., backbone_hidden_size=...)
    with raises(ModelFileError, '"backbone_hidden_size" is missing'):
        opened(path)


# ---- converting --------------------------------------------------------------------------------


@pytest.mark.parametrize("centroids", [None, (16, 3)])
def test_pair_is_converted(
    centroids: tuple[int, int] | None, assistant: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    path = assistant(centroids=centroids, dtype="bfloat16")
    out = convert(make(TARGET), tmp_path / "out", path, 3, progress=False)
    contents = read_json(out / "paceline.json")
    assert contents["num_speculative_tokens"] == 3
    assert contents["draft"]["dtype"] == "float32", "the target's"
    assert contents["draft"]["config"] == opened(path).config
    source = load_tensors(path)
    written = load_file(out / "draft.safetensors")
    assert torch.equal(written["fc.weight"], source["pre_projection.weight"])
    assert torch.equal(written["feedback.weight"], source["post_projection.weight"])
    assert torch.equal(written["lm_head.weight"], source["model.embed_tokens.weight"])
    assert ("token_ordering" in written) == (centroids is not None)
    if centroids is not None:
        assert torch.equal(written["token_ordering"], source[ORDERING].int())
        assert torch.equal(written["centroids.weight"], source[CENTROIDS])
    assert len(written) == len(source)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
def test_both_ways_give_the_same_bytes(
    target_dtype: str, dtype: str, assistant: Callable[..., Path], tmp_path: Path
) -> None:
    path = assistant(dtype=dtype)
    target = make(replace(TARGET, dtype=target_dtype))
    out = convert(target, tmp_path / "out", path, progress=False)
    folder = _core.load_model_folder(str(out))
    assert folder.draft is not None
    loaded = load_drafter(path, load_checkpoint(target, progress=False), progress=False)
    assert bytes(folder.draft.arena()) == bytes(loaded.model.arena())


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
@pytest.mark.parametrize("position", [None, "last", "next"])
@pytest.mark.parametrize("centroids", [None, (16, 3)])
def test_output_is_that_of_plain_decoding(
    centroids: tuple[int, int] | None,
    position: str | None,
    is_named: bool,
    assistant: Callable[..., Path],
    plain: list[list[int]],
) -> None:
    path = assistant(centroids=centroids)
    config: dict[str, Any] = {"model": str(path), "num_speculative_tokens": 3}
    if is_named:
        config["method"] = "gemma4_mtp"
    if position is not None:
        config["x"] = {"draft_position": position}
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        configured = llm.capabilities()["configured"]
        assert configured["method"] == "gemma4_mtp"
        assert configured["draft_position"] == (position or "last")
        assert configured["draft_architecture"] == "Gemma4AssistantForCausalLM"
        assert outputs(llm) == plain
        assert llm._executor.check_integrity() == ""


def test_it_has_no_cache_of_its_own(assistant: Callable[..., Path]) -> None:
    config = {"model": str(assistant()), "num_speculative_tokens": 3}
    engine = {key: value for key, value in ENGINE.items() if key != "kv_cache_bytes"}
    with LLM(make(TARGET), **engine) as llm:
        expected = llm.memory_report()
    with LLM(make(TARGET), speculative_config=config, **engine) as llm:
        report = llm.memory_report()
    assert [group["owner"] for group in report["groups"]] == ["target", "target"]
    assert report["groups"] == expected["groups"]
    assert report["draft_weight_bytes"] > 0


def test_loaded_drafter_of_another_target(assistant: Callable[..., Path]) -> None:
    target = load_checkpoint(make(TARGET), progress=False)
    draft = load_drafter(assistant(), target, progress=False)
    assert (draft.method, draft.family) == ("gemma4_mtp", "gemma4_mtp")
    config = {"model": "assistant", "num_speculative_tokens": 2}
    for change, parts in (
        ({"dtype": "bfloat16"}, ("weight dtype", "'float32'", "'bfloat16'")),
        ({"window": 16}, ("layer 0 of the drafter", "a window of 8", "has 16")),
        ({"layer_types": (FULL,) * 4}, ("layer 0 of the drafter", "no layer to read")),
    ):
        other = load_checkpoint(make(replace(TARGET, **change)), progress=False)
        with raises(ValueError, *parts):
            LLM.from_loaded(other, draft, speculative_config=config)
    llama = load_checkpoint(make(TinySpec("llama")), progress=False)
    with raises(ValueError, "multiplies its embeddings by 8.0", "by 1.0"):
        LLM.from_loaded(llama, draft, speculative_config=config)
    with raises(ValueError, "is 'eagle'", "'gemma4_mtp'"):
        LLM.from_loaded(target, draft, speculative_config=config | {"method": "eagle"})


def test_position_of_another_drafter(tmp_path: Path) -> None:
    """Known to be one only once it was loaded."""
    spec = EagleSpec("eagle3", aux_layers=(1, 3, 5), owns_embedding=False)
    head = eagle_models.write(spec, make(TARGET), tmp_path / "head")
    config = {
        "model": str(head), "num_speculative_tokens": 2, "x": {"draft_position": "next"},
    }  # fmt: skip
    with raises(ValueError, "draft_position'] is 'next'", "'eagle3'", "'gemma4_mtp'"):
        LLM(make(TARGET), speculative_config=config, **ENGINE)


@pytest.mark.parametrize("centroids", [None, (16, 3)])
def test_dummy_weights(
    centroids: tuple[int, int] | None, assistant: Callable[..., Path], tmp_path: Path
) -> None:
    path = assistant(centroids=centroids)
    (path / "model.safetensors").unlink()
    target = tiny_models.copy_checkpoint(make(TARGET), tmp_path / "target")
    (target / "model.safetensors").unlink()
    config = {"model": str(path), "num_speculative_tokens": 3}
    with LLM(target, load_format="dummy", speculative_config=config, **ENGINE) as llm:
        assert llm.draft is not None
        assert (llm.draft.is_dummy, llm.draft.method) == (True, "gemma4_mtp")
        drafted = outputs(llm)
    with LLM(target, load_format="dummy", **ENGINE) as llm:
        assert outputs(llm) == drafted


def test_bench(assistant: Callable[..., Path], tmp_path: Path) -> None:
    from paceline.cli import main

    speculative = {
        "method": "gemma4_mtp", "model": str(assistant()), "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.3,
        "x": {"draft_position": "next"},
    }  # fmt: skip
    out = tmp_path / "bench.json"
    argv = ["bench", "latency", "--config", str(make(TARGET)), "--json", str(out)]
    argv += ["--concurrency", "2", "--input-len", "8", "--output-len", "8", "--rounds", "1"]
    assert main([*argv, "--speculative-config", json.dumps(speculative)]) == 0
    row = json.loads(out.read_text())["rows"][1]
    assert row["configuration"] == "k=3" and 1.5 < row["tokens_per_iteration"] < 3.1
