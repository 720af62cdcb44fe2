# SPDX-License-Identifier: Apache-2.0
"""`RequestStream`: the chunks that running requests emit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.dispatcher import SessionClosed
from paceline.outputs import StreamChunk
from paceline.request import Request, RequestGroup

if TYPE_CHECKING:
    from paceline.dispatcher import Dispatcher


class RequestStream(Iterator[StreamChunk]):
    """An iterator over the chunks that running requests emit. `LLM.stream` returns it.

    Closing the stream, leaving its `with` block or deleting it cancels the requests that still run.
    Several threads may consume one stream, and any thread may close it; each chunk goes to one
    consumer.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        requests: Sequence[Request],
        *,
        owner: object,
    ) -> None:
        """Queues the requests; all or none.

        Args:
            dispatcher: The dispatcher of the engine.
            requests: The samples to run; those of one prompt are adjacent and in order.
            owner: An object that is kept alive while requests run.
        """
        self._is_closed = True  # for `__del__`, until there is a session
        self._session = dispatcher.open()
        self._is_closed = False
        self._failure: Exception | None = None
        self._num_open = 0
        self._consuming = threading.Lock()
        self._owner: object | None = owner
        self._groups: dict[int, RequestGroup] = {}  # by id
        try:
            queued_at = time.monotonic()
            by_prompt = [request for request in requests if request.sample == 0]
            ids = self._session.add_requests(
                [request.for_engine(dispatcher.make_request) for request in by_prompt]
            )
            for request in requests:
                if request.sample == 0:
                    request_id = ids[len(self._groups)]
                    samples: list[Request] = []
                    self._groups[request_id] = RequestGroup(samples)
                request.request_id, request.queued_at = str(request_id), queued_at
                samples.append(request)
                self._num_open += 1
        except BaseException:
            self.close()
            raise

    def __next__(self) -> StreamChunk:
        """Waits for the next event of any of the requests.

        Raises:
            StopIteration: All requests have ended, or a thread has closed the stream.
            RuntimeError: The LLM was closed, or this process is a fork of the one that built it.
            Exception: The engine has failed. Every consumer gets the error, at every call.
            KeyboardInterrupt: Ctrl-C; the requests are cancelled.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise StopIteration
        self._session.check_usable()
        try:
            with self._consuming:
                has_ended = self._is_closed or self._num_open == 0
                chunk = None if has_ended else self._next_chunk()
        except SessionClosed:
            chunk = None
        except BaseException as error:
            if isinstance(error, Exception):
                self._failure = error  # before `close` wakes the other consumers
            self.close()
            raise
        if chunk is None:
            self.close()
            raise self._failure or StopIteration
        return chunk

    def _next_chunk(self) -> StreamChunk:
        """Takes the next event; the caller holds `_consuming`."""
        while True:
            event = self._session.get()
            group = self._groups[event.id]
            chunk = group.take(event)
            if chunk is not None:
                break
        if chunk.finished:
            self._num_open -= 1
        elif group.is_to_cancel(event.sample):
            # The last event, which has the counters, then follows at once.
            self._session.cancel(event.id, event.sample)
        return chunk

    def close(self) -> None:
        """Cancels the requests that still run and ends the iteration in all threads. Closing twice
        is fine."""
        self._is_closed = True
        self._session.close()
        self._owner = None

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close()
