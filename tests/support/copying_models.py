# SPDX-License-Identifier: Apache-2.0
"""A target that copies its prompt, and block drafters for it that are usually right.

    target = write_target("qwen3", folder)
    drafter = write_drafter("z-lab", target, folder)

One attention head of the target sees, at each position, the position PERIOD - 1 before it, and its
output is that token. So a prompt that ends with PERIOD tokens is repeated without end, and a single
key or value in a wrong place is a wrong token one period later. The heads that copy depend on
positions alone: the queries and keys before rotation are constants whose phases cancel at one
distance. Everything else is random and small, so that the logprobs of tokens depend on it.

A drafter has the same head in its first layer, on keys and values from the target's hidden states.
It mistakes some tokens for others, so that a window is accepted in part.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import block_models
import tiny_models
from block_models import BlockSpec
from tiny_configs import SLIDING, TinySpec, hf_config

if TYPE_CHECKING:
    import torch

PERIOD = 96
VOCAB = 64
HEAD_DIM = 64
#: Ids that a drafter replaces by the next id.
MISTAKEN = (7, 19, 23, 38, 45, 52)
#: The layer that copies. Without norms of queries and keys it needs exact inputs.
_COPYING = {"qwen3": 1, "gpt_oss": 0}
#: Of the logits: that of the copied token over all others.
LEAD = 14.0
#: Of a head that copies: the score of its one key over that of every other.
_CERTAINTY = 30.0
NOISE = 0.03

TARGETS = {
    "qwen3": TinySpec(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=2 * VOCAB,
        num_layers=4,
        heads=2,
        kv_heads=1,
        head_dim=HEAD_DIM,
        tokenizer_size=0,
    ),
    # Windows that end at the key that is copied.
    "gpt_oss": TinySpec(
        "gpt_oss",
        vocab_size=VOCAB,
        hidden_size=2 * VOCAB,
        layer_types=(SLIDING,) * 4,
        window=PERIOD,
        heads=2,
        kv_heads=1,
        head_dim=HEAD_DIM,
        num_experts=4,
        top_k=2,
        tokenizer_size=0,
    ),
}
_COMMON = {"heads": 2, "kv_heads": 1, "head_dim": HEAD_DIM, "aux_layers": (1, 3)}
#: Windows of drafters end at the key that is copied, too.
DRAFTERS = {
    "z-lab": BlockSpec("z-lab", block_size=16, **_COMMON),
    "z-lab, windows": BlockSpec("z-lab", block_size=16, window=PERIOD + 1, **_COMMON),
    "deepseek": BlockSpec("deepseek", block_size=7, markov_rank=8, **_COMMON),
    "speculators, windows": BlockSpec(
        "speculators", block_size=8, markov_rank=8, window=PERIOD - 1, **_COMMON
    ),
}


def orthogonal_codes(count: int) -> torch.Tensor:
    """Codes of 1 and -1, [count, count]; the first element of each is 1."""
    import torch

    table = torch.ones(1, 1)
    while len(table) < count:
        table = torch.cat([torch.cat([table, table], 1), torch.cat([table, -table], 1)])
    return table


def lead_of(frequencies: torch.Tensor, distance: int) -> float:
    """How much more a rotated constant agrees with itself at one distance than at all others.

    Args:
        frequencies: Of the rotation, [pairs].
        distance: The one.
    """
    import torch

    offsets = torch.tensor([d - distance for d in range(8 * PERIOD) if d != distance])
    return len(frequencies) - float((offsets[:, None] * frequencies).cos().sum(1).max())


def _head(frequencies: torch.Tensor, distance: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Query and key of a head that sees one distance, and the factor that each of them needs.

    Args:
        frequencies: Of the rotation, [HEAD_DIM / 2].
        distance: From the query's position back to the key's.
    """
    import torch

    phases = frequencies * distance
    query = torch.cat([phases.cos(), -phases.sin()])
    key = torch.cat([torch.ones(HEAD_DIM // 2), torch.zeros(HEAD_DIM // 2)])
    lead = lead_of(frequencies, distance)
    return query, key, float((_CERTAINTY * HEAD_DIM**0.5 / lead) ** 0.5)


def _make_copying(
    tensors: dict[str, torch.Tensor],
    layer: str,
    frequencies: torch.Tensor,
    distance: int,
    seen: torch.Tensor,
) -> None:
    """Makes the first head of a layer copy: codes from the first half of rows to the second half.

    Args:
        tensors: Of the model.
        layer: The name of the layer's attention.
        frequencies: Of its rotation.
        distance: Between query and key.
        seen: The code that each id is taken for, [VOCAB, VOCAB].
    """
    import torch

    query, key, factor = _head(frequencies, distance)
    own = slice(0, HEAD_DIM)
    for name, values in (("q_proj", query), ("k_proj", key)):
        matrix = tensors[f"{layer}.{name}.weight"]
        matrix[own] = 0
        # The first element of every code. A norm makes the head's root mean square 1.
        matrix[own, 0] = values * factor
        norm = tensors.get(f"{layer}.{name[0]}_norm.weight")
        if norm is not None:
            norm.fill_(factor / 2**0.5)
    v, o = tensors[f"{layer}.v_proj.weight"], tensors[f"{layer}.o_proj.weight"]
    v[own] = 0
    v[own, :VOCAB] = seen.T @ orthogonal_codes(VOCAB) / VOCAB
    o[:, own] = 0
    o[VOCAB:, own] = torch.eye(VOCAB)


def _make_quiet(tensors: dict[str, torch.Tensor]) -> None:
    """Makes what layers add small, and removes biases and sinks."""
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.mul_(NOISE)
        if name.endswith(("_proj.bias", "sinks")):
            tensor.zero_()
        if "norm" in name and tensor.ndim == 1:
            tensor.fill_(1)


def write_target(name: str, out: Path) -> Path:
    """Writes one of `TARGETS` into a new folder."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = TARGETS[name]
    tiny_models.write(spec, out)
    config = hf_config(spec)
    if spec.family == "gpt_oss":
        frequencies = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))[0]
    else:
        theta = config.rope_parameters["rope_theta"]
        frequencies = _frequencies(theta)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        _make_quiet(tensors)
        table = torch.zeros(VOCAB, 2 * VOCAB)
        table[:, :VOCAB] = orthogonal_codes(VOCAB)
        tensors["model.embed_tokens.weight"] = table
        # The last norm divides by the root mean square of both codes, 1.
        tensors["lm_head.weight"] = table.roll(VOCAB, 1) * (LEAD / VOCAB)
        layer = f"model.layers.{_COPYING[name]}.self_attn"
        _make_copying(tensors, layer, frequencies, PERIOD - 1, orthogonal_codes(VOCAB))

    tiny_models.edit_tensors(out, change)
    return out


def write_drafter(name: str, target: Path, out: Path) -> Path:
    """Writes one of `DRAFTERS` for a target of this module into a new folder."""
    import torch

    spec = DRAFTERS[name]
    block_models.write(spec, target, out)
    config = tiny_models.read_json(out / "config.json")
    theta = config.get("transformer_layer_config", config)["rope_theta"]
    mistaken = orthogonal_codes(VOCAB)
    for token in MISTAKEN:
        mistaken[token] = orthogonal_codes(VOCAB)[token + 1]
    # A row sees the token one period before the one that it predicts.
    distance = PERIOD - 1 if spec.samples_from_anchor else PERIOD

    def change(tensors: dict[str, torch.Tensor]) -> None:
        _make_quiet(tensors)
        fc = tensors["fc.weight"]
        fc.mul_(NOISE)
        # The codes in the second of the hidden states.
        fc[:VOCAB, 2 * VOCAB : 3 * VOCAB] += torch.eye(VOCAB)
        _make_copying(tensors, "layers.0.self_attn", _frequencies(theta), distance, mistaken)
        if spec.markov_rank:
            tensors["markov_head.markov_w2.weight"].mul_(20)  # so that it errs, too

    tiny_models.edit_tensors(out, change)
    return out


def _frequencies(theta: float) -> torch.Tensor:
    import torch

    half = HEAD_DIM // 2
    return theta ** (-torch.arange(half) / half)
