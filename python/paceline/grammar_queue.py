# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars for event loops, apart from what prepares other requests."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from paceline.grammar_trial import Cancelled, Trial

if TYPE_CHECKING:
    from paceline.grammar import CompiledGrammar, Grammars
    from paceline.structured_outputs import StructuredOutputsParams

# Grammars that are compiled at a time, and that wait.
_NUM_WORKERS: Final = 2
MAX_WAITING: Final = 64
# Of the grammars that are kept or that requests use.
_MAX_BYTES: Final = 1 << 30


class GrammarQueueFull(RuntimeError):
    """Too many grammars wait to be compiled."""


@dataclasses.dataclass(eq=False)
class _Job:
    trial: Trial
    future: Future[CompiledGrammar]
    num_tasks: int = 0  # that wait for it


class GrammarQueue:
    """The grammars of an `AsyncLLM` that are not compiled yet. Thread-safe.

    Tasks that need the same grammar share its compilation, which ends when none of them waits.
    """

    def __init__(self, grammars: Grammars) -> None:
        """Starts empty."""
        self._grammars = grammars
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="paceline-grammars")
        self._lock = threading.Lock()
        self._jobs: dict[StructuredOutputsParams, _Job] = {}
        self._closed = ""  # why it takes no more; "" while it does

    async def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compiles a grammar unless it is compiled already.

        Args:
            params: What an output must look like.

        Returns:
            The grammar. While someone refers to it, it does not have to be compiled again.

        Raises:
            ValueError: As `Grammars.compile`.
            GrammarQueueFull: Too many others wait.
            RuntimeError: It was closed; or as `Grammars.compile`.
        """
        known = self._grammars.find(params)
        if known is not None:
            return known
        job = self._join(params)
        try:
            return await asyncio.shield(asyncio.wrap_future(job.future))
        except Cancelled:
            raise RuntimeError(self._closed or "this LLM is closed") from None
        finally:
            self._leave(params, job)

    def _join(self, params: StructuredOutputsParams) -> _Job:
        with self._lock:
            if self._closed:
                raise RuntimeError(self._closed)
            job = self._jobs.get(params)
            if job is None:
                if len(self._jobs) >= _NUM_WORKERS + MAX_WAITING:
                    raise GrammarQueueFull(
                        f"{MAX_WAITING} grammars of structured_outputs wait to be compiled; "
                        f"allowed: {MAX_WAITING}; try again later"
                    )
                trial = Trial()
                future = self._workers.submit(self._grammars.compile, params, trial, _MAX_BYTES)
                job = _Job(trial, future)
                self._jobs[params] = job
            job.num_tasks += 1
        return job

    def _leave(self, params: StructuredOutputsParams, job: _Job) -> None:
        with self._lock:
            job.num_tasks -= 1
            if job.num_tasks > 0:
                return
            if self._jobs.get(params) is job:
                del self._jobs[params]
        job.future.cancel()
        job.trial.cancel()

    def close(self, reason: str) -> None:
        """Ends what is being compiled, and takes no more. Closing twice is fine.

        Args:
            reason: The message of the errors that tasks get.
        """
        with self._lock:
            self._closed = self._closed or reason
            jobs = list(self._jobs.values())
        for job in jobs:
            job.trial.cancel()
        self._workers.shutdown(wait=False)
