# SPDX-License-Identifier: Apache-2.0
"""Block drafters, DFlash and DSpark, as canonical descriptions and tensor names.

Four layouts are read: DFlash as z-lab writes it, DSpark and DFlash as deepseek-ai writes them (a
flat configuration of the class `Qwen3DSparkModel`), the same with the keys of a block nested in
"dflash_config", and both in the format of the `speculators` package. The result is a decoder
description with the key "drafter" of `docs/model-format.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline._core import ModelFileError

from .block_facts import BlockFacts
from .block_kinds import block_section
from .block_settings import aux_layers, read_block
from .block_tensors import block_tensors
from .decoder import Layer, Sizes, describe, read_activation, read_sizes, same_layers
from .description import check_description
from .drafters import Target, check_same_vocabulary, made_for_another, take_positions
from .family import Family
from .layer_types import FULL, LAYER_TYPES, SLIDING, read_layer_types
from .rope import read_rope
from .section import Section

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
_MAP_NAMES: Final = ("d2t", "t2d")
#: Tensors of the confidence head, which ends a draft early and is not used yet.
_CONFIDENCE: Final = "confidence_head."


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
    block = block_section(top)
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
    layers = _read_layers(layer, sizes)
    drafter: dict[str, Any] = {
        "kind": kind,
        "target_hidden_size": target.hidden_size,
        "aux_layers": aux_layers(top, block, sizes, facts, target, notes),
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
        "block": read_block(kind, top, block, facts, target),
    }
    config = _description(kind, layer, block, sizes, layers, facts, drafter)
    config["drafter"] = drafter
    take_positions(config, sizes, target, notes)
    check_description(config, (layer, top))
    if block.boolean("enable_confidence_head", False):
        notes.append("the drafter's confidence head is not used")
    prefixes = {"", facts.prefix}
    ignored = tuple(p + name for p in prefixes for name in (*_MAP_NAMES, _CONFIDENCE))
    family = Family(
        kind,
        (top.strings("architectures") or [kind])[0],
        config,
        block_tensors(sizes, layers, facts, drafter),
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


def _read_layers(layer: Section, sizes: Sizes) -> tuple[Layer, ...]:
    layer_types = (FULL,) * sizes.layers
    if layer.has("layer_types"):
        layer_types = read_layer_types(layer, sizes.layers, 1)
    return same_layers(sizes, layer_types)


def _description(
    kind: str,
    layer: Section,
    block: Section,
    sizes: Sizes,
    layers: tuple[Layer, ...],
    facts: BlockFacts,
    drafter: Mapping[str, Any],
) -> dict[str, Any]:
    has_sliding = any(entry.layer_type == SLIDING for entry in layers)
    window = layer.integer("sliding_window") if has_sliding else 0
    if window and drafter["block"]["sliding"]["is_anchored"]:
        window += 1  # all rows see the window before the first row, which itself is one more
    cap = 0.0
    if block.has("final_logit_softcapping"):
        cap = block.number("final_logit_softcapping")
    config = describe(
        kind,
        sizes,
        layers,
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
