# SPDX-License-Identifier: Apache-2.0
"""EAGLE and EAGLE-3 in torch, float64, written from their equations: the expected drafts.

No code of Paceline is used: this module reads the files itself, key by key and tensor by tensor,
and has no cache. Every pass computes all positions from the first one on.

With tokens t_0..t_P known and the target's hidden states h_0..h_{P-1}, a drafter runs over the
pairs (t_{i+1}, h_i) at positions i = 0..P-1; its output at the last one gives d_1. Draft step
j runs (d_j, the output of the step before) at position P-1+j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tiny_models import load_tensors, plain_copy, read_json


@dataclass(frozen=True)
class TargetStates:
    """The results of a target for some tokens.

    Attributes:
        logits: [tokens, vocab].
        streams: The residual stream entering each layer, [layers, tokens, hidden].
        output: Its hidden state after the last norm, [tokens, hidden].
    """

    logits: Tensor
    streams: Tensor
    output: Tensor

    def first(self, count: int) -> TargetStates:
        """The results for the first tokens, which do not depend on later ones."""
        return TargetStates(self.logits[:count], self.streams[:, :count], self.output[:count])


class TargetReference:
    """A target in transformers, float64."""

    def __init__(self, directory: Path) -> None:
        """Loads the target; of matrices with scales, the values that they stand for."""
        from transformers import AutoModelForCausalLM

        if "quantization_config" in read_json(directory / "config.json"):
            directory = plain_copy(directory)
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",  # the others have no float64
        )
        self.model = model.double().eval().requires_grad_(False)
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.lm_head: Tensor = self.model.get_output_embeddings().weight

    def states(self, tokens: Sequence[int]) -> TargetStates:
        """Runs the target over tokens."""
        out = self.model(torch.tensor([list(tokens)]), output_hidden_states=True)
        # The last hidden state is the one after the last norm.
        hidden = [state[0] for state in out.hidden_states]
        return TargetStates(out.logits[0], torch.stack(hidden[:-1]), hidden[-1])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The target's greedy continuation of a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.states(tokens).logits[-1].argmax()))
        return tokens[len(prompt) :]


@dataclass(frozen=True)
class Draft:
    """A drafted token.

    Attributes:
        token: The token id in the target's vocabulary.
        logits: The logits of the drafter's own vocabulary, [draft vocab].
        margin: The difference of the two largest logits, relative to the largest magnitude. With a
            tiny margin float32 may choose the other token.
    """

    token: int
    logits: Tensor
    margin: float


def draft_greedily(
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    tokens: Sequence[int],
    k: int,
    inputs: Tensor,
    token_of: Callable[[int], int] = lambda token: token,
) -> list[Draft]:
    """Drafts k tokens greedily with a head that reads its own output from the second step on.

    Args:
        run: As `EagleReference.run`.
        tokens: t_0..t_P.
        k: The number of drafts.
        inputs: The hidden inputs of positions 0 to P - 1.
        token_of: The token of an index of the logits.
    """
    ids = list(tokens[1:])
    drafts: list[Draft] = []
    for _ in range(k):
        logits, feedback = run(torch.tensor(ids), inputs)
        last = logits[-1]
        top = last.topk(2).values
        token = token_of(int(last.argmax()))
        drafts.append(Draft(token, last, float((top[0] - top[1]) / last.abs().max())))
        ids.append(token)
        inputs = torch.cat([inputs, feedback[-1:]])
    return drafts


class EagleReference:
    """An EAGLE or EAGLE-3 draft head.

    Attributes:
        weights: Its tensors by their names in the file, with "layers.0." for "midlayer.". To train
            it, replace them with tensors that require gradients.
    """

    def __init__(self, directory: Path, target: TargetReference) -> None:
        """Reads a draft head's folder."""
        config = read_json(directory / "config.json")
        layer = config.get("transformer_layer_config", config)
        self.target = target
        self.weights: dict[str, Tensor] = {}
        for name, tensor in load_tensors(directory).items():
            values = tensor.double() if tensor.is_floating_point() else tensor
            self.weights[name.replace("midlayer.", "layers.0.")] = values
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self.weights
        is_speculators = "speculators_model_type" in config
        self.norm_before_residual = config.get("norm_before_residual", is_speculators)
        self.norm_output = config.get("norm_output", False)
        num_layers = target.model.config.num_hidden_layers
        self.aux_layers = config.get("eagle_aux_hidden_state_layer_ids") or [
            2,
            num_layers // 2,
            num_layers - 3,
        ]
        self.num_layers = layer["num_hidden_layers"]
        self.heads = layer["num_attention_heads"]
        self.kv_heads = layer["num_key_value_heads"]
        self.head_dim = layer["head_dim"]
        self.eps = layer["rms_norm_eps"]
        self.theta = layer.get("rope_theta")
        if self.theta is None:
            rope = target.model.config.rope_parameters
            self.theta = rope.get("full_attention", rope)["rope_theta"]

    def hidden_of(self, states: TargetStates) -> Tensor:
        """The part of a target's states that the draft head reads, [tokens, ...]."""
        if self.is_eagle3:
            return torch.cat([states.streams[k] for k in self.aux_layers], dim=-1)
        return states.output

    def first_inputs(self, hidden: Tensor) -> Tensor:
        """The layer's hidden input in a first pass, from the result of `hidden_of`."""
        if not self.is_eagle3:
            return hidden
        weights = self.weights
        if "input_norm.weight" in weights:
            hidden = self.rms(hidden, weights["input_norm.weight"])
        elif "fc_norm.0.weight" in weights:
            parts = hidden.chunk(len(self.aux_layers), dim=-1)
            hidden = torch.cat(
                [self.rms(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)],
                dim=-1,
            )
        return self.linear(hidden, "fc")

    def run(self, tokens: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the draft head over positions 0, 1, ...

        Args:
            tokens: t_{i+1} at each position i, [positions].
            inputs: The hidden input at each, [positions, hidden]: `first_inputs`, or the
                feedback of the draft step before.

        Returns:
            Logits [positions, draft vocab], and the feedback [positions, hidden].
        """
        weights = self.weights
        embedding = weights.get("embed_tokens.weight", self.target.embedding)[tokens]
        if not self.is_eagle3:
            x = self.linear(torch.cat([embedding, inputs], dim=-1), "fc")
            x = x + self.attention(x, "layers.0.self_attn.")
            x = x + self.mlp(x, 0)
            return x @ self.target.lm_head.to(x.dtype).T, x
        e = self.rms(embedding, weights["layers.0.input_layernorm.weight"])
        n = self.rms(inputs, weights["layers.0.hidden_norm.weight"])
        x = n if self.norm_before_residual else inputs
        x = x + self.attention(torch.cat([e, n], dim=-1), "layers.0.self_attn.")
        x = x + self.mlp(x, 0)
        for i in range(1, self.num_layers):
            normed = self.rms(x, weights[f"layers.{i}.input_layernorm.weight"])
            x = x + self.attention(normed, f"layers.{i}.self_attn.")
            x = x + self.mlp(x, i)
        normed = self.rms(x, weights["norm.weight"])
        return normed @ weights["lm_head.weight"].T, normed if self.norm_output else x

    def token_of(self, row: int) -> int:
        """The target's token id of a row of the lm_head."""
        offsets = self.weights.get("d2t")
        return row if offsets is None else row + int(offsets[row])

    def draft(self, tokens: Sequence[int], k: int, states: TargetStates) -> list[Draft]:
        """Drafts k tokens greedily.

        Args:
            tokens: t_0..t_P.
            k: The number of drafts.
            states: The target's results for t_0..t_{P-1}.
        """
        inputs = self.first_inputs(self.hidden_of(states))
        return draft_greedily(self.run, tokens, k, inputs, self.token_of)

    # ---- pieces --------------------------------------------------------------------------------

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer, with its bias if there is one."""
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        """The MLP with its norm."""
        name = f"layers.{layer}."
        x = self.rms(x, self.weights[f"{name}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(self.linear(x, f"{name}mlp.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention of positions 0, 1, ..., one head at a time."""
        length = len(x)
        q = self.linear(x, f"{name}q_proj").view(length, self.heads, self.head_dim)
        k = self.linear(x, f"{name}k_proj").view(length, self.kv_heads, self.head_dim)
        v = self.linear(x, f"{name}v_proj").view(length, self.kv_heads, self.head_dim)
        if f"{name}q_norm.weight" in self.weights:
            q = self.rms(q, self.weights[f"{name}q_norm.weight"])
            k = self.rms(k, self.weights[f"{name}k_norm.weight"])
        q, k = self.rope(q), self.rope(k)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(self.heads):
            shared = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, shared].T / self.head_dim**0.5
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs.append(weights @ v[:, shared])
        return self.linear(torch.cat(outputs, dim=-1), f"{name}o_proj")

    def rope(self, x: Tensor) -> Tensor:
        """Rotates the halves of each head by its position."""
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64).unsqueeze(1) * frequencies
        cos, sin = angles.cos().unsqueeze(1).to(x.dtype), angles.sin().unsqueeze(1).to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True)
