# SPDX-License-Identifier: Apache-2.0
"""`RemoteExecutor`: what a `Dispatcher` needs of an executor, for engines in other processes."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.engine_options import ExecutorOptions
from paceline.replicas.ledger import Ledger, Run
from paceline.replicas.messages import EngineEvent, EngineRequest, Facts

# Statistics of one engine's choice, which have no sum.
_OWN_CHOICE: Final = ("is_adaptive", "num_drafts", "drafts", "expected_acceptance", "costs")


class RemoteExecutor(ABC):
    """Runs requests in other processes. Thread-safe.

    Attributes:
        lock: Guards everything; `changed` belongs to it. Nothing blocks while it is held.
        changed: Notified when there are events, and when a replica changes.
        ledger: The open requests.
        facts: Of the engines; set once one of them is known.
    """

    facts: Facts

    #: Makes the requests that `add_requests` takes.
    make_request = EngineRequest

    def __init__(self) -> None:
        """Starts without requests."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.ledger = Ledger()
        self._events: list[EngineEvent] = []

    def add_requests(self, requests: Sequence[EngineRequest], ids: list[int]) -> bool:
        """Adds requests and appends their ids; as `_core.Executor.add_requests`.

        Raises:
            RuntimeError: No replica runs.
            NotImplementedError: A request asks for logits or hidden states of its prompt; replicas
                return neither.
        """
        if not all(isinstance(request, EngineRequest) for request in requests):
            raise NotImplementedError(
                "replicas generate only; an LLM in this process has logits and hidden states"
            )
        with self.lock:
            self.check_running()
            for request in requests:
                run = self.ledger.add(request)
                ids.append(run.request.id)
                self.start_run(run)
        return True

    def cancel(self, request_id: int, sample: int | None = None) -> bool:
        """Cancels a request, or one of its samples. Its last event still follows."""
        with self.lock:
            found = self.ledger.cancel(request_id, sample)
            for run, index in found:
                self.cancel_run(run, index)
        return bool(found)

    def poll(self, timeout_ms: int = 0) -> list[EngineEvent]:
        """Waits for events and returns them."""
        with self.lock:
            if not self._events:
                self.changed.wait(timeout_ms / 1e3)
            events, self._events = self._events, []
        return events

    def deliver(self, events: Sequence[EngineEvent]) -> None:
        """Leaves events for `poll`; the caller holds the lock."""
        if events:
            self._events += events
            self.changed.notify_all()

    def replace_runs(self, run_ids: Sequence[int]) -> None:
        """Has the runs of a replica that has ended go on; the caller holds the lock."""
        events, runs = self.ledger.lose(run_ids)
        self.deliver(events)
        for run in runs:
            self.start_run(run)

    @abstractmethod
    def check_running(self) -> None:
        """Raises RuntimeError if no replica runs; the caller holds the lock."""

    @abstractmethod
    def start_run(self, run: Run) -> None:
        """Has a replica begin a run, or keeps it until there is one; the caller holds the lock."""

    @abstractmethod
    def cancel_run(self, run: Run, sample: int) -> None:
        """Cancels one of a run's samples; the caller holds the lock."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Sums what `_core.Executor.stats` returns over all replicas."""

    @abstractmethod
    def replica_stats(self) -> dict[str, dict[str, Any]]:
        """Returns the same for each replica that runs, by its name."""

    @abstractmethod
    def replica_states(self) -> list[dict[str, Any]]:
        """Describes the replicas: a dict of plain JSON types for each, with "replica" and
        "state"."""

    @abstractmethod
    def close(self) -> None:
        """Ends the replicas. Closing twice is fine."""

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """The number of replicas, whether they run or not."""

    @property
    def options(self) -> ExecutorOptions:
        """The options in effect of each engine."""
        return self.facts.options

    def memory_report(self) -> dict[str, Any]:
        """The memory of one replica."""
        return copy.deepcopy(self.facts.memory_report)


def total_stats(engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up what `_core.Executor.stats` returns. Each engine chooses its number of drafts for
    itself, so the sum has no choice."""
    counts = [{key: one[key] for key in one if key not in _OWN_CHOICE} for one in engines]
    return {**summed(counts), "is_adaptive": False}


def summed(values: Sequence[Any]) -> Any:
    """Adds up statistics: numbers, and lists and dicts of them element by element."""
    first = values[0]
    if isinstance(first, dict):
        return {key: summed([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [summed(column) for column in zip(*values, strict=True)]
    return sum(values)
