# SPDX-License-Identifier: Apache-2.0
"""Tiny Gemma 4 assistants in Hugging Face layout, for tests.

    path = write(AssistantSpec(centroids=(16, 3)), target_dir, tmp_path / "assistant")

Every parameter is random, and the order of tokens is a random permutation. torch and transformers
are imported when they are first used.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_configs import FULL, SLIDING, to_old_spelling
from tiny_models import save_tensors, write_json

# The classes of transformers; True: those of the 12B model's assistant.
_CLASSES = {
    False: ("Gemma4TextConfig", "Gemma4AssistantConfig", "Gemma4AssistantForCausalLM"),
    True: (
        "Gemma4UnifiedTextConfig",
        "Gemma4UnifiedAssistantConfig",
        "Gemma4UnifiedAssistantForCausalLM",
    ),
}


@dataclass(frozen=True)
class AssistantSpec:
    """A tiny assistant; settings that must equal the target's are taken from it.

    Attributes:
        seed: The seed of the weights.
        hidden_size: Its own width.
        intermediate_size: The width of its MLPs.
        heads: Query heads.
        layer_types: One for each layer; the last is a full one.
        centroids: The number of clusters, and of clusters with logits; None: no clusters.
        attention_bias: Biases on q and o.
        logit_soft_cap: The soft cap on logits; 0: none.
        max_position: The number of positions.
        dtype: The dtype of the stored tensors.
        old_spelling: Write `config.json` with the keys of published files.
        shards: Files to spread the tensors over.
    """

    seed: int = 0
    hidden_size: int = 32
    intermediate_size: int = 48
    heads: int = 4
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, SLIDING, FULL)
    centroids: tuple[int, int] | None = None
    attention_bias: bool = False
    logit_soft_cap: float = 0.0
    max_position: int = 2048
    dtype: str = "float32"
    old_spelling: bool = False
    shards: int = 1


def write(spec: AssistantSpec, target_dir: Path, out: Path) -> Path:
    """Writes an assistant for a target into a new folder."""
    import torch

    model = _random_model(spec, target_dir)
    dtype = getattr(torch, spec.dtype)
    tensors = {
        name: tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    out.mkdir(parents=True)
    save_tensors(out, tensors, spec.shards)
    write_json(out / "config.json", _config_json(spec, model))
    return out


def _hf_config(spec: AssistantSpec, target_dir: Path) -> Any:
    import transformers

    target = transformers.AutoConfig.from_pretrained(target_dir).get_text_config()
    is_unified = "unified" in target.model_type
    text_class, config_class, _ = (getattr(transformers, name) for name in _CLASSES[is_unified])
    by_type = {
        layer_type: target.per_layer_config[i] for i, layer_type in enumerate(target.layer_types)
    }
    full = by_type[FULL]
    sliding = by_type.get(SLIDING, full)
    values: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layer_types),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": sliding.num_key_value_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": target.attention_k_eq_v,
        "num_global_key_value_heads": (
            full.num_key_value_heads if target.attention_k_eq_v else None
        ),
        "layer_types": list(spec.layer_types),
        "num_kv_shared_layers": len(spec.layer_types),
        "sliding_window": target.sliding_window,
        "final_logit_softcapping": spec.logit_soft_cap or None,
        "rope_parameters": target.rope_parameters,
        "rms_norm_eps": 1e-6,
        "attention_bias": spec.attention_bias,
        "max_position_embeddings": spec.max_position,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if not is_unified:
        values |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    # Files of the sizes without clusters have the two numbers too.
    count, top = spec.centroids or (2048, 32)
    return config_class(
        text_config=text_class(**values),
        backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=spec.centroids is not None,
        num_centroids=count,
        centroid_intermediate_top_k=top,
    )


def _random_model(spec: AssistantSpec, target_dir: Path) -> Any:
    import torch
    import transformers

    config = _hf_config(spec, target_dir)
    name = _CLASSES["unified" in config.model_type][2]
    model = getattr(transformers, name)(config).eval().float()

    def noise(name: str, shape: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {name}".encode()))
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = noise(name, parameter.shape)
            if name == "pre_projection.weight":
                # The target's hidden states are large; what layers add must not vanish beside them.
                parameter.copy_(0.04 * values)
            elif parameter.ndim == 1 and name.endswith("norm.weight"):
                is_second = "post_attention" in name or "post_feedforward" in name
                parameter.copy_((2.0 if is_second or name == "model.norm.weight" else 1.0)
                                + 0.1 * values)  # fmt: skip
            else:
                parameter.copy_(0.2 * values)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.15 * noise(name, buffer.shape))
            elif name.endswith("token_ordering"):
                generator = torch.Generator().manual_seed(spec.seed)
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    return model


def _config_json(spec: AssistantSpec, model: Any) -> dict[str, Any]:
    values = json.loads(model.config.to_json_string(use_diff=False))
    kept = {key: value for key, value in values.items() if not key.startswith("_")}
    text = {key: value for key, value in kept["text_config"].items() if not key.startswith("_")}
    kept |= {"architectures": [type(model).__name__], "dtype": spec.dtype}
    kept["text_config"] = to_old_spelling(text) if spec.old_spelling else text
    return kept