class Simulation:
    """The expected result of a run of an engine.

    Attributes:
        emitted: The number of tokens of each verify iteration, without a request's first token.
        margins: For each iteration, the smallest margin of the drafts that decided that number.
    """

    emitted: list[int]
    margins: list[float]

    def num_clear(self, least_margin: float) -> int:
        """Iterations before the first one that a rounding error could have changed."""
        return next((i for i, m in enumerate(self.margins) if m < least_margin), len(self.margins))


class GreedyDrafter(Protocol):
    """The drafter that `simulate` runs, such as an `EagleReference`."""

    target: Any

    def draft(self, tokens: Sequence[int], k: int, states: Any) -> list[Draft]:
        """Drafts k tokens greedily; see `EagleReference.draft`."""


def emission(
    reference: GreedyDrafter,
    states: Any,
    prompt: Sequence[int],
    continuation: Sequence[int],
    position: int,
    k: int,
) -> tuple[int, float]:
    """What an iteration emits after the first `position` tokens of a continuation.

    Args:
        reference: The drafter.
        states: The target's results for the prompt and the whole continuation.
        prompt: The prompt.
        continuation: The target's own tokens.
        position: At least 1.
        k: The number of drafts.

    Returns:
        The number of tokens: the drafts that equal the target's own tokens, and one more. And the
        smallest margin of the drafts that decided it; drafts after the first wrong one do not.
    """
    known = [*prompt, *continuation[:position]]
    drafts = reference.draft(known, k, states.first(len(known) - 1))
    accepted = 0
    while (
        accepted < k
        and position + accepted < len(continuation)
        and drafts[accepted].token == continuation[position + accepted]
    ):
        accepted += 1
    margin = min(draft.margin for draft in drafts[: accepted + 1])
    return min(accepted + 1, len(continuation) - position), margin


