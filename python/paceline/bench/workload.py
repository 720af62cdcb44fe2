# SPDX-License-Identifier: Apache-2.0
"""The requests of a bench."""

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
