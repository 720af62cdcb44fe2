# SPDX-License-Identifier: Apache-2.0
"""Measures iterations: time, tokens, acceptance, and their share of the machine's limits.

Unless `Requests` say otherwise, prompts are random token ids, and all requests start at once. The
iteration time is the median over the iterations in which every request decodes. Throughput is
counted from a request's first token to its last. `paceline.bench.floor` has the least time that an
iteration can take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from paceline import _core
from paceline.bench.drafting import may_stop_early
from paceline.bench.floor import iteration_passes, work_of
from paceline.bench.gpu_state import GpuSample, GpuSampler, gpu_state
from paceline.bench.measurement import Measurement
from paceline.bench.models import BenchModel
from paceline.bench.runs import Requests, Run, first_token_seconds, run_once, trace
from paceline.bench.workload import Workload
from paceline.device import capture_progress
from paceline.speculative_checks import speculative_options
from paceline.speculative_config import SpeculativeConfig

_MIN_BATCHED_TOKENS: Final = {"cpu": 512, "cuda": 2048}


def can_trace(device: str) -> bool:
    """Returns whether the engine can time the kernels of an iteration on a device."""
    return device == "cuda"


def make_executor(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: SpeculativeConfig | None,
    workload: Workload,
    *,
    num_threads: int = 0,
    tensor_parallel_size: int = 1,
    use_null_device: bool = False,
    show_progress: bool = False,
) -> _core.Executor:
    """Starts an engine just large enough for the workload, on the device of the models.

    On GPUs the models are on `tensor_parallel_size` of them. `show_progress` shows a bar while
    graphs are captured, if standard error is a terminal.
    """
    k = 0 if speculation is None else speculation.k
    options: dict[str, Any] = {
        "max_model_len": workload.input_len + workload.output_len,
        "max_num_seqs": workload.concurrency,
        "max_num_batched_tokens": max(
            _MIN_BATCHED_TOKENS[target.model.device], workload.concurrency * (k + 1)
        ),
        # Runs repeat their prompts, and each run shall compute them.
        "enable_prefix_caching": False,
        "num_threads": num_threads,
        "tensor_parallel_size": tensor_parallel_size,
        "use_null_device": use_null_device,
    }
    if speculation is not None:
        options |= speculative_options(speculation)
    drafter = None if draft is None else draft.model
    with capture_progress(is_shown=show_progress) as report:
        return _core.Executor(target.model, drafter, options, report)


def measure(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: SpeculativeConfig | None,
    workloads: Sequence[Workload],
    *,
    num_threads: int = 0,
    tensor_parallel_size: int = 1,
    rounds: int = 3,
    use_null_device: bool = False,
    seconds_before: float | None = None,
    is_traced: bool = False,
    requests: Requests | None = None,
    show_progress: bool = False,
    after_run: Callable[[], object] = lambda: None,
) -> list[Measurement]:
    """Runs each workload `rounds` times after a warm-up and summarises the runs.

    Workloads that are compared within percents belong in one call. They share an engine, since
    engines choose their matrix products by measurement. They take turns, since the device changes
    its clock as it gets warmer.

    Args:
        target: The target.
        draft: The drafter; None with speculation None.
        speculation: None = plain decoding.
        workloads: The workloads, which differ only in `sampling`.
        num_threads: CPU threads; 0 = all cores.
        tensor_parallel_size: Ranks that share the target.
        rounds: Runs of each workload.
        use_null_device: Run no ops, to measure the host's work alone.
        seconds_before: Seconds from the start of the process until the models were loaded; None =
            unknown.
        is_traced: Also time the kernels of one iteration of each workload; needs `can_trace()`.
        requests: The requests of a run; None = one for each sequence of the workload, with random
            ids. With prompts, the workload's `input_len` is their mean length, for the floor. The
            warm-up runs at most as many requests as run at the same time.
        show_progress: As for `make_executor`.
        after_run: Is called after each run, of which each workload has `rounds` + 1.

    Returns:
        One measurement per workload, without a floor; see `paceline.bench.floor`.

    Raises:
        ValueError: There is no workload, or workloads differ in more than `sampling`.
        RuntimeError: A request failed; the message says why.
    """
    if len({(w.concurrency, w.input_len, w.output_len) for w in workloads}) != 1:
        raise ValueError(
            f"workloads are {list(workloads)}; allowed: at least one, and all of one concurrency, "
            "input_len and output_len; measure others in a separate call"
        )
    requests = requests or Requests()
    count = workloads[0].concurrency
    warm_up = replace(
        requests, count=min(count, count if requests.count is None else requests.count)
    )
    sampler = GpuSampler(target.model.device)
    vocab = min(m.config["vocab_size"] for m in ([target] if draft is None else [target, draft]))
    begin = time.monotonic()
    longest = max(map(len, requests.prompts), default=workloads[0].input_len)
    executor = make_executor(
        target, draft, speculation, replace(workloads[0], input_len=longest),
        num_threads=num_threads, tensor_parallel_size=tensor_parallel_size,
        use_null_device=use_null_device, show_progress=show_progress,
    )  # fmt: skip
    engine_start_s = time.monotonic() - begin
    samples = [_Samples() for _ in workloads]
    try:
        first_token_s = first_token_seconds(executor, workloads[0], vocab)
        for workload in workloads:
            run_once(executor, workload, vocab, seed=0, requests=warm_up)
            after_run()
        for seed in range(1, rounds + 1):
            for workload, sample in zip(workloads, samples, strict=True):
                with sampler.sampling():
                    run = run_once(executor, workload, vocab, seed=seed, requests=requests)
                sample.add(run, workload.concurrency, sampler.take())
                after_run()
        kernels = [trace(executor, w, vocab) if is_traced else None for w in workloads]
    finally:
        executor.close()
    before = seconds_before
    return [
        replace(
            _sum_up(target, draft, speculation, workload, sample),
            engine_start_s=engine_start_s,
            first_token_s=first_token_s,
            start_to_first_token_s=(
                None if before is None else before + engine_start_s + first_token_s
            ),
            kernels=kernels_of_one,
        )
        for workload, sample, kernels_of_one in zip(workloads, samples, kernels, strict=True)
    ]


@dataclass
class _Experts:
    """Mixture layers that ran, and the experts that had rows in them, added up."""

    num_layers: int = 0
    num_hit: int = 0

    @property
    def mean(self) -> float | None:
        """Experts a layer; None if no mixture layer ran."""
        return self.num_hit / self.num_layers if self.num_layers > 0 else None


@dataclass
class _Samples:
    """The results of the runs of a workload.

    Attributes:
        runs: The runs.
        iteration_ms: Times of the iterations in which all requests decode.
        idle_us: Idle time of the device before each of those.
        host_us: Host work of all iterations together.
        num_iterations: Number of all iterations.
        target_experts: Counts of the target's mixture layers in the former.
        draft_experts: Counts of the drafter's.
        rounds: The figures of each run, as in `Measurement`.
        gpu: Samples of the GPU during the runs.
    """

    runs: list[Run] = field(default_factory=list)
    iteration_ms: list[float] = field(default_factory=list)
    idle_us: list[float] = field(default_factory=list)
    host_us: float = 0.0
    num_iterations: int = 0
    target_experts: _Experts = field(default_factory=_Experts)
    draft_experts: _Experts = field(default_factory=_Experts)
    rounds: list[dict[str, float]] = field(default_factory=list)
    gpu: list[GpuSample] = field(default_factory=list)

    def add(self, run: Run, concurrency: int, gpu: Sequence[GpuSample]) -> None:
        """Adds a run of a workload with this concurrency."""
        num_before = len(self.iteration_ms)
        self._add_iterations(run, concurrency)
        own = self.iteration_ms[num_before:]
        self.runs.append(run)
        self.gpu += gpu
        self.rounds.append(
            {
                "iteration_ms": statistics.median(own) if own else 0.0,
                "output_tokens_per_s": run.tokens_per_s,
                "time_to_first_token_ms": run.first_token_ms,
                "prompts_ms": run.prompts_ms,
            }
        )

    def _add_iterations(self, run: Run, concurrency: int) -> None:
        self.host_us += run.stats["host_us"]
        self.num_iterations += run.stats["num_iterations"]
        times = run.times
        for i, (num_decoding, num_prefill) in enumerate(
            zip(times["num_decoding"], times["num_prefill"], strict=True)
        ):
            if num_decoding == concurrency and num_prefill == 0:
                self.iteration_ms.append(times["us"][i] / 1000)
                self.idle_us.append(times["idle_us"][i])
                for model, experts in (
                    ("target", self.target_experts),
                    ("draft", self.draft_experts),
                ):
                    experts.num_layers += times[f"{model}_mixture_layers"][i]
                    experts.num_hit += times[f"{model}_experts_hit"][i]


def _sum_up(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: SpeculativeConfig | None,
    workload: Workload,
    samples: _Samples,
) -> Measurement:
    """Summarises the runs, except for the times of the engine's start."""
    k = 0 if speculation is None else speculation.k
    imposed = None if speculation is None else speculation.synthetic_acceptance_length
    runs, times = samples.runs, samples.iteration_ms
    iteration_ms = statistics.median(times) if times else 0.0
    idle_us = statistics.median(samples.idle_us) if times else 0.0
    target_experts, draft_experts = samples.target_experts.mean, samples.draft_experts.mean
    experts = target_experts, draft_experts
    work = work_of(iteration_passes(target, draft, k, workload, experts))
    num_bytes = work.weight_bytes + work.kv_bytes
    return Measurement(
        workload=workload,
        draft_driver=None if speculation is None else speculation.draft_driver,
        iteration_ms=iteration_ms,
        iteration_p99_ms=_percentile(times, 0.99),
        output_tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        time_to_first_token_ms=statistics.fmean(run.first_token_ms for run in runs),
        prompts_ms=statistics.median(run.prompts_ms for run in runs),
        tokens_per_iteration=statistics.fmean(run.tokens_per_iteration for run in runs),
        num_draft_tokens=k,
        may_stop_early=speculation is not None and may_stop_early(speculation),
        is_adaptive=speculation is not None and bool(speculation.adaptive),
        imposed_acceptance_length=imposed,
        target_experts=target_experts,
        draft_experts=draft_experts,
        weight_bytes=work.weight_bytes,
        kv_bytes=work.kv_bytes,
        iteration_bytes=num_bytes,
        flops=work.flops,
        gb_per_s=num_bytes / iteration_ms / 1e6 if iteration_ms > 0 else 0.0,
        idle_us=idle_us,
        idle_share=idle_us / (idle_us + iteration_ms * 1000) if iteration_ms > 0 else 0.0,
        host_us=samples.host_us / max(samples.num_iterations, 1),
        gpu=gpu_state(samples.gpu),
        rounds=tuple(samples.rounds),
        runs=tuple(runs),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
