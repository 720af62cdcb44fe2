# SPDX-License-Identifier: Apache-2.0
"""Has chat templates rendered by another process, which can be ended; see `chat_sandbox`."""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

from paceline import lifetime
from paceline.chat_messages import PartsAsText
from paceline.child_process import start_python

#: The CPU time of a rendering.
MAX_CPU_S: Final = 5.0
#: The memory of a rendering.
MAX_MEMORY_BYTES: Final = 512 << 20
#: The length of a prompt.
MAX_CHARS: Final = 8 << 20

#: How the messages of the process begin.
STARTED: Final = b"+"
RENDERED: Final = b"="
FAILED: Final = b"!"
PARTS: Final = b"P"

_MAX_STARTS: Final = 3
# On a machine that gives the process little CPU.
_MAX_WAIT_S: Final = 60.0


class TemplateError(Exception):
    """A template fails; the message continues a sentence that begins with its name."""


def render(text: str, variables: Mapping[str, Any], max_cpu_s: float | None = None) -> str:
    """Renders a template. Several threads may call it; one renders at a time.

    Args:
        text: The template.
        variables: What the template sees: plain data only.
        max_cpu_s: The limit of its CPU time; None = MAX_CPU_S.

    Returns:
        The prompt.

    Raises:
        TemplateError: The template is not valid, refuses the messages, fails or exceeds a limit.
        PartsAsText: It writes content in parts as a string.
        RuntimeError: The process does not run, or had too little CPU.
    """
    try:
        request = _pickled((text, dict(variables), max_cpu_s or MAX_CPU_S, MAX_MEMORY_BYTES))
    except RecursionError:
        raise TemplateError("exceeds a limit: its variables are nested too deeply") from None
    kind, answer = _renderer.ask(request)
    if kind == PARTS:
        raise PartsAsText
    result = answer.decode(errors="surrogatepass")
    if kind == FAILED:
        raise TemplateError(result)
    return result


class _Pickler(pickle.Pickler):
    """Lets other threads run while it pickles a long conversation."""

    def persistent_id(self, _: object) -> None:
        """Is called for each object, and Python's lock can change hands in every call."""


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Renderer:
    """The process, which starts with the first template and again after one that exceeds a
    limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Returns the kind of the answer, and the answer."""
        with self._lock:
            for _ in range(_MAX_STARTS):
                try:
                    has_started, answer = self._exchange(request)
                except BaseException:
                    self._end()  # an answer may still come, which is for no later request
                    raise
                if answer:
                    return answer[:1], answer[1:]
                self._end()
                if has_started:
                    message = (
                        f"exceeds a limit: it takes more than {MAX_CPU_S:g} s of CPU time or "
                        f"{MAX_MEMORY_BYTES >> 20} MiB"
                    )
                    return FAILED, message.encode()
        raise RuntimeError(
            "the process that renders chat templates does not run; see whether the system ends it "
            f"for its memory, and whether {sys.executable} can be started"
        )

    def _exchange(self, request: bytes) -> tuple[bool, bytes]:
        """Returns whether the process has read the request; and its answer, empty if it ended."""
        has_started = False
        with contextlib.suppress(EOFError, ConnectionError):
            connection = self._start()
            connection.send_bytes(request)
            has_started = _receive(connection) == STARTED
            return True, _receive(connection)
        return has_started, b""

    def _start(self) -> Connection:
        if self._process is None:
            self._connection, theirs = Pipe()
            with theirs:
                self._process = start_python(
                    "paceline.chat_sandbox", theirs.fileno(), stdout=subprocess.DEVNULL
                )
            lifetime.register(self)
        return self._connection

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Ends the process, and what it renders; see `lifetime`."""
        process = self._process
        if process is not None:
            process.kill()  # so that no other thread keeps the lock for long
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Forgets the process in a forked child of the one that started it."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._connection.close()
            self._process.returncode = 0  # not a child of this process
            self._process = None


def _receive(connection: Connection) -> bytes:
    if not connection.poll(_MAX_WAIT_S):
        raise RuntimeError(
            f"a chat template was not rendered within {_MAX_WAIT_S:g} s, because the processors "
            "are busy; try again later"
        )
    return connection.recv_bytes(1 + 4 * MAX_CHARS)


_renderer: Final = _Renderer()
