# SPDX-License-Identifier: Apache-2.0
"""Block drafters, DFlash and DSpark, as canonical descriptions and tensor names.

Four layouts are read: DFlash as z-lab writes it, DSpark and DFlash as deepseek-ai writes them (a
flat configuration of the class `Qwen3DSparkModel`), the same with the keys of a block nested in
"dflash_config", and both in the format of the `speculators` package. The result is a decoder
description with the key "drafter" of `docs/model-format.md`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline._core import ModelFileError
from paceline.limits import MAX_SPECULATIVE_TOKENS

from .binding import same_bytes
from .decoder import Sizes, describe, read_activation, read_sizes, same_layers
from .decoder_tensors import LINEARS, QK_NORMS
from .description import check_description
from .drafters import (
    DFLASH,
    DSPARK,
    Target,
    check_same_vocabulary,
    made_for_another,
    take_positions,
)
from .family import Family, TensorSpec
from .layer_types import FULL, LAYER_TYPES, SLIDING, read_layer_types
from .messages import show
from .rope import read_rope
from .section import Section
from .tensor_source import TensorSource

#: Keys that change what the drafter computes, and that Paceline does not implement.
_REFUSED_KEYS: Final = (
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
)
#: Drafters of other papers, by a part of their architecture's name.
_OTHERS: Final = ("dflash2", "domino", "peagle", "xpress", "lilicorr", "gemma4dspark")
_SPECULATORS: Final = "speculators_model_type"
_MAP_NAMES: Final = ("d2t", "t2d")
#: Tensors of the confidence head, which ends a draft early and is not used yet.
_CONFIDENCE: Final = "confidence_head."
_MARKOV_TABLE: Final = "markov_head.markov_w1.weight"
_MARKOV: Final = "markov_head.markov_w2.weight"


@dataclass(frozen=True)
class BlockFacts:
    """The parts that a block drafter has: read from its tensors, or guessed from its configuration.

    Attributes:
        prefix: The prefix of every tensor but the lm_head.
        draft_vocab_size: Rows of its lm_head; None: it has none.
        fc_columns: Columns of `fc.weight`; None: unknown.
        markov_rank: Columns of the Markov head's table; 0: it has none.
        has_embedding: It has an embedding table.
        has_map: It has `d2t`.
        has_qkv_bias: It has biases on q, k and v.
        has_o_bias: It has a bias on o.
        copies: Tensors that are copies of the target's and are not read.
    """

    prefix: str = ""
    draft_vocab_size: int | None = None
    fc_columns: int | None = None
    markov_rank: int = 0
    has_embedding: bool = False
    has_map: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    copies: tuple[str, ...] = ()


# ---- which kind is it? -------------------------------------------------------------------------


def block_kind_of_config(top: Section) -> str | None:
    """The method of a configuration, "dflash" or "dspark"; None: it is no block drafter.

    Raises:
        NotImplementedError: It is a block drafter that is not supported; names what is.
    """
    names = list(top.strings("architectures") or [])
    if top.has(_SPECULATORS):
        names.insert(0, top.text(_SPECULATORS))
    for name in names:
        plain = re.sub("[^a-z0-9]", "", name.lower())
        if any(other in plain for other in _OTHERS):
            key = _SPECULATORS if top.has(_SPECULATORS) else "architectures"
            raise top.refusal(key, "DFlash or DSpark with layers of Qwen3, and EAGLE-3")
        if "dspark" in plain or "dflash" in plain:
            return DSPARK if _markov_rank(top) > 0 else DFLASH
    return None


def _nested(top: Section) -> Section:
    return top.section("dflash_config") or top


def _markov_rank(top: Section) -> int:
    section = _nested(top)
    for where in (section, top):
        if where.has("markov_rank"):
            return where.integer("markov_rank", low=0)
    return 0


def default_num_drafts(top: Section) -> int:
    """The drafts of a whole block, or as many as an engine makes.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
    """
    block = _nested(top)
    size = (block if block.has("block_size") else top).integer("block_size", low=1, high=64)
    return min(size if _samples_from_anchor(top) else max(size - 1, 1), MAX_SPECULATIVE_TOKENS)


# ---- its parts ---------------------------------------------------------------------------------


def read_block_facts(shapes: Mapping[str, tuple[int, ...]]) -> BlockFacts:
    """Finds the parts of a block drafter in its tensors.

    Args:
        shapes: The shape of every tensor by name.
    """
    prefix = "model." if "model.fc.weight" in shapes else ""
    lm_head = shapes.get("lm_head.weight")
    fc = shapes.get(f"{prefix}fc.weight")
    table = shapes.get(prefix + _MARKOV_TABLE)
    return BlockFacts(
        prefix=prefix,
        draft_vocab_size=lm_head[0] if lm_head else None,
        fc_columns=fc[-1] if fc else None,
        markov_rank=table[-1] if table else 0,
        has_embedding=f"{prefix}embed_tokens.weight" in shapes,
        has_map=f"{prefix}d2t" in shapes or "d2t" in shapes,
        has_qkv_bias=f"{prefix}layers.0.self_attn.q_proj.bias" in shapes,
        has_o_bias=f"{prefix}layers.0.self_attn.o_proj.bias" in shapes,
    )


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
    return BlockFacts(
        draft_vocab_size=rows if is_reduced else None,
        markov_rank=_markov_rank(top),
        has_map=is_reduced,
        has_qkv_bias=bias,
        has_o_bias=bias,
    )


# ---- the description ---------------------------------------------------------------------------


def translate_block(
    kind: str, top: Section, facts: BlockFacts, target: Target
) -> tuple[Family, list[str]]:
    """Translates a block drafter for a target.

    Args:
        kind: "dflash" or "dspark".
        top: Its configuration.
        facts: The parts that it has.
        target: The target that it must fit.

    Returns:
        The description with the tensors it needs, without `d2t`; and notes for the user.

    Raises:
        ValueError: It was made for another target; names both values.
        ModelFileError: A key has a wrong value, or contradicts the tensors.
        NotImplementedError: It needs something that Paceline does not support.
    """
    layer = top.section("transformer_layer_config") or top
    block = _nested(top)
    for section in {id(s): s for s in (top, layer, block)}.values():
        for key in _REFUSED_KEYS:
            if section.has(key):
                raise section.refusal(key, "no such key")
        if section.has("quantization_config"):
            raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")
    if layer.text("model_type", "qwen3") != "qwen3":
        raise layer.refusal("model_type", "qwen3")
    sizes = read_sizes(layer, vocab=target.vocab_size, head_dim=128, max_position=32_768, eps=1e-6)
    _check_target(top, layer, sizes, facts, target)
    notes: list[str] = []
    layer_types = (FULL,) * sizes.layers
    if layer.has("layer_types"):
        layer_types = read_layer_types(layer, sizes.layers, 1)
    drafter: dict[str, Any] = {
        "kind": kind,
        "target_hidden_size": target.hidden_size,
        "aux_layers": _aux_layers(top, block, sizes, facts, target, notes),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "has_fc_bias": False,
        "has_attn_norm": True,
        "has_final_norm": True,
        "owns_embedding": facts.has_embedding,
        "owns_lm_head": facts.draft_vocab_size is not None,
        "draft_vocab_size": facts.draft_vocab_size or target.vocab_size,
        "block": _read_block(kind, top, block, facts, target),
    }
    config = _description(kind, layer, block, sizes, layer_types, facts, drafter, target)
    config["drafter"] = drafter
    take_positions(config, sizes, target, notes)
    check_description(config, (layer, top))
    if any(block.has(key) for key in ("enable_confidence_head",)) and block.boolean(
        "enable_confidence_head"
    ):
        notes.append("the drafter's confidence head is not used")
    prefixes = {"", facts.prefix}
    ignored = tuple(p + name for p in prefixes for name in (*_MAP_NAMES, _CONFIDENCE))
    family = Family(
        kind,
        (top.strings("architectures") or [kind])[0],
        config,
        _tensors(sizes, facts, drafter),
        prefixes=(facts.prefix,),
        ignored_prefixes=(*ignored, *facts.copies),
    )
    return family, notes


def _check_target(
    top: Section, layer: Section, sizes: Sizes, facts: BlockFacts, target: Target
) -> None:
    check_same_vocabulary(top, layer, sizes, target)
    made_for = made_for_another(top)
    stated = top.integer("target_hidden_size", target.hidden_size)
    if stated != target.hidden_size:
        raise ValueError(
            f'{made_for} key "{top.name("target_hidden_size")}" is {stated}, but {target.path} has '
            f"a hidden size of {target.hidden_size}"
        )
    borrows = not facts.has_embedding or facts.draft_vocab_size is None
    if borrows and sizes.hidden != target.hidden_size:
        raise ValueError(
            f'{made_for} key "{layer.name("hidden_size")}" is {sizes.hidden}, but {target.path} '
            f"has a hidden size of {target.hidden_size}, and the drafter uses its embeddings or "
            "lm_head"
        )
    rows = facts.draft_vocab_size
    if rows is not None and not facts.has_map and rows != sizes.vocab:
        raise ModelFileError(
            f"{top.source}: 'd2t' is not in the weights, but 'lm_head.weight' has {rows} rows and "
            f"the target {sizes.vocab} token ids; expected 'd2t', or a row for each id"
        )


def _aux_layers(
    top: Section,
    block: Section,
    sizes: Sizes,
    facts: BlockFacts,
    target: Target,
    notes: list[str],
) -> list[int]:
    """The target's layers whose incoming residual stream the drafter reads.

    "target_layer_ids" names layers by their output, "aux_hidden_state_layer_ids" by their input.
    """
    num_layers = target.num_layers
    section, key, shift = top, "aux_hidden_state_layer_ids", 0
    if not top.has(key):
        section, key, shift = block, "target_layer_ids", 1
    if section.has(key):
        value = section.values[key]
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise section.error(key, "a list of layers of the target")
        chosen = [item + shift for item in value]
    elif top.has(_SPECULATORS):
        chosen = [2, num_layers // 2, num_layers - 3]
    elif sizes.layers == 1:
        chosen = [num_layers // 2 + 1]
    else:
        step = (num_layers - 4) / (sizes.layers - 1)
        chosen = [round(1 + i * step) + 1 for i in range(sizes.layers)]
    where = f'key "{section.name(key)}" is' if section.has(key) else "by default it reads"
    if not section.has(key):
        notes.append(f"the drafter reads the residual streams that enter layers {chosen}")
    is_ascending = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not is_ascending or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise ValueError(
            f"{made_for_another(top)} {where} {show([item - shift for item in chosen])}; "
            f"{target.path} has {num_layers} layers: allowed: {-shift} to "
            f"{num_layers - 1 - shift}, in ascending order"
        )
    columns = len(chosen) * target.hidden_size
    if facts.fc_columns is not None and facts.fc_columns != columns:
        raise ValueError(
            f"{made_for_another(top)} 'fc.weight' has {facts.fc_columns} columns; expected "
            f"{columns}, {len(chosen)} layers of the hidden size {target.hidden_size} of "
            f"{target.path}"
        )
    return chosen


def _read_block(
    kind: str, top: Section, block: Section, facts: BlockFacts, target: Target
) -> dict[str, Any]:
    is_speculators = top.has(_SPECULATORS)
    sized = block if block.has("block_size") else top
    full_is_causal = False
    if is_speculators:
        sliding_is_causal = not top.boolean("sliding_window_non_causal", False)
    else:
        sliding_is_causal = True
        for section, key in ((block, "causal"), (top, "is_causal")):
            if section.has(key):
                sliding_is_causal = full_is_causal = section.boolean(key)
    read: dict[str, Any] = {
        "size": sized.integer("block_size", low=1, high=64),
        "mask_token": _mask_token(top, block, target),
        "samples_from_anchor": _samples_from_anchor(top),
        "full": {"is_causal": full_is_causal},
        "sliding": {"is_causal": sliding_is_causal, "is_anchored": is_speculators},
    }
    rank = _markov_rank(top)
    if facts.markov_rank != rank:
        raise ModelFileError(
            f'{top.source}: key "markov_rank" is {rank}, but {_MARKOV_TABLE!r} '
            + (f"has {facts.markov_rank} columns" if facts.markov_rank else "is not in the weights")
            + "; expected the same number"
        )
    if kind == DSPARK:
        section = block if block.has("markov_head_type") else top
        if section.text("markov_head_type", "vanilla") != "vanilla":
            raise section.refusal("markov_head_type", "vanilla")
        read["markov"] = {"kind": "vanilla", "rank": rank}
    return read


def _samples_from_anchor(top: Section) -> bool:
    """Whether the row of the newest token predicts one."""
    if top.has("sample_from_anchor"):
        return top.boolean("sample_from_anchor")
    names = top.strings("architectures") or []
    if top.has(_SPECULATORS):
        names = [*names, top.text(_SPECULATORS)]
    return any(DSPARK in name.lower() for name in names)


def _mask_token(top: Section, block: Section, target: Target) -> int:
    section = block if block.has("mask_token_id") else top
    return section.integer("mask_token_id", low=0, high=target.vocab_size - 1)


def _description(
    kind: str,
    layer: Section,
    block: Section,
    sizes: Sizes,
    layer_types: tuple[str, ...],
    facts: BlockFacts,
    drafter: Mapping[str, Any],
    target: Target,
) -> dict[str, Any]:
    window = layer.integer("sliding_window") if SLIDING in layer_types else 0
    if window and drafter["block"]["sliding"]["is_anchored"]:
        window += 1  # all rows see the window before the first row, which itself is one more
    cap = 0.0
    if block.has("final_logit_softcapping"):
        cap = block.number("final_logit_softcapping")
    config = describe(
        kind,
        sizes,
        same_layers(sizes, layer_types),
        window=window,
        ropes=dict.fromkeys(LAYER_TYPES, read_rope(layer, 10_000.0)),
        attention_scale=sizes.head_dim**-0.5,
        activation=read_activation(layer, ("hidden_act",), "silu"),
        ties_lm_head=False,
        has_qk_norm=True,
        mlp_bias=False,
        logit_soft_cap=cap,
    )
    for entry in config["layers"]:
        entry["attention"]["has_qkv_bias"] = facts.has_qkv_bias
        entry["attention"]["has_o_bias"] = facts.has_o_bias
    return config


def _tensors(sizes: Sizes, facts: BlockFacts, drafter: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Lists every tensor but `d2t`, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")
    num_aux = len(drafter["aux_layers"])
    rows = (drafter["draft_vocab_size"], "rows")
    specs: list[TensorSpec] = []

    def add(name: str, source: str, *dims: tuple[int, str]) -> None:
        shape = tuple(size for size, _ in dims)
        specs.append(TensorSpec(name, source, shape, ", ".join(key for _, key in dims)))

    if facts.has_embedding:
        add("embed.weight", "embed_tokens.weight", vocab, hidden)
    columns = (num_aux * drafter["target_hidden_size"], f"{num_aux} * hidden size of the target")
    add("fc.weight", "fc.weight", hidden, columns)
    add("hidden_norm.weight", "hidden_norm.weight", hidden)
    qo = (sizes.qo_heads * sizes.head_dim, "num_attention_heads * head_dim")
    kv = (sizes.kv_heads * sizes.head_dim, "num_key_value_heads * head_dim")
    mlp = (sizes.intermediate, "intermediate_size")
    out_in = {
        "attn.q": (qo, hidden, facts.has_qkv_bias),
        "attn.k": (kv, hidden, facts.has_qkv_bias),
        "attn.v": (kv, hidden, facts.has_qkv_bias),
        "attn.o": (hidden, qo, facts.has_o_bias),
        "mlp.gate": (mlp, hidden, False),
        "mlp.up": (mlp, hidden, False),
        "mlp.down": (hidden, mlp, False),
    }
    for i in range(sizes.layers):
        name = f"layers.{i}."
        add(f"{name}attn_norm.weight", f"{name}input_layernorm.weight", hidden)
        add(f"{name}mlp_norm.weight", f"{name}post_attention_layernorm.weight", hidden)
        for ours, source in QK_NORMS:
            add(name + ours, name + source, (sizes.head_dim, "head_dim"))
        for ours, source in LINEARS:
            rows_of, columns_of, has_bias = out_in[ours]
            add(f"{name}{ours}.weight", f"{name}{source}.weight", rows_of, columns_of)
            if has_bias:
                add(f"{name}{ours}.bias", f"{name}{source}.bias", rows_of)
    add("final_norm.weight", "norm.weight", hidden)
    if facts.draft_vocab_size is not None:
        add("lm_head.weight", "lm_head.weight", rows, hidden)
    if facts.markov_rank:
        rank = (facts.markov_rank, "markov_rank")
        add("markov.table.weight", _MARKOV_TABLE, vocab, rank)
        add("markov.weight", _MARKOV, rows, rank)
    return tuple(specs)
