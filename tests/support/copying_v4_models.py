# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 that copies its prompt from compressed entries, and whose MTP layer is usually right.

    path = write(4, folder)     # entries of 4 tokens that overlap, chosen by the indexer
    path = write(8, folder)     # entries of 8 tokens, as ratio 128 has them with 128

As in `copying_models`, a prompt that ends with PERIOD tokens is repeated without end, and what a
head sees depends on positions alone. In the first layer, each part of an entry's channels is that
of one of its tokens, by the bias of the compressor's gate. Head s sees the one entry whose token s
is PERIOD - 1 positions before the query; if none begins there, it sees nothing but its sink. So one
entry that is missing, stale or in a wrong place makes wrong tokens one period later.

The MTP layer copies from its window, which is PERIOD tokens, and mistakes some tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import tiny_models
from copying_models import LEAD, NOISE, PERIOD, lead_of, orthogonal_codes
from deepseek_v4_models import V4Spec, hf_config, make

VOCAB = 32
HEADS = 8
_CODE = 16  # elements of a token's code; twice as many tokens, by its sign
_ROPE = 32
_HEAD_DIM = HEADS * _CODE + _ROPE
_RANK = HEADS // 2 * _CODE  # two groups of heads
#: Elements of the residual stream: a constant, the token's code and the code of the copied token.
_TOKEN = slice(1, 1 + _CODE)
_COPIED = slice(1 + _CODE, 1 + 2 * _CODE)
#: Of a key before its norm: the rotated part is so much larger that the rest does not change it.
_KEY = 10.0
#: The lead of a head's one entry over all others in its scores; its sink is half way.
_CERTAINTY = 60.0


def write(ratio: int, out: Path) -> Path:
    """Writes a target of which the first layer copies.

    Args:
        ratio: The tokens of an entry: 4, or 8 for the kind that is published with 128.
        out: The new folder.
    """
    first, other = (4, 128) if ratio == 4 else (128, 4)
    spec = V4Spec(
        seed=1,
        ratios=(first, 0, other),
        hca=8,
        index_top_k=256,
        window=PERIOD,
        vocab_size=VOCAB,
        head_dim=_HEAD_DIM,
        rope_dim=_ROPE,
        index_dim=_ROPE,
        o_rank=_RANK,
    )
    tiny_models.copy_checkpoint(make(spec), out)
    tiny_models.edit_config(out, num_attention_heads=HEADS)
    rope = _rope(spec)

    def change(tensors: dict[str, Tensor]) -> None:
        _make_quiet(tensors)
        codes = _codes()
        tensors["embed.weight"].zero_()
        tensors["embed.weight"][:, 0] = 1
        tensors["embed.weight"][:, _TOKEN] = codes
        tensors["head.weight"].zero_()
        root_mean_square = ((1 + 2 * _CODE) / spec.hidden) ** 0.5
        tensors["head.weight"][:, _COPIED] = codes * (LEAD / _CODE * root_mean_square)
        _copy_from_entries(tensors, "layers.0.attn.", ratio, *rope["compress"])
        _copy_from_window(tensors, *rope["main"])
        for name in ("e_proj", "h_proj"):
            tensors[f"mtp.0.{name}.weight"].mul_(NOISE)
        tensors["mtp.0.e_proj.weight"].add_(torch.eye(spec.hidden))

    tiny_models.edit_tensors(out, change)
    return out


def _codes() -> Tensor:
    half = orthogonal_codes(_CODE)
    return torch.cat([half, -half])


