# SPDX-License-Identifier: Apache-2.0
"""How large the KV pool becomes when nobody says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

_MIN_KV_CACHE_BYTES: Final = 8 << 20


def default_kv_cache_bytes(
    models: Sequence[LoadedModel],
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_extra_tokens: int,
    num_prefill_tokens: int,
) -> tuple[int, str]:
    """Chooses the size of the KV pool.

    Args:
        models: Whose layers have a cache; the target first.
        max_num_seqs: Sequences at the same time.
        max_model_len: Tokens of one sequence.
        num_extra_tokens: Tokens that a sequence holds beyond a window: drafts, block edges.
        num_prefill_tokens: Tokens beyond the windows that prefilling sequences hold, together.

    Returns:
        Bytes, and the reason in words.
    """
    # The cache, the drafter's too, holds elements of the target's weight dtype.
    item_bytes = 4 if models[0].weight_dtype == "float32" else 2
    per_token_full = 0
    wanted = 0
    for model in models:
        for layer in model.config["layers"]:
            attention = layer["attention"]
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
