# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of Qwen3.5 with an MTP layer, and the layer in torch, float64.

The layer is that of the reference's equations, not of any library: fc reads the embedding's half
first, the target's row after its last norm, and a step passes on its row after `mtp.norm`. The
reference reads the files itself and has no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

import tiny_models
from eagle_reference import Draft, TargetReference, TargetStates, draft_greedily
from tiny_configs import FULL
from tiny_models import TinySpec, edit_config, load_tensors, read_json

PART = "mtp."


def write(spec: TinySpec, out: Path, *, seed: int = 0, is_split: bool = False) -> Path:
    """A copy of a target with a random MTP layer.

    Args:
        spec: The target.
        out: A new folder.
        seed: Of the layer.
        is_split: The layer's experts have tensors of their own.
    """
    tiny_models.copy_checkpoint(tiny_models.make(spec), out)
    # A full layer of another model has random values of the right shapes.
    number = 1 if spec.family == "qwen3_next" else 0
    kind = TinySpec(
        **vars(spec)
        | {
            "seed": spec.seed + 1000,
            "layer_types": (FULL,) * (number + 1),
            "delta": type(spec.delta)(**vars(spec.delta) | {"dense_layers": ()}),
        }
    )
    other = load_tensors(tiny_models.make(kind))
    last = f"model.layers.{number}."
    generator = torch.Generator().manual_seed(seed)
    hidden = spec.hidden_size

    def add(tensors: dict[str, Tensor]) -> None:
        dtype = tensors["model.norm.weight"].dtype

        def random(*shape: int, mean: float = 0.0, std: float = 0.2) -> Tensor:
            return (mean + std * torch.randn(shape, generator=generator)).to(dtype)

        layer = {
            name.replace(last, f"{PART}layers.0.", 1): tensor.clone()
            for name, tensor in other.items()
            if name.startswith(last)
        }
        if is_split:
            split_experts(layer)
        tensors |= layer
        tensors[f"{PART}fc.weight"] = random(hidden, 2 * hidden, std=0.1)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"{PART}{name}.weight"] = random(hidden, std=0.3)
        tensors[f"{PART}norm.weight"] = random(hidden, std=0.9)

    tiny_models.edit_tensors(out, add)
    key = "num_nextn_predict_layers" if spec.family == "qwen3_next" else "mtp_num_hidden_layers"
    edit_config(out, **{key: 1})
    return out


def split_experts(tensors: dict[str, Tensor]) -> None:
    """Gives each expert tensors of its own, as transformers writes them."""
    for name in [name for name in tensors if ".experts." in name]:
        base, which = name.rsplit(".", 1)
        for i, matrix in enumerate(tensors.pop(name)):
            parts = {"down_proj": matrix}
            if which == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, value in parts.items():
                tensors[f"{base}.{i}.{part}.weight"] = value.contiguous()


class MtpReference:
    """The MTP layer of Qwen3.5.

    Attributes:
        weights: Its tensors by their names after "mtp.". To train it, replace them with tensors
            that require gradients.
        bug: Empty, or a mistake that tests plant.
    """

    def __init__(self, directory: Path, target: TargetReference, bug: str = "") -> None:
        """Reads the target's folder."""
        self.config: dict[str, Any] = read_json(directory / "config.json")
        self.target = target
        self.bug = bug
        self.weights: dict[str, Tensor] = {
            name.removeprefix(PART): tensor.double()
            for name, tensor in load_tensors(directory).items()
            if name.startswith(PART)
        }

    def hidden_of(self, states: TargetStates) -> Tensor:
        """The part of a target's states that the layer reads, [tokens, hidden]."""
        return states.output

    def first_inputs(self, hidden: Tensor) -> Tensor:
        """The layer's hidden input in a first pass."""
        return hidden

    def run(self, tokens: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the layer over positions 0, 1, ...; as `EagleReference.run`."""
        e = self.rms(self.target.embedding[tokens], "pre_fc_norm_embedding")
        h = self.rms(inputs, "pre_fc_norm_hidden")
        halves = [h, e] if self.bug == "hidden first" else [e, h]
        x = torch.cat(halves, dim=-1) @ self.weights["fc.weight"].T
        layer = "layers.0."
        x = x + self.attention(self.rms(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
        x = x + self.mlp(self.rms(x, f"{layer}post_attention_layernorm"), f"{layer}mlp.")
        normed = self.rms(x, "norm")
        feedback = x if self.bug == "feedback before the norm" else normed
        return normed @ self.target.lm_head.to(x.dtype).T, feedback

    def draft(self, tokens: Sequence[int], k: int, states: TargetStates) -> list[Draft]:
        """Drafts k tokens greedily; as `EagleReference.draft`."""
        return draft_greedily(self.run, tokens, k, self.hidden_of(states))

    # ---- pieces --------------------------------------------------------------------------------

    def rms(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with 1 + w."""
        mean = x.pow(2).mean(-1, keepdim=True)
        return (1 + self.weights[f"{name}.weight"]) * x * torch.rsqrt(mean + 1e-6)

    def glu(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """SwiGLU."""
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """A dense MLP, or all experts, of which those that are not chosen have the weight 0."""
        w = {k.removeprefix(name): v for k, v in self.weights.items() if k.startswith(name)}
        units = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        if units[0] in w:
            return self.glu(x, *(w[unit] for unit in units))
        scores = (x @ w["gate.weight"].T).softmax(-1)
        chosen = scores.topk(self.config["num_experts_per_tok"])
        weights = chosen.values / chosen.values.sum(-1, keepdim=True)
        every = torch.zeros_like(scores).scatter(1, chosen.indices, weights)
        shared = self.glu(x, *(w[f"shared_expert.{unit}"] for unit in units))
        total = torch.sigmoid(x @ w["shared_expert_gate.weight"].T) * shared
        for i in range(every.shape[1]):
            if "experts.gate_up_proj" in w:
                gate, up = w["experts.gate_up_proj"][i].chunk(2)
                expert = self.glu(x, gate, up, w["experts.down_proj"][i])
            else:
                expert = self.glu(x, *(w[f"experts.{i}.{unit}"] for unit in units))
            total = total + every[:, i : i + 1] * expert
        return total

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Full attention of positions 0, 1, ..., one head at a time, and its gate."""
        config, length = self.config, len(x)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config["head_dim"]
        w = {k.removeprefix(name): v for k, v in self.weights.items() if k.startswith(name)}
        both = (x @ w["q_proj.weight"].T).view(length, heads, 2, dim)
        q = self.rotate(self.rms(both[:, :, 0], f"{name}q_norm"))
        k = (x @ w["k_proj.weight"].T).view(length, kv_heads, dim)
        k = self.rotate(self.rms(k, f"{name}k_norm"))
        v = (x @ w["v_proj.weight"].T).view(length, kv_heads, dim)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, own].T / dim**0.5
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs.append((weights @ v[:, own]) * torch.sigmoid(both[:, head, 1]))
        return torch.cat(outputs, dim=-1) @ w["o_proj.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates the first part of each head, its halves by their position."""
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[-1] * rope["partial_rotary_factor"])
        pairs = torch.arange(0, rotated, 2, dtype=torch.float64)
        frequencies = rope["rope_theta"] ** (-pairs / rotated)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        a, b, rest = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