def _rope(spec: V4Spec) -> dict[str, tuple[Tensor, float]]:
    """The frequencies of both rotations, and the factors of what they rotate."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    module = DeepseekV4RotaryEmbedding(hf_config(spec))
    return {
        kind: (getattr(module, f"{kind}_inv_freq"), getattr(module, f"{kind}_attention_scaling"))
        for kind in ("main", "compress")
    }


def _make_quiet(tensors: dict[str, Tensor]) -> None:
    """Gives attention HEADS heads, and makes what layers add small."""
    for name, tensor in list(tensors.items()):
        generator = torch.Generator().manual_seed(len(name))
        if name.endswith(".attn.wq_b.weight"):
            shape = (HEADS * _HEAD_DIM, tensor.shape[1])
            tensors[name] = 0.2 * torch.randn(shape, generator=generator)
        elif name.endswith(".attn.wo_a.weight"):
            shape = (2 * _RANK, HEADS // 2 * _HEAD_DIM)
            tensors[name] = 0.2 * torch.randn(shape, generator=generator)
        elif name.endswith("attn_sink"):
            tensors[name] = torch.randn(HEADS, generator=generator)
        elif name.endswith(("wo_b.weight", ".w2.weight", "_fn")):
            tensor.mul_(NOISE)
        elif name.endswith(("hc_attn_base", "hc_ffn_base", "hc_head_base")):
            tensor.zero_()  # streams that are equal stay so
        elif "norm" in name:
            tensor.fill_(1)


def _queries(
    tensors: dict[str, Tensor], layer: str, frequencies: Tensor, distances: list[int]
) -> None:
    """Makes head s look at distance s of a list; other heads look nowhere."""
    q_a, q_b = tensors[f"{layer}wq_a.weight"], tensors[f"{layer}wq_b.weight"]
    q_a.zero_()
    q_a[0, 0] = 1
    q_b.zero_()
    for head, distance in enumerate(distances):
        phases = frequencies * distance
        at = head * _HEAD_DIM + HEADS * _CODE
        q_b[at : at + _ROPE, 0] = torch.stack([phases.cos(), -phases.sin()], 1).flatten()


def _keys(tensors: dict[str, Tensor], matrix: str, norm: str, parts: int, code: Tensor) -> float:
    """Makes a matrix of keys, which are values too, and its norm; returns the norm's last element.

    Args:
        tensors: Of the model.
        matrix: The name of the matrix, [head_dim, hidden].
        norm: The name of the norm.
        parts: How many parts of the channels have the token's code.
        code: What codes are taken for, [_CODE, _CODE].
    """
    weight = tensors[matrix]
    weight.zero_()
    own = weight[-_HEAD_DIM:]
    for part in range(parts):
        own[part * _CODE : (part + 1) * _CODE, _TOKEN] = code
    own[HEADS * _CODE :: 2, 0] = _KEY
    energy = (_ROPE / 2 * _KEY**2 + parts * _CODE) / _HEAD_DIM
    tensors[norm][: HEADS * _CODE] = energy**0.5
    return float(_KEY / energy**0.5 * (_ROPE / 2) ** 0.5)


def _set_scores(
    tensors: dict[str, Tensor], norm: str, frequencies: Tensor, factor: float, distances: list[int],
    length: float,
) -> float:  # fmt: skip
    """Sets the rotated part of a norm so that each head is certain; returns its score.

    Args:
        tensors: Of the model.
        norm: The name of the norm of keys.
        frequencies: Of the rotation.
        factor: Of what it rotates.
        distances: Those that heads look at.
        length: Of the rotated part of a key with a weight of 1.
    """
    lead = min(lead_of(frequencies, distance) for distance in distances) / (_ROPE / 2)
    score = _CERTAINTY / lead
    # A query's norm is the root of the head's elements, by which scores are divided.
    tensors[norm][HEADS * _CODE :] = score / (length * factor**2)
    return score


def _copy_from_entries(
    tensors: dict[str, Tensor], layer: str, ratio: int, frequencies: Tensor, factor: float
) -> None:
    distances = [PERIOD - 1 + slot for slot in range(ratio)]
    _queries(tensors, layer, frequencies, distances)
    tensors[f"{layer}wkv.weight"].zero_()  # nothing comes from the window
    compressor = f"{layer}compressor."
    norm = f"{compressor}norm.weight"
    length = _keys(tensors, f"{compressor}wkv.weight", norm, ratio, torch.eye(_CODE))
    score = _set_scores(tensors, norm, frequencies, factor, distances, length)
    tensors[f"{compressor}wgate.weight"].zero_()
    ape = tensors[f"{compressor}ape"]
    ape.fill_(-100)  # with ratio 4, of the entry that a token's other series is for
    own = ape[:, -_HEAD_DIM:]
    own.fill_(0)
    for slot in range(ratio):
        own[slot, slot * _CODE : (slot + 1) * _CODE] = 100
    tensors[f"{layer}attn_sink"] = torch.full((HEADS,), score - _CERTAINTY / 2)
    _outputs(tensors, layer, list(range(ratio)))


def _copy_from_window(tensors: dict[str, Tensor], frequencies: Tensor, factor: float) -> None:
    # A row has the token after its position, and predicts the one after that.
    layer, distances = "mtp.0.attn.", [PERIOD - 1]
    _queries(tensors, layer, frequencies, distances)
    codes = orthogonal_codes(_CODE)
    mistaken = codes.clone()
    mistaken[[3, 7]] = codes[[4, 8]]
    norm = f"{layer}kv_norm.weight"
    length = _keys(tensors, f"{layer}wkv.weight", norm, 1, mistaken.T @ codes / _CODE)
    score = _set_scores(tensors, norm, frequencies, factor, distances, length)
    tensors[f"{layer}attn_sink"] = torch.full((HEADS,), score - _CERTAINTY / 2)
    _outputs(tensors, layer, [0])


def _outputs(tensors: dict[str, Tensor], layer: str, heads: list[int]) -> None:
    """Sums part s of the channels of each head s."""
    o_a, o_b = tensors[f"{layer}wo_a.weight"], tensors[f"{layer}wo_b.weight"]
    o_a.zero_()
    o_b.zero_()
    for head in heads:
        group, inner = divmod(head, HEADS // 2)
        rank = group * _RANK + inner * _CODE
        channel = inner * _HEAD_DIM + head * _CODE
        o_a[rank : rank + _CODE, channel : channel + _CODE] = torch.eye(_CODE)
        o_b[_COPIED, rank : rank + _CODE] = torch.eye(_CODE)
