# SPDX-License-Identifier: Apache-2.0
"""The heads of a block drafter: the Markov head of DSpark, the confidence head, and what DFlash2
adds: convolutions in its layers, and the candidate selector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline._core import ModelFileError

from .block_facts import (
    CODEBOOKS,
    CONFIDENCE,
    CONFIDENCE_WEIGHT,
    HIDDEN_PROJECTION,
    MARKOV_TABLE,
    MARKOV_WEIGHT,
    BlockFacts,
)
from .block_kinds import SPECULATORS, find_key, markov_rank
from .decoder import Sizes
from .decoder_tensors import tensor_spec
from .drafters import DSPARK
from .family import TensorSpec
from .section import Section

_VANILLA: Final = "vanilla"
#: Types of Markov heads with a matrix that mixes hidden state and embedding: that matrix, its rows
#: and its columns beside the hidden size, as multiples of the rank.
_MIXES: Final = {
    "gated": ("markov_head.gate_proj", 1, 1),
    "rnn": ("markov_head.joint_proj", 3, 2),
}


def read_heads(
    kind: str, top: Section, block: Section, facts: BlockFacts, sizes: Sizes
) -> dict[str, Any]:
    """The keys "markov" and "confidence" of the object "block" of the description.

    Args:
        kind: One of `BLOCK_KINDS`.
        top: The configuration.
        block: The part that has the keys of the block.
        facts: The parts that the drafter has.
        sizes: Its sizes.

    Raises:
        ModelFileError: A key has a wrong value, or contradicts the tensors.
        NotImplementedError: The Markov head is of another type.
    """
    heads: dict[str, Any] = {}
    rank = markov_rank(top)
    if facts.markov_rank != rank:
        raise ModelFileError(
            f'{top.source}: key "markov_rank" is {rank}, but {MARKOV_TABLE!r} '
            + (f"has {facts.markov_rank} columns" if facts.markov_rank else "is not in the weights")
            + "; expected the same number"
        )
    if kind == DSPARK:
        section = find_key("markov_head_type", block) or top
        head_type = section.text("markov_head_type", _VANILLA)
        if head_type not in (_VANILLA, *_MIXES):
            raise section.refusal("markov_head_type", "vanilla, gated and rnn")
        heads["markov"] = {"kind": head_type, "rank": rank}
    if _has_confidence(top, block, facts):
        heads["confidence"] = {"reads_token": _reads_token(top, block, facts, sizes, rank)}
    return heads


def _has_confidence(top: Section, block: Section, facts: BlockFacts) -> bool:
    """Returns whether the drafter has a confidence head and the configuration enables it."""
    key = "enable_confidence_head"
    section = find_key(key, block) or top
    is_there = facts.confidence_columns > 0
    is_enabled = section.boolean(key, is_there)
    if is_enabled and not is_there:
        seen = f"is true, but {CONFIDENCE_WEIGHT!r} is not in the weights"
        raise section.wrong(key, f"{seen}; expected the tensor, or false")
    return is_enabled


def _reads_token(top: Section, block: Section, facts: BlockFacts, sizes: Sizes, rank: int) -> bool:
    """Returns whether the confidence head reads the Markov head's row of the token before."""
    key = "confidence_head_with_markov"
    section = find_key(key, block) or top
    reads_token = section.boolean(key, rank > 0 and facts.confidence_columns != sizes.hidden)
    if reads_token and rank == 0:
        raise section.wrong(
            key, 'is true, but "markov_rank" is 0; expected false, or a Markov head'
        )
    columns = sizes.hidden + (rank if reads_token else 0)
    if facts.confidence_columns != columns:
        parts = "hidden_size + markov_rank" if reads_token else "hidden_size"
        raise ModelFileError(
            f"{top.source}: {CONFIDENCE_WEIGHT!r} has {facts.confidence_columns} columns; expected "
            f'{columns}, {parts}, where "{section.name(key)}" is {str(reads_token).lower()}'
        )
    return reads_token


def head_tensors(
    sizes: Sizes, drafter: Mapping[str, Any], rows: tuple[int, str]
) -> list[TensorSpec]:
    """Lists the tensors of the heads.

    Args:
        sizes: The drafter's sizes.
        drafter: The object "drafter" of the description.
        rows: Rows of its lm_head, and what to call them.
    """
    block = drafter["block"]
    specs: list[TensorSpec] = []
    rank = 0
    if markov := block.get("markov"):
        rank = markov["rank"]
        width = (rank, "markov_rank")
        vocab = (sizes.vocab, "vocab_size")
        specs.append(tensor_spec("markov.table.weight", MARKOV_TABLE, vocab, width))
        specs.append(tensor_spec("markov.weight", MARKOV_WEIGHT, rows, width))
        if mix := _MIXES.get(markov["kind"]):
            source, num_outputs, num_inputs = mix
            out = (num_outputs * rank, f"{num_outputs} * markov_rank")
            into = (sizes.hidden + num_inputs * rank, f"hidden_size + {num_inputs} * markov_rank")
            specs.append(tensor_spec("markov.mix.weight", f"{source}.weight", out, into))
            specs.append(tensor_spec("markov.mix.bias", f"{source}.bias", out))
    if confidence := block.get("confidence"):
        reads_token = confidence["reads_token"]
        columns = (sizes.hidden + (rank if reads_token else 0), "columns")
        specs.append(tensor_spec("confidence.weight", CONFIDENCE_WEIGHT, (1, "1"), columns))
        specs.append(tensor_spec("confidence.bias", f"{CONFIDENCE}proj.bias", (1, "1")))
    return specs


