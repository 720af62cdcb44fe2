# SPDX-License-Identifier: Apache-2.0
"""Hands the events of one executor to the callers that wait for them.

One daemon thread polls the executor, so that several threads can generate at the same time and a
Ctrl-C, which only ever interrupts the main thread, cannot lose an event of another caller. The
thread sleeps while no request is open.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from paceline import _core

# Longest sleep in the executor; bounds how long closing takes, not how soon events arrive.
_POLL_TIMEOUT_MS: Final = 50


class Session:
    """The requests of one call. Made by `Dispatcher.open`; used by one thread at a time."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Starts without requests."""
        self._dispatcher = dispatcher
        # An exception says that no further event will come.
        self._inbox: queue.SimpleQueue[_core.RequestEvent | BaseException] = queue.SimpleQueue()
        self._open_samples: dict[int, int] = {}  # by request: those whose last event is to come

    def add_requests(self, requests: Sequence[_core.Request]) -> list[int]:
        """Queues requests, all or none; they can begin in the same iteration.

        Args:
            requests: At least one.

        Returns:
            Their ids.

        Raises:
            ValueError: One that can never run; says which.
            RuntimeError: The executor is closed or has failed, or its queue is full.
        """
        dispatcher = self._dispatcher
        ids: list[int] = []
        # Under the lock, so that no event of a request is looked at before it is known.
        with dispatcher.lock:
            dispatcher.check_running()
            try:
                if not dispatcher.executor.add_requests(requests, ids):
                    raise RuntimeError("the queue of waiting requests is full; try again later")
            finally:
                # Also when a Ctrl-C has come meanwhile, which is raised when the call returns: who
                # closes the session then cancels what was queued.
                for request_id, request in zip(ids, requests, strict=False):
                    dispatcher.sessions[request_id] = self
                    dispatcher.open_samples[request_id] = request.num_samples
                    self._open_samples[request_id] = request.num_samples
                dispatcher.has_work.notify()
        return ids

    def get(self) -> _core.RequestEvent:
        """Waits for the next event of any of the session's requests.

        Raises:
            RuntimeError: The executor was closed.
            Exception: The cause, if the executor has failed.
        """
        item = self._inbox.get()
        if isinstance(item, BaseException):
            self._inbox.put(item)
            raise item
        if item.finish_reason is not None and item.id in self._open_samples:
            self._open_samples[item.id] -= 1
            if self._open_samples[item.id] == 0:
                del self._open_samples[item.id]
        return item

    def cancel(self, request_id: int, sample: int) -> None:
        """Asks for the end of a sample; its last event still comes. An ended one is left alone."""
        dispatcher = self._dispatcher
        with dispatcher.lock:
            if request_id in dispatcher.sessions:
                dispatcher.cancel_ignoring_failure(request_id, sample)

    def close(self) -> None:
        """Cancels the requests that have not ended and forgets them. Closing twice is fine."""
        dispatcher = self._dispatcher
        with dispatcher.lock:
            for request_id in self._open_samples:
                # Unknown to the dispatcher: it has ended, or the executor is closed.
                if dispatcher.forget(request_id) is not None:
                    dispatcher.cancel_ignoring_failure(request_id)
            self._open_samples.clear()


class Dispatcher:
    """Owns an executor and the thread that polls it. Thread-safe.

    Attributes:
        executor: The executor.
        lock: Guards `sessions` and `open_samples`.
        has_work: Notified when a session opens a request or the dispatcher closes.
        sessions: Who waits for which request.
        open_samples: Of those requests, how many last events are to come.
    """

    def __init__(self, executor: _core.Executor) -> None:
        """Takes over an executor; nobody else may poll it."""
        self.executor = executor
        # Reentrant: the garbage collector may close a session or an LLM while the lock is held.
        self.lock = threading.RLock()
        self.has_work = threading.Condition(self.lock)
        self.sessions: dict[int, Session] = {}
        self.open_samples: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-dispatcher", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def open(self) -> Session:
        """Starts a session."""
        return Session(self)

    def check_running(self) -> None:
        """Raises RuntimeError when closed, or what made the executor fail."""
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise RuntimeError("this LLM is closed")

    def forget(self, request_id: int) -> Session | None:
        """Drops a request; the caller holds the lock. Returns who waited for it."""
        self.open_samples.pop(request_id, None)
        return self.sessions.pop(request_id, None)

    def cancel_ignoring_failure(self, request_id: int, sample: int | None = None) -> None:
        """Cancels a request, or one sample, whose further output nobody wants."""
        try:
            self.executor.cancel(request_id, sample)
        except Exception as error:
            # A failed executor runs nothing; the next call raises the cause.
            self._failure = self._failure or error

    def close(self) -> None:
        """Ends all sessions, joins both threads and frees the executor. Closing twice is fine."""
        with self.lock:
            self._is_closed = True
            self._end_sessions(RuntimeError("this LLM was closed while a request was running"))
            self.has_work.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.executor.close()

    def _run(self) -> None:
        while True:
            with self.lock:
                while not self.sessions and not self._is_closed:
                    self.has_work.wait()
                if self._is_closed:
                    return
            try:
                events = self.executor.poll(timeout_ms=_POLL_TIMEOUT_MS)
                with self.lock:
                    for event in events:
                        self._deliver(event)
            except BaseException as error:
                with self.lock:
                    self._failure = error
                    self._end_sessions(error)
                return

    def _deliver(self, event: _core.RequestEvent) -> None:
        """Hands an event over; the caller holds the lock."""
        session = self.sessions.get(event.id)
        # Without a session: the request was cancelled and its caller is gone.
        if session is None:
            return
        if event.finish_reason is not None:
            # None where the garbage collector has just closed the session, from this thread.
            num_open = self.open_samples.get(event.id, 1) - 1
            if num_open == 0:
                self.forget(event.id)
            else:
                self.open_samples[event.id] = num_open
        session._inbox.put(event)

    def _end_sessions(self, cause: BaseException) -> None:
        """Tells every session that no event will come; the caller holds the lock."""
        for session in set(self.sessions.values()):
            session._inbox.put(cause)
        self.sessions.clear()
        self.open_samples.clear()
