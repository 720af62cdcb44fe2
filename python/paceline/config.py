# SPDX-License-Identifier: Apache-2.0
"""The configuration of an engine, checked once and frozen.

Every error names the key, the value and the values allowed. No value is silently rewritten.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final, TypedDict

from paceline.checks import (
    check_bool,
    check_choice,
    check_finite,
    check_int,
    quoted,
    shorten,
)
from paceline.limits import (
    MAX_BLOCK_SIZE,
    MAX_BYTES,
    MAX_HANG_TIMEOUT_S,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MAX_NUM_THREADS,
    MAX_SEED,
)

DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16")
LOAD_FORMATS: Final = ("auto", "dummy")


def check_device(device: Any) -> None:
    """Checks a `device` argument against this build and this machine.

    Args:
        device: The value.

    Raises:
        NotImplementedError: The GPU cannot be used; the message says why.
        ValueError: It is not the name of a device.
    """
    if isinstance(device, str) and device.startswith("cuda:"):
        raise NotImplementedError(
            f"device is {shorten(device)}; allowed: {quoted(DEVICES)}: 'cuda' is the first GPU "
            "that CUDA_VISIBLE_DEVICES leaves visible"
        )
    check_choice("device", device, DEVICES)
    if device == "cuda":
        from paceline import _core

        status = _core.cuda_status()
        if not status["is_usable"]:
            raise NotImplementedError(f"device is 'cuda': {status['reason']}")


def check_dtype(dtype: Any) -> None:
    """Checks the name of a dtype.

    Raises:
        NotImplementedError: 16-bit floats other than bfloat16.
        ValueError: It is another value that is not allowed.
    """
    if isinstance(dtype, str) and dtype in ("half", "float16"):
        raise NotImplementedError(
            f"dtype {dtype!r} is not supported yet; this version has: {quoted(DTYPES)}. With "
            "'auto', a checkpoint in float16 is loaded as float32, which is lossless"
        )
    check_choice("dtype", dtype, DTYPES)


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
    num_threads: int | None
    seed: int
    max_logprobs: int
    chat_template: str | os.PathLike[str] | None
    disable_log_stats: bool
    hang_timeout_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs: the keyword arguments of `LLM`.

    Attributes:
        device: "cpu", "cuda" (the first visible GPU), or "auto": "cuda" if available, else "cpu".
        dtype: Dtype of the weights: "auto" (as stored, if the runtime supports it), "float32" or
            "bfloat16". Sums are always float32. On CUDA, float32 weights use slow reference
            kernels, which are for comparing numbers.
        max_model_len: Maximum tokens of prompt and output of one request; None = see `LLM`.
        max_num_seqs: Maximum sequences that run at the same time, 1 to 1,024.
        max_num_batched_tokens: Maximum rows of one iteration; None = 2,048, or more if the verify
            windows of max_num_seqs sequences need more.
        prefill_chunk_size: Maximum prompt tokens of one request in one iteration; None = limited
            by max_num_batched_tokens and, while other requests decode, by measured times.
        kv_cache_bytes: Bytes of the KV pool, all groups together; None = see `LLM`.
        gpu_memory_utilization: Instead of kv_cache_bytes, on CUDA: the fraction of the GPU's memory
            that the engine may use in all. On the CPU it changes nothing.
        block_size: Tokens per KV block, 1 to 256.
        enable_prefix_caching: Whether prompts take over the KV of earlier requests that begin with
            the same tokens.
        num_threads: CPU threads, on device "cpu"; None = one per core that the process may use.
        seed: Seed of requests without one, 0 to 2**64 - 1.
        max_logprobs: The largest `logprobs` that a request may set, 0 to 64. 0 disables logprobs,
            and no memory is allocated for them.
        chat_template: The text of the chat template that takes the place of the checkpoint's own;
            given as text or as the path of a file.
        disable_log_stats: Whether the engine logs no lines of figures while requests run.
        hang_timeout_s: Seconds, up to 86,400, after which an iteration that the device has not
            completed is a failure of the device; None = never. Longer than the longest iteration.
    """

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
    num_threads: int | None = None
    seed: int = 0
    max_logprobs: int = 20
    chat_template: str | os.PathLike[str] | None = None
    disable_log_stats: bool = False
    hang_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtype(self.dtype)
        self._check("max_num_seqs", 1, MAX_NUM_SEQS)
        self._check("block_size", 1, MAX_BLOCK_SIZE)
        self._check("seed", 0, MAX_SEED)
        self._check("max_logprobs", 0, MAX_LOGPROBS)
        self._check("max_model_len", 1, MAX_INT, is_optional=True)
        for key in ("max_num_batched_tokens", "prefill_chunk_size"):
            self._check(key, 1, MAX_NUM_BATCHED_TOKENS, is_optional=True)
        self._check("kv_cache_bytes", 1, MAX_BYTES, is_optional=True)
        self._check("num_threads", 1, MAX_NUM_THREADS, is_optional=True)
        self._check_gpu_memory_utilization()
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("disable_log_stats", self.disable_log_stats)
        if self.hang_timeout_s is not None:
            allowed = f"seconds above 0, at most {MAX_HANG_TIMEOUT_S:g}, or None"
            seconds = check_finite("hang_timeout_s", self.hang_timeout_s, allowed)
            if not 0 < seconds <= MAX_HANG_TIMEOUT_S:
                raise ValueError(f"hang_timeout_s is {seconds:g}; allowed: {allowed}")
            object.__setattr__(self, "hang_timeout_s", seconds)
        if self.chat_template is not None:
            from paceline.chat_template import read_given_template

            object.__setattr__(self, "chat_template", read_given_template(self.chat_template))

    def _check(self, key: str, low: int, high: int, *, is_optional: bool = False) -> None:
        value = getattr(self, key)
        if not (is_optional and value is None):
            object.__setattr__(self, key, check_int(key, value, low, high))

    def _check_gpu_memory_utilization(self) -> None:
        share = self.gpu_memory_utilization
        if share is None:
            return
        key = "gpu_memory_utilization"
        allowed = "a number above 0, at most 1, or None"
        number = check_finite(key, share, allowed)
        if not 0 < number <= 1:
            raise ValueError(f"{key} is {shorten(share)}; allowed: {allowed}")
        if self.kv_cache_bytes is not None:
            raise ValueError(
                f"{key} is {shorten(share)} and kv_cache_bytes is {self.kv_cache_bytes}; allowed: "
                "one of them, because both set the size of the KV pool"
            )
        object.__setattr__(self, key, number)
