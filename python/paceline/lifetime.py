# SPDX-License-Identifier: Apache-2.0
"""Ends engines with their process: at the interpreter's exit, and in a child made by `fork`.

A thread that the exit of the interpreter overtakes inside native code aborts the process, and a
forked child has the engine's memory but not its threads, so that waiting for them never ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Protocol


class Engine(Protocol):
    """An object that owns threads and native memory."""

    def close(self) -> None:
        """Ends the threads and frees the memory. Called at exit; closing twice is fine."""

    def abandon(self) -> None:
        """Makes the engine unusable in a forked child, without touching its threads or memory."""


# Guards the variables below. A forked child replaces it, since another thread may have held it.
_changed = threading.Condition()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_starting: Counter[int] = Counter()  # `delayed_exit` blocks by thread
_is_exiting = False


def register(engine: Engine) -> None:
    """Has an engine closed at exit and abandoned in forked children, unless it dies before."""
    with _changed:
        _engines.add(engine)


@contextlib.contextmanager
def delayed_exit() -> Iterator[None]:
    """Delays the interpreter's exit until the block, which starts an engine, has ended.

    Raises:
        RuntimeError: The interpreter is exiting already.
    """
    thread = threading.get_ident()
    with _changed:
        check_not_exiting()
        _starting[thread] += 1
    # A Ctrl-C here leaves a count for the main thread, which is the one that does not wait at exit.
    try:
        yield
    finally:
        with _changed:
            _starting[thread] -= 1
            _changed.notify_all()


def check_not_exiting() -> None:
    """Raises RuntimeError once the interpreter has begun to exit."""
    if _is_exiting:
        raise RuntimeError("an LLM cannot be started while the Python interpreter exits")


def end_daemon_thread() -> None:
    """Ends the calling thread without a traceback if it is a daemon thread of an exiting process.

    Called where an engine that the exit has closed would raise an error that no caller receives.
    """
    if _is_exiting and threading.current_thread().daemon:
        raise SystemExit  # threads end silently with it


def _close_all() -> None:
    global _is_exiting
    thread = threading.get_ident()
    with _changed:
        _is_exiting = True
        while any(count and other != thread for other, count in _starting.items()):
            _changed.wait()
        engines = list(_engines)
    for engine in engines:
        engine.close()
    if engines:
        from paceline import engine_log

        engine_log.stop()


def _abandon_all() -> None:
    global _changed, _engines
    thread = threading.get_ident()
    _changed = threading.Condition()
    for other in [other for other in _starting if other != thread]:
        del _starting[other]
    engines, _engines = list(_engines), weakref.WeakSet()
    for engine in engines:
        engine.abandon()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
