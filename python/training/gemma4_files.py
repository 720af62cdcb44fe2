# SPDX-License-Identifier: Apache-2.0
"""The files of `gemma4_model.py`'s models, in the layout of Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from corpus import END_OF_TEXT_ID
from gemma4_model import FULL, INIT_STD, SLIDING, Assistant, Gemma4Config, Target
from safetensors.torch import load_file, save_file


def _text_config(config: Gemma4Config, *, dtype: str) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": END_OF_TEXT_ID,
        "dtype": dtype,
        "enable_moe_block": False,
        "eos_token_id": END_OF_TEXT_ID,
        "final_logit_softcapping": config.soft_cap,
        "global_head_dim": config.full_head_dim,
        "head_dim": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": config.hidden,
        "hidden_size_per_layer_input": 0,
        "initializer_range": INIT_STD,
        "intermediate_size": config.intermediate,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position,
        "model_type": "gemma4_text",
        "num_attention_heads": config.heads,
        "num_hidden_layers": len(config.layer_types),
        "num_key_value_heads": config.kv_heads,
        "num_kv_shared_layers": config.shared_layers,
        "pad_token_id": None,
        "rms_norm_eps": config.eps,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": config.full_rotary,
                "rope_theta": config.full_theta,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": config.sliding_theta, "rope_type": "default"},
        },
        "sliding_window": config.window,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": config.vocab,
        "vocab_size_per_layer_input": 0,
    }


def _write(folder: Path, name: str, values: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _save_tensors(model: Target | Assistant, folder: Path, dtype: torch.dtype) -> None:
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix = "" if name.startswith(("pre_projection.", "post_projection.")) else "model."
        tensors[prefix + name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_target(
    model: Target, folder: Path, tokenizer_from: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a target in Hugging Face layout, with the tokenizer of another checkpoint."""
    config = _text_config(model.config, dtype=str(dtype).removeprefix("torch."))
    _write(folder, "config.json", {"architectures": ["Gemma4ForCausalLM"], **config})
    ids = {name: END_OF_TEXT_ID for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder, "generation_config.json", ids)
    _save_tensors(model, folder, dtype)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_symlink():  # to that of the other checkpoint
            shutil.copyfile(tokenizer_from / name, folder / name)


def save_assistant(model: Assistant, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes an assistant in Hugging Face layout."""
    name = str(dtype).removeprefix("torch.")
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": model.backbone,
        "dtype": name,
        "model_type": "gemma4_assistant",
        "text_config": _text_config(model.config, dtype=name),
        "tie_word_embeddings": True,
        "use_ordered_embeddings": False,
    }
    _write(folder, "config.json", config)
    _save_tensors(model, folder, dtype)


def _read_config(text: Mapping[str, Any]) -> Gemma4Config:
    ropes = text["rope_parameters"]
    return Gemma4Config(
        layer_types=tuple(text["layer_types"]),
        shared_layers=text["num_kv_shared_layers"],
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        full_head_dim=text["global_head_dim"],
        window=text["sliding_window"],
        vocab=text["vocab_size"],
        max_position=text["max_position_embeddings"],
        sliding_theta=ropes[SLIDING]["rope_theta"],
        full_theta=ropes[FULL]["rope_theta"],
        full_rotary=ropes[FULL]["partial_rotary_factor"],
        soft_cap=text["final_logit_softcapping"],
        eps=text["rms_norm_eps"],
    )


def _load_tensors(model: Target | Assistant, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in tensors.items()})


def load_target(folder: Path, device: torch.device) -> Target:
    """Loads a target that `save_target` wrote, for evaluation in float32."""
    model = Target(_read_config(json.loads((folder / "config.json").read_text())))
    _load_tensors(model, folder)
    return model.to(device).eval().requires_grad_(False)


def load_assistant(folder: Path, device: torch.device) -> Assistant:
    """Loads an assistant that `save_assistant` wrote, for evaluation in float32."""
    values = json.loads((folder / "config.json").read_text())
    model = Assistant(_read_config(values["text_config"]), values["backbone_hidden_size"])
    _load_tensors(model, folder)
    return model.to(device).eval().requires_grad_(False)
