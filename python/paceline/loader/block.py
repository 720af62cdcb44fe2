# SPDX-License-Identifier: Apache-2.0
"""Block drafters, DFlash, DFlash2 and DSpark, as canonical descriptions and tensor names.

Five layouts are read: DFlash and DFlash2 as z-lab writes them, DSpark and DFlash as deepseek-ai
writes them (a flat configuration of the classes `Qwen3DSparkModel` and `Gemma4DSparkModel`), the
first of these with the keys of a block nested in "dflash_config", all of them in the format of the
`speculators` package, and the assistant of Muse-Glimmer, which is DFlash. The result is a decoder
description with the key "drafter" of `docs/model-format.md`.
"""

from __future__ import annotations

from typing import Final

from paceline._core import ModelFileError

from .block_facts import CONFIDENCE, BlockFacts
from .block_heads import read_heads
from .block_kinds import block_section
from .block_layers import describe_block, read_block_layers
from .block_selector import DFLASH2_KEYS, read_selector
from .block_settings import aux_layers, read_block
from .block_tensors import block_tensors
from .decoder import Sizes
from .description import check_description
from .drafters import (
    DFLASH2,
    Target,
    check_same_vocabulary,
    check_target_width,
    describe_drafter,
    made_for_another,
    take_positions,
)
from .family import Family
from .messages import show
from .section import Section

#: Keys that change what the drafter computes, and that Paceline does not implement, with the value
#: with which they change nothing.
_NEUTRAL_VALUES: Final = {"attention_sink_bias": False, "attention_value_scale": 1.0}
_MAP_NAMES: Final[tuple[str, ...]] = ("d2t", "t2d")


def translate_block(
    kind: str, top: Section, facts: BlockFacts, target: Target
) -> tuple[Family, list[str]]:
    """Translates a block drafter for a target.

    Args:
        kind: One of `BLOCK_KINDS`.
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
        _check_supported(kind, section)
    stack = read_block_layers(top, layer, block, target)
    sizes = stack.sizes
    _check_target(top, layer, sizes, facts, target)
    notes: list[str] = []
    drafter = describe_drafter(
        kind,
        target,
        aux_layers=aux_layers(top, block, sizes, facts, target, notes),
        owns_embedding=facts.has_embedding,
        owns_lm_head=facts.draft_vocab_size is not None,
        draft_vocab_size=facts.draft_vocab_size or target.vocab_size,
        block=read_block(top, block, target)
        | read_heads(kind, top, block, facts, sizes)
        | (read_selector(top, block, facts, sizes) if kind == DFLASH2 else {}),
    )
    is_anchored = drafter["block"]["sliding"]["is_anchored"]
    config = describe_block(
        kind, top, layer, block, stack, facts, target, notes, is_anchored=is_anchored
    )
    config["drafter"] = drafter
    take_positions(config, sizes, target, notes)
    check_description(config, (layer, top, block))
    ignored_names = _MAP_NAMES
    if "confidence" not in drafter["block"]:
        ignored_names = (*_MAP_NAMES, CONFIDENCE)  # the configuration switches it off
    prefixes = {"", facts.prefix}
    ignored = tuple(prefix + name for prefix in prefixes for name in ignored_names)
    family = Family(
        kind,
        (top.strings("architectures") or [kind])[0],
        config,
        block_tensors(stack, facts, config),
        prefixes=(facts.prefix,),
        ignored_prefixes=(*ignored, *facts.copies),
        rounds_embed_scale=True,
    )
    return family, notes


def _check_supported(kind: str, section: Section) -> None:
    for key in DFLASH2_KEYS if kind != DFLASH2 else ():
        if section.has(key):
            raise section.refusal(key, 'no such key but with "architectures" of DFlash2')
    for key, neutral in _NEUTRAL_VALUES.items():
        if section.has(key) and section.values[key] != neutral:
            raise section.refusal(key, f"{show(neutral)}, or no such key")
    if section.has("quantization_config"):
        raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")


def _check_target(
    top: Section, layer: Section, sizes: Sizes, facts: BlockFacts, target: Target
) -> None:
    check_same_vocabulary(top, layer, sizes, target)
    made_for = made_for_another(top)
    key = "target_hidden_size"
    check_target_width(top, key, top.integer(key, target.hidden_size), target)
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
