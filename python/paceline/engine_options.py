# SPDX-License-Identifier: Apache-2.0
"""The types of the engine's options. Generated from options.toml; do not edit.

Run PYTHONPATH=python python docs/scripts/generate_options.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TypedDict


class EngineArguments(TypedDict, total=False):
    """The fields of `EngineConfig`, for the types of functions that pass them on."""

    device: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    prefill_chunk_size: int | None
    kv_cache_bytes: int | None
    gpu_memory_utilization: float | None
    block_size: int
    enable_prefix_caching: bool
    state_interval: int | None
    num_threads: int | None
    tensor_parallel_size: int
    devices: list[int] | None
    seed: int
    max_logprobs: int
    chat_template: str | os.PathLike[str] | None
    disable_log_stats: bool
    hang_timeout_s: float | None


class ExecutorOptions(TypedDict):
    """The options of `_core.Executor`, as it reports them."""

    drafter: object
    num_speculative_tokens: int
    rejection_sample_method: str
    synthetic_acceptance_length: float
    draft_sample_method: str
    prompt_lookup_min: int
    prompt_lookup_max: int
    draft_tensor_parallel_size: int
    draft_driver: str
    draft_stop_threshold: float
    draft_position: str | None
    draft_proposals: int
    adaptive: bool | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_waiting_requests: int
    kv_cache_bytes: int
    gpu_memory_utilization: float
    block_size: int
    enable_prefix_caching: bool
    state_interval: int
    num_threads: int
    tensor_parallel_size: int
    max_logprobs: int
    log_interval_s: float
    hang_timeout_s: float
    device_lateness: int
    host_delay_max_us: int
    draft_schedule_seed: int
    use_null_device: bool
    poison_freed_blocks: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFields:
    """The values of an `EngineConfig`, which describes them; not checked yet."""

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    state_interval: int | None = None
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    devices: list[int] | None = None
    seed: int = 0
    max_logprobs: int = 20
    chat_template: str | os.PathLike[str] | None = None
    disable_log_stats: bool = False
    hang_timeout_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeKeys:
    """The values of a `SpeculativeConfig`, which describes them; not checked yet."""

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    drafter: Callable[[list[int]], Sequence[int]] | None = None
    num_speculative_tokens: int | None = None
    rejection_sample_method: str = "coupled"
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_tensor_parallel_size: int | None = None
    draft_driver: str = "unrolled"
    draft_stop_threshold: float = 0.0
    draft_position: str | None = None
    draft_feedback: str | None = None
    draft_proposals: int | None = None
    adaptive: bool | None = None
