# SPDX-License-Identifier: Apache-2.0
"""A small Gemma 4 target and its MTP assistant in torch; `gemma4_files.py` saves and loads them.

The models are dense Gemma 4 without per-layer embeddings. The target's last layers read the keys
and values of earlier layers; all layers of the assistant read those of the target. The parameters
have the names of transformers, so a state dict is a checkpoint except for a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from corpus import VOCAB_SIZE
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, rms_norm, scaled_dot_product_attention

SLIDING, FULL = "sliding_attention", "full_attention"
INIT_STD = 0.02

KeyValue = tuple[Tensor, Tensor]  # each [batch, kv heads, tokens, head size]
Rotation = tuple[Tensor, Tensor]  # cosines and sines, [batch or 1, 1, tokens, half a head]


@dataclass(frozen=True)
class Gemma4Config:
    """Sizes of a model.

    Attributes:
        layer_types: The type of each layer; the last one is full.
        shared_layers: Number of last layers that read the keys and values of the last layer of
            their type before them. In an assistant all layers are shared and read the target's.
        soft_cap: Cap on the logits; None: none.
    """

    layer_types: tuple[str, ...]
    shared_layers: int
    hidden: int
    intermediate: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    full_head_dim: int = 128
    window: int = 64
    vocab: int = VOCAB_SIZE
    max_position: int = 1024
    sliding_theta: float = 10_000.0
    full_theta: float = 1_000_000.0
    full_rotary: float = 0.25
    soft_cap: float | None = 30.0
    eps: float = 1e-6

    def head_size(self, kind: str) -> int:
        """The head size of layers of this type."""
        return self.full_head_dim if kind == FULL else self.head_dim

    def sources(self) -> dict[str, int]:
        """The last layer of each type that owns keys and values."""
        own = self.layer_types[: len(self.layer_types) - self.shared_layers]
        return {kind: index for index, kind in enumerate(own)}


def target_config() -> Gemma4Config:
    """About 4.8 million parameters; layer 4 reads the keys and values of layer 3, 5 those of 2."""
    return Gemma4Config(
        layer_types=(SLIDING, SLIDING, FULL) * 2, shared_layers=2, hidden=256, intermediate=512
    )


def assistant_config() -> Gemma4Config:
    """About 1.2 million parameters; nearly half of them are the table of the LM head."""
    return Gemma4Config(
        layer_types=(SLIDING, SLIDING, FULL),
        shared_layers=3,
        hidden=128,
        intermediate=256,
        soft_cap=None,
    )


class RmsNorm(nn.Module):
    """RMSNorm in float32; the weight is the factor itself, not an offset from 1."""

    def __init__(self, size: int, eps: float, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=INIT_STD)
    return layer


def rotation(config: Gemma4Config, kind: str, positions: Tensor) -> Rotation:
    """Cosines and sines of a layer type at positions `[batch, tokens]`.

    A full layer rotates the first part of each half of the head ("proportional"): it uses the first
    frequencies of the whole head and sets the others to 0.
    """
    size = config.head_size(kind)
    theta = config.full_theta if kind == FULL else config.sliding_theta
    index = torch.arange(size // 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-2 * index / size)
    if kind == FULL:
        frequencies = frequencies * (index < int(config.full_rotary * size // 2))
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, by: Rotation) -> Tensor:
    cos, sin = by
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def visible(config: Gemma4Config, kind: str, positions: Tensor, keys: Tensor) -> Tensor:
    """The mask of visible keys, `[batch, 1, tokens, keys]`; a sliding layer sees the last ones."""
    back = positions.unsqueeze(-1) - keys
    mask = back >= 0
    if kind == SLIDING:
        mask = mask & (back < config.window)
    return mask.unsqueeze(1)


class Attention(nn.Module):
    """Attention with norms on queries, keys and values, and without a scale."""

    def __init__(self, config: Gemma4Config, kind: str, *, owns_kv: bool) -> None:
        super().__init__()
        size = config.head_size(kind)
        self.heads, self.kv_heads, self.size, self.eps = (
            config.heads,
            config.kv_heads,
            size,
            config.eps,
        )
        # The product of the two norm weights starts at the usual scale, size**-0.5.
        self.q_proj = _linear(config.hidden, config.heads * size)
        self.q_norm = RmsNorm(size, config.eps, size**-0.25)
        if owns_kv:
            self.k_proj = _linear(config.hidden, config.kv_heads * size)
            self.v_proj = _linear(config.hidden, config.kv_heads * size)
            self.k_norm = RmsNorm(size, config.eps, size**-0.25)
        self.o_proj = _linear(config.heads * size, config.hidden)

    def key_value(self, x: Tensor, by: Rotation) -> KeyValue:
        """Computes keys and values of tokens: both normalised, the keys rotated."""
        batch, length, _ = x.shape
        shape = (batch, length, self.kv_heads, self.size)
        k, v = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        keys = _rotate(self.k_norm(k).transpose(1, 2), by)
        values = rms_norm(v.float(), (self.size,), None, self.eps).transpose(1, 2)
        return keys.to(v.dtype), values.to(v.dtype)

    def forward(self, x: Tensor, by: Rotation, kv: KeyValue, mask: Tensor | None) -> Tensor:
        """Attends to `kv`; without a mask each token sees the keys up to its own index."""
        batch, length, _ = x.shape
        k, v = kv
        q = self.q_proj(x).view(batch, length, self.heads, self.size)
        q = _rotate(self.q_norm(q).transpose(1, 2), by).to(k.dtype)
        groups = self.heads // self.kv_heads
        if length == 1:
            # One token: heads that share keys become rows of one product.
            q = q.view(batch, self.kv_heads, groups, self.size)
        else:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0
        )
        if length == 1:
            out = out.reshape(batch, self.heads, 1, self.size)
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return merged


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden, config.intermediate)
        self.up_proj = _linear(config.hidden, config.intermediate)
        self.down_proj = _linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP to the last dimension."""
        out: Tensor = self.down_proj(gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer.

    Attributes:
        owns_kv: Whether it has keys and values of its own.
    """

    def __init__(
        self, config: Gemma4Config, kind: str, *, owns_kv: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.owns_kv, self.dropout = owns_kv, dropout
        self.self_attn = Attention(config, kind, owns_kv=owns_kv)
        self.mlp = Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps)
        self.pre_feedforward_layernorm = RmsNorm(config.hidden, config.eps)
        self.post_feedforward_layernorm = RmsNorm(config.hidden, config.eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Tensor, by: Rotation, kv: KeyValue | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValue | None]:
        """Returns the residual stream after the layer, and the layer's own keys and values or None.

        Args:
            x: The residual stream before the layer, `[batch, tokens, hidden]`.
            by: Rotation of the tokens.
            kv: Keys and values for a layer that owns none.
            mask: `[batch or 1, 1, tokens, keys]`; None: causal.
        """
        normed = self.input_layernorm(x)
        own = self.self_attn.key_value(normed, by) if self.owns_kv else None
        used = own or kv
        assert used is not None
        return self.rest(x, self.self_attn(normed, by, used, mask)), own

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Runs everything after the attention."""
        x = x + self._drop(self.post_attention_layernorm(attended))
        out = self.mlp(self.pre_feedforward_layernorm(x))
        x = x + self._drop(self.post_feedforward_layernorm(out))
        return x * self.layer_scalar

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training) if self.dropout else x


