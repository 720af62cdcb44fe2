# SPDX-License-Identifier: Apache-2.0
"""Runs the requests of a bench, and records when each of them received its tokens."""

from __future__ import annotations

import collections
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import _core
from paceline.bench.serving import TimedRequest
from paceline.bench.workload import Workload


@dataclass(frozen=True)
class Requests:
    """The requests of a run, where a workload alone does not define them.

    Attributes:
        count: Number of requests. At most the workload's concurrency run at the same time, and the
            next one starts when one has ended. None = the concurrency, all at once.
        prompts: Token ids of the prompts, used in turn; empty = random ids, input_len of them.
        stop_token_ids: Token ids that end an output before output_len.
        rate: Requests a second, which arrive as a Poisson process and wait in the engine's queue;
            None = the next one is sent when one has ended.
    """

    count: int | None = None
    prompts: Sequence[Sequence[int]] = ()
    stop_token_ids: Sequence[int] = ()
    rate: float | None = None


@dataclass
class RequestTimes(TimedRequest):
    """When a request was sent and its tokens arrived, in seconds of one clock.

    Attributes:
        num_tokens: Number of tokens in each of the events.
    """

    num_prompt_tokens: int
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output."""
        return sum(self.num_tokens)


@dataclass(frozen=True)
class Run:
    """The result of one run.

    Attributes:
        duration_s: Seconds from sending the first request to the last event.
        requests: Times of the requests, in the order in which they ended.
        tokens_per_s: Throughput of the decoding requests together, by the engine's clock: first
            tokens are not counted, and neither is the time before them.
        first_token_ms: Mean time from queueing to the first token, by the engine's clock.
        prompts_ms: From the first queueing to the last first token, by the engine's clock.
        tokens_per_iteration: Tokens of each event with tokens but a request's first, on average.
        stats: `Executor.stats()` of the run.
        times: `Executor.iteration_times()` of the run.
    """

    duration_s: float
    requests: Sequence[RequestTimes]
    tokens_per_s: float
    first_token_ms: float
    prompts_ms: float
    tokens_per_iteration: float
    stats: Mapping[str, Any]
    times: Mapping[str, Any]


def run_once(
    executor: _core.Executor,
    workload: Workload,
    vocab: int,
    *,
    seed: int,
    requests: Requests | None = None,
) -> Run:
    """Runs all requests of a workload.

    Args:
        executor: The engine.
        workload: The workload.
        vocab: Random prompts have ids below it.
        seed: Seed of random prompts, and of the seeds of sampling.
        requests: The requests; None = as many as run at the same time.

    Raises:
        RuntimeError: A request failed; the message says why.
    """
    executor.reset_stats()
    requests = requests or Requests()
    waiting = collections.deque(_make(requests, workload, vocab, random.Random(seed)))
    gaps = random.Random(seed)  # of their own, so that prompts do not depend on the rate
    ended: list[RequestTimes] = []
    last: list[_core.RequestEvent] = []
    live: dict[int, RequestTimes] = {}
    begin = arrival_s = time.monotonic()
    while live or waiting:
        timeout_ms = 1000
        if requests.rate is None:
            num_free = min(workload.concurrency - len(live), len(waiting))
            live |= _send(executor, [waiting.popleft() for _ in range(num_free)])
        else:
            while waiting and arrival_s <= time.monotonic():
                live |= _send(executor, [waiting.popleft()])
                arrival_s += gaps.expovariate(requests.rate)
            if waiting:
                timeout_ms = max(0, int((arrival_s - time.monotonic()) * 1e3))
        events = executor.poll(timeout_ms)
        now = time.monotonic()
        for event in events:
            request = live[event.id]
            token_ids = event.token_ids
            if token_ids:
                request.token_times_s.append(now)
                request.num_tokens.append(len(token_ids))
            if has_ended(event):
                request.ended_s = now
                ended.append(live.pop(event.id))
                last.append(event)
    span_us = statistics.fmean(event.finish_us - event.first_token_us for event in last)
    num_later = statistics.fmean(request.num_output_tokens - 1 for request in ended)
    later = [count for request in ended for count in request.num_tokens[1:]]
    return Run(
        duration_s=max(request.ended_s for request in ended) - begin,
        requests=ended,
        tokens_per_s=workload.concurrency * num_later / span_us * 1e6 if span_us > 0 else 0.0,
        first_token_ms=statistics.fmean(e.first_token_us - e.arrival_us for e in last) / 1000,
        prompts_ms=(max(e.first_token_us for e in last) - min(e.arrival_us for e in last)) / 1000,
        tokens_per_iteration=statistics.fmean(later) if later else 0.0,
        stats=executor.stats(),
        times=executor.iteration_times(),
    )


def first_token_seconds(executor: _core.Executor, workload: Workload, vocab: int) -> float:
    """Runs one request; returns the seconds from its arrival to its first token."""
    begin = time.monotonic()
    seconds = None
    (request,) = _send(executor, _make(Requests(count=1), workload, vocab, random.Random(-1)))
    while True:
        for event in executor.poll(1000):
            if seconds is None and event.token_ids:
                seconds = time.monotonic() - begin
                executor.cancel(request)
            if has_ended(event, is_cancelled=True):
                assert seconds is not None  # it is cancelled after its first token
                return seconds


def trace(executor: _core.Executor, workload: Workload, vocab: int) -> list[dict[str, Any]]:
    """Times the kernels of an iteration in which all requests decode."""
    ids = set(_send(executor, _make(Requests(), workload, vocab, random.Random(0))))
    without_token = set(ids)
    kernels: list[dict[str, Any]] | None = None
    while ids:
        for event in executor.poll(1000):
            if event.token_ids:
                without_token.discard(event.id)
            if has_ended(event, is_cancelled=kernels is not None):
                ids.discard(event.id)
                without_token.discard(event.id)
        if kernels is None and not without_token:
            kernels = executor.trace_iteration()
            for request in ids:
                executor.cancel(request)
    return kernels or []


def has_ended(event: _core.RequestEvent, *, is_cancelled: bool = False) -> bool:
    """Returns whether this is a request's last event.

    Raises:
        RuntimeError: The request ended neither by its length, nor by a stop token, nor with
            `is_cancelled` by cancellation, so that its times are meaningless.
    """
    reason = event.finish_reason
    if reason is None:
        return False
    if reason in ("length", "stop") or (is_cancelled and reason == "cancelled"):
        return True
    raise RuntimeError(
        f"a request of the bench ended by {reason}: {event.error or 'the engine gives no reason'}"
    )


def _make(
    requests: Requests, workload: Workload, vocab: int, rng: random.Random
) -> list[tuple[int, _core.Request]]:
    """The requests, each with its number of prompt tokens."""
    made = []
    for index in range(workload.concurrency if requests.count is None else requests.count):
        if requests.prompts:
            prompt = requests.prompts[index % len(requests.prompts)]
        else:
            prompt = [rng.randrange(vocab) for _ in range(workload.input_len)]
        request = _core.Request(
            prompt,
            seed=rng.randrange(2**32),
            max_tokens=workload.output_len,
            stop_token_ids=requests.stop_token_ids,
            **{"temperature": 0.0, **workload.sampling},
        )
        made.append((len(prompt), request))
    return made


def _send(
    executor: _core.Executor, made: Iterable[tuple[int, _core.Request]]
) -> dict[int, RequestTimes]:
    """Queues requests that can start in the same iteration; returns their times by id."""
    listed = list(made)
    now = time.monotonic()
    ids: list[int] = []
    is_queued = executor.add_requests([request for _, request in listed], ids)
    assert is_queued  # the queue has no bound
    return {
        request_id: RequestTimes(num_tokens, now)
        for request_id, (num_tokens, _) in zip(ids, listed, strict=True)
    }
