# SPDX-License-Identifier: Apache-2.0
"""Forwards the log lines of engines to the logger "paceline".

Engines leave their lines in native memory and never wait for Python. The lines of a running engine
are logged in a thread of their own, for which no other thread waits: a handler may hold its lock
while it closes an engine.
"""

from __future__ import annotations

import _thread
import contextlib
import logging

from paceline import _core

_logger = logging.getLogger("paceline")


def start() -> None:
    """Has lines kept from now on. A second call changes nothing."""
    _core.collect_log_lines()


def stop() -> None:
    """Has lines dropped, when the interpreter exits."""
    _core.collect_log_lines(is_on=False)


def forward() -> None:
    """Logs the lines so far in the calling thread, which must not hold locks."""
    _log(_core.take_log_lines())


def forward_in_background() -> None:
    """Logs the lines so far in a thread of their own, if there are any."""
    lines = _core.take_log_lines()
    if lines:
        with contextlib.suppress(RuntimeError):  # no thread, or the interpreter exits
            _thread.start_new_thread(_log, (lines,))


def _log(lines: list[tuple[int, str]]) -> None:
    for level, line in lines:
        _logger.log(level, "%s", line)
