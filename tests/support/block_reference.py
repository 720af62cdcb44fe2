# SPDX-License-Identifier: Apache-2.0
"""DFlash, DFlash2 and DSpark in torch, float64, written from their equations: the expected drafts.

No code of Paceline is used: this module reads the files itself and has no cache. With tokens
t_0..t_P known and the target's hidden states of positions 0 to P - 1, a block has the rows t_P,
mask, mask, ... at positions P, P + 1, ... Its attention reads keys and values of the context, made
from the hidden states, and of the block's own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from block_models import MASK_NAME, BlockSpec
from eagle_reference import Draft, TargetReference, TargetStates
from tiny_models import load_tensors, read_json

#: Some rows of a block, convolved.
Convolution = Callable[[Tensor], Tensor]


class BlockReference:
    """A block drafter.

    Attributes:
        weights: Its tensors by their names in the file. To train it, replace them with tensors that
            require gradients.
        room: How many tokens may follow `tokens` in a request: a block never goes further.
        least_confidence: The first draft with a lower estimate of the confidence head is not made,
            nor are those behind it. 0: all drafts are made.
    """

    def __init__(self, spec: BlockSpec, directory: Path, target: TargetReference) -> None:
        """Reads a drafter's folder; the spec says how its layout is meant."""
        self.spec = spec
        self.target = target
        self.weights: dict[str, Tensor] = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in load_tensors(directory).items()
        }
        config = read_json(directory / "config.json")
        layer = config.get("transformer_layer_config", config)
        self.eps = layer["rms_norm_eps"]
        rope = layer.get("rope_parameters", layer)
        rope = rope.get("full_attention", rope)
        self.theta = rope["rope_theta"]
        self.rotated = rope.get("partial_rotary_factor", 1.0)
        self.mask_token = config.get("dflash_config", config)["mask_token_id"]
        self.mask_embedding: Tensor | None = None
        if spec.has_mask_embedding:
            path = directory / MASK_NAME
            self.mask_embedding = torch.load(path, weights_only=True)["embedding"].double()
        self.room: Callable[[Sequence[int]], int] = lambda tokens: 1 << 30
        self.least_confidence = 0.0

    # ---- what a row sees -----------------------------------------------------------------------

    def sees(self, layer: int, row: int, key: int, first: int) -> bool:
        """Whether the row at a position sees the key at one, in a block that begins at `first`."""
        spec = self.spec
        is_sliding = spec.slides(layer)
        if spec.layout == "speculators":
            if key < first:
                return not is_sliding or key >= first - spec.window
            causal = is_sliding and (not spec.taps if spec.is_causal is None else spec.is_causal)
            return key <= row or not causal
        causal = is_sliding if spec.is_causal is None else spec.is_causal
        if spec.layout == "assistant":
            causal = False
        if causal and key > row:
            return False
        # transformers lets an assistant see one key more, to each side.
        nearest_hidden = spec.window + (1 if spec.layout == "assistant" else 0)
        return not is_sliding or abs(row - key) < nearest_hidden

    # ---- a block -------------------------------------------------------------------------------

    def context(self, states: TargetStates) -> Tensor:
        """What keys and values of the context are made from, [tokens, hidden]."""
        taps = torch.cat([states.streams[i] for i in self.spec.aux_layers], dim=-1)
        names = ("fc.weight", "hidden_norm.weight")
        if self.spec.layout == "assistant":
            names = ("encoder.fc.weight", "encoder.output_norm_enc.weight")
        weight, norm = (self.weights[name] for name in names)
        return self.rms(taps.to(weight.dtype) @ weight.T, norm)

    def block(self, context: Tensor, newest: int, num_drafts: int) -> Tensor:
        """The normed output of all rows of a block, [rows, hidden]."""
        spec, w = self.spec, self.weights
        first = len(context)
        skipped = 0 if spec.samples_from_anchor else 1
        ids = torch.tensor([newest] + [self.mask_token] * (num_drafts - 1 + skipped))
        x = w.get("embed_tokens.weight", self.target.embedding.to(context.dtype))[ids]
        if self.mask_embedding is not None:
            is_mask = (ids == self.mask_token).unsqueeze(1)
            x = torch.where(is_mask, self.mask_embedding.to(x.dtype), x)
        x = x * self.embed_scale()
        for i in range(spec.num_layers):
            name = f"layers.{i}."
            normed = self.rms(x, w[f"{name}input_layernorm.weight"])
            enter, leave = self.convolutions(f"{name}attention_conv.", normed)
            attended = self.attention(i, enter(normed), context, first)
            if spec.layout == "gemma4":
                x = x + self.rms(attended, w[f"{name}post_attention_layernorm.weight"])
                normed = self.rms(x, w[f"{name}pre_feedforward_layernorm.weight"])
                x = x + self.rms(
                    self.mlp(name, normed), w[f"{name}post_feedforward_layernorm.weight"]
                )
                x = x * w[f"{name}layer_scalar"]
            else:
                x = x + leave(attended)
                normed = self.rms(x, w[f"{name}post_attention_layernorm.weight"])
                enter, leave = self.convolutions(f"{name}mlp_conv.", normed)
                x = x + leave(self.mlp(name, enter(normed)))
        return self.rms(x, w["norm.weight"])

    def convolutions(self, name: str, normed: Tensor) -> tuple[Convolution, Convolution]:
        """The convolutions of a branch's input and output, whose factors the input decides."""
        spec = self.spec
        if not spec.taps:
            return (lambda x: x), (lambda x: x)
        base = self.weights[f"{name}base_kernel"]
        factors = normed @ self.weights[f"{name}kernel_projection.weight"].T
        groups = factors.view(len(normed), 2, spec.taps, -1).repeat_interleave(spec.group, dim=-1)

        def convolution(side: int) -> Convolution:
            def convolve(x: Tensor) -> Tensor:
                result = x * (base[side, 0] + groups[:, side, 0])
                for tap in range(1, min(spec.taps, len(x))):
                    # Row r takes row r - tap, and the first rows have none.
                    terms = x[:-tap] * (base[side, tap] + groups[tap:, side, tap])
                    result = result + torch.nn.functional.pad(terms, (0, 0, tap, 0))
                return result

            return convolve

        return convolution(0), convolution(1)

    def embed_scale(self) -> float:
        """The factor on the embeddings of a block's rows."""
        spec = self.spec
        width = self.target.embedding.shape[1] ** 0.5
        if spec.layout == "gemma4":
            return width
        if spec.embed_scale is not None:
            return spec.embed_scale
        is_gemma = self.target.model.config.model_type.startswith("gemma")
        return width if spec.layout == "z-lab" and is_gemma and not spec.taps else 1.0

    def head_weights(self) -> Mapping[str, Tensor]:
        """The tensors of the Markov head and of the confidence head, as deepseek-ai names them."""
        return self.weights

    def confidence_input(self, row: Tensor) -> Tensor:
        """What the confidence head reads of a row of a block's output."""
        return row

    def logits(self, rows: Tensor) -> Tensor:
        """The logits of a block's predicting rows without its Markov head."""
        spec = self.spec
        h = rows if spec.samples_from_anchor else rows[1:]
        logits = h @ self.weights.get("lm_head.weight", self.target.lm_head.to(h.dtype)).T
        if spec.multiplier is not None:
            logits = logits * spec.multiplier
        return logits if spec.soft_cap is None else spec.soft_cap * (logits / spec.soft_cap).tanh()

    def draft(self, tokens: Sequence[int], k: int, states: TargetStates) -> list[Draft]:
        """Drafts k tokens greedily, or fewer where the request ends.

        Args:
            tokens: t_0..t_P.
            k: The number of drafts.
            states: The target's results for t_0..t_{P-1}.
        """
        count = min(k, self.room(tokens))
        drafts: list[Draft] = []
        if count > 0:
            rows = self.block(self.context(states), tokens[-1], count)
            chain = Chain(self, rows, tokens[-1])
            previous = tokens[-1]
            for row in self.logits(rows):
                bias, confidence = chain.step(previous)
                # Without a threshold nothing is compared.
                is_clear = abs(confidence - self.least_confidence) if self.least_confidence else 1.0
                if confidence < self.least_confidence:
                    drafts.append(Draft(-1, torch.zeros(1), is_clear))
                    break
                own = row + bias
                gap = float("inf")
                if self.spec.taps:
                    # Only the tokens with the highest logits are candidates.
                    highest = row.topk(self.spec.selector_top + 1)
                    gap = float(highest.values[-2] - highest.values[-1])
                    is_candidate = torch.zeros(len(row), dtype=torch.bool)
                    is_candidate[highest.indices[:-1]] = True
                    own = own.masked_fill(~is_candidate, float("-inf"))
                top = own.topk(2).values
                gap = min(gap, float(top[0] - top[1]))
                margin = min(gap / float((row + bias).abs().max()), is_clear)
                previous = self.token_of(int(own.argmax()))
                drafts.append(Draft(previous, own, margin))
        # `simulate` looks at k drafts. The request has no room for these, or confidence was low.
        return drafts + [Draft(-1, torch.zeros(1), 1.0)] * (k - len(drafts))

    def token_of(self, row: int) -> int:
        """The target's token id of a row of the lm_head."""
        offsets = self.weights.get("d2t")
        return row if offsets is None else row + int(offsets[row])

    # ---- pieces --------------------------------------------------------------------------------

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """The MLP of a layer."""
        w = self.weights
        gate = x @ w[f"{name}mlp.gate_proj.weight"].T
        if self.spec.layout == "gemma4":
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
        else:
            gate = torch.nn.functional.silu(gate)
        return (gate * (x @ w[f"{name}mlp.up_proj.weight"].T)) @ w[f"{name}mlp.down_proj.weight"].T

    def attention(self, layer: int, x: Tensor, context: Tensor, first: int) -> Tensor:
        """The attention of a block's rows."""
        spec = self.spec
        name = f"layers.{layer}.self_attn."
        w = self.weights
        is_gemma4 = spec.layout == "gemma4"
        kv_heads, head_dim = spec.attention_heads

        def project(source: Tensor, projection: str, heads: int) -> Tensor:
            y = source @ w[f"{name}{projection}.weight"].T
            bias = w.get(f"{name}{projection}.bias")
            return (y if bias is None else y + bias).view(len(source), heads, head_dim)

        sources = torch.cat([context, x])
        positions = torch.arange(len(sources))
        q = self.rms(project(x, "q_proj", spec.heads), w[f"{name}q_norm.weight"])
        keys = project(sources, "k_proj", kv_heads)
        k = self.rms(keys, w[f"{name}k_norm.weight"])
        v = keys if is_gemma4 and spec.k_eq_v else project(sources, "v_proj", kv_heads)
        if is_gemma4:
            v = self.rms(v, torch.ones(head_dim, dtype=v.dtype))
        q, k = self.rope(q, positions[first:]), self.rope(k, positions)
        hidden = torch.tensor(
            [
                [not self.sees(layer, first + row, key, first) for key in range(len(sources))]
                for row in range(len(x))
            ]
        )
        shared = torch.arange(spec.heads) // (spec.heads // kv_heads)  # of each head, its KV head
        q, k, v = (each.transpose(0, 1) for each in (q, k[:, shared], v[:, shared]))
        scores = q @ k.mT * (1.0 if is_gemma4 else head_dim**-0.5)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        y = (weights @ v).transpose(0, 1).flatten(1) @ w[f"{name}o_proj.weight"].T
        bias = w.get(f"{name}o_proj.bias")
        return y if bias is None else y + bias

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the halves of each head by its position."""
        half = x.shape[-1] // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        frequencies[int(self.rotated * half) :] = 0
        angles = positions.double().unsqueeze(1) * frequencies
        cos, sin = angles.cos().unsqueeze(1).to(x.dtype), angles.sin().unsqueeze(1).to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Chain:
    """The heads of one block, one draft after the other."""

    def __init__(self, reference: BlockReference, rows: Tensor, newest: int) -> None:
        """Begins a block, whose rows of the drafter's output are `rows`."""
        self._spec = reference.spec
        self._reference = reference
        self._weights = reference.head_weights()
        self._rows = iter(rows)
        self._state = torch.zeros(self._spec.markov_rank, dtype=rows.dtype)
        if not self._spec.samples_from_anchor:
            self.step(newest)  # the row that predicts nothing, of which only a state remains

    def step(self, previous: int) -> tuple[Tensor | float, float]:
        """What the Markov head adds to the next row's logits, and the confidence in its draft.

        Args:
            previous: The token before the draft.
        """
        w = self._weights
        h = next(self._rows)
        bias: Tensor | float = 0.0
        e = h[:0]
        if self._spec.markov_rank:
            e = w["markov_head.markov_w1.weight"][previous]
            bias = w["markov_head.markov_w2.weight"] @ self._factors(h, e)
        if self._spec.taps:
            suffix = self._spec.codebook_suffix
            before = w[f"candidate_selector.predecessor_codebook{suffix}"][previous]
            projected = w["candidate_selector.hidden_projection.weight"] @ h
            bias = w[f"candidate_selector.successor_codebook{suffix}"] @ (before * projected)
        confidence = 1.0
        if self._spec.confidence:
            inputs = self._reference.confidence_input(h)
            if self._spec.confidence == "token":
                inputs = torch.cat([inputs, e])
            own = w["confidence_head.proj.weight"] @ inputs
            own = own + w.get("confidence_head.proj.bias", 0.0)
            confidence = float(own.detach().sigmoid())
        return bias, confidence

    def _factors(self, h: Tensor, e: Tensor) -> Tensor:
        w = self._weights
        if self._spec.markov_type == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, e])
            return (gate + w["markov_head.gate_proj.bias"]).sigmoid() * e
        if self._spec.markov_type == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ torch.cat([self._state, e, h])
            g, c, o = (joint + w["markov_head.joint_proj.bias"]).chunk(3)
            self._state = g.sigmoid() * self._state + (1 - g.sigmoid()) * c.tanh()
            return o.tanh()
        return e