def simulate(
    reference: GreedyDrafter, prompt: Sequence[int], continuation: Sequence[int], k: int
) -> Simulation:
    """Greedy speculative decoding without an engine. The prefill emits the first token."""
    emitted: list[int] = []
    margins: list[float] = []
    states = reference.target.states([*prompt, *continuation])
    position = 1
    while position < len(continuation):
        count, margin = emission(reference, states, prompt, continuation, position, k)
        emitted.append(count)
        margins.append(margin)
        position += count
    return Simulation(emitted, margins)


def overfit(
    reference: Any,
    texts: Sequence[Sequence[int]],
    *,
    steps: int,
    rate: float,
    later_steps: int = 3,
) -> dict[str, Tensor]:
    """Trains a draft head on some sequences, so that it drafts them well.

    The first draft step is trained at every position, later ones after one random position of each
    sequence.

    Args:
        reference: The draft head: an `EagleReference`, or another with its methods.
        texts: Tokens.
        steps: The number of steps of Adam.
        rate: The learning rate.
        later_steps: Steps after the first.

    Returns:
        The new tensors, float32, by their names in the reference.
    """
    kept = reference.weights
    trained = {
        name: tensor.float().requires_grad_(name != "embed_tokens.weight")
        for name, tensor in kept.items()
        if tensor.is_floating_point()
    }
    rows = None
    if "d2t" in kept:
        rows = torch.full((len(reference.target.embedding),), -1)
        ids = kept["d2t"] + torch.arange(len(kept["d2t"]))
        rows[ids] = torch.arange(len(ids))
    cases = []
    for text in texts:
        hidden = reference.hidden_of(reference.target.states(text)).float()[:-2]
        wanted = torch.tensor(text[2:])
        cases.append((torch.tensor(text[1:-1]), hidden, wanted if rows is None else rows[wanted]))
    embedding = reference.target.embedding
    reference.target.embedding = embedding.float()
    reference.weights = kept | trained
    optimizer = torch.optim.Adam([t for t in trained.values() if t.requires_grad], lr=rate)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = torch.zeros(())
        for ids, hidden, wanted in cases:
            inputs = reference.first_inputs(hidden)
            logits, feedback = reference.run(ids, inputs)
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-1)
            cut = int(torch.randint(8, len(ids) - later_steps, (), generator=random))
            rows_so_far, fed_back = inputs[:cut], feedback[cut - 1 : cut]
            for step in range(later_steps):
                rows_so_far = torch.cat([rows_so_far, fed_back.detach()])
                logits, feedback = reference.run(ids[: cut + step + 1], rows_so_far)
                fed_back = feedback[-1:]
                target = wanted[cut + step : cut + step + 1]
                if target >= 0:
                    loss = loss + 0.5 * torch.nn.functional.cross_entropy(logits[-1:], target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([t for t in trained.values() if t.requires_grad], 1.0)
        optimizer.step()
    result = {name: tensor.detach() for name, tensor in trained.items()}
    reference.target.embedding = embedding
    reference.weights = kept | {name: tensor.double() for name, tensor in result.items()}
    return result
