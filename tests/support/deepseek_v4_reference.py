# SPDX-License-Identifier: Apache-2.0
"""The MTP layer of DeepSeek-V4 in torch, float64, from its equations; and its target.

No code of Paceline is used, and there is no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepseek_v4_models import (
    V4Spec,
    model,
    published_config,
    published_tensors,
    value_of,
    whole_state,
)
from eagle_reference import Draft, TargetStates, draft_greedily


class V4TargetReference:
    """A target in transformers, for drafters that read its residual streams."""

    def __init__(self, spec: V4Spec) -> None:
        """Loads the target."""
        self.model = model(spec)
        self.embedding: Tensor = self.model.get_input_embeddings().weight.double()
        self.lm_head: Tensor = self.model.get_output_embeddings().weight.double()

    def states(self, tokens: Sequence[int]) -> TargetStates:
        """Runs the target.

        Returns:
            Its streams [tokens, 4, hidden] after each layer, and as its output those after the last
            one.
        """
        found: list[Tensor] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            streams = output[0] if isinstance(output, tuple) else output
            found.append(streams.reshape(len(tokens), 4, -1).double())

        hooks = [layer.register_forward_hook(keep) for layer in self.model.model.layers]
        logits = self.model(torch.tensor([list(tokens)])).logits[0]
        for hook in hooks:
            hook.remove()
        return TargetStates(logits.double(), torch.stack(found), found[-1])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The target's greedy continuation of a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.states(tokens).logits[-1].argmax()))
        return tokens[len(prompt) :]


class V4MtpReference:
    """The MTP layer: models.md 3.4, with the layer of 2.6, without a cache.

    Attributes:
        weights: Its tensors by their published names after "mtp.0.", without scales. To train it,
            replace them with tensors that require gradients.
    """

    def __init__(self, spec: V4Spec, target: V4TargetReference) -> None:
        """Takes the layer's weights."""
        self.target = target
        self.config = published_config(spec)
        stored = published_tensors(spec, whole_state(spec))
        self.weights: dict[str, Tensor] = {
            name.removeprefix("mtp.0."): value_of(stored, name).double()
            for name in stored
            if name.startswith("mtp.0.") and not name.endswith(".scale")
        }

    def hidden_of(self, states: TargetStates) -> Tensor:
        """The streams that the layer reads, [tokens, 4, hidden]."""
        return states.output

    def first_inputs(self, hidden: Tensor) -> Tensor:
        """The layer's hidden input in a first pass."""
        return hidden

    def run(self, tokens: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the layer over positions 0, 1, ...; as `EagleReference.run`."""
        e = self.linear(self.rms(self.target.embedding[tokens], "enorm"), "e_proj")
        x = e.unsqueeze(1) + self.linear(self.rms(inputs, "hnorm"), "h_proj")
        x = self.branch(x, "attn", self.attention)
        x = self.branch(x, "ffn", self.mixture)
        return self.logits(x), x

    def draft(self, tokens: Sequence[int], k: int, states: TargetStates) -> list[Draft]:
        """Drafts k tokens greedily; as `EagleReference.draft`."""
        return draft_greedily(self.run, tokens, k, self.hidden_of(states))

    # ---- pieces --------------------------------------------------------------------------------

    def rms(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm."""
        return self.weights[f"{name}.weight"] * self.unit(x)

    def unit(self, x: Tensor) -> Tensor:
        """RMSNorm without a weight."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer."""
        return x @ self.weights[f"{name}.weight"].T

    def logits(self, x: Tensor) -> Tensor:
        """The logits of streams."""
        return self.rms(self.summed(x), "norm") @ self.target.lm_head.to(x.dtype).T

    def summed(self, x: Tensor) -> Tensor:
        """What the last norm reads of streams [tokens, 4, hidden], [tokens, hidden]."""
        scale, base = self.weights["hc_head_scale"], self.weights["hc_head_base"]
        pre = (self.mix(x, "hc_head_") * scale + base).sigmoid() + self.config["hc_eps"]
        return (pre.unsqueeze(-1) * x).sum(1)

    def mix(self, x: Tensor, name: str) -> Tensor:
        """The factors of each row before scale and base."""
        return self.unit(x.flatten(1)) @ self.weights[f"{name}fn"].T

    def branch(self, x: Tensor, name: str, sub: Any) -> Tensor:
        """A branch between reading and writing the streams."""
        m, eps = self.mix(x, f"hc_{name}_"), self.config["hc_eps"]
        scale, base = self.weights[f"hc_{name}_scale"], self.weights[f"hc_{name}_base"]
        pre = (m[:, :4] * scale[0] + base[:4]).sigmoid() + eps
        post = 2 * (m[:, 4:8] * scale[1] + base[4:8]).sigmoid()
        c = (m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + eps
        c = c / (c.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            c = c / (c.sum(2, keepdim=True) + eps)
            c = c / (c.sum(1, keepdim=True) + eps)
        out = sub(self.rms((pre.unsqueeze(-1) * x).sum(1), f"{name}_norm"))
        return post.unsqueeze(-1) * out.unsqueeze(1) + torch.einsum("tij,tih->tjh", c, x)

    def expert(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU with limits."""
        limit = self.config["swiglu_limit"]
        gate = self.linear(x, f"{name}.w1").clamp(max=limit)
        up = self.linear(x, f"{name}.w3").clamp(-limit, limit)
        return self.linear(torch.nn.functional.silu(gate) * up, f"{name}.w2")

    def mixture(self, x: Tensor) -> Tensor:
        """The chosen experts of each row, and the shared one."""
        scores = torch.nn.functional.softplus(self.linear(x, "ffn.gate")).sqrt()
        chosen = (
            (scores + self.weights["ffn.gate.bias"])
            .topk(self.config["num_experts_per_tok"])
            .indices
        )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        every = torch.zeros_like(scores).scatter(1, chosen, weights)
        total = self.expert(x, "ffn.shared_experts")
        for i in range(every.shape[1]):
            total = total + every[:, i : i + 1] * self.expert(x, f"ffn.experts.{i}")
        return total

    def attention(self, x: Tensor) -> Tensor:
        """Attention over the window, with sinks; every head has the same key and value."""
        positions = torch.arange(len(x))
        distance = positions.unsqueeze(1) - positions
        hidden = (distance < 0) | (distance >= self.config["sliding_window"])
        return self.attend(x, self.entries(x), hidden)

    def entries(self, x: Tensor, first: int = 0) -> Tensor:
        """Keys, which are values too, of rows at positions from `first` on, [rows, head_dim]."""
        entries = self.rms(self.linear(x, "attn.wkv"), "attn.kv_norm")
        return self.rotate(entries.unsqueeze(1), self.config["qk_rope_head_dim"], 1, first)[:, 0]

    def attend(self, x: Tensor, kv: Tensor, hidden: Tensor, first: int = 0) -> Tensor:
        """The output for rows at positions from `first` on, which do not see `hidden` entries."""
        config, length = self.config, len(x)
        heads, dim = config["num_attention_heads"], config["head_dim"]
        rope = config["qk_rope_head_dim"]
        q = self.linear(self.rms(self.linear(x, "attn.wq_a"), "attn.q_norm"), "attn.wq_b")
        q = self.rotate(self.unit(q.view(length, heads, dim)), rope, 1, first)
        scores = torch.einsum("thd,sd->hts", q, kv) * dim**-0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        sinks = self.weights["attn.attn_sink"].view(heads, 1, 1).expand(heads, length, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out = self.rotate(torch.einsum("hts,sd->thd", weights, kv), rope, -1, first)
        groups = out.reshape(length, config["o_groups"], -1)
        o_a = self.weights["attn.wo_a.weight"].view(config["o_groups"], -1, groups.shape[-1])
        return self.linear(torch.einsum("tgd,grd->tgr", groups, o_a).flatten(1), "attn.wo_b")

    def rotate(self, x: Tensor, width: int, sign: int = 1, first: int = 0) -> Tensor:
        """Rotates pairs in the last elements of each head by their position, from `first` on."""
        frequencies = self.config["rope_theta"] ** (
            -torch.arange(width // 2, dtype=torch.float64) * 2 / width
        )
        positions = first + torch.arange(len(x), dtype=torch.float64)
        angles = sign * positions.view(-1, 1, 1) * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        kept, tail = x[..., :-width], x[..., -width:]
        a, b = tail[..., 0::2], tail[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([kept, rotated], dim=-1)
