# SPDX-License-Identifier: Apache-2.0
"""The kind of block drafter that a configuration describes, and the keys that tell it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.limits import MAX_SPECULATIVE_TOKENS

from .deepseek_v4 import BLOCK_SIZE, has_stages
from .drafters import BLOCK_KINDS, DFLASH, DFLASH2, DSPARK
from .files import find
from .section import Section

#: Drafters of other papers, by a part of their architecture's name.
_OTHERS: Final = ("domino", "peagle", "xpress", "lilicorr")
_GEMMA4: Final = "gemma4dspark"
_ASSISTANT: Final = "museglimmerassistant"
SPECULATORS: Final = "speculators_model_type"
#: The object that has the keys of the block, where they are not at the top.
NESTED: Final = "dflash_config"


def block_kind_of_config(top: Section) -> str | None:
    """The method of a configuration, one of `BLOCK_KINDS`; None: it is no block drafter.

    Raises:
        NotImplementedError: It is a block drafter that is not supported; the message names those
            that are.
    """
    for plain in _plain_names(top):
        if any(other in plain for other in _OTHERS):
            key = SPECULATORS if top.has(SPECULATORS) else "architectures"
            raise top.refusal(
                key, "DFlash, DFlash2 or DSpark with layers of Qwen3 or Gemma 4, and EAGLE-3"
            )
        if DFLASH2 in plain:
            return DFLASH2
        if _ASSISTANT in plain:
            return DFLASH
        if "dspark" in plain or "dflash" in plain:
            return DSPARK if markov_rank(top) > 0 else DFLASH
    return None


def own_block_kind(top: Section) -> str | None:
    """The method of the block drafter in a target's own files; None: the target has none."""
    return DSPARK if has_stages(top) else None


def block_subfolders(path: Path) -> list[str]:
    """The methods for which a target's folder has a drafter in a subfolder."""
    return [kind for kind in BLOCK_KINDS if find(path / kind) is not None]


def is_assistant(top: Section) -> bool:
    """Returns whether the drafter is of transformers' class for Muse-Glimmer's assistant."""
    return any(_ASSISTANT in plain for plain in _plain_names(top))


def is_named_dflash2(top: Section) -> bool:
    """Returns whether the drafter's class is one of DFlash2."""
    return any(DFLASH2 in plain for plain in _plain_names(top))


def has_gemma4_layers(top: Section) -> bool:
    """Returns whether the drafter is of deepseek-ai's class for Gemma 4."""
    return any(_GEMMA4 in plain for plain in _plain_names(top))


def is_named_dspark(top: Section) -> bool:
    """Returns whether the drafter's class is one of DSpark, with or without a Markov head."""
    return any(DSPARK in plain for plain in _plain_names(top))


def _plain_names(top: Section) -> list[str]:
    """The names of the drafter's class, in lower case, letters and digits only."""
    names = list(top.strings("architectures") or [])
    if top.has(SPECULATORS):
        names.insert(0, top.text(SPECULATORS))
    return [re.sub("[^a-z0-9]", "", name.lower()) for name in names]


def find_key(key: str, *sections: Section) -> Section | None:
    """The first of some sections that has a key; None: none has it."""
    return next((section for section in sections if section.has(key)), None)


def block_section(top: Section) -> Section:
    """The part of the configuration that has the keys of the block."""
    return top.section(NESTED) or top


def markov_rank(top: Section) -> int:
    """Columns of the Markov head's table; 0: there is no such head."""
    section = find_key("markov_rank", block_section(top), top)
    return 0 if section is None else section.integer("markov_rank", low=0)


def default_num_drafts(top: Section) -> int:
    """The number of drafts of a whole block, at most the largest k of an engine.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
    """
    if has_stages(top):
        return min(top.integer(BLOCK_SIZE, low=1, high=64), MAX_SPECULATIVE_TOKENS)
    size = read_size(top, block_section(top))
    return min(size if samples_from_anchor(top) else max(size - 1, 1), MAX_SPECULATIVE_TOKENS)


def num_block_drafts(config: Mapping[str, Any]) -> int:
    """The number of drafts of a whole block, from the description of a block drafter."""
    block = config["drafter"]["block"]
    return int(block["size"]) - (0 if block["samples_from_anchor"] else 1)


def read_size(top: Section, block: Section) -> int:
    """Rows of the longest block.

    Raises:
        ModelFileError: The key is missing or has a wrong value.
    """
    return (find_key("block_size", block) or top).integer("block_size", low=1, high=64)


def read_mask_token(top: Section, block: Section, vocab_size: int) -> int:
    """The token id of the rows after the newest token.

    Raises:
        ModelFileError: The key is missing or has a wrong value.
    """
    section = find_key("mask_token_id", block) or top
    return section.integer("mask_token_id", low=0, high=vocab_size - 1)


def read_causality(top: Section, block: Section) -> bool | None:
    """Returns whether all layers are causal, in a file not of `speculators`; None: unknown."""
    if is_assistant(top):
        return False
    for section, key in ((top, "is_causal"), (block, "causal")):
        if section.has(key):
            return section.boolean(key)
    return None


def samples_from_anchor(top: Section) -> bool:
    """Returns whether the row of the newest token predicts a token."""
    return top.boolean("sample_from_anchor", is_named_dspark(top))
