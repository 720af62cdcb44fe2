# SPDX-License-Identifier: Apache-2.0
"""The keys of `speculative_config` and the names that some of them may have."""

from __future__ import annotations

import dataclasses
from typing import Final

from paceline.custom_drafter import Drafter

METHODS: Final = (
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "gemma4_mtp",
    "dflash",
    "dflash2",
    "dspark",
    "ngram",
    "custom",
)
#: The methods whose drafter states how many tokens it drafts, and may be in the target's folder.
BLOCK_METHODS: Final = ("dflash", "dflash2", "dspark")
#: The methods without a model.
MODEL_FREE_METHODS: Final = ("ngram", "custom")
LATER_METHODS: Final = ("suffix",)
REJECTION_SAMPLE_METHODS: Final = ("coupled", "standard", "block", "synthetic")
DRAFT_SAMPLE_METHODS: Final = ("probabilistic", "greedy")
DRAFT_DRIVERS: Final = ("unrolled", "replay", "while", "eager")
DRAFT_POSITIONS: Final = ("last", "next")
DRAFT_FEEDBACKS: Final = ("normed", "raw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeFields:
    """The values of a `SpeculativeConfig`, which describes them; not checked yet."""

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    drafter: Drafter | None = None
    num_speculative_tokens: int | None = None
    rejection_sample_method: str = "coupled"
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_driver: str = "unrolled"
    draft_stop_threshold: float = 0.0
    draft_position: str | None = None
    draft_feedback: str | None = None
    draft_proposals: int | None = None
    adaptive: bool | None = None

    @property
    def is_incomplete(self) -> bool:
        """Returns whether the drafter is one that the model brings, see `completed`."""
        return self.method is None and self.model is None

    @property
    def has_model(self) -> bool:
        """Returns whether a model drafts."""
        return self.method not in MODEL_FREE_METHODS
