# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants in torch, float64, written from their equations: the expected drafts.

No code of Paceline is used: this module reads the files itself, key by key and tensor by tensor.

With tokens t_0..t_P known and the target's hidden states h_0..h_{P-1}, the first draft step takes
t_P and h_{P-1}. Each later one takes the token and the feedback of the step before. All draft steps
read the target's keys and values of positions 0..P-1 (in sliding layers the last W of them), and
rotate their queries for the same position: P-1 ("last") or P ("next").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_reference import Draft, TargetReference, TargetStates
from tiny_models import FULL, SLIDING, load_tensors, read_json

KeysAndValues = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StatesWithKv(TargetStates):
    """The results of a Gemma 4 target for some tokens.

    Attributes:
        kv: By layer type, the keys and values of the last layer of that type which owns them, both
            [tokens, heads, head size].
    """

    kv: KeysAndValues

    def first(self, count: int) -> StatesWithKv:
        """The results for the first tokens, which do not depend on later ones."""
        some = super().first(count)
        kv = {name: (keys[:count], values[:count]) for name, (keys, values) in self.kv.items()}
        return StatesWithKv(some.logits, some.streams, some.output, kv)


class Gemma4Target(TargetReference):
    """A Gemma 4 target in transformers, float64."""

    def states(self, tokens: Sequence[int]) -> StatesWithKv:
        """Runs the target over tokens."""
        out = self.model(
            torch.tensor([list(tokens)]),
            output_hidden_states=True,
            use_cache=True,
            return_shared_kv_states=True,
        )
        hidden = [state[0] for state in out.hidden_states]
        kv = {
            name: (keys[0].transpose(0, 1), values[0].transpose(0, 1))
            for name, (keys, values) in out.shared_kv_states.items()
        }
        return StatesWithKv(out.logits[0], torch.stack(hidden[:-1]), hidden[-1], kv)


