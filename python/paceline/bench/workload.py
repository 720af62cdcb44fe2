# SPDX-License-Identifier: Apache-2.0
"""What a bench runs: its requests, and how tokens are drafted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Workload:
    """The requests of a measurement.

    Attributes:
        concurrency: Number of requests, all at once.
        input_len: Prompt tokens of each request.
        output_len: Tokens that each request generates.
        sampling: Sampling parameters, in the names of `SamplingParams`; empty = greedy.
    """

    concurrency: int
    input_len: int
    output_len: int
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mean_context(self) -> float:
        """Tokens that precede those of an iteration, averaged over the run."""
        return self.input_len + self.output_len / 2


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted and accepted.

    Attributes:
        num_speculative_tokens: k.
        accept_method: "coupled", "standard", "block" or "synthetic".
        synthetic_acceptance_length: Mean tokens per iteration, for "synthetic".
        draft_driver: "unrolled", "replay", "while" or "eager".
        draft_stop_threshold: See `SpeculativeConfig`.
        ngram_min: Shortest n-gram of prompt lookup; 0 = there is a drafter.
        ngram_max: Longest one.
        draft_position: See `SpeculativeConfig`; None = the drafter has no such choice.
        samples_drafts: Whether drafts are sampled; False only with "standard" and "block".
        num_draft_proposals: Tokens that drafts are sampled from, with these two; 0 = 64.
        adaptive: Whether each iteration chooses how many tokens are drafted.
    """

    num_speculative_tokens: int
    accept_method: str = "coupled"
    synthetic_acceptance_length: float = 0.0
    draft_driver: str = "unrolled"
    draft_stop_threshold: float = 0.0
    ngram_min: int = 0
    ngram_max: int = 0
    draft_position: str | None = None
    samples_drafts: bool = True
    num_draft_proposals: int = 0
    adaptive: bool = False

    @property
    def may_stop_early(self) -> bool:
        """Returns whether an iteration may draft fewer tokens than k.

        It may end below a threshold, prompt lookup may find nothing, or the engine chooses.
        """
        return self.draft_stop_threshold > 0 or self.ngram_max > 0 or self.adaptive