def overfit(
    reference: BlockReference, texts: Sequence[Sequence[int]], *, steps: int, rate: float, seed: int
) -> dict[str, Tensor]:
    """Trains a block drafter on some sequences, so that it drafts them well.

    Every step takes two random places of each text.

    Returns:
        The new tensors, float32, by their names in the reference.
    """
    kept = reference.weights
    fixed = ("embed_tokens.weight", "lm_head.weight")
    trained = {
        name: tensor.float().requires_grad_(name not in fixed or "d2t" in kept)
        for name, tensor in kept.items()
        if tensor.is_floating_point()
    }
    row_of: Tensor | None = None
    if "d2t" in kept:
        row_of = torch.full((len(reference.target.embedding),), -1)
        row_of[kept["d2t"] + torch.arange(len(kept["d2t"]))] = torch.arange(len(kept["d2t"]))
    states = [reference.target.states(text) for text in texts]
    reference.weights = kept | trained
    optimizer = torch.optim.Adam([t for t in trained.values() if t.requires_grad], lr=rate)
    random = torch.Generator().manual_seed(seed)
    spec = reference.spec
    k = spec.max_drafts
    for _ in range(steps):
        loss = torch.zeros(())
        for text, of_text in zip(texts, states, strict=True):
            context = reference.context(of_text)
            for _ in range(2):
                at = int(torch.randint(1, len(text) - k, (), generator=random))
                rows = reference.block(context[:at], text[at], k)
                chain = Chain(reference, rows, text[at])
                biases = [chain.step(token)[0] for token in text[at : at + k]]
                logits = reference.logits(rows)
                if spec.markov_rank or spec.taps:
                    logits = logits + torch.stack([torch.as_tensor(bias) for bias in biases])
                wanted = torch.tensor(text[at + 1 : at + 1 + k])
                loss = (
                    loss
                    + torch.nn.functional.cross_entropy(
                        logits, wanted if row_of is None else row_of[wanted], ignore_index=-1
                    ).nan_to_num()
                )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([t for t in trained.values() if t.requires_grad], 1.0)
        optimizer.step()
    result = {name: tensor.detach() for name, tensor in trained.items()}
    reference.weights = kept | {name: tensor.double() for name, tensor in result.items()}
    return result
