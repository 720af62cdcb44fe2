# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with an MTP layer, and the layer in torch, float64, from its equations.

As in published files, the layer comes after the last one of the target. No code of Paceline is
used: the reference reads the files itself and has no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny_models
from eagle_reference import Draft, TargetReference, TargetStates, draft_greedily
from tiny_models import TinySpec, load_tensors, read_json

# The layer's copies of the target's tables, by the names of these.
TABLES = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "shared_head.head.weight",
}


def layer_name(directory: Path) -> str:
    """The prefix of the layer's tensors."""
    return f"model.layers.{read_json(directory / 'config.json')['num_hidden_layers']}."


def write(spec: TinySpec, out: Path, *, tables: str = "copies", seed: int = 0) -> Path:
    """A copy of a target with a random MTP layer.

    Args:
        spec: The target.
        out: A new folder.
        tables: "copies" of the target's embeddings and lm_head, as published; "own": others; or
            "none".
        seed: Of the layer.
    """
    tiny_models.copy_checkpoint(tiny_models.make(spec), out)
    # A layer of another model has random values of the right shapes.
    number = read_json(out / "config.json")["num_hidden_layers"]
    other = load_tensors(tiny_models.make(TinySpec(**vars(spec) | {"seed": spec.seed + 1000})))
    last, layer = f"model.layers.{number - 1}.", layer_name(out)
    generator = torch.Generator().manual_seed(seed)
    hidden = spec.hidden_size

    def add(tensors: dict[str, Tensor]) -> None:
        for name, tensor in other.items():
            if name.startswith(last):
                tensors[name.replace(last, layer, 1)] = tensor.clone()
        dtype = tensors["lm_head.weight"].dtype

        def random(*shape: int, mean: float = 0.0, std: float = 0.2) -> Tensor:
            return (mean + std * torch.randn(shape, generator=generator)).to(dtype)

        tensors[f"{layer}eh_proj.weight"] = random(hidden, 2 * hidden, std=0.1)
        for name in ("enorm", "hnorm"):
            tensors[f"{layer}{name}.weight"] = random(hidden, mean=1.0, std=0.3)
        # Its weights are all that tells the two kinds of feedback apart, since `hnorm` follows.
        tensors[f"{layer}shared_head.norm.weight"] = random(hidden, mean=1.0, std=0.9)
        for original, name in TABLES.items() if tables != "none" else ():
            copy = tensors[original].clone()
            tensors[layer + name] = copy if tables == "copies" else random(*copy.shape)

    tiny_models.edit_tensors(out, add)
    return out


class MtpReference:
    """An MTP layer: models.md 3.3, with the attention and the mixture of 2.5.

    Attributes:
        weights: Its tensors by their names after the layer's prefix. To train it, replace them with
            tensors that require gradients.
        feedback: "normed": a step passes on its hidden state after the last norm; "raw": before it.
    """

    def __init__(self, directory: Path, target: TargetReference, feedback: str = "normed") -> None:
        """Reads the target's folder."""
        self.config: dict[str, Any] = read_json(directory / "config.json")
        self.target = target
        self.feedback = feedback
        layer = layer_name(directory)
        self.weights: dict[str, Tensor] = {
            name.removeprefix(layer): tensor.double()
            for name, tensor in load_tensors(directory).items()
            if name.startswith(layer)
        }

    def hidden_of(self, states: TargetStates) -> Tensor:
        """The part of a target's states that the layer reads, [tokens, hidden]."""
        return states.output

    def first_inputs(self, hidden: Tensor) -> Tensor:
        """The layer's hidden input in a first pass."""
        return hidden

    def run(self, tokens: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the layer over positions 0, 1, ...; as `EagleReference.run`."""
        w = self.weights
        table = w.get("embed_tokens.weight", self.target.embedding)
        head = w.get("shared_head.head.weight", self.target.lm_head)
        e = self.rms(table[tokens], "enorm")
        n = self.rms(inputs, "hnorm")
        x = torch.cat([e, n], dim=-1) @ w["eh_proj.weight"].T
        x = x + self.attention(self.rms(x, "input_layernorm"))
        x = x + self.mixture(self.rms(x, "post_attention_layernorm"))
        normed = self.rms(x, "shared_head.norm")
        return normed @ head.to(x.dtype).T, normed if self.feedback == "normed" else x

    def draft(self, tokens: Sequence[int], k: int, states: TargetStates) -> list[Draft]:
        """Drafts k tokens greedily; as `EagleReference.draft`."""
        return draft_greedily(self.run, tokens, k, self.hidden_of(states))

    # ---- pieces --------------------------------------------------------------------------------

    def rms(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """RMSNorm."""
        mean = x.pow(2).mean(-1, keepdim=True)
        return (
            self.weights[f"{name}.weight"]
            * x
            * torch.rsqrt(mean + (self.config["rms_norm_eps"] if eps is None else eps))
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer."""
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU."""
        gate = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def mixture(self, x: Tensor) -> Tensor:
        """The chosen experts of each row, and the shared one; without groups of experts."""
        assert self.config["n_group"] == 1
        scores = self.linear(x, "mlp.gate").sigmoid()
        corrected = scores + self.weights["mlp.gate.e_score_correction_bias"]
        chosen = corrected.topk(self.config["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.config["routed_scaling_factor"]
        # Every expert computes every row; the weight of those that are not chosen is 0.
        every = torch.zeros_like(scores).scatter(1, chosen, weights)
        total = self.mlp(x, "mlp.shared_experts")
        for expert in range(every.shape[1]):
            total = total + every[:, expert : expert + 1] * self.mlp(x, f"mlp.experts.{expert}")
        return total

    def attention(self, x: Tensor) -> Tensor:
        """Latent attention of positions 0, 1, ..., one head at a time, with keys as they are."""
        config, length = self.config, len(x)
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        v_dim, rank = config["v_head_dim"], config["kv_lora_rank"]
        heads = config["num_attention_heads"]
        name = "self_attn"
        q = self.linear(
            self.rms(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6),
            f"{name}.q_b_proj",
        ).view(length, heads, nope + rope)
        latent, k_rope = self.linear(x, f"{name}.kv_a_proj_with_mqa").split([rank, rope], -1)
        latent = self.rms(latent, f"{name}.kv_a_layernorm", 1e-6)
        k_rope = self.rotate(k_rope)
        kv = self.linear(latent, f"{name}.kv_b_proj").view(length, heads, nope + v_dim)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            scores = q[:, head, :nope] @ kv[:, head, :nope].T
            scores = scores + self.rotate(q[:, head, nope:]) @ k_rope.T
            weights = (scores / (nope + rope) ** 0.5).masked_fill(future, float("-inf")).softmax(-1)
            outputs.append(weights @ kv[:, head, nope:])
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates pairs that are side by side by their position."""
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64).unsqueeze(1) * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[:, 0::2], x[:, 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(1)
