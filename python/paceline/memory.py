# SPDX-License-Identifier: Apache-2.0
"""Describes the use of memory."""

from __future__ import annotations

from typing import Any


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