class Gemma4MtpReference:
    """An assistant.

    Attributes:
        weights: Its tensors by their names in the file. To train it, replace them with tensors
            that require gradients.
        position: "last" or "next".
        extra_window: Added to the window; 0, except in a reference that is wrong on purpose.
    """

    def __init__(self, directory: Path, target: Gemma4Target, position: str = "last") -> None:
        """Reads an assistant's folder."""
        config = read_json(directory / "config.json")
        text = config["text_config"]
        self.target = target
        self.position = position
        self.weights: dict[str, Tensor] = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in load_tensors(directory).items()
        }
        self.layer_types: list[str] = text["layer_types"]
        self.eps = text["rms_norm_eps"]
        self.window = text["sliding_window"]
        self.ropes = text["rope_parameters"]
        self.soft_cap = text["final_logit_softcapping"]
        self.num_clusters = config["num_centroids"]
        self.num_scored = config["centroid_intermediate_top_k"]
        self.embed_scale = target.embedding.shape[1] ** 0.5
        self.extra_window = 0

    def run(
        self, tokens: Tensor, hidden: Tensor, newest: Tensor, kv: KeysAndValues
    ) -> tuple[Tensor, Tensor]:
        """Runs one draft step at several positions of one sequence.

        Args:
            tokens: The input tokens, [n].
            hidden: The input states, [n, backbone].
            newest: The positions P, [n].
            kv: The keys and values of the whole sequence.

        Returns:
            The output after the last norm [n, hidden], and what is fed back [n, backbone].
        """
        weights = self.weights
        embedding = self.target.embedding[tokens] * self.embed_scale
        x = torch.cat([embedding, hidden], dim=-1) @ weights["pre_projection.weight"].T
        for i, layer_type in enumerate(self.layer_types):
            name = f"model.layers.{i}."
            normed = self.rms(x, f"{name}input_layernorm")
            attended = self.attention(normed, name, layer_type, newest, *kv[layer_type])
            x = x + self.rms(attended, f"{name}post_attention_layernorm")
            normed = self.rms(x, f"{name}pre_feedforward_layernorm")
            gate = torch.nn.functional.gelu(
                self.linear(normed, f"{name}mlp.gate_proj"), approximate="tanh"
            )
            made = self.linear(gate * self.linear(normed, f"{name}mlp.up_proj"),
                               f"{name}mlp.down_proj")  # fmt: skip
            x = x + self.rms(made, f"{name}post_feedforward_layernorm")
            x = x * weights[f"{name}layer_scalar"]
        output = self.rms(x, "model.norm")
        return output, output @ weights["post_projection.weight"].T

    def centroid_scores(self, output: Tensor) -> Tensor:
        """The score of each cluster, [n, clusters]."""
        return output @ self.weights["masked_embedding.centroids.weight"].T

    def scores(self, output: Tensor) -> Tensor:
        """The logits of all tokens, without regard to clusters, [n, vocab]."""
        logits = output @ self.weights["model.embed_tokens.weight"].T
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def logits(self, output: Tensor) -> Tensor:
        """The logits; minus infinity for tokens of clusters that are not chosen, [n, vocab]."""
        logits = self.scores(output)
        if "masked_embedding.centroids.weight" not in self.weights:
            return logits
        chosen = self.centroid_scores(output).topk(self.num_scored).indices
        clusters = self.weights["masked_embedding.token_ordering"].view(self.num_clusters, -1)
        masked = torch.full_like(logits, float("-inf"))
        for row in range(len(logits)):
            ids = clusters[chosen[row]].flatten()
            masked[row, ids] = logits[row, ids]
        return masked

    def draft(self, tokens: Sequence[int], k: int, states: StatesWithKv) -> list[Draft]:
        """Drafts k tokens greedily.

        Args:
            tokens: t_0..t_P.
            k: The number of drafts.
            states: The target's results for t_0..t_{P-1}.
        """
        newest = torch.tensor([len(tokens) - 1])
        token, hidden = tokens[-1], states.output[-1:]
        drafts: list[Draft] = []
        for _ in range(k):
            output, hidden = self.run(torch.tensor([token]), hidden, newest, states.kv)
            logits = self.logits(output)[0]
            token = int(logits.argmax())
            drafts.append(Draft(token, logits, self._margin(output, logits)))
        return drafts

    def _margin(self, output: Tensor, logits: Tensor) -> float:
        """The smaller of the margins of the best token and of the last chosen cluster."""
        top = logits.topk(2).values
        margin = float((top[0] - top[1]) / logits[logits.isfinite()].abs().max())
        if "masked_embedding.centroids.weight" in self.weights:
            scores = self.centroid_scores(output)[0].sort(descending=True).values
            if self.num_scored < len(scores):
                gap = scores[self.num_scored - 1] - scores[self.num_scored]
                margin = min(margin, float(gap / scores.abs().max()))
        return margin

    # ---- pieces --------------------------------------------------------------------------------

    def rms(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm."""
        weight = self.weights[f"{name}.weight"]
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A linear layer, with its bias if there is one."""
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def attention(
        self,
        x: Tensor,
        name: str,
        layer_type: str,
        newest: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Attention to the target's keys, one head at a time."""
        head_dim = keys.shape[-1]
        q = self.linear(x, f"{name}self_attn.q_proj").view(len(x), -1, head_dim)
        q = self.rms(q, f"{name}self_attn.q_norm")
        q = self.rotate(q, newest if self.position == "next" else newest - 1, layer_type)
        key_positions = torch.arange(len(keys))
        is_seen = key_positions < newest.unsqueeze(1)
        if layer_type == SLIDING:
            window = self.window + self.extra_window
            is_seen &= key_positions >= newest.unsqueeze(1) - window
        per_kv_head = q.shape[1] // keys.shape[1]
        outputs = []
        for head in range(q.shape[1]):
            shared = head // per_kv_head
            scores = q[:, head] @ keys[:, shared].T
            weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
            outputs.append(weights @ values[:, shared])
        return self.linear(torch.cat(outputs, dim=-1), f"{name}self_attn.o_proj")

    def rotate(self, x: Tensor, positions: Tensor, layer_type: str) -> Tensor:
        """Rotates the halves of each head; in a full layer, a part of them."""
        rope: Mapping[str, Any] = self.ropes[layer_type]
        head_dim = x.shape[-1]
        half = head_dim // 2
        exponents = -2 * torch.arange(half, dtype=torch.float64) / head_dim
        frequencies = torch.tensor(float(rope["rope_theta"]), dtype=torch.float64) ** exponents
        if layer_type == FULL:
            frequencies[int(rope["partial_rotary_factor"] * head_dim // 2) :] = 0.0
        angles = positions.double().unsqueeze(1) * frequencies
        cos, sin = angles.cos().unsqueeze(1).to(x.dtype), angles.sin().unsqueeze(1).to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class TransformersAssistant:
    """An assistant in transformers, float64, whose position is P; only where no window is full."""

    def __init__(self, directory: Path, target: Gemma4Target) -> None:
        """Loads the assistant."""
        import transformers

        name = read_json(directory / "config.json")["architectures"][0]
        model: Any = getattr(transformers, name).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.double().eval().requires_grad_(False)
        self.target = target

    def step(
        self, token: int, hidden: Tensor, newest: int, kv: KeysAndValues
    ) -> tuple[Tensor, Tensor]:
        """Runs one step; returns logits [vocab] and the feedback [1, backbone]."""
        embedding = self.target.model.get_input_embeddings()(torch.tensor([[token]]))
        out = self.model(
            inputs_embeds=torch.cat([embedding, hidden.unsqueeze(0)], dim=-1),
            position_ids=torch.tensor([[newest]]),
            attention_mask=torch.ones(1, newest + 1, dtype=torch.long),
            shared_kv_states={
                name: tuple(part.transpose(0, 1).unsqueeze(0) for part in pair)
                for name, pair in kv.items()
            },
        )
        return out.logits[0, 0], out.last_hidden_state[0]

    def draft(self, tokens: Sequence[int], k: int, states: StatesWithKv) -> list[Draft]:
        """As `Gemma4MtpReference.draft`."""
        token, hidden = tokens[-1], states.output[-1:]
        drafts: list[Draft] = []
        for _ in range(k):
            logits, hidden = self.step(token, hidden, len(tokens) - 1, states.kv)
            top = logits.topk(2).values
            token = int(logits.argmax())
            margin = float((top[0] - top[1]) / logits.abs().max())
            drafts.append(Draft(token, logits, margin))
        return drafts


def overfit(
    reference: Gemma4MtpReference, texts: Sequence[Sequence[int]], *, steps: int, rate: float
) -> dict[str, Tensor]:
    """Trains an assistant on some sequences, at its position, so that it drafts them well.

    Args:
        reference: Whose weights change.
        texts: Tokens.
        steps: Of Adam.
        rate: Its learning rate.

    Returns:
        The new tensors, float32, by their names in the file.
    """
    kept = reference.weights
    trained = {
        name: tensor.float().requires_grad_()
        for name, tensor in kept.items()
        if tensor.is_floating_point()
    }
    cluster_of = None
    if "masked_embedding.token_ordering" in kept:
        ordering = kept["masked_embedding.token_ordering"]
        cluster_of = torch.empty_like(ordering)
        size = len(ordering) // reference.num_clusters
        cluster_of[ordering] = torch.arange(len(ordering)) // size
    embedding = reference.target.embedding
    cases = []
    for text in texts:
        states = reference.target.states(text)
        kv = {name: (k.float(), v.float()) for name, (k, v) in states.kv.items()}
        cases.append((torch.tensor(text), states.output.float(), kv))
    reference.target.embedding = embedding.float()
    reference.weights = kept | trained
    optimizer = torch.optim.Adam(trained.values(), lr=rate)
    for _ in range(steps):
        loss = torch.zeros(())
        for ids, hidden, kv in cases:
            # Two draft steps, with the sequence's own token between them.
            newest = torch.arange(1, len(ids) - 2)
            fed_back = hidden[newest - 1]
            for step in range(2):
                output, fed_back = reference.run(ids[newest + step], fed_back, newest, kv)
                wanted = ids[newest + step + 1]
                loss = loss + torch.nn.functional.cross_entropy(reference.scores(output), wanted)
                if cluster_of is not None:
                    loss = loss + torch.nn.functional.cross_entropy(
                        reference.centroid_scores(output), cluster_of[wanted]
                    )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    result = {name: tensor.detach() for name, tensor in trained.items()}
    reference.target.embedding = embedding
    reference.weights = kept | {name: tensor.double() for name, tensor in result.items()}
    return result
