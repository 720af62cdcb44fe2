# SPDX-License-Identifier: Apache-2.0
"""The process of a replica: an engine, and a connection to the server's process.

The connection carries tuples, whose first element says what they are. From the server:
("start", arguments of `LLM`, settings), once; ("add", run, prompt, sampling), ("cancel", run,
sample), ("stats", number) and ("end",). To the server: ("ready", `Facts`, process id) or ("failed",
error); ("events", list), ("refused", run, message, whether the request is not allowed), ("stats",
number, dict) and ("draining",).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

from paceline import _core, engine_log
from paceline.background_log import start_background_log
from paceline.grammar import Grammars
from paceline.llm import LLM
from paceline.replicas.messages import EngineEvent, Facts
from paceline.request import engine_request
from paceline.running_llm import internals

_POLL_TIMEOUT_MS: Final = 50
_NUM_COMPILERS: Final = 2
#: How often a replica says that it lives.
HEARTBEAT_S: Final = 1.0
#: The number of statistics that were not asked for.
HEARTBEAT: Final = 0


def main(descriptor: int) -> NoReturn:
    """Runs a replica until the server's process ends it, or ends itself.

    Args:
        descriptor: The file descriptor of the connection.
    """
    replica = _Replica(Connection(descriptor))
    signal.signal(signal.SIGTERM, lambda *_: replica.drain())
    code = replica.run()
    logging.shutdown()  # its last lines say why it ends
    os._exit(code)


class _Replica:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        # Guards the dicts. No event of a request is read before its run is known.
        self._adding = threading.Lock()
        self._runs: dict[int, int] = {}  # by id in the engine
        self._ids: dict[int, int] = {}  # ids in the engine, by run
        self._num_open: dict[int, int] = {}  # samples that have not ended, by id in the engine
        # Of runs whose grammar is being compiled: the samples that were cancelled meanwhile.
        self._cancelled: dict[int, list[int]] = {}
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammars")
        self._wants_drain = threading.Event()
        self._ends = threading.Event()
        self._executor: _core.Executor
        self._grammars: Grammars

    def drain(self) -> None:
        """Asks the server for no further requests; called in a signal handler."""
        self._wants_drain.set()

    def run(self) -> int:
        """Returns the exit code."""
        _, arguments, settings = self._connection.recv()
        start_background_log(settings["log_level"], settings["log_format"])
        # From now on, so that the process ends with the server even while it loads.
        threading.Thread(target=self._read, daemon=True).start()
        try:
            llm = LLM(**arguments)
        except BaseException as error:
            self._send(("failed", _picklable(error)))
            return 1
        self._executor = internals(llm).dispatcher.executor
        self._grammars = internals(llm).requests.grammars
        self._grammars.read_tokenizer(compiles=False)
        self._send(("ready", Facts.of(llm, self._executor), os.getpid()))
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while not self._ends.is_set():
                events = self._executor.poll(timeout_ms=_POLL_TIMEOUT_MS)
                if events:
                    self._send(("events", self._copied(events)))
                engine_log.forward_in_background()
        except Exception as error:  # the engine has failed
            engine_log.forward()
            logging.getLogger("paceline").error("the engine has failed: %s", error)
            return 1
        llm.close()
        return 0

    def _copied(self, events: list[_core.RequestEvent]) -> list[EngineEvent]:
        copies = []
        with self._adding:
            for event in events:
                run = self._runs[event.id]
                copies.append(EngineEvent.of(event, run))
                if event.finish_reason is not None:
                    self._num_open[event.id] -= 1
                    if self._num_open[event.id] == 0:
                        del self._num_open[event.id], self._runs[event.id], self._ids[run]
        return copies

    def _read(self) -> None:
        """Does what the server says."""
        try:
            while True:
                kind, *rest = self._connection.recv()
                if kind == "add":
                    self._take(*rest)
                elif kind == "cancel":
                    self._cancel(*rest)
                elif kind == "stats":
                    self._send_stats(*rest)
                elif kind == "end":
                    self._ends.set()
        except (EOFError, OSError):
            os._exit(1)  # the server has ended

    def _take(self, run: int, prompt: list[int], sampling: dict[str, Any]) -> None:
        """Adds a request; one with a grammar in a thread of its own, since it may be compiled."""
        if "grammar" not in sampling:
            self._add(run, prompt, sampling)
            return
        with self._adding:
            self._cancelled[run] = []
        self._compilers.submit(self._add, run, prompt, sampling)

    def _add(self, run: int, prompt: list[int], sampling: dict[str, Any]) -> None:
        try:
            if "grammar" in sampling:
                self._grammars.ensure(sampling["grammar"])
            request = engine_request(prompt, sampling, self._grammars)
            ids: list[int] = []
            with self._adding:
                if not self._executor.add_requests([request], ids):
                    raise RuntimeError("the queue of waiting requests is full; try again later")
                self._runs[ids[0]], self._ids[run] = run, ids[0]
                self._num_open[ids[0]] = request.num_samples
                cancelled = self._cancelled.pop(run, [])
            for sample in cancelled:
                self._cancel(run, sample)
        except Exception as error:
            with self._adding:
                self._cancelled.pop(run, None)
            is_refused = isinstance(error, ValueError | NotImplementedError)
            self._send(("refused", run, " ".join(str(error).split()), is_refused))

    def _cancel(self, run: int, sample: int) -> None:
        with self._adding:
            request_id = self._ids.get(run)
            if run in self._cancelled:
                self._cancelled[run].append(sample)
        if request_id is not None:
            with contextlib.suppress(Exception):  # a failed engine ends the process
                self._executor.cancel(request_id, sample)

    def _beat(self) -> None:
        has_drained = False
        while True:
            self._send_stats(HEARTBEAT)
            if self._wants_drain.wait(HEARTBEAT_S) and not has_drained:
                has_drained = True
                self._send(("draining",))
            elif has_drained:
                self._ends.wait(HEARTBEAT_S)

    def _send_stats(self, number: int) -> None:
        with contextlib.suppress(RuntimeError):  # the engine has failed or is closed
            self._send(("stats", number, self._executor.stats()))

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            os._exit(1)  # the server has ended


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
