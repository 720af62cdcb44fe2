# SPDX-License-Identifier: Apache-2.0
"""Block drafters, DFlash, DFlash2 and DSpark, as canonical descriptions and tensor names.

Five layouts are read: DFlash and DFlash2 as z-lab writes them, DSpark and DFlash as deepseek-ai
writes them (a flat configuration of the classes `Qwen3DSparkModel` and `Gemma4DSparkModel`), the
first of these with the keys of a block nested in "dflash_config", all of them in the format of the
`speculators` package, and the assistant of Muse-Glimmer, which is DFlash. The result is a decoder
description with the key "drafter" of `docs/model-format.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

from .block_facts import CONFIDENCE, BlockFacts
from .block_heads import (
    DFLASH2_KEYS,
    convolution_tensors,
    head_tensors,
    read_heads,
    read_selector,
    selector_tensors,
)
from .block_kinds import (
    SPECULATORS,
    block_section,
    is_assistant,
    is_named_dflash2,
    read_causality,
    read_mask_token,
    read_size,
    samples_from_anchor,
)
from .block_layers import BlockLayers, describe_block, read_block_layers
from .decoder import Sizes
from .decoder_tensors import PRE_NORMS, SANDWICH_NORMS, layer_tensors, tensor_spec
from .description import check_description
from .drafters import (
    DFLASH2,
    Target,
    check_fits,
    check_full_head,
    describe_drafter,
    made_for_another,
    take_positions,
)
from .family import Family, TensorSpec
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
    borrows = not facts.has_embedding or facts.draft_vocab_size is None
    check_fits(top, layer, sizes, target, "embeddings or lm_head" if borrows else "")
    if not facts.has_map:
        check_full_head(top, facts.draft_vocab_size, sizes.vocab)
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


# ---- the tensors ---------------------------------------------------------------------------------


def block_tensors(
    stack: BlockLayers, facts: BlockFacts, config: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Lists every tensor but `d2t`, in the order in which the model is filled."""
    sizes, drafter = stack.sizes, config["drafter"]
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")
    num_aux = len(drafter["aux_layers"])
    rows = (drafter["draft_vocab_size"], "rows")
    columns = (num_aux * drafter["target_hidden_size"], f"{num_aux} * hidden size of the target")
    specs: list[TensorSpec] = []
    if facts.has_embedding:
        specs.append(tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden))
    fc, hidden_norm = facts.context
    specs.append(tensor_spec("fc.weight", fc, hidden, columns))
    specs.append(tensor_spec("hidden_norm.weight", hidden_norm, hidden))
    norms = SANDWICH_NORMS if stack.is_gemma4 else PRE_NORMS
    for i, (layer, entry) in enumerate(zip(stack.layers, config["layers"], strict=True)):
        name = f"layers.{i}."
        specs += layer_tensors(name, name, sizes, layer, entry, norms)
        if stack.is_gemma4:
            specs.append(tensor_spec(f"{name}scale", f"{name}layer_scalar", (1, "1")))
        specs += convolution_tensors(i, sizes, drafter)
    specs.append(tensor_spec("final_norm.weight", "norm.weight", hidden))
    if facts.draft_vocab_size is not None:
        specs.append(tensor_spec("lm_head.weight", "lm_head.weight", rows, hidden))
    specs += head_tensors(sizes, drafter, rows)
    specs += selector_tensors(sizes, facts, drafter)
    return tuple(specs)


# ---- the block, and the layers of the target, in the configuration -------------------------------


def read_block(top: Section, block: Section, target: Target) -> dict[str, Any]:
    """The object "block" of the description, without its heads.

    Raises:
        ModelFileError: A key has a wrong value.
    """
    is_speculators = top.has(SPECULATORS)
    full_is_causal = False
    if is_speculators:
        sliding_is_causal = not top.boolean("sliding_window_non_causal", is_named_dflash2(top))
    else:
        stated = read_causality(top, block)
        sliding_is_causal = stated is None or stated
        full_is_causal = stated is True
    return {
        "size": read_size(top, block),
        "mask_token": read_mask_token(top, block, target.vocab_size),
        "samples_from_anchor": samples_from_anchor(top),
        "full": {"is_causal": full_is_causal},
        "sliding": {"is_causal": sliding_is_causal, "is_anchored": is_speculators},
    }


def aux_layers(
    top: Section,
    block: Section,
    sizes: Sizes,
    facts: BlockFacts,
    target: Target,
    notes: list[str],
) -> list[int]:
    """The target's layers whose incoming residual stream the drafter reads.

    "target_layer_ids" names layers by their output, "aux_hidden_state_layer_ids" by their input.

    Raises:
        ModelFileError: The key has a wrong value.
        ValueError: The target has no such layers, or the columns of fc are of others.
    """
    num_layers = target.num_layers
    section, key, shift = top, "aux_hidden_state_layer_ids", 0
    if not top.has(key):
        section, key, shift = block, "target_layer_ids", 1
    if is_assistant(top) and not section.has(key):
        raise section.error(key, "a list of layers of the target")
    if section.has(key):
        value = section.values[key]
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise section.error(key, "a list of layers of the target")
        chosen = [item + shift for item in value]
    elif top.has(SPECULATORS):
        chosen = [2, num_layers // 2, num_layers - 3]
    elif sizes.layers == 1:
        chosen = [num_layers // 2 + 1]
    else:
        step = (num_layers - 4) / (sizes.layers - 1)
        chosen = [round(1 + i * step) + 1 for i in range(sizes.layers)]
    by_default = f'by default, as key "{section.name(key)}" is missing,'
    where = f'key "{section.name(key)}" is' if section.has(key) else f"{by_default} it reads"
    stated = show([item - shift for item in chosen])
    if not section.has(key):
        notes.append(f"the drafter reads the residual streams that enter layers {chosen}")
    is_ascending = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not is_ascending or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise ValueError(
            f"{made_for_another(top)} {where} {stated}; "
            f"{target.path} has {num_layers} layers: allowed: {-shift} (the embeddings) to "
            f"{num_layers - 1 - shift} (not the output of the last layer), in ascending order"
        )
    columns = len(chosen) * target.hidden_size
    if facts.fc_columns is not None and facts.fc_columns != columns:
        raise ValueError(
            f"{made_for_another(top)} 'fc.weight' has {facts.fc_columns} columns; expected "
            f"{columns}, {len(chosen)} layers of the hidden size {target.hidden_size} of "
            f"{target.path}" + ("" if section.has(key) else f" ({by_default} it reads {stated})")
        )
    return chosen
