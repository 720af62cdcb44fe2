# SPDX-License-Identifier: Apache-2.0
"""Tiny EAGLE draft heads in every layout in use, for tests.

    path = write(EagleSpec("speculators", norm_before_fc=True), target_dir, tmp_path / "head")

Every parameter is random. torch is imported when it is first used.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import load_tensors, read_json, save_tensors, write_json

if TYPE_CHECKING:
    import torch

# EAGLE-1 and EAGLE-3 in SafeAILab's formats, EAGLE-3 in the format of `speculators`.
LAYOUTS = ("eagle", "eagle3", "speculators")
PICKLE_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class EagleSpec:
    """A tiny EAGLE draft head.

    Attributes:
        layout: One of `LAYOUTS`.
        seed: The seed of the weights.
        layer_type: "llama", or "qwen3": norms on q and k.
        hidden_size: EAGLE-3 only: width; None: the target's.
        intermediate_size: Width of the MLP.
        num_layers: EAGLE-3 only: layers; those after the first are ordinary ones.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Elements of a head.
        draft_vocab_size: EAGLE-3 only: rows of the lm_head; None: the target's, without `d2t`.
        aux_layers: EAGLE-3 only; None: the configuration names none.
        num_aux: EAGLE-3 only: the number of hidden states that `fc` reads.
        norm_before_residual: EAGLE-3 only; None: the configuration has no such key.
        norm_before_fc: EAGLE-3 only: one norm before `fc`.
        fc_norm: EAGLE-3 only: one norm for each hidden state.
        norm_output: EAGLE-3 only: the normed output is fed back.
        owns_embedding: Whether it has an embedding table.
        fc_bias: Whether `fc` has a bias.
        attention_bias: Biases on q, k, v and o.
        rope_theta: None: the configuration has none.
        max_position: The number of positions.
        dtype: The dtype of the stored tensors.
        is_pickle: Write `pytorch_model.bin` instead of safetensors.
    """

    layout: str = "eagle3"
    seed: int = 0
    layer_type: str = "llama"
    hidden_size: int | None = None
    intermediate_size: int = 80
    num_layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    draft_vocab_size: int | None = 96
    aux_layers: tuple[int, ...] | None = None
    num_aux: int = 3
    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    owns_embedding: bool = True
    fc_bias: bool = False
    attention_bias: bool = False
    rope_theta: float | None = 50_000.0
    max_position: int = 2048
    dtype: str = "float32"
    is_pickle: bool = False

    @property
    def is_eagle3(self) -> bool:
        """Whether it is EAGLE-3."""
        return self.layout != "eagle"

    @property
    def method(self) -> str:
        """Its method in `speculative_config`."""
        return "eagle3" if self.is_eagle3 else "eagle"

    @property
    def first_layer(self) -> str:
        """The prefix of the tensors of layer 0."""
        return "midlayer." if self.layout == "eagle3" else "layers.0."


def write(spec: EagleSpec, target_dir: Path, out: Path) -> Path:
    """Writes a draft head for a target into a new folder."""
    target = read_json(target_dir / "config.json")
    target = target.get("text_config", target)
    out.mkdir(parents=True)
    write_json(out / "config.json", config_json(spec, target))
    tensors = random_tensors(spec, target)
    if not spec.is_eagle3 and spec.owns_embedding:
        # EAGLE-1 draft heads have a copy of the target's table.
        embedding = load_tensors(target_dir)["model.embed_tokens.weight"]
        tensors["embed_tokens.weight"] = embedding.to(tensors["fc.weight"].dtype)
    save(spec, tensors, out)
    return out


def save(spec: EagleSpec, tensors: Mapping[str, torch.Tensor], out: Path) -> None:
    """Writes tensors in the format of the spec."""
    import torch

    if spec.is_pickle:
        torch.save(dict(tensors), out / PICKLE_NAME)
    else:
        save_tensors(out, tensors)


def config_json(spec: EagleSpec, target: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, as in published draft heads."""
    hidden = spec.hidden_size or target["hidden_size"]
    layer: dict[str, Any] = {
        "model_type": spec.layer_type,
        "hidden_size": hidden,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": spec.attention_bias,
        "tie_word_embeddings": False,
    }
    if spec.rope_theta is not None:
        layer["rope_theta"] = spec.rope_theta
    if spec.layout == "eagle":
        return layer | {"architectures": ["LlamaForCausalLM"], "bias": spec.fc_bias}
    flags: dict[str, Any] = {}
    if spec.draft_vocab_size is not None:
        flags["draft_vocab_size"] = spec.draft_vocab_size
    if spec.norm_before_residual is not None:
        flags["norm_before_residual"] = spec.norm_before_residual
    if spec.norm_output:
        flags["norm_output"] = True
    if spec.aux_layers is not None:
        flags["eagle_aux_hidden_state_layer_ids"] = list(spec.aux_layers)
    if spec.layout == "eagle3":
        return layer | flags | {"architectures": ["LlamaForCausalLMEagle3"]}
    return flags | {
        "architectures": ["Eagle3DraftModel" if spec.norm_before_fc else "Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "target_hidden_size": target["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": (
            None if spec.aux_layers is None else list(spec.aux_layers)
        ),
        "embed_requires_grad": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": "some/target",
                "architectures": list(target["architectures"]),
            },
        },
    }