# ---- DFlash2 -------------------------------------------------------------------------------------

#: The keys by the entries of the description that they become.
_CONVOLUTION: Final = {"taps": "conv_kernel_size", "group": "conv_group_size"}
_SELECTOR: Final = {"rank": "selector_rank", "top": "selector_top_k"}
#: The keys of DFlash2 alone.
DFLASH2_KEYS: Final = (*_CONVOLUTION.values(), *_SELECTOR.values())
#: All keys of z-lab's object with the block. Those of training change nothing.
_KNOWN_KEYS: Final = (
    *DFLASH2_KEYS,
    "attention_sink_bias",
    "attention_value_scale",
    "block_size",
    "causal",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "num_anchors",
    "output_multiplier",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
)
#: The convolutions of a layer: canonical name, name in the checkpoint.
_CONVOLUTIONS: Final = (("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv"))


def read_selector(top: Section, block: Section, facts: BlockFacts, sizes: Sizes) -> dict[str, Any]:
    """The keys "convolution" and "selector" of the object "block" of the description.

    Args:
        top: The configuration.
        block: The part that has the keys of the block.
        facts: The parts that the drafter has.
        sizes: Its sizes.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A key is not known, or a value not supported.
    """
    if not top.has(SPECULATORS):
        for key in block.values:
            if block is not top and block.has(key) and key not in _KNOWN_KEYS:
                raise block.refusal(key, f"no such key, only {', '.join(sorted(_KNOWN_KEYS))}")
    if markov_rank(top) > 0:
        section = find_key("markov_rank", block) or top
        raise section.refusal("markov_rank", "0, or no such key, with a candidate selector")
    if facts.has_map or facts.draft_vocab_size not in (None, sizes.vocab):
        rows = facts.draft_vocab_size
        raise NotImplementedError(
            f"{top.source}: 'lm_head.weight' has {rows} rows, which Paceline does not support with "
            f"a candidate selector; supported: {sizes.vocab}, a row for each token id, and no 'd2t'"
        )

    def read(key: str) -> int:
        return (find_key(key, block, top) or block).integer(key)

    return {
        "convolution": {entry: read(key) for entry, key in _CONVOLUTION.items()},
        "selector": {entry: read(key) for entry, key in _SELECTOR.items()},
    }


def convolution_tensors(layer: int, sizes: Sizes, drafter: Mapping[str, Any]) -> list[TensorSpec]:
    """Lists the tensors of the convolutions of a layer; none in other drafters."""
    convolution = drafter["block"].get("convolution")
    if convolution is None:
        return []
    taps, group = convolution["taps"], convolution["group"]
    hidden = (sizes.hidden, "hidden_size")
    outputs = (
        2 * taps * (sizes.hidden // group),
        "2 * conv_kernel_size * hidden_size / conv_group_size",
    )
    specs = []
    for name, source in _CONVOLUTIONS:
        name, source = f"layers.{layer}.{name}", f"layers.{layer}.{source}"
        specs += [
            tensor_spec(
                f"{name}.base",
                f"{source}.base_kernel",
                (2, "2"),
                (taps, "conv_kernel_size"),
                hidden,
            ),
            tensor_spec(
                f"{name}.kernel.weight", f"{source}.kernel_projection.weight", outputs, hidden
            ),
        ]
    return specs


def selector_tensors(
    sizes: Sizes, facts: BlockFacts, drafter: Mapping[str, Any]
) -> list[TensorSpec]:
    """Lists the tensors of the candidate selector; none in other drafters."""
    selector = drafter["block"].get("selector")
    if selector is None:
        return []
    rank = (selector["rank"], "selector_rank")
    vocab = (sizes.vocab, "vocab_size")
    specs = [
        tensor_spec(f"selector.{name}.weight", source + facts.codebook_suffix, vocab, rank)
        for name, source in CODEBOOKS.items()
    ]
    hidden = (sizes.hidden, "hidden_size")
    return [*specs, tensor_spec("selector.weight", HIDDEN_PROJECTION, rank, hidden)]
