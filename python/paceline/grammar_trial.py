# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars on trial in another process, which can be ended; see `grammar_worker`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from paceline.child_process import start_python
from paceline.grammar_worker import LENGTH, MAX_CPU_S, MAX_MEMORY_BYTES, STARTED
from paceline.structured_outputs import StructuredOutputsParams

#: The longest time that anyone waits for an answer, on a machine that gives the trial little CPU.
MAX_WAIT_S: Final = 30.0
#: How the error of a grammar begins that takes too much to compile, or to follow.
TOO_COSTLY: Final = "structured_outputs is a grammar that"

_CHUNK: Final = 1 << 16
_MAX_STARTS: Final = 3


class Cancelled(RuntimeError):
    """Nobody waits for the trial any more, or the LLM is closed."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed, and its grammar was not compiled")


class CostlyGrammarError(ValueError):
    """A grammar takes more to compile than is allowed."""


class Trial:
    """A grammar that is being tried. Any thread may cancel it."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self.is_cancelled = False

    def attach(self, connection: socket.socket) -> None:
        """Takes the connection whose end ends the trial.

        Raises:
            Cancelled: It was cancelled before.
        """
        with self._lock:
            if self.is_cancelled:
                raise Cancelled
            self._connection = connection

    def detach(self) -> None:
        """Forgets the connection."""
        with self._lock:
            self._connection = None

    def cancel(self) -> None:
        """Ends the trial at once."""
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)


class TrialProcess:
    """The process for trials of one tokenizer. Thread-safe; trials run side by side.

    It starts with the first use, and again if the system has ended it.
    """

    def __init__(self, setup: Callable[[], dict[str, Any]]) -> None:
        """Starts nothing.

        Args:
            setup: Returns the arguments of `grammar_worker.make_tokenizer`.
        """
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._open: set[Trial] = set()
        self._is_closed = False

    def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
            Cancelled: It is closed.
        """
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._is_closed:
            raise Cancelled
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            json.dump(self._setup(), file)
            file.flush()
            file.seek(0)
            try:
                self._process = start_python(
                    "paceline.grammar_worker",
                    theirs.fileno(),
                    file.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # Rust code writes there when its memory ends
                    # A thread's own heap would reserve memory, which counts.
                    env=os.environ | {"MALLOC_ARENA_MAX": "1"},
                )
            except BaseException:
                ours.close()
                raise
        self._control = ours

    def compile(self, params: StructuredOutputsParams, trial: Trial) -> tuple[str, int]:
        """Compiles a grammar in a child of the process.

        Args:
            params: What an output must look like.
            trial: Can be cancelled by another thread.

        Returns:
            The grammar as llguidance writes it, and the bytes that it takes when it is compiled.

        Raises:
            ValueError: It is no grammar, or not supported.
            CostlyGrammarError: It takes more CPU time or memory than is allowed.
            Cancelled: The trial was cancelled, or the process is closed.
            RuntimeError: The process does not run, or had too little CPU for `MAX_WAIT_S`.
        """
        for _ in range(_MAX_STARTS):
            answer = self._ask(params, trial)
            if answer[:1] == STARTED:
                break
            with self._lock:
                self._end()  # unless the system has ended it since its last use
        else:
            raise RuntimeError(
                "the process that compiles grammars does not run; see whether the system ends it "
                f"for its memory, and whether {sys.executable} can be started"
            )
        if len(answer) == 1:
            raise CostlyGrammarError(
                f"{TOO_COSTLY} takes more than {MAX_CPU_S} s of CPU time or "
                f"{MAX_MEMORY_BYTES >> 20} MiB to compile; allowed: a smaller one, with fewer "
                "alternatives and repetitions, and rounder numbers in multipleOf"
            )
        found = json.loads(answer[1:])
        if "error" in found:
            raise ValueError(found["error"])
        return found["grammar"], found["num_bytes"]

    def _ask(self, params: StructuredOutputsParams, trial: Trial) -> bytes:
        """Returns all that a child has said."""
        deadline = time.monotonic() + MAX_WAIT_S
        request = json.dumps(dataclasses.asdict(params)).encode()
        answer = b""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                trial.attach(ours)
                with theirs, self._lock:
                    self._start()
                    self._open.add(trial)
                    assert self._control is not None
                    with contextlib.suppress(OSError):  # it has just ended
                        socket.send_fds(self._control, [b" "], [theirs.fileno()])
                with contextlib.suppress(ConnectionError):
                    ours.settimeout(MAX_WAIT_S)
                    ours.sendall(LENGTH.pack(len(request)) + request)
                    while part := ours.recv(_CHUNK):
                        answer += part
                        ours.settimeout(max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise RuntimeError(
                    f"structured_outputs was not compiled within {MAX_WAIT_S:g} s, because the "
                    "processors are busy; try again later"
                ) from None
            finally:
                trial.detach()
                self._open.discard(trial)
        if trial.is_cancelled:
            raise Cancelled
        return answer

    def close(self) -> None:
        """Ends the process and all trials. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            trials = list(self._open)
            self._end()
        for trial in trials:
            trial.cancel()

    def abandon(self) -> None:
        """Forgets the process in a forked child of the one that started it."""
        self._lock = threading.Lock()
        self._is_closed = True
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # not a child of this process
        self._control = self._process = None

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
