# SPDX-License-Identifier: Apache-2.0
"""`BackgroundHandler`: a log on standard error that holds up nobody, whoever reads it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from typing import Final

# Longest wait at the exit for lines that are not yet written.
_LAST_LINES_S: Final = 1.0
_MAX_LINES: Final = 10_000
_STANDARD_ERROR: Final = 2


class BackgroundHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own.

    A pipe whose reader has stopped is full after 64 KiB, and then each write waits. Here lines wait
    instead, up to a number; those beyond it are lost, and a line says how many.
    """

    def __init__(self, descriptor: int = _STANDARD_ERROR, *, max_lines: int = _MAX_LINES) -> None:
        """Starts the thread.

        Args:
            descriptor: Where lines go. It stays open.
            max_lines: How many lines may wait.
        """
        super().__init__()
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._num_unwritten = 0
        self._changed = threading.Condition()
        # A daemon, as its write may never return. It writes past `sys.stderr`, whose lock it would
        # keep then.
        threading.Thread(target=self._write_all, name="paceline-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leaves a record's line to the thread."""
        try:
            self.tell(self.format(record))
        except Exception:  # as every handler: a log must not fail its caller
            self.handleError(record)

    def tell(self, line: str) -> None:
        """Leaves a line to the thread."""
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self._num_lost += 1
                return
            self._lines.append(line)
            self._num_unwritten += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all lines are written, but not for long."""
        deadline = time.monotonic() + _LAST_LINES_S
        with self._changed:
            while self._num_unwritten:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                lines, self._lines = self._lines, deque()
                lost, self._num_lost = self._num_lost, 0
            if lost:
                lines.append(
                    f"{lost} lines of the log are missing here: they were not read in time"
                )
            for line in lines:
                self._write(line.encode("utf-8", "backslashreplace") + b"\n")
            with self._changed:
                self._num_unwritten -= len(lines) - (1 if lost else 0)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody can read it any more
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another process has made it so
                    select.select([], [self._descriptor], [])


def start_background_log(level: str, line_format: str) -> BackgroundHandler:
    """Has all loggers of this process write to standard error without waiting for its reader.

    Args:
        level: The least level that is logged, such as "INFO".
        line_format: The form of lines, as `logging.Formatter` takes it.

    Returns:
        The handler, for lines that are no records.
    """
    handler = BackgroundHandler()
    handler.setFormatter(logging.Formatter(line_format))
    logging.basicConfig(level=level, handlers=[handler])
    return handler
