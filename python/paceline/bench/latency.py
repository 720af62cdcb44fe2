# SPDX-License-Identifier: Apache-2.0
"""Measures iterations: time, tokens, acceptance, and how near they come to the machine's bandwidth.

The rules: random prompt ids, all requests at once; the iteration time is the median over the
iterations in which every request decodes; throughput is counted from a request's first token to its
last.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline import _core
from paceline.bench.models import BenchModel


@dataclass(frozen=True)
class Workload:
    """What is asked of the engine.

    Attributes:
        concurrency: Requests, all at once.
        input_len: Prompt tokens of each.
        output_len: Tokens that each generates.
        temperature: 0 = greedy.
    """

    concurrency: int
    input_len: int
    output_len: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Speculation:
    """How drafts are made and judged.

    Attributes:
        num_speculative_tokens: k.
        accept_method: "coupled" or "synthetic".
        synthetic_acceptance_length: Mean tokens an iteration, for "synthetic".
    """

    num_speculative_tokens: int
    accept_method: str = "coupled"
    synthetic_acceptance_length: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """One row of the report. Times in ms unless named otherwise.

    Attributes:
        iteration_ms: Median over iterations in which all requests decode.
        iteration_p99_ms: 99th percentile of the same.
        output_tokens_per_s: All requests together, decoding only.
        time_to_first_token_ms: Mean over requests.
        tokens_per_iteration: Emitted by one request in one decoding iteration, bonus included.
        num_draft_tokens: k; 0 = plain.
        weight_bytes: Read by one iteration: target once, drafter k times.
        weight_gb_per_s: The same over the iteration time.
        bandwidth_share: That over the machine's read bandwidth.
        flops: Multiply-adds times two of one iteration's matrices, all rows.
        host_us: Host work of one iteration: schedule, batch, blocks, ring.
    """

    workload: Workload
    iteration_ms: float
    iteration_p99_ms: float
    output_tokens_per_s: float
    time_to_first_token_ms: float
    tokens_per_iteration: float
    num_draft_tokens: int
    weight_bytes: int
    weight_gb_per_s: float
    bandwidth_share: float
    flops: int
    host_us: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def make_executor(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: Speculation | None,
    workload: Workload,
    *,
    num_threads: int = 0,
    use_null_device: bool = False,
) -> _core.Executor:
    """Starts an engine just large enough for the workload."""
    k = 0 if speculation is None else speculation.num_speculative_tokens
    max_len = workload.input_len + workload.output_len
    options: dict[str, Any] = {
        "max_model_len": max_len,
        "max_num_seqs": workload.concurrency,
        "max_num_batched_tokens": max(512, workload.concurrency * (k + 1)),
        "kv_cache_bytes": _kv_bytes([target] if draft is None else [target, draft], workload),
        "num_threads": num_threads,
        "num_speculative_tokens": k,
        "use_null_device": use_null_device,
    }
    if speculation is not None:
        options["accept_method"] = speculation.accept_method
        options["synthetic_acceptance_length"] = speculation.synthetic_acceptance_length
    return _core.Executor(target.model, draft.model if draft is not None else None, options)


def measure(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: Speculation | None,
    workload: Workload,
    *,
    num_threads: int = 0,
    read_bandwidth: float = 0.0,
    rounds: int = 3,
    use_null_device: bool = False,
) -> Measurement:
    """Runs a workload `rounds` times after a warm-up and sums it up.

    Args:
        target: The target.
        draft: The drafter; None with speculation None.
        speculation: None = plain decoding.
        workload: What to run.
        num_threads: CPU threads; 0 = all cores.
        read_bandwidth: Bytes a second of this machine, for the share; 0 = leave it out.
        rounds: Repetitions.
        use_null_device: Run no op, to measure the host's work alone.

    Returns:
        The measurement.
    """
    executor = make_executor(
        target, draft, speculation, workload, num_threads=num_threads,
        use_null_device=use_null_device,
    )  # fmt: skip
    k = 0 if speculation is None else speculation.num_speculative_tokens
    vocab = min(m.config["vocab_size"] for m in ([target] if draft is None else [target, draft]))
    runs = []
    try:
        _run_once(executor, workload, vocab, seed=0)
        executor.reset_stats()
        for seed in range(1, rounds + 1):
            runs.append(_run_once(executor, workload, vocab, seed=seed))
        stats = executor.stats()
    finally:
        executor.close()
    full = [
        us / 1000
        for us, decoding, prefill in zip(
            stats["iteration_us"],
            stats["iteration_num_decoding"],
            stats["iteration_num_prefill"],
            strict=True,
        )
        if decoding == workload.concurrency and prefill == 0
    ]
    iteration_ms = statistics.median(full) if full else 0.0
    weight_bytes = target.matrix_bytes + (draft.matrix_bytes * k if draft is not None else 0)
    gb_per_s = weight_bytes / iteration_ms / 1e6 if iteration_ms > 0 else 0.0
    target_rows = workload.concurrency * (k + 1)
    flops = 2 * target.matrix_bytes // _item(target) * target_rows
    if draft is not None:
        # Two rows a sequence in the first pass, one in each later step.
        flops += 2 * draft.matrix_bytes // _item(draft) * workload.concurrency * (k + 1)
    return Measurement(
        workload=workload,
        iteration_ms=iteration_ms,
        iteration_p99_ms=_percentile(full, 0.99),
        output_tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        time_to_first_token_ms=statistics.fmean(run.first_token_ms for run in runs),
        tokens_per_iteration=statistics.fmean(run.tokens_per_iteration for run in runs),
        num_draft_tokens=k,
        weight_bytes=weight_bytes,
        weight_gb_per_s=gb_per_s,
        bandwidth_share=gb_per_s * 1e9 / read_bandwidth if read_bandwidth > 0 else 0.0,
        flops=flops,
        host_us=stats["host_us"] / max(stats["num_iterations"], 1),
    )


@dataclass(frozen=True)
class _Run:
    tokens_per_s: float
    first_token_ms: float
    tokens_per_iteration: float


def _run_once(executor: _core.Executor, workload: Workload, vocab: int, *, seed: int) -> _Run:
    rng = random.Random(seed)
    ids = set()
    for i in range(workload.concurrency):
        prompt = [rng.randrange(vocab) for _ in range(workload.input_len)]
        request = executor.add_request(
            prompt,
            temperature=workload.temperature,
            seed=seed * 100003 + i,
            max_tokens=workload.output_len,
        )
        assert request is not None  # the queue has no bound
        ids.add(request)
    last = []
    decode_events = 0
    decode_tokens = 0
    seen = set()
    while ids:
        for event in executor.poll(1000):
            if event.token_ids and event.id in seen:
                decode_events += 1
                decode_tokens += len(event.token_ids)
            seen.add(event.id)
            if event.finish_reason is not None:
                ids.discard(event.id)
                last.append(event)
    begin = max(event.first_token_us for event in last)
    end = max(event.finish_us for event in last)
    # Tokens before every request has its first one are left out with their time, on average.
    num_tokens = workload.concurrency * (workload.output_len - 1)
    span = statistics.fmean(event.finish_us - event.first_token_us for event in last)
    return _Run(
        tokens_per_s=num_tokens / max(span, 1) * 1e6 if end > begin else 0.0,
        first_token_ms=statistics.fmean(e.first_token_us - e.arrival_us for e in last) / 1000,
        tokens_per_iteration=decode_tokens / max(decode_events, 1),
    )


def _item(model: BenchModel) -> int:
    return 4 if model.model.weight_dtype == "float32" else 2


def _kv_bytes(models: Sequence[BenchModel], workload: Workload) -> int:
    """Enough for every sequence in full, as if no layer had a window."""
    tokens = workload.concurrency * (workload.input_len + workload.output_len + 64)
    item = max(_item(model) for model in models)
    per_token = sum(
        2 * layer["attention"]["num_kv_heads"] * layer["attention"]["head_dim"] * item
        for model in models
        for layer in model.config["layers"]
    )
    return int(tokens * per_token * 5 // 4) + (16 << 20)


def _percentile(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
