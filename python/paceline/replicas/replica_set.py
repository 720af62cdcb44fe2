# SPDX-License-Identifier: Apache-2.0
"""`ReplicaSet`: starts replicas on this machine, gives them requests, and starts them again."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any, Final

from paceline import lifetime
from paceline.child_process import start_python
from paceline.replicas.ledger import Run, is_untouched, open_samples
from paceline.replicas.messages import EngineEvent, Facts, unsendable
from paceline.replicas.prefixes import PrefixRouter, block_keys
from paceline.replicas.remote import RemoteExecutor, total_stats
from paceline.replicas.worker import HEARTBEAT

_logger = logging.getLogger("paceline")

#: A replica that has said nothing for so long is killed. It says that it lives every second.
HANG_S: Final = 30.0
# Longest wait for fresh statistics; then the last ones count.
_STATS_S: Final = 0.5
# A replica that is told to end is killed after this time.
_END_S: Final = 10.0
# Pauses before a replica that does not start is started again.
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class _Replica:
    """One replica, as the server's process sees it.

    Attributes:
        index: Its number, from 0.
        environment: Environment variables that it has beside the server's.
        state: "starting", "up", "draining", "down" (until it starts again) or "closed".
        error: Why it did not start the last time; "" if it did.
        num_restarts: How often it was started again.
        runs: What it runs, by the run's id.
        num_open: The samples that have not ended.
    """

    def __init__(self, index: int, environment: Mapping[str, str]) -> None:
        self.index = index
        self.environment = environment
        self.state = "starting"
        self.error = ""
        self.num_restarts = 0
        self.runs: set[int] = set()
        self.num_open = 0
        self.stats: dict[str, Any] | None = None
        self.stats_number = HEARTBEAT
        self.outbox: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self.process: subprocess.Popen[bytes] | None = None
        self.failure: BaseException | None = None
        self.thread: threading.Thread


class ReplicaSet(RemoteExecutor):
    """Several engines on this machine, each in a process of its own.

    A replica that ends is started again, and its requests go on elsewhere meanwhile. SIGTERM to its
    process drains it: it is started again when its requests have ended.
    """

    def __init__(
        self,
        arguments: Sequence[Mapping[str, Any]],
        environments: Sequence[Mapping[str, str]],
        *,
        log_level: str = "INFO",
        hang_s: float = HANG_S,
    ) -> None:
        """Starts the replicas and waits until all of them have loaded their models.

        Args:
            arguments: For each replica those of `LLM`.
            environments: For each replica its own environment variables.
            log_level: That of the replicas' loggers.
            hang_s: See HANG_S.

        Raises:
            ValueError: An argument cannot be sent to another process.
            Exception: What `LLM` raises in a replica.
        """
        for one in arguments:
            for name, error in unsendable(one):
                raise ValueError(
                    f"{name} cannot be sent to the process of a replica: {error}; allowed with "
                    "replicas: plain values"
                )
        super().__init__()
        self._arguments = arguments
        self._log_level = log_level
        self._hang_s = hang_s
        self._is_closed = False
        self._waiting: list[int] = []  # runs that no replica has
        self._number = HEARTBEAT
        self._router: PrefixRouter | None = None
        self._started_at = time.monotonic()
        self._replicas = [_Replica(index, given) for index, given in enumerate(environments)]
        lifetime.register(self)
        for replica in self._replicas:
            replica.thread = threading.Thread(
                target=self._supervise, args=(replica,), name=f"paceline-replica-{replica.index}"
            )
            replica.thread.daemon = True
            replica.thread.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        with self.lock:
            while any(replica.state != "up" for replica in self._replicas):
                for replica in self._replicas:
                    if replica.failure is not None:
                        raise replica.failure
                self.changed.wait(1.0)

    # ---- requests ------------------------------------------------------------------------------

    def check_running(self) -> None:
        """See `RemoteExecutor`. A replica that starts again counts, unless it has failed to."""
        if self._is_closed:
            raise RuntimeError("the replicas are closed")
        if not any(replica.state == "up" or not replica.error for replica in self._replicas):
            raise RuntimeError(f"no replica runs: {self._replicas[0].error}")

    def start_run(self, run: Run) -> None:
        """See `RemoteExecutor`."""
        up = {replica.index: replica for replica in self._replicas if replica.state == "up"}
        if not up:
            self._waiting.append(run.id)
            return
        assert self._router is not None
        keys = self._keys(run, run.prompt)
        chosen = self._router.choose(keys, {index: one.num_open for index, one in up.items()})
        self._give(self._replicas[int(str(chosen))], run)

    def _keys(self, run: Run, tokens: Sequence[int]) -> list[int]:
        assert self._router is not None
        return block_keys(tokens, self._router.block_size, run.sampling.get("cache_salt", ""))

    def _give(self, replica: _Replica, run: Run) -> None:
        replica.runs.add(run.id)
        replica.num_open += len(open_samples(run))
        replica.outbox.put(("add", run.id, run.prompt, run.sampling))
        for index, sample in enumerate(run.samples):
            if sample.run is not run:  # cancelled while the run waited
                replica.outbox.put(("cancel", run.id, index))

    def cancel_run(self, run: Run, sample: int) -> None:
        """See `RemoteExecutor`."""
        for replica in self._replicas:
            if run.id in replica.runs:
                replica.outbox.put(("cancel", run.id, sample))
                return
        if run.id in self._waiting:
            self.deliver(self.ledger.end_cancelled(run))

    def _relieve(self, replica: _Replica) -> None:
        """Gives a replica that has started its share of the runs that wait elsewhere."""
        assert self._router is not None
        up = [one for one in self._replicas if one.state == "up"]
        share = sum(one.num_open for one in up) / len(up)
        moved: list[Run] = []
        for other in up:
            for run_id in sorted(other.runs, reverse=True):  # the last of the queue first
                if other.num_open <= share or other is replica:
                    break
                run = self.ledger.run(run_id)
                if run is None or not is_untouched(run):
                    continue
                # Late events of the other replica are dropped, since it no longer has the run.
                for index in range(len(run.samples)):
                    other.outbox.put(("cancel", run.id, index))
                other.runs.discard(run.id)
                other.num_open -= len(run.samples)
                moved.append(run)
        for run in sorted(moved, key=lambda run: run.id):
            self._give(replica, run)
            self._router.note_chosen(replica.index, self._keys(run, run.prompt))

    def _take(self, replica: _Replica, events: Sequence[EngineEvent]) -> None:
        """Delivers what a replica has sent; the caller holds the lock."""
        assert self._router is not None
        taken: list[EngineEvent] = []
        for event in events:
            run = self.ledger.run(event.id)
            if run is None or run.id not in replica.runs:
                continue
            sample = run.samples[event.sample]
            if self.ledger.take(event) is None:
                continue
            taken.append(event)
            if event.finish_reason is not None:
                replica.num_open -= 1
                # The next prompt of a conversation begins with the output.
                tokens = run.request.prompt + sample.tokens
                self._router.note(replica.index, self._keys(run, tokens))
                if self.ledger.run(run.id) is None:
                    replica.runs.discard(run.id)
        self.deliver(taken)
        self._end_if_drained(replica)

    def _end_if_drained(self, replica: _Replica) -> None:
        if replica.state == "draining" and replica.num_open == 0:
            replica.outbox.put(("end",))

    # ---- the thread of a replica ---------------------------------------------------------------

    def _supervise(self, replica: _Replica) -> None:
        """Starts a replica again whenever it has ended, until all are closed."""
        pause_s = 0.0
        while True:
            was_up = self._run_once(replica)
            with self.lock:
                if replica.failure is not None and self._router is None:
                    return  # the first start, whose error the constructor raises
                if not self._is_closed:
                    pause_s = (
                        0.0 if was_up else min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
                    )
                    self.changed.wait_for(lambda: self._is_closed, pause_s)
                if self._is_closed:
                    replica.state = "closed"
                    return
                replica.state = "starting"
                replica.num_restarts += 1

    def _run_once(self, replica: _Replica) -> bool:
        """Starts a replica and returns when it has ended; whether it was up."""
        replica.failure = None
        replica.outbox = SimpleQueue()
        was_up = False
        try:
            connection, process = self._spawn(replica)
        except OSError as error:
            self._lose(replica, error)
            return False
        writer = threading.Thread(target=_write, args=(connection, replica.outbox), daemon=True)
        try:
            with self.lock:
                replica.process = process
                if self._is_closed:
                    return False
            arguments = self._arguments[replica.index]
            if self._router is not None:  # as the others, whatever memory is free now
                arguments = {**arguments, "max_model_len": self.facts.max_model_len}
            replica.outbox.put(("start", arguments, self._settings(replica)))
            writer.start()
            was_up = self._read(replica, connection)
        finally:
            replica.outbox.put(None)
            process.kill()  # it has ended, or hangs
            code = process.wait()
            connection.close()
            if not self._is_closed:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                _logger.log(
                    logging.INFO if replica.state == "draining" else logging.ERROR,
                    "replica %d (process %d) has ended with %s; %d outputs go on elsewhere",
                    replica.index,
                    process.pid,
                    how,
                    replica.num_open,
                )
                ended = RuntimeError(f"its process ended with {how}")
                self._lose(replica, replica.failure or (None if was_up else ended))
        return was_up

    def _spawn(self, replica: _Replica) -> tuple[Connection, subprocess.Popen[bytes]]:
        ours, theirs = Pipe()
        with theirs:
            process = start_python(
                "paceline.replicas.worker",
                theirs.fileno(),
                env=os.environ | dict(replica.environment),
            )
        return ours, process

    def _settings(self, replica: _Replica) -> dict[str, Any]:
        return {
            "log_level": self._log_level,
            "log_format": f"%(asctime)s %(levelname)s %(name)s: replica {replica.index}: "
            "%(message)s",
        }

    def _read(self, replica: _Replica, connection: Connection) -> bool:
        """Does what a replica says until it ends or hangs; returns whether it was up."""
        was_up = False
        try:
            while True:
                if was_up and not connection.poll(self._hang_s):
                    _logger.error(
                        "replica %d has said nothing for %g s and is killed",
                        replica.index,
                        self._hang_s,
                    )
                    break
                kind, *rest = connection.recv()
                with self.lock:
                    if kind == "events":
                        self._take(replica, rest[0])
                    elif kind == "stats":
                        number, replica.stats = rest
                        replica.stats_number = max(replica.stats_number, number)
                        self.changed.notify_all()
                    elif kind == "refused":
                        self._refuse(replica, *rest)
                    elif kind == "ready":
                        was_up = True
                        self._note_ready(replica, *rest)
                    elif kind == "failed":
                        replica.failure = rest[0]
                    elif kind == "draining":
                        _logger.info("replica %d drains and then starts again", replica.index)
                        replica.state = "draining"
                        self._end_if_drained(replica)
        except (EOFError, OSError):
            pass  # it has ended
        except Exception:  # a fault of ours, which must not end this thread
            _logger.exception("replica %d is killed", replica.index)
        return was_up

    def _note_ready(self, replica: _Replica, facts: Facts, process_id: int) -> None:
        if self._router is None:
            self.facts = facts
            self.ledger.num_speculative_tokens = facts.options["num_speculative_tokens"]
            self._router = PrefixRouter(
                block_size=facts.options["block_size"],
                max_blocks=_most_blocks(facts.memory_report),
                max_num_seqs=facts.options["max_num_seqs"],
            )
        if facts.max_model_len != self.facts.max_model_len:
            lengths = sorted((facts.max_model_len, self.facts.max_model_len))
            replica.failure = ValueError(
                f"the replicas' default of --max-model-len differs, {lengths[0]} and {lengths[1]}, "
                f"because it depends on free memory; give --max-model-len {lengths[0]}"
            )
            self.changed.notify_all()
            return
        replica.state, replica.error = "up", ""
        _logger.info("replica %d is up (process %d)", replica.index, process_id)
        waiting, self._waiting = self._waiting, []
        for run_id in waiting:
            run = self.ledger.run(run_id)
            if run is not None:
                self.start_run(run)
        self._relieve(replica)
        self.changed.notify_all()

    def _refuse(self, replica: _Replica, run_id: int, message: str, is_refused: bool) -> None:
        run = self.ledger.run(run_id)
        if run is not None and run_id in replica.runs:
            replica.runs.discard(run_id)
            events = self.ledger.refuse(run_id, message, is_refused=is_refused)
            replica.num_open -= len(events)
            self.deliver(events)
            self._end_if_drained(replica)

    def _lose(self, replica: _Replica, error: BaseException | None) -> None:
        """Has the requests of a replica that has ended go on."""
        with self.lock:
            replica.state = "down"
            replica.error = "" if error is None else " ".join(str(error).split())
            replica.failure = error
            replica.stats = None
            runs, replica.runs, replica.num_open = sorted(replica.runs), set(), 0
            if self._router is not None:
                self._router.forget(replica.index)
            self.replace_runs(runs)
            self._give_up_waiting()
            self.changed.notify_all()

    def _give_up_waiting(self) -> None:
        """Ends the requests that wait, if no replica will run them soon."""
        try:
            self.check_running()
        except RuntimeError as error:
            waiting, self._waiting = self._waiting, []
            for run_id in waiting:
                self.deliver(self.ledger.refuse(run_id, str(error)))

    # ---- reports -------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """See `RemoteExecutor`."""
        return len(self._replicas)

    def replica_stats(self) -> dict[str, dict[str, Any]]:
        """See `RemoteExecutor`."""
        with self.lock:
            self._number += 1
            number = self._number
            asked = [replica for replica in self._replicas if replica.state in ("up", "draining")]
            for replica in asked:
                replica.outbox.put(("stats", number))
            self.changed.wait_for(
                lambda: all(
                    replica.stats_number >= number or replica.state not in ("up", "draining")
                    for replica in asked
                ),
                _STATS_S,
            )
            return {
                str(replica.index): dict(replica.stats)
                for replica in asked
                if replica.stats is not None
            }

    def stats(self) -> dict[str, Any]:
        """See `RemoteExecutor`. Those of a replica that has ended are lost."""
        found = list(self.replica_stats().values())
        if not found:
            raise RuntimeError("no replica runs")
        return {**total_stats(found), "uptime_s": time.monotonic() - self._started_at}

    def replica_states(self) -> list[dict[str, Any]]:
        """See `RemoteExecutor`."""
        with self.lock:
            return [
                {
                    "replica": str(replica.index),
                    "state": replica.state,
                    "num_outputs": replica.num_open,
                    "num_restarts": replica.num_restarts,
                    **({"error": replica.error} if replica.error else {}),
                }
                for replica in self._replicas
            ]

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """See `RemoteExecutor`."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for replica in self._replicas:
                replica.outbox.put(("end",))
                if replica.state == "starting" and replica.process is not None:
                    replica.process.kill()  # loading cannot be interrupted otherwise
            self.changed.notify_all()
        deadline = time.monotonic() + _END_S
        for replica in self._replicas:
            replica.thread.join(max(0.0, deadline - time.monotonic()))
            if replica.thread.is_alive() and replica.process is not None:
                replica.process.kill()
                replica.thread.join()

    def abandon(self) -> None:
        """Makes the object unusable in a forked child; see `lifetime`."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._is_closed = True


def _most_blocks(memory_report: Mapping[str, Any]) -> int:
    """The most blocks of any KV group that the pool of a replica has room for."""
    num_slabs, slab_bytes = memory_report["kv_num_slabs"], memory_report["kv_slab_bytes"]
    return max(
        int(num_slabs * max(1, slab_bytes // group["block_bytes"]))
        for group in memory_report["groups"]
    )


def _write(connection: Connection, outbox: SimpleQueue[tuple[Any, ...] | None]) -> None:
    """Sends what is left for a replica, in a thread of its own: a pipe can be full."""
    with contextlib.suppress(OSError):
        while (message := outbox.get()) is not None:
            connection.send(message)
