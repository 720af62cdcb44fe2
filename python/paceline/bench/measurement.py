# SPDX-License-Identifier: Apache-2.0
"""One row of the bench of latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.gpu_state import GpuState
from paceline.bench.runs import Run
from paceline.bench.workload import Workload


@dataclass(frozen=True)
class Measurement:
    """One row of the report. Times in ms unless named otherwise.

    Attributes:
        workload: The requests.
        draft_driver: The draft driver; None = plain decoding.
        iteration_ms: Median over iterations in which all requests decode.
        iteration_p99_ms: 99th percentile over the same iterations.
        output_tokens_per_s: Throughput of all requests together, decoding only.
        time_to_first_token_ms: Mean over requests.
        prompts_ms: From the first request's arrival to the last one's first token, the median over
            the runs; only for requests that all start at once.
        prompt_floor_ms: The least time for the prompts of all requests; None before `with_floor`.
        tokens_per_iteration: The acceptance length: tokens that one request emits in one decoding
            iteration, bonus included.
        num_draft_tokens: k; 0 = plain.
        may_stop_early: Whether an iteration may draft fewer tokens.
        is_adaptive: Whether an iteration may also do without the drafter.
        imposed_acceptance_length: The acceptance length of "synthetic"; None = it was measured.
        target_experts: Experts that had rows, on average over the mixture layers of the target in
            iterations in which all requests decode; None without a mixture.
        draft_experts: The same of the drafter, over all its passes.
        weight_bytes: Weights that one iteration reads: target once, drafter k times; of a mixture
            the experts that had rows.
        kv_bytes: KV that one iteration reads at the mean context of the run.
        iteration_bytes: Both together.
        flops: Multiply-adds times two of one iteration, matrices and attention, all rows.
        gb_per_s: iteration_bytes over the iteration time.
        floor_ms: Least time for the reads and the arithmetic; None before `with_floor`.
        floor_share: floor_ms over iteration_ms; 1 = at the limit of the machine.
        additive_floor_ms: The same with operations that do not overlap; None before `with_floor`.
        additive_floor_share: additive_floor_ms over iteration_ms.
        idle_us: Median time that the device was idle before an iteration.
        idle_share: idle_us over the sum of idle_us and the iteration time.
        host_us: Host work of one iteration: schedule, batch, blocks, ring.
        engine_start_s: Seconds to start the engine: memory and captured programs.
        first_token_s: Seconds from there to the first token of the engine's first request.
        start_to_first_token_s: Seconds from the start of the process to that token, as if this
            engine had been the first; None if the start is unknown.
        gpu: Clocks, power and temperature of the GPU during the runs; None on the CPU.
        rounds: The figures of each run: "iteration_ms", "output_tokens_per_s",
            "time_to_first_token_ms" and "prompts_ms".
        kernels: The result of `Executor.trace_iteration`, if requested.
        runs: The runs, except for the warm-up.
    """

    workload: Workload
    draft_driver: str | None
    iteration_ms: float
    iteration_p99_ms: float
    output_tokens_per_s: float
    time_to_first_token_ms: float
    prompts_ms: float
    tokens_per_iteration: float
    num_draft_tokens: int
    may_stop_early: bool
    is_adaptive: bool
    imposed_acceptance_length: float | None
    target_experts: float | None
    draft_experts: float | None
    weight_bytes: int
    kv_bytes: int
    iteration_bytes: int
    flops: int
    gb_per_s: float
    idle_us: float
    idle_share: float
    host_us: float
    prompt_floor_ms: float | None = None
    floor_ms: float | None = None
    floor_share: float | None = None
    additive_floor_ms: float | None = None
    additive_floor_share: float | None = None
    engine_start_s: float = 0.0
    first_token_s: float = 0.0
    start_to_first_token_s: float | None = None
    gpu: GpuState | None = None
    rounds: Sequence[dict[str, float]] = ()
    kernels: list[dict[str, Any]] | None = None
    runs: Sequence[Run] = ()

    def as_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types, without `kernels` and `runs`."""
        values = asdict(replace(self, kernels=None, runs=()))
        del values["kernels"], values["runs"]
        return values
