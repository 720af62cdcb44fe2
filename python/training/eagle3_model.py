# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft head of the demo target: the model in torch, saving and loading.

`docs/model-format.md` has the equations; `DraftHead.forward` explains the training form of the
attention.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import VOCAB_SIZE
from draft_layers import RmsNorm, rope, rotation
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

# The draft head reads the residual streams that enter these layers of the target, which has six.
AUX_LAYERS = (1, 3, 5)
# Upper bound of the saved tensors.
MAX_BYTES = 8 << 20


@dataclass(frozen=True)
class DraftHeadConfig:
    """Sizes of the draft head, which has one Llama layer."""

    target_hidden: int
    hidden: int
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    draft_vocab: int = 2048
    theta: float = 10_000.0
    eps: float = 1e-6
    max_position: int = 1024


@dataclass
class DraftKeys:
    """Keys and values that the steps of one training pass store.

    Attributes:
        first: Keys and values of the first step, each `[batch, kv heads, length, head_dim]`.
        later: The same for each later step; position i sees its own entry only.
    """

    first: tuple[Tensor, Tensor] | None = None
    later: list[tuple[Tensor, Tensor]] | None = None


class DraftHead(nn.Module):
    """The draft head; the embedding table is the target's.

    Attributes:
        ids: `[draft_vocab]`, the target's id of each row of the LM head, ascending.
    """

    ids: Tensor

    def __init__(self, config: DraftHeadConfig, ids: Tensor) -> None:
        super().__init__()
        self.config = config
        c = config
        streams = len(AUX_LAYERS) * c.target_hidden

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.input_norm = RmsNorm(streams, c.eps)
        self.fc = linear(streams, c.hidden)
        self.input_layernorm = RmsNorm(c.hidden, c.eps)
        self.hidden_norm = RmsNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RmsNorm(c.hidden, c.eps)
        self.q_proj = linear(2 * c.hidden, c.heads * c.head_dim)
        self.k_proj = linear(2 * c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = linear(2 * c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden)
        self.gate_proj = linear(c.hidden, c.intermediate)
        self.up_proj = linear(c.hidden, c.intermediate)
        self.down_proj = linear(c.intermediate, c.hidden)
        self.norm = RmsNorm(c.hidden, c.eps)
        self.lm_head = linear(c.hidden, c.draft_vocab)
        self.register_buffer("ids", ids)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def first_hidden(self, streams: Tensor) -> Tensor:
        """Computes the hidden input of the first step from `[..., 3 * target_hidden]`."""
        hidden: Tensor = self.fc(self.input_norm(streams))
        return hidden

    def forward(self, embedding: Tensor, hidden: Tensor, step: int, keys: DraftKeys) -> Tensor:
        """Runs one step for all drafts at once.

        Index i belongs to the draft that starts after token i + 1. In step s it is at position
        i + s. It sees the keys of the first step at positions 0 to i and the keys of its own
        earlier steps, exactly as when it drafts alone.

        Args:
            embedding: Embedding of token i + 1 + s, `[batch, length, hidden]`.
            hidden: `first_hidden`, or the output of the previous step.
            step: s.
            keys: Keys and values of the previous steps; this step's are added.

        Returns:
            The input of `logits` and of the next step, `[batch, length, hidden]`.
        """
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        x = normed + self._attention(inputs, step, keys)
        y = self.post_attention_layernorm(x)
        out: Tensor = x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits `[..., draft_vocab]` from the output of a step."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def _attention(self, inputs: Tensor, step: int, keys: DraftKeys) -> Tensor:
        c = self.config
        batch, length, _ = inputs.shape
        by = rotation(torch.arange(length, device=inputs.device) + step, c.head_dim, c.theta)

        def split(x: Tensor, heads: int) -> Tensor:
            return x.view(batch, length, heads, c.head_dim).transpose(1, 2)

        q = rope(split(self.q_proj(inputs), c.heads), by)
        k = rope(split(self.k_proj(inputs), c.kv_heads), by)
        v = split(self.v_proj(inputs), c.kv_heads)
        if keys.first is None:
            keys.first, keys.later = (k, v), []
        else:
            assert keys.later is not None
            keys.later.append((k, v))
        later = keys.later or []
        groups = c.heads // c.kv_heads

        def widened(x: Tensor) -> Tensor:
            return x.repeat_interleave(groups, dim=1)

        first_k, first_v = (widened(x) for x in keys.first)
        scores = (q @ first_k.transpose(-1, -2)) * c.head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.float().masked_fill(future, float("-inf"))
        own = [(q * widened(k)).sum(-1, keepdim=True) * c.head_dim**-0.5 for k, _ in later]
        weights = torch.cat([scores, *(score.float() for score in own)], dim=-1).softmax(-1)
        output = weights[..., :length].to(v.dtype) @ first_v
        for index, (_, value) in enumerate(later):
            column = weights[..., length + index : length + index + 1]
            output = output + column.to(v.dtype) * widened(value)
        merged: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return merged


_LAYER = {
    "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp.": ("gate_proj", "up_proj", "down_proj"),
    "": ("input_layernorm", "hidden_norm", "post_attention_layernorm"),
}
_FILE_NAMES = {name: f"layers.0.{part}{name}" for part, names in _LAYER.items() for name in names}


def _file_name(parameter: str) -> str:
    module, _, leaf = parameter.partition(".")
    return f"{_FILE_NAMES.get(module, module)}.{leaf}"


def saved_tensors(head: DraftHead) -> dict[str, Tensor]:
    """All tensors by their names in the `speculators` format, matrices in bf16."""
    tensors = {}
    for name, parameter in head.named_parameters():
        tensors[_file_name(name)] = parameter.detach().bfloat16().cpu()
    ids = head.ids.cpu()
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    mask[ids] = True
    return {
        **{name: tensor.contiguous() for name, tensor in tensors.items()},
        "d2t": ids - torch.arange(len(ids)),
        "t2d": mask,
    }


def save_head(head: DraftHead, folder: Path) -> int:
    """Writes `config.json` and `model.safetensors`; returns the bytes of the tensors.

    Raises:
        ValueError: The tensors exceed MAX_BYTES.
    """
    c = head.config
    tensors = saved_tensors(head)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if nbytes > MAX_BYTES:
        raise ValueError(
            f"the draft head has {nbytes} bytes; allowed: at most {MAX_BYTES}; reduce "
            "draft_vocab or intermediate"
        )
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": c.draft_vocab,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": c.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "embed_requires_grad": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "gemma3_code", "architectures": ["Gemma3ForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": c.hidden,
            "intermediate_size": c.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": c.eps,
            "rope_theta": c.theta,
            "max_position_embeddings": c.max_position,
            "tie_word_embeddings": False,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return nbytes


def load_head(folder: Path, device: torch.device) -> DraftHead:
    """Loads a draft head that `save_head` wrote, for evaluation in float32."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layer = values["transformer_layer_config"]
    tensors = load_file(folder / "model.safetensors")
    config = DraftHeadConfig(
        target_hidden=values["target_hidden_size"],
        hidden=layer["hidden_size"],
        intermediate=layer["intermediate_size"],
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        draft_vocab=values["draft_vocab_size"],
        theta=layer["rope_theta"],
        eps=layer["rms_norm_eps"],
        max_position=layer["max_position_embeddings"],
    )
    d2t = tensors["d2t"]
    head = DraftHead(config, d2t + torch.arange(len(d2t)))
    for name, parameter in head.named_parameters():
        parameter.data.copy_(tensors[_file_name(name)])
    return head.to(device).eval().requires_grad_(False)
