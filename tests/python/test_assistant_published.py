# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants (method "gemma4_mtp") with the configurations that were published."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from bench_work import all_parameters
from paceline.bench.costs import matrix_costs
from paceline.loader import Target, decoder_config, drafter_config, families
from paceline.loader.gemma4_assistant import translate_assistant
from paceline.loader.hf_config import parse_hf_config
from paceline.loader.section import Section
from tiny_models import FULL, SLIDING

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
    """Configurations of a target and its assistant, without keys that do not concern text."""
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
    """Counts tensors, without the order of tokens, and the parameters of a draft step."""
    hf_config = published(size)[1]
    family, notes = translate_assistant(Section(hf_config, size), target_as_published(size))
    assert notes == []
    assert len(family.tensors) == num_tensors
    assert sum(math.prod(spec.shape) for spec in family.tensors) == num_parameters
    step = 2 * all_parameters(matrix_costs(family.config, "bfloat16")) / 2**20
    assert step == pytest.approx(step_mib, abs=0.1)


@pytest.mark.parametrize("size", ["E2B", "12B"])
def test_matrices_of_the_target_are_counted(size: str) -> None:
    """Shared KV, keys as values, and per-layer embeddings, whose table is in no product."""
    hf_config = published(size)[0]
    specs = families.translate(parse_hf_config(hf_config, size, families.ARCHITECTURES)).tensors
    matrices = [spec for spec in specs if spec.is_matrix and spec.name != "per_layer.embed.weight"]
    expected = sum(math.prod(spec.shape) for spec in matrices)
    assert all_parameters(matrix_costs(target_as_published(size).config, "bfloat16")) == expected


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
    # Some files say 0 shared layers where all of them are shared.
    config["text_config"]["num_kv_shared_layers"] = 0
    assert drafter_config(config, target) == drafter_config(E2B_ASSISTANT, target)


def test_model_type_stands_in_for_architectures() -> None:
    config = {key: value for key, value in E2B_ASSISTANT.items() if key != "architectures"}
    target = target_as_published("E2B")
    assert drafter_config(config, target) == drafter_config(E2B_ASSISTANT, target)
