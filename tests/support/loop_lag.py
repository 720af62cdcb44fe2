# SPDX-License-Identifier: Apache-2.0
"""How late an event loop wakes a task while something else runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

_SLEEP_S = 0.002


class LoopLag:
    """Sleeps in an event loop, again and again, and notes how late each sleep ends.

    Attributes:
        largest: The largest delay in seconds, of the last `measure`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.largest = 0.0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measures until the block ends."""
        self.largest = 0.0
        watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            before = self._loop.time()
            try:
                await asyncio.sleep(_SLEEP_S)
            finally:  # a stall may last until the end
                self.largest = max(self.largest, self._loop.time() - before - _SLEEP_S)
