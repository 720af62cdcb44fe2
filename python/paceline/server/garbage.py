# SPDX-License-Identifier: Apache-2.0
"""Keeps Python's garbage collector from holding up the event loop.

A full collection visits every object of the process that may be in a cycle, with Python's lock.
Those of the imported libraries alone take longer than an event loop may stand still.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_num_blocks = 0


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keeps the collector from running, which the lists of a large body would start many times."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


@contextlib.contextmanager
def without_old_objects() -> Iterator[None]:
    """Lets the collector pass over all objects that there are now. It visits them again when the
    last such block of the process has ended."""
    global _num_blocks
    with _lock:
        gc.collect()
        gc.freeze()
        _num_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if not _num_blocks:
                gc.unfreeze()
