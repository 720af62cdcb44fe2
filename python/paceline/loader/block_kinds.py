# SPDX-License-Identifier: Apache-2.0
"""Which kind of block drafter a configuration is of, and the keys that say it."""

from __future__ import annotations

import re
from typing import Final

from paceline.limits import MAX_SPECULATIVE_TOKENS

from .drafters import DFLASH, DSPARK
from .section import Section

#: Drafters of other papers, by a part of their architecture's name.
_OTHERS: Final = ("dflash2", "domino", "peagle", "xpress", "lilicorr", "gemma4dspark")
SPECULATORS: Final = "speculators_model_type"


def block_kind_of_config(top: Section) -> str | None:
    """The method of a configuration, "dflash" or "dspark"; None: it is no block drafter.

    Raises:
        NotImplementedError: It is a block drafter that is not supported; names what is.
    """
    names = list(top.strings("architectures") or [])
    if top.has(SPECULATORS):
        names.insert(0, top.text(SPECULATORS))
    for name in names:
        plain = re.sub("[^a-z0-9]", "", name.lower())
        if any(other in plain for other in _OTHERS):
            key = SPECULATORS if top.has(SPECULATORS) else "architectures"
            raise top.refusal(key, "DFlash or DSpark with layers of Qwen3, and EAGLE-3")
        if "dspark" in plain or "dflash" in plain:
            return DSPARK if markov_rank(top) > 0 else DFLASH
    return None


def block_section(top: Section) -> Section:
    """The part of the configuration that has the keys of the block."""
    return top.section("dflash_config") or top


def markov_rank(top: Section) -> int:
    """Columns of the Markov head's table; 0: there is no such head."""
    for where in (block_section(top), top):
        if where.has("markov_rank"):
            return where.integer("markov_rank", low=0)
    return 0


def default_num_drafts(top: Section) -> int:
    """The drafts of a whole block, or as many as an engine makes.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
    """
    block = block_section(top)
    size = (block if block.has("block_size") else top).integer("block_size", low=1, high=64)
    return min(size if samples_from_anchor(top) else max(size - 1, 1), MAX_SPECULATIVE_TOKENS)


def samples_from_anchor(top: Section) -> bool:
    """Whether the row of the newest token predicts one."""
    if top.has("sample_from_anchor"):
        return top.boolean("sample_from_anchor")
    names = top.strings("architectures") or []
    if top.has(SPECULATORS):
        names = [*names, top.text(SPECULATORS)]
    return any(DSPARK in name.lower() for name in names)
