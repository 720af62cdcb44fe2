# SPDX-License-Identifier: Apache-2.0
"""`RayExecutor`: what a dispatcher needs of an executor, for engines that Ray runs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any, Final

from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from paceline.replicas.ledger import Run, open_samples
from paceline.replicas.messages import Facts
from paceline.replicas.remote import RemoteExecutor, total_stats

_logger = logging.getLogger("paceline")

# Before a request that a replica has dropped goes on: Ray learns meanwhile that it has ended.
_PAUSE_S: Final = 0.2
# Statistics of replicas that have answered nothing for longer are dropped.
_KEPT_S: Final = 600.0


class RayExecutor(RemoteExecutor):
    """Runs requests on a deployment of `Engine`. Ray chooses the replica, and replaces those that
    have ended."""

    def __init__(self, handle: DeploymentHandle, facts: Facts, *, max_replicas: int) -> None:
        """Starts without requests.

        Args:
            handle: The deployment.
            facts: Of its engines.
            max_replicas: The most replicas that it can have.
        """
        super().__init__()
        self.ledger.num_speculative_tokens = facts.options["num_speculative_tokens"]
        self._handle = handle.options(method_name="generate", stream=True)
        self.facts = facts
        self._max_replicas = max_replicas
        self._started_at = time.monotonic()
        self._streams: dict[int, Future[None]] = {}  # by run
        self._places: dict[int, str] = {}  # the names of replicas, by run
        self._stats: dict[str, tuple[float, dict[str, Any]]] = {}  # with their time, by name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="paceline-ray", daemon=True
        )
        self._thread.start()

    def check_running(self) -> None:
        """See `RemoteExecutor`. Requests wait until Ray has a replica."""
        if self._loop.is_closed():
            raise RuntimeError("the server is closed")

    def start_run(self, run: Run) -> None:
        """See `RemoteExecutor`."""
        self._streams[run.id] = asyncio.run_coroutine_threadsafe(self._follow(run), self._loop)

    def cancel_run(self, run: Run, sample: int) -> None:
        """See `RemoteExecutor`. A run goes on as long as one of its samples is wanted."""
        self.deliver(self.ledger.end_cancelled(run))
        if not open_samples(run) and run.id in self._streams:
            self._streams[run.id].cancel()

    async def _follow(self, run: Run) -> None:
        """Delivers the events of a run. If its replica ends, it goes on elsewhere."""
        if any(sample.num_runs > 1 for sample in run.samples):
            await asyncio.sleep(_PAUSE_S)
        response = self._handle.remote(run.prompt, run.sampling)
        try:
            async for kind, value in response:
                with self.lock:
                    self._take(run, kind, value)
            error: Exception = RuntimeError("its replica has ended early")
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as caught:
            error = caught
        finally:
            with self.lock:
                self._streams.pop(run.id, None)
                name = self._places.pop(run.id, "of Ray")
        with self.lock:
            if self.ledger.run(run.id) is None:
                return
            cause = error.cause if isinstance(error, RayTaskError) else error
            message = " ".join(str(cause).split())
            if isinstance(cause, ValueError | NotImplementedError):
                self.deliver(self.ledger.refuse(run.id, message, is_refused=True))
                return
            _logger.error("replica %s has dropped a request, which goes on: %s", name, message)
            self.replace_runs([run.id])

    def _take(self, run: Run, kind: str, value: Any) -> None:
        """Does what a replica says; the caller holds the lock."""
        if kind == "begin":
            self._places[run.id] = value
        elif kind == "stats":
            self._stats[self._places[run.id]] = time.monotonic(), value
        else:
            for event in value:
                event.id = run.id
            self.deliver([event for event in value if self.ledger.take(event) is not None])

    # ---- reports -------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """See `RemoteExecutor`: the most that there can be."""
        return self._max_replicas

    def replica_stats(self) -> dict[str, dict[str, Any]]:
        """See `RemoteExecutor`: as they were when each replica's last request ended."""
        oldest = time.monotonic() - _KEPT_S
        with self.lock:
            self._stats = {name: one for name, one in self._stats.items() if one[0] >= oldest}
            return {name: stats for name, (_, stats) in self._stats.items()}

    def stats(self) -> dict[str, Any]:
        """See `RemoteExecutor`."""
        found = list(self.replica_stats().values()) or [self.facts.stats]
        return {**total_stats(found), "uptime_s": time.monotonic() - self._started_at}

    def replica_states(self) -> list[dict[str, Any]]:
        """See `RemoteExecutor`: of the replicas that run requests, or have lately."""
        with self.lock:
            num_open = {name: 0 for name in self.replica_stats()}
            for run_id, name in self._places.items():
                run = self.ledger.run(run_id)
                num_open[name] = num_open.get(name, 0) + (len(open_samples(run)) if run else 0)
        return [
            {"replica": name, "state": "up", "num_outputs": count, "num_restarts": 0}
            for name, count in num_open.items()
        ]

    def close(self) -> None:
        """See `RemoteExecutor`. Ends the requests; Ray ends the replicas."""
        with self.lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
