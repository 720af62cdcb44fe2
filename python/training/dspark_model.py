# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter of the demo target: the model in torch, saving and loading.

`docs/block-drafters.md` has the equations. The training form drafts many blocks of one sequence at
once; each sees the target's hidden states before its first token, and its own rows.
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
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import Gemma3ForCausalLM

# The tokenizer's entry of the byte 0xC0, which does not occur in UTF-8.
MASK_TOKEN_ID = 125
# Upper bound of the saved tensors.
MAX_BYTES = 8 << 20


@dataclass(frozen=True)
class DSparkConfig:
    """Sizes of the drafter, whose layers are those of Qwen3."""

    target_hidden: int
    target_layers: int
    hidden: int
    taps: tuple[int, ...] = (0, 1, 2, 3, 4)
    layers: int = 3
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block: int = 7
    rank: int = 128
    theta: float = 10_000.0
    eps: float = 1e-6
    max_position: int = 1024


@dataclass(frozen=True)
class View:
    """Where the rows of blocks are, and what they see.

    Attributes:
        by: Rotation of the rows of the blocks, each `[rows, 1, blocks * block, head_dim / 2]`.
        before: Rotation of the context, each `[length, head_dim / 2]`.
        mask: Whether a row sees the context and the rows of blocks, `[rows, 1, blocks * block,
            length + blocks * block]`.
    """

    by: tuple[Tensor, Tensor]
    before: tuple[Tensor, Tensor]
    mask: Tensor

    @classmethod
    def of(cls, config: DSparkConfig, anchors: Tensor, length: int) -> View:
        """The view of blocks at `anchors`, `[rows, blocks]`, beside a context of `length`.

        A block sees the positions before its anchor, and its own rows.
        """
        context = torch.arange(length, device=anchors.device)
        offsets = torch.arange(config.block, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
        starts = anchors.repeat_interleave(config.block, 1)
        block = torch.arange(positions.shape[1], device=anchors.device) // config.block
        own = (block.unsqueeze(1) == block).expand(len(anchors), -1, -1)
        mask = torch.cat([context < starts.unsqueeze(-1), own], -1)
        size, theta = config.head_dim, config.theta
        by = rotation(positions.unsqueeze(1), size, theta)
        return cls(by, rotation(context, size, theta), mask.unsqueeze(1))


class BlockLayer(nn.Module):
    """A Qwen3 layer whose rows attend to the context and, in both directions, to their block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.input_layernorm = RmsNorm(c.hidden, c.eps)
        self.q_proj = _linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = _linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = _linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = _linear(c.heads * c.head_dim, c.hidden)
        self.q_norm = RmsNorm(c.head_dim, c.eps)
        self.k_norm = RmsNorm(c.head_dim, c.eps)
        self.post_attention_layernorm = RmsNorm(c.hidden, c.eps)
        self.gate_proj = _linear(c.hidden, c.intermediate)
        self.up_proj = _linear(c.hidden, c.intermediate)
        self.down_proj = _linear(c.intermediate, c.hidden)

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        """Runs the layer.

        Args:
            x: Rows of the blocks, `[rows, blocks * block, hidden]`.
            context: The drafter's view of the target's hidden states, `[rows, length, hidden]`.
            view: What the blocks see.
        """
        c = self.config

        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, c.head_dim)).transpose(1, 2)

        def keys(y: Tensor, by: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            k = rope(self.k_norm(split(self.k_proj(y), c.kv_heads)), by)
            return k, split(self.v_proj(y), c.kv_heads)

        normed = self.input_layernorm(x)
        q = rope(self.q_norm(split(self.q_proj(normed), c.heads)), view.by)
        # The context is normalised once for all layers.
        parts = zip(keys(context, view.before), keys(normed, view.by), strict=True)
        groups = c.heads // c.kv_heads
        k, v = (torch.cat(part, 2).repeat_interleave(groups, 1).to(q.dtype) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=view.mask)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        out: Tensor = x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))
        return out


class MarkovHead(nn.Module):
    """What the token before a draft adds to its logits."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(VOCAB_SIZE, config.rank)
        self.markov_w2 = _linear(config.rank, VOCAB_SIZE)
        nn.init.normal_(self.markov_w1.weight, std=0.1)


class ConfidenceHead(nn.Module):
    """Estimates how likely the target accepts a draft."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden + config.rank, 1)
        nn.init.zeros_(self.proj.bias)


class DSpark(nn.Module):
    """The drafter. It shares the target's embeddings and LM head.

    Attributes:
        embed: The target's embedding table, `[vocabulary, hidden]`.
    """

    embed: Tensor

    def __init__(self, config: DSparkConfig, embed: Tensor) -> None:
        super().__init__()
        self.config = config
        c = config
        self.fc = _linear(len(c.taps) * c.target_hidden, c.hidden)
        self.hidden_norm = RmsNorm(c.hidden, c.eps)
        self.layers = nn.ModuleList(BlockLayer(c) for _ in range(c.layers))
        self.norm = RmsNorm(c.hidden, c.eps)
        self.markov_head = MarkovHead(c)
        self.confidence_head = ConfidenceHead(c)
        self.register_buffer("embed", embed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, streams: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Runs blocks that start at different positions of the same rows.

        Args:
            streams: The target's residual streams of the taps, `[rows, length, taps *
                target_hidden]`.
            anchors: Position of the first token of each block, `[rows, blocks]`.
            tokens: That token, `[rows, blocks]`.

        Returns:
            The input of `corrected`, `[rows, blocks, block, hidden]`; entry j of a block is for
            position `anchors + j + 1`.
        """
        context = self.hidden_norm(self.fc(streams))
        masks = tokens.new_full((*tokens.shape, self.config.block - 1), MASK_TOKEN_ID)
        ids = torch.cat([tokens.unsqueeze(-1), masks], -1)
        x = embedding(ids.flatten(1), self.embed)
        view = View.of(self.config, anchors, streams.shape[1])
        for layer in self.layers:
            x = layer(x, context, view)
        hidden: Tensor = self.norm(x)
        return hidden.view(*ids.shape, -1)

    def corrected(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of drafts, `[..., vocabulary]`, and of the confidence head, `[...]`.

        Args:
            hidden: `[..., hidden]`.
            previous: The token before each draft, `[...]`; before the first it is the anchor.
        """
        markov = self.markov_head
        e = markov.markov_w1(previous)
        confidence = self.confidence_head.proj(torch.cat([hidden, e], -1))
        return linear(hidden, self.embed) + markov.markov_w2(e), confidence.squeeze(-1)

    @torch.no_grad()
    def draft(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The drafts of blocks at temperature 0, `[..., block]`, after the anchors `tokens`."""
        drafts = []
        for k in range(self.config.block):
            tokens = self.corrected(hidden[..., k, :], tokens)[0].argmax(-1)
            drafts.append(tokens)
        return torch.stack(drafts, -1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


_PARTS = {
    "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    "mlp.": ("gate_proj", "up_proj", "down_proj"),
}
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}


def _file_name(parameter: str) -> str:
    words = parameter.split(".")
    if words[0] == "layers":
        words[2] = _PART_OF.get(words[2], "") + words[2]
    return ".".join(words)


def saved_tensors(drafter: DSpark) -> dict[str, Tensor]:
    """All tensors by their names in the DeepSpec layout, in bf16."""
    return {
        _file_name(name): parameter.detach().bfloat16().cpu().contiguous()
        for name, parameter in drafter.named_parameters()
    }


def save_dspark(drafter: DSpark, folder: Path) -> int:
    """Writes `config.json` and `model.safetensors`; returns the bytes of the tensors.

    Raises:
        ValueError: The tensors exceed MAX_BYTES.
    """
    c = drafter.config
    tensors = saved_tensors(drafter)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": c.block,
        "target_layer_ids": list(c.taps),
        "mask_token_id": MASK_TOKEN_ID,
        "markov_rank": c.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_target_layers": c.target_layers,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers,
        "layer_types": ["full_attention"] * c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": c.eps,
        "rope_theta": c.theta,
        "max_position_embeddings": c.max_position,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return nbytes


def load_dspark(folder: Path, target: Gemma3ForCausalLM) -> DSpark:
    """Loads a drafter that `save_dspark` wrote, for evaluation in float32."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = DSparkConfig(
        target_hidden=target.config.hidden_size,
        target_layers=values["num_target_layers"],
        hidden=values["hidden_size"],
        taps=tuple(values["target_layer_ids"]),
        layers=values["num_hidden_layers"],
        intermediate=values["intermediate_size"],
        heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        block=values["block_size"],
        rank=values["markov_rank"],
        theta=values["rope_theta"],
        eps=values["rms_norm_eps"],
        max_position=values["max_position_embeddings"],
    )
    drafter = DSpark(config, target.lm_head.weight.detach())
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in drafter.named_parameters():
        parameter.data.copy_(tensors[_file_name(name)])
    return drafter.to(target.device).eval().requires_grad_(False)
