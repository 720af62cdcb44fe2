# SPDX-License-Identifier: Apache-2.0
"""The parts that a block drafter has: from its tensors, or guessed from its configuration."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Final

from .binding import same_bytes
from .block_kinds import block_section, find_key, is_assistant, markov_rank
from .drafters import Target
from .section import Section
from .tensor_source import TensorSource

MARKOV_TABLE: Final = "markov_head.markov_w1.weight"
MARKOV_WEIGHT: Final = "markov_head.markov_w2.weight"
#: The prefix of the tensors of the confidence head, and its matrix.
CONFIDENCE: Final = "confidence_head."
CONFIDENCE_WEIGHT: Final = f"{CONFIDENCE}proj.weight"
#: The codebooks of the candidate selector by their canonical names; files may add ".weight".
CODEBOOKS: Final = {
    "predecessors": "candidate_selector.predecessor_codebook",
    "successors": "candidate_selector.successor_codebook",
}
HIDDEN_PROJECTION: Final = "candidate_selector.hidden_projection.weight"
#: The matrix and the norm that make the context, and their names in an assistant of Muse-Glimmer.
CONTEXT: Final = ("fc.weight", "hidden_norm.weight")
_ASSISTANT_CONTEXT: Final = ("encoder.fc.weight", "encoder.output_norm_enc.weight")


@dataclass(frozen=True)
class BlockFacts:
    """The parts that a block drafter has: read from its tensors, or guessed from its configuration.

    Attributes:
        prefix: The prefix of every tensor but the lm_head.
        draft_vocab_size: Rows of its lm_head; None: it has none.
        fc_columns: Columns of `fc.weight`; None: unknown.
        markov_rank: Columns of the Markov head's table; 0: it has none.
        confidence_columns: Columns of the confidence head's matrix; 0: it has none.
        has_embedding: It has an embedding table.
        has_map: It has `d2t`.
        has_qkv_bias: It has biases on q, k and v.
        has_o_bias: It has a bias on o.
        copies: Tensors that are copies of the target's and are not read.
        context: The names of the matrix and of the norm that make the context.
        codebook_suffix: What the names of the codebooks end with.
    """

    prefix: str = ""
    draft_vocab_size: int | None = None
    fc_columns: int | None = None
    markov_rank: int = 0
    confidence_columns: int = 0
    has_embedding: bool = False
    has_map: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    copies: tuple[str, ...] = ()
    context: tuple[str, str] = CONTEXT
    codebook_suffix: str = ""


def read_block_facts(shapes: Mapping[str, tuple[int, ...]]) -> BlockFacts:
    """Finds the parts of a block drafter in its tensors.

    Args:
        shapes: The shape of every tensor by name.
    """
    prefix = tensor_prefix(shapes)
    lm_head = shapes.get("lm_head.weight")
    context = CONTEXT if prefix + CONTEXT[0] in shapes else _ASSISTANT_CONTEXT
    if prefix + context[0] not in shapes:
        context = CONTEXT
    fc = shapes.get(prefix + context[0])
    table = shapes.get(prefix + MARKOV_TABLE)
    confidence = shapes.get(prefix + CONFIDENCE_WEIGHT)
    return BlockFacts(
        prefix=prefix,
        draft_vocab_size=lm_head[0] if lm_head else None,
        fc_columns=fc[-1] if fc else None,
        markov_rank=table[-1] if table else 0,
        confidence_columns=confidence[-1] if confidence else 0,
        has_embedding=f"{prefix}embed_tokens.weight" in shapes,
        has_map=f"{prefix}d2t" in shapes or "d2t" in shapes,
        has_qkv_bias=f"{prefix}layers.0.self_attn.q_proj.bias" in shapes,
        has_o_bias=f"{prefix}layers.0.self_attn.o_proj.bias" in shapes,
        context=context,
        codebook_suffix=".weight" if f"{prefix}{CODEBOOKS['successors']}.weight" in shapes else "",
    )


def tensor_prefix(names: Container[str]) -> str:
    """The prefix of every tensor but the lm_head."""
    is_prefixed = any(f"model.{fc}" in names for fc, _ in (CONTEXT, _ASSISTANT_CONTEXT))
    return "model." if is_prefixed else ""


def without_copies(
    facts: BlockFacts, owners: Mapping[str, TensorSource], target: Target
) -> BlockFacts:
    """The parts of a block drafter without copies of the target's tables, which it shares instead.

    Args:
        facts: Its parts.
        owners: Its tensors by name.
        target: The target.

    Raises:
        ModelFileError: A tensor cannot be read.
    """

    def is_copy(name: str, table: str) -> bool:
        theirs = target.tables.get(table)
        if theirs is None or name not in owners:
            return False
        return same_bytes(owners[name], name, theirs.shard, theirs.source)

    embeddings, lm_head = f"{facts.prefix}embed_tokens.weight", "lm_head.weight"
    if is_copy(embeddings, "embed.weight"):
        facts = replace(facts, has_embedding=False, copies=(embeddings,))
    if not facts.has_map and is_copy(lm_head, "lm_head.weight"):
        facts = replace(facts, draft_vocab_size=None, copies=(*facts.copies, lm_head))
    return facts


def guess_block_facts(top: Section, target: Target) -> BlockFacts:
    """Guesses the parts of a block drafter from its configuration, for dummy weights.

    It is assumed to use the target's embeddings, and the target's lm_head for a full vocabulary.
    """
    layer = top.section("transformer_layer_config") or top
    bias = layer.boolean("attention_bias", False)
    rows = top.integer("draft_vocab_size", target.vocab_size)
    is_reduced = rows != target.vocab_size
    rank = markov_rank(top)
    return BlockFacts(
        draft_vocab_size=rows if is_reduced else None,
        markov_rank=rank,
        confidence_columns=_guess_confidence(top, layer, rank),
        has_map=is_reduced,
        has_qkv_bias=bias,
        has_o_bias=bias,
        context=_ASSISTANT_CONTEXT if is_assistant(top) else CONTEXT,
    )


def _guess_confidence(top: Section, layer: Section, rank: int) -> int:
    block = block_section(top)

    def is_set(key: str, default: bool) -> bool:
        return (find_key(key, block) or top).boolean(key, default)

    if not is_set("enable_confidence_head", False):
        return 0
    reads_token = is_set("confidence_head_with_markov", rank > 0)
    return layer.integer("hidden_size", low=1) + (rank if reads_token else 0)
