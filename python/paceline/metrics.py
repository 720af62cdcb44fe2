# SPDX-License-Identifier: Apache-2.0
"""The figures of an engine under vLLM's names: what `LLM.get_metrics` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# By vLLM's name: the key of `_core.Executor.stats`.
_COUNTERS: Final = {
    "vllm:prompt_tokens": "num_prompt_tokens",
    "vllm:generation_tokens": "num_emitted_tokens",
    "vllm:prefix_cache_queries": "num_prefix_query_tokens",
    "vllm:prefix_cache_hits": "num_prefix_hit_tokens",
    "vllm:num_preemptions": "num_preemptions",
}
_GAUGES: Final = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
}
_DRAFT_COUNTERS: Final = {
    "vllm:spec_decode_num_drafts": "num_verify_windows",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}


@dataclass(frozen=True)
class Metric:
    """A figure since the engine started, or of now.

    Attributes:
        name: vLLM's name, such as "vllm:generation_tokens".
    """

    name: str


@dataclass(frozen=True)
class Counter(Metric):
    """A figure that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A figure of now."""

    value: float


def metrics(stats: Mapping[str, Any], *, is_speculative: bool) -> list[Metric]:
    """Converts the counters of an engine.

    Args:
        stats: The result of `_core.Executor.stats`.
        is_speculative: Whether there is a drafter; without one its figures are absent.
    """
    slabs = stats["kv_num_slabs"]
    used = (slabs - stats["kv_free_slabs"]) / slabs if slabs else 0.0
    counters = _COUNTERS | (_DRAFT_COUNTERS if is_speculative else {})
    found: list[Metric] = [Counter(name, stats[key]) for name, key in counters.items()]
    if is_speculative:
        accepted = list(stats["accepted_per_position"])
        found.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", accepted))
    found += [Gauge(name, float(stats[key])) for name, key in _GAUGES.items()]
    return [*found, Gauge("vllm:kv_cache_usage_perc", used)]
