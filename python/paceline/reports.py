# SPDX-License-Identifier: Apache-2.0
"""What this version supports, and what a running engine reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline import _core, limits, speculative_fields
from paceline.config import DTYPES, LOAD_FORMATS
from paceline.device import usable_devices
from paceline.loader import ARCHITECTURES
from paceline.metrics import used_share
from paceline.outputs import acceptance, drafter_counts
from paceline.sampling import SamplingParams


def capabilities() -> dict[str, Any]:
    """Lists what this version supports, without a model; see `LLM.capabilities`."""
    return {
        "methods": list(speculative_fields.METHODS),
        "later_methods": list(speculative_fields.LATER_METHODS),
        "max_num_speculative_tokens": limits.MAX_SPECULATIVE_TOKENS,
        "rejection_sample_methods": list(speculative_fields.REJECTION_SAMPLE_METHODS),
        "draft_sample_methods": list(speculative_fields.DRAFT_SAMPLE_METHODS),
        "max_draft_proposals": limits.MAX_DRAFT_PROPOSALS,
        "draft_drivers": list(speculative_fields.DRAFT_DRIVERS),
        "draft_positions": list(speculative_fields.DRAFT_POSITIONS),
        "draft_feedbacks": list(speculative_fields.DRAFT_FEEDBACKS),
        "architectures": sorted(ARCHITECTURES),
        "devices": usable_devices(),
        "has_cuda": _core.build_info()["has_cuda"],
        "dtypes": list(DTYPES),
        "load_formats": list(LOAD_FORMATS),
        "block_sizes": {"min": 1, "max": limits.MAX_BLOCK_SIZE},
        "max_num_seqs": {"min": 1, "max": limits.MAX_NUM_SEQS},
        "max_n": limits.MAX_SAMPLES,
        "sampling_parameters": list(SamplingParams.__dataclass_fields__),
    }


def kv_groups(memory_report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what names each KV group of an engine, from `_core.Executor.memory_report`."""
    return [
        {key: group[key] for key in ("owner", "kind", "window")}
        for group in memory_report["groups"]
    ]