@dataclass(frozen=True)
class States:
    """The target's states that a drafter reads.

    Attributes:
        hidden: Hidden states after the last norm, `[batch, tokens, hidden]`.
        shared: By layer type, the keys and values that other layers read.
    """

    hidden: Tensor
    shared: dict[str, KeyValue]


class Target(nn.Module):
    """A causal language model; embeddings and LM head share one table."""

    def __init__(self, config: Gemma4Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=INIT_STD)
        owners = len(config.layer_types) - config.shared_layers
        self.layers = nn.ModuleList(
            Layer(config, kind, owns_kv=index < owners, dropout=dropout)
            for index, kind in enumerate(config.layer_types)
        )
        self.norm = RmsNorm(config.hidden, config.eps)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings times the square root of the hidden size."""
        scaled: Tensor = self.embed_tokens(ids) * self.config.hidden**0.5
        return scaled

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits from the hidden states after the last norm."""
        raw = (hidden @ self.embed_tokens.weight.T).float()
        cap = self.config.soft_cap
        return raw if cap is None else cap * torch.tanh(raw / cap)

    def states(self, ids: Tensor) -> States:
        """Computes the states for a drafter from token ids `[batch, tokens]`."""
        config = self.config
        x = dropout(self.embed(ids), self.dropout, self.training)
        index = torch.arange(ids.shape[1], device=ids.device)
        rotations = {kind: rotation(config, kind, index[None]) for kind in (SLIDING, FULL)}
        masks = {SLIDING: visible(config, SLIDING, index[None], index), FULL: None}
        shared: dict[str, KeyValue] = {}
        for kind, layer in zip(config.layer_types, self.layers, strict=True):
            x, own = layer(x, rotations[kind], shared.get(kind), masks[kind])
            if own is not None:
                shared[kind] = own
        return States(self.norm(x), shared)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocabulary]` of token ids `[batch, tokens]`."""
        return self.logits(self.states(ids).hidden)


class _Cache:
    """Keys and values during generation, by the layer that owns them."""

    def __init__(self, model: Target, rows: int, length: int) -> None:
        self.config = model.config
        self.size = (rows, model.config.kv_heads, length)
        self.layers: dict[int, KeyValue] = {}

    def put(self, layer: int, kv: KeyValue, start: Tensor) -> None:
        """Stores keys and values; row i starts at position `start[i]`."""
        k, v = kv
        if layer not in self.layers:
            shape = (*self.size, k.shape[-1])
            self.layers[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        rows = torch.arange(len(k), device=k.device).unsqueeze(1)
        index = start.unsqueeze(1) + torch.arange(k.shape[2], device=k.device)
        for stored, new in zip(self.layers[layer], kv, strict=True):
            stored[rows, :, index] = new.transpose(1, 2)


@torch.no_grad()
def generate(
    model: Target, prompts: Tensor, new_tokens: int, lengths: Tensor | None = None
) -> Tensor:
    """Continues prompts greedily; returns the new tokens, `[batch, new_tokens]`.

    Args:
        model: The target.
        prompts: Token ids `[batch, length]`, padded at the end.
        new_tokens: Number of tokens to generate.
        lengths: Length of each prompt, `[batch]`; None: all prompts fill their row.
    """
    config = model.config
    rows, longest = prompts.shape
    if lengths is None:
        lengths = torch.full((rows,), longest, device=prompts.device)
    shortest = int(lengths.min())
    cache = _Cache(model, rows, longest + new_tokens)
    sources = config.sources()
    inputs, start, generated = prompts, torch.zeros_like(lengths), []
    for step in range(new_tokens):
        positions = start.unsqueeze(1) + torch.arange(inputs.shape[1], device=prompts.device)
        end = longest + step
        x = model.embed(inputs)
        # Skip the keys before the first that any row sees.
        firsts = {FULL: 0, SLIDING: max(0, shortest + step - config.window) if step else 0}
        rotations: dict[str, Rotation] = {}
        masks: dict[str, Tensor | None] = {}
        for kind, first in firsts.items():
            rotations[kind] = rotation(config, kind, positions)
            keys = torch.arange(first, end, device=prompts.device)
            # In the prefill all rows start at 0, so one mask serves all.
            masks[kind] = visible(config, kind, positions if step else positions[:1], keys)
        if not step:
            masks[FULL] = None
        for index, (kind, layer) in enumerate(zip(config.layer_types, model.layers, strict=True)):
            assert isinstance(layer, Layer)
            normed = layer.input_layernorm(x)
            source = index if layer.owns_kv else sources[kind]
            if layer.owns_kv:
                cache.put(index, layer.self_attn.key_value(normed, rotations[kind]), start)
            k, v = (part[:, :, firsts[kind] : end] for part in cache.layers[source])
            x = layer.rest(x, layer.self_attn(normed, rotations[kind], (k, v), masks[kind]))
        last = x[:, -1] if step else x[torch.arange(rows, device=x.device), lengths - 1]
        inputs = model.logits(model.norm(last)).argmax(-1, keepdim=True)
        generated.append(inputs)
        start = lengths + step
    return torch.cat(generated, dim=1)


class Assistant(nn.Module):
    """The drafter: layers with queries only, which read the target's keys and values.

    Drafting starts after token t_P and reads the target's keys and values of positions 0 to P-1.
    All drafts of a row are at one position and see the same keys, so the assistant stores no KV.
    """

    def __init__(self, config: Gemma4Config, backbone: int) -> None:
        super().__init__()
        self.config, self.backbone = config, backbone
        self.pre_projection = _linear(2 * backbone, config.hidden)
        self.post_projection = _linear(config.hidden, backbone)
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=INIT_STD)
        self.layers = nn.ModuleList(
            Layer(config, kind, owns_kv=False) for kind in config.layer_types
        )
        self.norm = RmsNorm(config.hidden, config.eps)

    def forward(self, token: Tensor, hidden: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Runs one step for all drafts at once.

        Args:
            token: The target's scaled embedding of the token before the one to draft,
                `[batch, drafts, backbone]`.
            hidden: The target's hidden state at position P-1, or the second output of the previous
                step.
            view: The keys and values that the drafts see; the same in all steps.

        Returns:
            Logits `[batch, drafts, vocabulary]`, and `hidden` of the next step.
        """
        x = self.pre_projection(torch.cat([token, hidden.to(token.dtype)], dim=-1))
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            x, _ = layer(x, view.rotations[kind], view.shared[kind], view.masks[kind])
        out = self.norm(x)
        return (out @ self.embed_tokens.weight.T).float(), self.post_projection(out)


@dataclass(frozen=True)
class View:
    """What drafts see of the target, by layer type.

    Attributes:
        shared: The target's keys and values.
        rotations: Rotations of the queries, at one position per draft.
        masks: Visible keys, `[batch, 1, drafts, keys]`.
    """

    shared: Mapping[str, KeyValue]
    rotations: dict[str, Rotation]
    masks: dict[str, Tensor]

    @classmethod
    def of(cls, config: Gemma4Config, states: States, last: Tensor, ahead: int = 0) -> View:
        """Builds the view for drafts whose last position with KV is P-1.

        Args:
            config: The assistant's configuration.
            states: The target's states.
            last: P-1 of each draft, `[batch, drafts]`.
            ahead: Position of the queries minus (P-1): 0 as in Paceline and vLLM, 1 as in
                transformers. The keys are the same.
        """
        kinds = tuple(dict.fromkeys(config.layer_types))
        keys = torch.arange(states.hidden.shape[1], device=last.device)
        return cls(
            states.shared,
            {kind: rotation(config, kind, last + ahead) for kind in kinds},
            {kind: visible(config, kind, last, keys) for kind in kinds},
        )


def compile_layers(model: Target | Assistant) -> None:
    """Compiles the layers one by one, so that layers of one type share the compiled code."""
    # dynamo counts one entry per layer type, shape and mode.
    torch._dynamo.config.recompile_limit = 64
    for layer in model.layers:
        layer.compile(dynamic=False)


def rounded_to_bf16(model: Target) -> Target:
    """A copy in evaluation mode, with the weights as they are saved in bf16, stored in float32."""
    device = model.embed_tokens.weight.device
    other = Target(model.config)
    other.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    return other.to(device).eval().requires_grad_(False)
