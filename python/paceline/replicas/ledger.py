# SPDX-License-Identifier: Apache-2.0
"""What the server's process knows of the requests that replicas run, and how they go on elsewhere.

A *run* is what one replica is asked to do: all samples of a request, or one sample from its known
tokens on. A sample has the same tokens whichever runs it takes, because noise is keyed by seed and
position and acceptance is coupled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from paceline.limits import MAX_SEED
from paceline.outputs import added_counters
from paceline.replicas.messages import EngineEvent, EngineRequest

#: A request is given up when this number of replicas has ended under it: it may be the reason.
MAX_RUNS: Final = 4


def now_us() -> int:
    """The time of events, in microseconds of the steady clock."""
    return time.monotonic_ns() // 1000


@dataclasses.dataclass(slots=True)
class Run:
    """Work for one replica.

    Attributes:
        id: Its number, which no other run of this process has.
        request: The request.
        samples: Those that it runs, in order.
        prompt: The tokens that the replica gets.
        sampling: Further arguments of `_core.Request`.
    """

    id: int
    request: OpenRequest
    samples: list[Sample]
    prompt: list[int]
    sampling: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Sample:
    """One sample of a request.

    Attributes:
        index: Among the request's samples.
        tokens: Its output so far.
        past: The counters of its runs that were cut short.
        now: Those of its present run.
        num_runs: The runs that it has been part of.
        first_token_us: When its first token came; 0 before.
        is_cancelled: Whether its output is not wanted any more.
        run: The run that it is part of; None once its last event has come.
    """

    index: int
    past: dict[str, Any]
    now: dict[str, Any]
    tokens: list[int] = dataclasses.field(default_factory=list)
    num_runs: int = 0
    first_token_us: int = 0
    is_cancelled: bool = False
    run: Run | None = None


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        id: Its id.
        prompt: Its prompt.
        sampling: Further arguments of `_core.Request`; the seed is among them.
        samples: All of its samples.
        arrival_us: When it was added.
    """

    id: int
    prompt: list[int]
    sampling: dict[str, Any]
    samples: list[Sample]
    arrival_us: int