def stats_and_memory(executor: _core.Executor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the counters of an engine, and the memory report that names their KV groups, which a
    change of the drafter may change in between."""
    while True:
        stats, memory = executor.stats(), executor.memory_report()
        if len(memory["groups"]) == len(stats["kv_groups"]):
            return stats, memory


def engine_stats(
    stats: Mapping[str, Any], memory: Mapping[str, Any], num_spec_tokens: int | None
) -> dict[str, Any]:
    """Converts the counters of an engine to the dict that `LLM.stats` describes.

    Args:
        stats: The result of `_core.Executor.stats`.
        memory: The result of `_core.Executor.memory_report`.
        num_spec_tokens: k; None without speculative decoding.

    Returns:
        The dict.
    """
    same = (
        "num_running",
        "num_waiting",
        "num_finished",
        "num_failed",
        "num_cancelled",
        "num_prompt_tokens",
        "num_iterations",
        "num_preemptions",
        "uptime_s",
    )
    return {
        **{key: stats[key] for key in same},
        "num_cached_tokens": stats["num_shared_tokens"],
        "prefix_cache": {
            "num_query_tokens": stats["num_prefix_query_tokens"],
            "num_hit_tokens": stats["num_prefix_hit_tokens"],
        },
        "num_output_tokens": stats["num_emitted_tokens"],
        "kv_cache_usage": used_share(stats),
        "kv_groups": [
            {**name, **group}
            for name, group in zip(kv_groups(memory), stats["kv_groups"], strict=True)
        ],
        "ranks": memory["ranks"],
        "speculative_decoding": None
        if num_spec_tokens is None
        else {
            "num_spec_tokens": num_spec_tokens,
            **acceptance(
                num_steps=stats["num_verify_windows"],
                num_drafted=stats["num_draft_tokens"],
                num_accepted=stats["num_accepted_tokens"],
                drafted_per_position=stats["drafted_per_position"],
                accepted_per_position=stats["accepted_per_position"],
            ),
            "drafters": {
                method: drafter_counts(
                    of["num_drafts"], of["num_draft_tokens"], of["num_accepted_tokens"]
                )
                for method, of in stats["methods"].items()
            },
            "adaptive": _adaptive(stats) if stats["is_adaptive"] else None,
        },
    }


def _adaptive(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of the number of drafts, and what it follows from."""
    total_us = sum(of["us"] for of in stats["drafts"])
    return {
        "num_drafts": stats["num_drafts"],
        "by_num_drafts": [
            {
                "num_drafts": of["num_drafts"],
                "num_iterations": of["num_iterations"],
                "time_share": of["us"] / total_us if total_us else 0.0,
                "expected_tokens": of["expected_tokens"],
                "expected_ms": of["expected_us"] * 1e-3 or None,
            }
            for of in stats["drafts"]
            if of["expected_tokens"] or of["num_iterations"]
        ],
        "acceptance": stats["expected_acceptance"],
        "costs": [
            {
                "num_seqs": cost["num_seqs"],
                "num_drafts": cost["num_drafts"],
                "num_samples": cost["num_samples"],
                "ms": cost["us"] * 1e-3,
            }
            for cost in stats["costs"]
        ],
    }


def group_max_bytes(group: dict[str, Any], *, max_num_seqs: int, max_model_len: int) -> int:
    """Computes the bytes that all sequences together can hold in a KV group, except for prefill.

    Args:
        group: An entry of `memory_report()["groups"]`.
        max_num_seqs: Number of sequences at the same time.
        max_model_len: Number of tokens of one sequence.

    Returns:
        The bytes of whole blocks.
    """
    tokens = max_model_len
    if group["window"]:
        # A window can begin anywhere in its first block.
        tokens = min(tokens, group["window"] + group["block_size"] * group["tokens_per_entry"])
    blocks = -(-(tokens // group["tokens_per_entry"]) // group["block_size"])
    return int(max_num_seqs * blocks * group["block_bytes"])


def pool_capacity(report: dict[str, Any]) -> dict[str, int]:
    """Computes what the KV pool has room for.

    Args:
        report: The result of `LLM.memory_report`.

    Returns:
        "tokens": the tokens for which it has room, in the groups that keep all of them; 0 if every
        layer has a window. "states", of models with recurrent layers only: the states for which it
        has room instead.
    """
    usable = (report["kv_num_slabs"] - 1) * report["kv_slab_bytes"]
    bytes_per_token = sum(
        group["block_bytes"] / (group["block_size"] * group["tokens_per_entry"])
        for group in report["groups"]
        if not group["window"]
    )
    capacity = {"tokens": int(usable / bytes_per_token) if bytes_per_token else 0}
    states = [group["block_bytes"] for group in report["groups"] if group["kind"] == "state"]
    if states:
        capacity["states"] = int(usable // sum(states))
    return capacity


def memory_plan(report: dict[str, Any]) -> str:
    """Formats a memory report in one line.

    Args:
        report: The result of `LLM.memory_report`.

    Returns:
        The line, with sizes in MiB.
    """
    weights = _mib(report["target_weight_bytes"])
    if report["draft_weight_bytes"]:
        weights += f" + {_mib(report['draft_weight_bytes'])} (drafter)"
    groups = ", ".join(
        f"{group['owner']} {group['kind']}"
        f"{' ' + str(group['window']) if group['window'] else ''} x {group['num_layers']}: "
        f"up to {_mib(group['max_bytes'])}"
        for group in report["groups"]
    )
    capacity = report["kv_capacity"]
    room = ", or ".join(f"{count:,} {what}" for what, count in capacity.items() if count)
    parts = sorted(report["workspace"].items(), key=lambda part: (-part[1], part[0]))
    # Leave out parts that would be shown as 0.0.
    shown = [(purpose, num_bytes) for purpose, num_bytes in parts if num_bytes >= 2**20 // 20]
    workspace = ", ".join(f"{purpose} {_mib(num_bytes)}" for purpose, num_bytes in shown)
    return (
        f"{report['device']} memory in MiB: weights {weights}; "
        f"KV pool {_mib(report['kv_pool_bytes'])} ({groups}; room for {room or 'windows only'}); "
        f"workspace {_mib(report['workspace_bytes'])} ({workspace}); "
        f"graphs {_mib(report['graph_bytes'])}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
