# SPDX-License-Identifier: Apache-2.0
"""Tokens per second at fixed acceptance lengths.

The time of an iteration does not depend on how many of its drafts are accepted, so one measurement
gives the throughput at every length up to k + 1. Drafters are compared at the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from paceline.bench.measurement import Measurement
from paceline.bench.values import parse_list
from paceline.limits import MAX_SPECULATIVE_TOKENS

#: The lengths of --acceptance-lengths: of the Qwen3-8B pair, of a good drafter, and of k = 7.
DEFAULT_LENGTHS: Final = "2.34,3.41,6.3"


def parse_lengths(text: str) -> list[float]:
    """Reads --acceptance-lengths; "none" is an empty list.

    Raises:
        ValueError: It is no list of such numbers.
    """
    if text == "none":
        return []
    largest = MAX_SPECULATIVE_TOKENS + 1
    allowed = f"numbers from 1 to {largest}, for example {DEFAULT_LENGTHS}, or none"
    return list(dict.fromkeys(parse_list("acceptance_lengths", text, float, allowed, 1, largest)))


def at_lengths(row: Measurement, lengths: Sequence[float]) -> list[dict[str, Any]]:
    """Tokens per second of a row at acceptance lengths.

    Args:
        row: The row.
        lengths: The acceptance lengths.

    Returns:
        For each length that k drafts can have: "acceptance_length"; "tokens_per_s" while all
        sequences decode; and "source", which is "imposed" if the measured iterations ran with this
        length, else "computed". Empty for plain decoding, and for drafting that may stop early,
        whose iterations take a time that depends on the drafts.
    """
    if row.num_draft_tokens == 0 or row.may_stop_early or row.iteration_ms == 0:
        return []
    seconds = row.iteration_ms / 1e3 + row.idle_us / 1e6
    return [
        {
            "acceptance_length": length,
            "tokens_per_s": row.workload.concurrency * length / seconds,
            "source": "imposed" if length == row.imposed_acceptance_length else "computed",
        }
        for length in lengths
        if length <= row.num_draft_tokens + 1
    ]