class Ledger:
    """The open requests. For one thread at a time.

    Attributes:
        num_resumed: Samples that went on with known tokens on another replica.
        num_retried: Samples that began again on another replica, because they had no tokens.
        num_speculative_tokens: The engine's k; 0 without speculative decoding. Set before the first
            request.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.num_speculative_tokens = 0
        self._requests: dict[int, OpenRequest] = {}
        self._runs: dict[int, Run] = {}
        self._next_id = 0
        self._next_run = 0
        self.num_resumed = 0
        self.num_retried = 0

    def add(self, request: EngineRequest) -> Run:
        """Opens a request.

        Returns:
            The run for all of its samples.
        """
        k = request.sampling.get("num_speculative_tokens", -1)
        k = self.num_speculative_tokens if k < 0 else k
        opened = OpenRequest(
            id=self._next_id,
            prompt=request.prompt,
            sampling=request.sampling,
            samples=[
                Sample(index, past=_no_counters(k), now=_no_counters(k))
                for index in range(request.num_samples)
            ],
            arrival_us=now_us(),
        )
        self._next_id += 1
        self._requests[opened.id] = opened
        return self._run(opened, opened.samples, opened.prompt, opened.sampling)

    def run(self, run_id: int) -> Run | None:
        """Returns a run; None if it has ended."""
        return self._runs.get(run_id)

    def cancel(self, request_id: int, sample: int | None) -> list[tuple[Run, int]]:
        """Marks samples as cancelled.

        Args:
            request_id: The request; unknown ones are ignored.
            sample: One sample, or None for all.

        Returns:
            What to cancel: runs, each with an index among its samples.
        """
        request = self._requests.get(request_id)
        found = []
        for one in [] if request is None else request.samples:
            if sample in (None, one.index) and one.run is not None:
                one.is_cancelled = True
                found.append((one.run, one.run.samples.index(one)))
        return found

    def take(self, event: EngineEvent) -> EngineEvent | None:
        """Notes an event of a replica.

        Args:
            event: The event, whose id is that of a run. It is changed.

        Returns:
            The event for the request; None if the run or the sample has been given up.
        """
        run = self._runs.get(event.id)
        if run is None:
            return None
        sample = run.samples[event.sample]
        if sample.run is not run:
            return None
        event.id, event.sample = run.request.id, sample.index
        if event.token_ids:
            sample.tokens += event.token_ids
            sample.first_token_us = sample.first_token_us or now_us()
        if event.finish_reason is None:
            _count(sample.now, event)
            return event
        # The replica has counted all of this run.
        event.counters = added_counters([sample.past, dict(event.counters)])
        return self._end(run, sample, event)

    def refuse(self, run_id: int, message: str, *, is_refused: bool = False) -> list[EngineEvent]:
        """Ends a run that no replica runs.

        Args:
            run_id: The run.
            message: Why.
            is_refused: Whether the request is not allowed, so that it is the caller's fault.

        Returns:
            The last events of its samples.
        """
        run = self._runs.get(run_id)
        if run is None:
            return []
        events = [self._cut(run, sample, "error", message) for sample in open_samples(run)]
        for event in events:
            event.is_refused = is_refused
        return events

    def end_cancelled(self, run: Run) -> list[EngineEvent]:
        """Ends the cancelled samples of a run that no replica has; returns their last events."""
        return [
            self._cut(run, sample, "cancelled")
            for sample in open_samples(run)
            if sample.is_cancelled
        ]

    def lose(self, run_ids: Iterable[int]) -> tuple[list[EngineEvent], list[Run]]:
        """Replaces the runs of a replica that has ended.

        Returns:
            The last events of samples that are cancelled or given up, and the runs in which the
            others go on.
        """
        events: list[EngineEvent] = []
        runs: list[Run] = []
        for run_id in run_ids:
            run = self._runs.get(run_id)
            if run is None:
                continue
            going_on = []
            for sample in open_samples(run):
                sample.past = added_counters([sample.past, sample.now])
                sample.now = _no_counters(len(sample.now["drafted_per_position"]))
                if sample.is_cancelled:
                    events.append(self._cut(run, sample, "cancelled"))
                elif sample.num_runs >= MAX_RUNS:
                    message = f"the replicas that ran this request have ended {MAX_RUNS} times"
                    events.append(self._cut(run, sample, "error", message))
                else:
                    going_on.append(sample)
            self._runs.pop(run_id, None)
            runs += self._continued(run.request, going_on)
        return events, runs

    def _continued(self, request: OpenRequest, samples: list[Sample]) -> list[Run]:
        """The runs in which samples go on."""
        has_begun = any(sample.tokens for sample in samples)
        if len(samples) == len(request.samples) and not has_begun:
            self.num_retried += len(samples)
            # Together they compute their prompt once.
            return [self._run(request, samples, request.prompt, request.sampling)]
        runs = []
        for sample in samples:
            sampling = dict(request.sampling)
            sampling.pop("num_samples", None)
            sampling["seed"] = (sampling["seed"] + sample.index) & MAX_SEED
            # Those of the prompt come once, with the first token of sample 0.
            if sample.index > 0 or sample.tokens:
                sampling.pop("prompt_logprobs", None)
            if sample.tokens:
                sampling["num_resumed_tokens"] = len(sample.tokens)
                self.num_resumed += 1
            else:
                self.num_retried += 1
            runs.append(self._run(request, [sample], request.prompt + sample.tokens, sampling))
        return runs

    def _run(
        self,
        request: OpenRequest,
        samples: Sequence[Sample],
        prompt: list[int],
        sampling: dict[str, Any],
    ) -> Run:
        run = Run(self._next_run, request, list(samples), prompt, sampling)
        self._next_run += 1
        self._runs[run.id] = run
        for sample in samples:
            sample.run = run
            sample.num_runs += 1
        return run

    def _cut(self, run: Run, sample: Sample, finish_reason: str, error: str = "") -> EngineEvent:
        """Ends a sample that no replica ends."""
        event = EngineEvent(
            run.request.id,
            sample.index,
            finish_reason=finish_reason,
            error=error,
            counters=added_counters([sample.past, sample.now]),
        )
        return self._end(run, sample, event)

    def _end(self, run: Run, sample: Sample, event: EngineEvent) -> EngineEvent:
        sample.run = None
        if not open_samples(run):
            self._runs.pop(run.id, None)
        request = run.request
        if all(one.run is None for one in request.samples):
            del self._requests[request.id]
        event.arrival_us = request.arrival_us
        event.first_token_us = sample.first_token_us
        event.finish_us = now_us()
        return event


def _no_counters(k: int) -> dict[str, Any]:
    return {
        "num_iterations": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "num_discarded_tokens": 0,
        "accepted_per_position": [0] * k,
        "drafted_per_position": [0] * k,
    }


def open_samples(run: Run) -> list[Sample]:
    """The samples of a run that have not ended."""
    return [sample for sample in run.samples if sample.run is run]


def is_untouched(run: Run) -> bool:
    """Returns whether no sample of a run has tokens, has ended or is cancelled."""
    return not any(one.run is not run or one.tokens or one.is_cancelled for one in run.samples)


def _count(counters: dict[str, Any], event: EngineEvent) -> None:
    """Adds an event that is not the last one, as the engine does; it has no discarded drafts."""
    if event.num_drafted == 0:
        return
    counters["num_iterations"] += 1
    counters["num_draft_tokens"] += event.num_drafted
    counters["num_accepted_tokens"] += event.num_accepted
    for i in range(event.num_drafted):
        counters["drafted_per_position"][i] += 1
    for i in range(event.num_accepted):
        counters["accepted_per_position"][i] += 1
