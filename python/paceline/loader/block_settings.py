# SPDX-License-Identifier: Apache-2.0
"""Reads the block, and the layers of the target, from the configuration of a block drafter."""

from __future__ import annotations

import itertools
from typing import Any

from .block_facts import BlockFacts
from .block_kinds import (
    SPECULATORS,
    is_assistant,
    is_named_dflash2,
    read_causality,
    read_mask_token,
    read_size,
    samples_from_anchor,
)
from .decoder import Sizes
from .drafters import Target, made_for_another
from .messages import show
from .section import Section


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
