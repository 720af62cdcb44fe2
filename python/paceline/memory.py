# SPDX-License-Identifier: Apache-2.0
"""How large the KV pool becomes when nobody says, and where memory went, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

_MIN_KV_CACHE_BYTES: Final = 8 << 20
# On CUDA: the share of free memory that is used, and what workspace and captured graphs take of it.
_CUDA_SHARE: Final = 0.9
_CUDA_RESERVE_BYTES: Final = 2 << 30


def default_kv_cache_bytes(
    models: Sequence[LoadedModel],
    *,
    device: str,
    max_num_seqs: int,
    max_model_len: int,
    num_extra_tokens: int,
    num_prefill_tokens: int,
) -> tuple[int, str]:
    """Chooses the size of the KV pool.

    Args:
        models: The target, then the drafter if there is one. Their weights are in place.
        device: Where they lie: "cpu" or "cuda".
        max_num_seqs: Sequences at the same time.
        max_model_len: Tokens of one sequence.
        num_extra_tokens: Tokens that a sequence holds beyond a window: drafts, block edges.
        num_prefill_tokens: Tokens beyond the windows that prefilling sequences hold, together.

    Returns:
        Bytes, and the reason in words.

    Raises:
        paceline.OutOfMemoryError: The GPU has no room left for a pool.
    """
    if device == "cuda":
        return _default_on_cuda(models, max_num_seqs, max_model_len + num_extra_tokens)
    # The cache, the drafter's too, holds elements of the target's weight dtype.
    item_bytes = 4 if models[0].weight_dtype == "float32" else 2
    per_token_full = 0
    wanted = 0
    for attention in _caching_layers(models):
        token_bytes = 2 * attention["num_kv_heads"] * attention["head_dim"] * item_bytes
        if attention["kind"] == "full":
            per_token_full += token_bytes
            continue
        num_tokens = max_num_seqs * (attention["window"] + num_extra_tokens)
        num_tokens = min(num_tokens + num_prefill_tokens, max_num_seqs * max_model_len)
        wanted += token_bytes * num_tokens
    wanted += per_token_full * max_num_seqs * (max_model_len + num_extra_tokens)
    # Slabs: each group may leave one partly empty.
    wanted = max(wanted + wanted // 8, _MIN_KV_CACHE_BYTES)
    free = _free_memory_bytes()
    if free is None or wanted <= free // 4:
        return wanted, f"default: enough for {max_num_seqs} sequences of {max_model_len} tokens"
    return free // 4, (
        f"default: a quarter of the {free} bytes of free memory; {max_num_seqs} sequences of "
        f"{max_model_len} tokens would take {wanted}"
    )


def _caching_layers(models: Sequence[LoadedModel]) -> list[dict[str, Any]]:
    """The attention of every layer that has KV of its own."""
    attentions = [layer["attention"] for model in models for layer in model.config["layers"]]
    return [a for a in attentions if "kv_source" not in a and not a.get("reads_target", False)]


def _default_on_cuda(
    models: Sequence[LoadedModel], max_num_seqs: int, tokens_per_seq: int
) -> tuple[int, str]:
    """What memory is free, but no more than all sequences can use."""
    from paceline import _core

    item_bytes = 4 if models[0].weight_dtype == "float32" else 2
    token_bytes = sum(
        2 * attention["num_kv_heads"] * attention["head_dim"] * item_bytes
        for attention in _caching_layers(models)
    )
    # As if every layer kept all tokens; an eighth for slabs that groups leave partly empty.
    wanted = token_bytes * max_num_seqs * tokens_per_seq
    wanted = max(wanted + wanted // 8, _MIN_KV_CACHE_BYTES)
    free = _core.cuda_status()["free_bytes"]
    available = int(free * _CUDA_SHARE) - _CUDA_RESERVE_BYTES
    if wanted <= available:
        return wanted, (
            f"default: enough for {max_num_seqs} sequences of {tokens_per_seq} tokens, as if no "
            "layer had a window"
        )
    if available < _MIN_KV_CACHE_BYTES:
        raise _core.OutOfMemoryError(
            f"the GPU has {_mib(free)} MiB free beside the weights, which leaves no room for a KV "
            f"pool: {_CUDA_SHARE:.0%} of it less {_mib(_CUDA_RESERVE_BYTES)} MiB for workspace and "
            "graphs; free memory of the GPU, use a smaller model or dtype, or set kv_cache_bytes"
        )
    return available, (
        f"default: {_CUDA_SHARE:.0%} of the {free} bytes that are free on the GPU, less "
        f"{_CUDA_RESERVE_BYTES} for workspace and graphs; {max_num_seqs} sequences of "
        f"{tokens_per_seq} tokens would take {wanted}"
    )


def group_max_bytes(group: dict[str, Any], *, max_num_seqs: int, max_model_len: int) -> int:
    """Bytes that all sequences together can hold in a KV group, prefill aside.

    Args:
        group: An entry of `memory_report()["groups"]`.
        max_num_seqs: Sequences at the same time.
        max_model_len: Tokens of one sequence.

    Returns:
        Bytes, in whole blocks.
    """
    tokens = max_model_len
    if group["window"]:
        # A window begins anywhere in its first block.
        tokens = min(tokens, group["window"] + group["block_size"])
    blocks = -(-tokens // group["block_size"])
    return int(max_num_seqs * blocks * group["block_bytes"])


def memory_plan(report: dict[str, Any]) -> str:
    """Puts a memory report in one line for people.

    Args:
        report: What `LLM.memory_report` returns.

    Returns:
        The line, in MiB.
    """
    weights = _mib(report["target_weight_bytes"])
    if report["draft_weight_bytes"]:
        weights += f" + {_mib(report['draft_weight_bytes'])} of the drafter"
    groups = ", ".join(
        f"{group['owner']} {group['kind']}"
        f"{' ' + str(group['window']) if group['window'] else ''} x {group['num_layers']}: "
        f"up to {_mib(group['max_bytes'])}"
        for group in report["groups"]
    )
    parts = sorted(report["workspace"].items(), key=lambda part: (-part[1], part[0]))
    # Not those that would read 0.0.
    shown = [(purpose, num_bytes) for purpose, num_bytes in parts if num_bytes >= 2**20 // 20]
    workspace = ", ".join(f"{purpose} {_mib(num_bytes)}" for purpose, num_bytes in shown)
    return (
        f"{report['device']} memory in MiB: weights {weights}; "
        f"KV pool {_mib(report['kv_pool_bytes'])} ({groups}); "
        f"workspace {_mib(report['workspace_bytes'])} ({workspace}); "
        f"graphs {_mib(report['graph_bytes'])}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _free_memory_bytes() -> int | None:
    """Memory that the process can still have, within its control group; None = unknown."""
    candidates = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    candidates.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit_path, usage_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            with open(limit_path, encoding="ascii") as file:
                limit = file.read().strip()
            with open(usage_path, encoding="ascii") as file:
                usage = file.read().strip()
        except OSError:
            continue
        if limit.isdigit() and usage.isdigit():
            candidates.append(max(int(limit) - int(usage), 0))
    return min(candidates, default=None)
