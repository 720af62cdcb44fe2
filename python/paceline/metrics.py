# SPDX-License-Identifier: Apache-2.0
"""The figures of an engine under vLLM's names: what `LLM.get_metrics` returns."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: What metrics.toml says.
FIGURES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
)


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
    named = [
        (kind, f"vllm:{vllm}", value_of(stats, key))
        for kind, key, _, *names in FIGURES["engine"].values()
        for vllm in names
    ]
    found: list[Metric] = [Counter(name, value) for kind, name, value in named if kind == "counter"]
    if is_speculative:
        drafts = FIGURES["drafts"]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            found.append(Counter(f"vllm:spec_decode_{name}", stats[drafts[name][0]]))
        accepted = list(stats["accepted_per_position"])
        found.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", accepted))
    found += [Gauge(name, float(value)) for kind, name, value in named if kind == "gauge"]
    return [*found, Gauge("vllm:kv_cache_usage_perc", used_share(stats))]


def value_of(stats: Mapping[str, Any], key: str) -> Any:
    """The figure of a key of metrics.toml, which may be a sum."""
    values = [stats[name] for name in key.split(" + ")]
    return values[0] if len(values) == 1 else sum(values)


def used_share(stats: Mapping[str, Any]) -> float:
    """The share of the KV pool in use."""
    slabs = stats["kv_num_slabs"]
    return float((slabs - stats["kv_free_slabs"]) / slabs) if slabs else 0.0
