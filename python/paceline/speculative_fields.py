# SPDX-License-Identifier: Apache-2.0
"""The keys of `speculative_config`, what follows from them, and the names that some may have."""

from __future__ import annotations

import dataclasses
from typing import Final

from paceline.engine_options import SpeculativeKeys
from paceline.option_schema import KEYS

METHODS: Final = KEYS["method"].choices
LATER_METHODS: Final = KEYS["method"].later
#: The methods whose drafter states how many tokens it drafts, and may be in the target's folder.
BLOCK_METHODS: Final = ("dflash", "dflash2", "dspark")
#: The methods without a model.
MODEL_FREE_METHODS: Final = tuple(name for name in METHODS if name not in KEYS["model"].methods)
REJECTION_SAMPLE_METHODS: Final = KEYS["rejection_sample_method"].choices
DRAFT_SAMPLE_METHODS: Final = KEYS["draft_sample_method"].choices
DRAFT_DRIVERS: Final = KEYS["draft_driver"].choices
DRAFT_POSITIONS: Final = KEYS["draft_position"].choices
DRAFT_FEEDBACKS: Final = KEYS["draft_feedback"].choices


def check_found_method(
    method: str | None, found: str, holder: str = "the drafter is", reason: str = ""
) -> None:
    """Checks the method that the user named against that of a drafter.

    Whoever reads a drafter calls it: the loader for a checkpoint or a folder of `paceline convert`,
    and `SpeculativeConfig.resolved` for a drafter that is loaded already.

    Args:
        method: The method that the user named, or None.
        found: The drafter's method.
        holder: What holds the drafter, with a verb, for the message.
        reason: How that is known, for the message.

    Raises:
        ValueError: They differ.
    """
    if method not in (None, found):
        raise ValueError(
            f"speculative_config['method'] is {method!r:.80}, but {holder} for {found!r}"
            f"{reason}; allowed: {found!r}, or no 'method'"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeFields(SpeculativeKeys):
    """The keys of a `SpeculativeConfig`, with what follows from them; not checked yet."""

    @property
    def is_incomplete(self) -> bool:
        """Returns whether the drafter is one that the model brings, see `completed`."""
        return self.method is None and self.model is None

    @property
    def has_model(self) -> bool:
        """Returns whether a model drafts."""
        return self.method not in MODEL_FREE_METHODS