def shapes(spec: EagleSpec, target: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor but `d2t` and `t2d`."""
    target_hidden, vocab = target["hidden_size"], target["vocab_size"]
    hidden = spec.hidden_size or target_hidden
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found: dict[str, tuple[int, ...]] = {}
    if spec.owns_embedding:
        found["embed_tokens.weight"] = (vocab, hidden)
    fc_in = spec.num_aux * target_hidden if spec.is_eagle3 else 2 * hidden
    found["fc.weight"] = (hidden, fc_in)
    if spec.fc_bias:
        found["fc.bias"] = (hidden,)
    if spec.norm_before_fc:
        found["input_norm.weight"] = (fc_in,)
    if spec.fc_norm:
        for i in range(spec.num_aux):
            found[f"fc_norm.{i}.weight"] = (target_hidden,)
    for i in range(spec.num_layers):
        layer = spec.first_layer if i == 0 else f"layers.{i}."
        wide = 2 * hidden if spec.is_eagle3 and i == 0 else hidden
        if spec.is_eagle3:
            found[f"{layer}input_layernorm.weight"] = (hidden,)
            if i == 0:
                found[f"{layer}hidden_norm.weight"] = (hidden,)
        found[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        for name, shape in {
            "q_proj": (queries, wide),
            "k_proj": (keys, wide),
            "v_proj": (keys, wide),
            "o_proj": (hidden, queries),
        }.items():
            found[f"{layer}self_attn.{name}.weight"] = shape
            if spec.attention_bias:
                found[f"{layer}self_attn.{name}.bias"] = shape[:1]
        if spec.layer_type == "qwen3":
            found[f"{layer}self_attn.q_norm.weight"] = (spec.head_dim,)
            found[f"{layer}self_attn.k_norm.weight"] = (spec.head_dim,)
        found[f"{layer}mlp.gate_proj.weight"] = (spec.intermediate_size, hidden)
        found[f"{layer}mlp.up_proj.weight"] = (spec.intermediate_size, hidden)
        found[f"{layer}mlp.down_proj.weight"] = (hidden, spec.intermediate_size)
    if spec.is_eagle3:
        found["norm.weight"] = (hidden,)
        found["lm_head.weight"] = (spec.draft_vocab_size or vocab, hidden)
    return found


def random_tensors(spec: EagleSpec, target: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor, random; the reduced vocabulary is a random choice of ids."""
    import torch

    dtype = getattr(torch, spec.dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(spec, target).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {name}".encode()))
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and not name.endswith("bias")
        # No norm follows in an EAGLE-1 draft head: with a large input attention would be one-hot.
        spread = 0.04 if name == "fc.weight" and not spec.is_eagle3 else 0.2
        tensors[name] = (1 + 0.1 * noise if is_norm else spread * noise).to(dtype)
    if spec.is_eagle3 and spec.draft_vocab_size is not None:
        generator = torch.Generator().manual_seed(spec.seed)
        chosen = torch.randperm(target["vocab_size"], generator=generator)
        ids = chosen[: spec.draft_vocab_size].sort().values
        tensors |= vocabulary_maps(ids, target["vocab_size"])
    return tensors


def vocabulary_maps(ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a reduced vocabulary of these ids."""
    import torch

    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
