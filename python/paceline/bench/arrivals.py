# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive at random while others decode: `paceline bench latency --request-rate`.

A prompt that is computed between two iterations of the others is felt as a longer time between
their tokens. Requests go straight to the engine, without a server, so these times are the engine's
own. The capacity is the number of requests a second that the engine completes if all are sent at
once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from paceline.bench.gpu_state import GpuSampler, gpu_state
from paceline.bench.latency import make_executor
from paceline.bench.models import BenchModel
from paceline.bench.report import columns, legends, parts, table
from paceline.bench.runs import Requests, Run, first_token_seconds, run_once
from paceline.bench.serving import draft_metrics, serving_metrics
from paceline.bench.workload import Workload
from paceline.checks import check_int, shorten
from paceline.limits import MAX_INT
from paceline.speculative_config import SpeculativeConfig

#: Requests of a run.
DEFAULT_NUM_PROMPTS: Final = 100


@dataclass(frozen=True)
class Arrivals:
    """How requests arrive.

    Attributes:
        rates: Requests a second, or the share of the capacity, 0.6 for 60 %; with which of both it
            is.
        num_prompts: Requests of a run.
    """

    rates: list[tuple[float, bool]]
    num_prompts: int

    @property
    def needs_capacity(self) -> bool:
        """Returns whether a rate is a share of the capacity."""
        return any(is_share for _, is_share in self.rates)

    def num_runs(self, rounds: int) -> int:
        """Runs of a cell, the warm-up included."""
        return 1 + int(self.needs_capacity) + rounds * len(self.rates)


@dataclass(frozen=True)
class ArrivalRows:
    """The figures of one engine.

    Attributes:
        rows: One for each rate, as plain JSON types.
        engine_start_s: Seconds to start the engine.
        first_token_s: Seconds from there to the first token.
    """

    rows: list[dict[str, Any]]
    engine_start_s: float
    first_token_s: float


def parse_arrivals(args: argparse.Namespace, num_samplings: int) -> Arrivals | None:
    """Reads --request-rate and --num-prompts; None without a rate.

    Raises:
        ValueError: An option is wrong, or does not go with --request-rate.
    """
    if args.request_rate is None:
        if args.num_prompts is not None:
            raise ValueError(
                f"num_prompts is {args.num_prompts}, but without --request-rate as many requests "
                "start as run at the same time; add --request-rate, or leave out --num-prompts"
            )
        return None
    for option in ("plot", "trace"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} does not go with --request-rate; leave out one of them")
    if num_samplings > 1:
        raise ValueError(
            f"--sampling is given {num_samplings} times; allowed with --request-rate: once"
        )
    num_prompts = DEFAULT_NUM_PROMPTS if args.num_prompts is None else args.num_prompts
    rates = []
    for text in args.request_rate.split(","):
        is_share = text.endswith("%")
        try:
            rate = float(text.removesuffix("%")) / (100 if is_share else 1)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise ValueError(
                f"request_rate is {shorten(args.request_rate)}; allowed: numbers above 0, and "
                "shares of the capacity, for example 2,10,60%"
            )
        rates.append((rate, is_share))
    return Arrivals(list(dict.fromkeys(rates)), check_int("num_prompts", num_prompts, 1, MAX_INT))


def measure_arrivals(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: SpeculativeConfig | None,
    workload: Workload,
    arrivals: Arrivals,
    *,
    num_threads: int = 0,
    tensor_parallel_size: int = 1,
    rounds: int = 3,
    use_null_device: bool = False,
    show_progress: bool = False,
    after_run: Callable[[], object] = lambda: None,
) -> ArrivalRows:
    """Measures every rate on one engine; the rates take turns in each round.

    Args:
        target: The target.
        draft: The drafter, or None.
        speculation: None = plain decoding.
        workload: The requests; at most its concurrency run at the same time.
        arrivals: How they arrive.
        num_threads: CPU threads; 0 = all cores.
        tensor_parallel_size: Ranks that share the target.
        rounds: Runs of each rate.
        use_null_device: Run no ops.
        show_progress: As for `make_executor`.
        after_run: Is called after each run.

    Raises:
        RuntimeError: A request failed; the message says why.
    """
    models = [target] if draft is None else [target, draft]
    vocab = min(model.config["vocab_size"] for model in models)
    begin = time.monotonic()
    executor = make_executor(
        target, draft, speculation, workload, num_threads=num_threads,
        tensor_parallel_size=tensor_parallel_size, use_null_device=use_null_device,
        show_progress=show_progress,
    )  # fmt: skip
    engine_start_s = time.monotonic() - begin
    sampler = GpuSampler(target.model.device)
    figures: list[list[dict[str, Any]]] = [[] for _ in arrivals.rates]
    samples: list[list[Any]] = [[] for _ in arrivals.rates]
    try:
        first_token_s = first_token_seconds(executor, workload, vocab)
        run_once(executor, workload, vocab, seed=0)
        after_run()
        capacity = None
        if arrivals.needs_capacity:
            # A rate that no clock resolves: all requests wait in the engine's queue at once.
            requests = Requests(arrivals.num_prompts, rate=1e9)
            run = run_once(executor, workload, vocab, seed=0, requests=requests)
            capacity = len(run.requests) / run.duration_s
            after_run()
        rates = [
            rate * capacity if is_share and capacity is not None else rate
            for rate, is_share in arrivals.rates
        ]
        for seed in range(1, rounds + 1):
            for i, rate in enumerate(rates):
                requests = Requests(arrivals.num_prompts, rate=rate)
                with sampler.sampling():
                    run = run_once(executor, workload, vocab, seed=seed, requests=requests)
                figures[i].append(_figures(run, has_drafts=speculation is not None))
                samples[i] += sampler.take()
                after_run()
    finally:
        executor.close()
    rows = []
    for i, ((rate, is_share), of_rate) in enumerate(zip(arrivals.rates, figures, strict=True)):
        state = gpu_state(samples[i])
        rows.append(
            {
                "workload": asdict(workload),
                "request_rate": rates[i],
                "capacity_share": rate if is_share else None,
                "capacity": capacity,
                "num_prompts": arrivals.num_prompts,
                "num_draft_tokens": 0 if speculation is None else speculation.k,
                "draft_driver": speculation and speculation.draft_driver,
                **_medians(of_rate),
                "gpu": None if state is None else state.as_dict(),
                "rounds": of_rate,
            }
        )
    return ArrivalRows(rows, engine_start_s, first_token_s)


def _figures(run: Run, *, has_drafts: bool) -> dict[str, Any]:
    """The figures of a run, under the keys of vLLM's result files."""
    figures: dict[str, Any] = dict(serving_metrics(run.requests, run.duration_s))
    median = figures["median_itl_ms"]
    figures["itl_p99_over_median"] = figures["p99_itl_ms"] / median if median > 0 else None
    if has_drafts:
        figures["spec_decode_acceptance_length"] = draft_metrics(run.stats)[
            "spec_decode_acceptance_length"
        ]
    return figures


def _medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure the median over the rounds."""
    medians: dict[str, Any] = {}
    for key in rounds[0]:
        values = [figures[key] for figures in rounds if figures[key] is not None]
        medians[key] = statistics.median(values) if values else None
    return medians


def arrival_lines(rows: Sequence[Mapping[str, Any]], device: str) -> list[str]:
    """The table of rows with what explains it, as lines."""
    shown = []
    for row in rows:
        share = row["capacity_share"]
        shown.append({**row, "share": "" if share is None else f" ({share:.0%})"})
    names = parts("arrivals", device)
    return [*table(columns(*names), shown), *legends(*names)]
