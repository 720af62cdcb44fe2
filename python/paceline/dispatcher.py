# SPDX-License-Identifier: Apache-2.0
"""Delivers the events of one executor to the callers that wait for them.

One daemon thread polls the executor, so that several threads can generate at the same time and a
Ctrl-C, which only ever interrupts the main thread, cannot lose an event of another caller. The
thread sleeps while no request is open, and ends after a while.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from paceline import engine_log, lifetime

if TYPE_CHECKING:
    from paceline import _core

T = TypeVar("T")

# Longest wait inside the executor. It limits how long closing takes; events arrive at once.
_POLL_TIMEOUT_MS: Final = 50
# The polling thread ends after this time without requests, and the next request starts another.
# A thread refers to its dispatcher, so this frees engines whose closing a Ctrl-C has prevented.
_IDLE_S: Final = 10.0


class SessionClosed(Exception):
    """The session was closed while a thread waited for its next event."""


class Session:
    """The requests of one call. Made by `Dispatcher.open`.

    Any thread may call `cancel` and `close` while another one waits in `get`.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Starts without requests."""
        self._dispatcher = dispatcher
        # An exception means that no further event will come.
        self._inbox: queue.SimpleQueue[_core.RequestEvent | BaseException] = queue.SimpleQueue()
        # By request: the samples whose last event `get` has not returned yet. The dispatcher's lock
        # guards it.
        self._open_samples: dict[int, int] = {}

    def add_requests(self, requests: Sequence[_core.Request]) -> list[int]:
        """Queues all requests or none, so that they can start in the same iteration.

        Args:
            requests: At least one.

        Returns:
            The ids of the requests.

        Raises:
            ValueError: A request can never run. The message says which.
            RuntimeError: The executor is closed or has failed, or its queue is full.
            paceline.DeviceError: The system refuses a thread.
        """
        dispatcher = self._dispatcher
        ids: list[int] = []
        # Under the lock, so that no event is delivered before its request is registered.
        with dispatcher.lock:
            dispatcher.check_running()
            dispatcher.start_polling()
            try:
                if not dispatcher.executor.add_requests(requests, ids):
                    raise RuntimeError("the queue of waiting requests is full; try again later")
            finally:
                # Also after a Ctrl-C during the call, which is raised when the call returns.
                # Closing the session then cancels the requests.
                for request_id, request in zip(ids, requests, strict=False):
                    dispatcher.sessions[request_id] = self
                    dispatcher.open_samples[request_id] = request.num_samples
                    self._open_samples[request_id] = request.num_samples
                dispatcher.changed.notify_all()
        return ids

    def put(self, item: _core.RequestEvent | BaseException) -> None:
        """Receives an event, or why no event will come. The caller holds the dispatcher's lock."""
        self._inbox.put(item)

    def notify(self) -> None:
        """Called by the polling thread, without the lock, after `put` for all events of a poll."""

    def check_usable(self) -> None:
        """Raises RuntimeError in a process that was forked from the one that built the LLM."""
        self._dispatcher.check_not_forked()

    def get(self) -> _core.RequestEvent:
        """Waits for the next event of any of the session's requests.

        Raises:
            SessionClosed: `close` was called.
            RuntimeError: The executor was closed.
            Exception: The cause, if the executor has failed.
        """
        item = self._inbox.get()
        if isinstance(item, BaseException):
            self._inbox.put(item)  # for other threads that wait
            lifetime.end_daemon_thread()
            raise item
        self.count_end(item)
        return item

    def count_end(self, event: _core.RequestEvent) -> None:
        """Notes that a sample has ended, if the event is its last one."""
        if event.finish_reason is not None:
            with self._dispatcher.lock:
                num_open = self._open_samples.pop(event.id, 1) - 1
                if num_open > 0:
                    self._open_samples[event.id] = num_open

    def cancel(self, request_id: int, sample: int) -> None:
        """Cancels a sample unless it has ended. Its last event still follows."""
        dispatcher = self._dispatcher
        with dispatcher.lock:
            if request_id in dispatcher.sessions:
                dispatcher.cancel_ignoring_failure(request_id, sample)

    def discard(self, request_id: int) -> None:
        """Cancels and forgets a request unless it has ended. No further event comes."""
        dispatcher = self._dispatcher
        with dispatcher.lock:
            self._open_samples.pop(request_id, None)
            # The dispatcher does not know a request that has ended.
            if dispatcher.forget(request_id) is not None:
                dispatcher.cancel_ignoring_failure(request_id)

    def close(self) -> None:
        """Cancels and forgets the requests that have not ended. Wakes the threads that wait in
        `get`. Closing twice is fine."""
        dispatcher = self._dispatcher
        if dispatcher.is_forked:
            return
        with dispatcher.lock:
            self.put(SessionClosed())
            for request_id in list(self._open_samples):
                self.discard(request_id)


class Dispatcher:
    """Owns an executor and the thread that polls it. Thread-safe.

    Attributes:
        executor: The executor.
        make_request: Makes the requests that it takes; None = `engine_request`.
        lock: Guards `sessions`, `open_samples` and the state of the polling thread.
        changed: Notified when a session opens a request, the dispatcher closes, or the polling
            thread ends.
        sessions: The session that waits for each request, by request id.
        open_samples: By request id: the number of samples whose last event has not come yet.
        is_forked: Whether this process is a forked child of the one that built the executor.
    """

    def __init__(
        self,
        executor: _core.Executor,
        make_request: Callable[..., _core.Request] | None = None,
    ) -> None:
        """Takes over an executor, which only this dispatcher may poll.

        The polling thread starts with the first request. Until then no thread refers to the
        dispatcher, so that a Ctrl-C during construction leaves no engine behind.
        """
        self.executor = executor
        self.make_request = make_request
        # Reentrant: the garbage collector may close a session or an LLM while the lock is held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.sessions: dict[int, Session] = {}
        self.open_samples: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._is_closed = False
        self._polling_thread: int | None = None  # its identifier
        self._owner_pid = os.getpid()
        self.is_forked = False
        lifetime.register(self)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._is_closed

    @property
    def is_polling(self) -> bool:
        """Returns whether the polling thread runs."""
        return self._polling_thread is not None

    def open(self) -> Session:
        """Starts a session."""
        return Session(self)

    def check_running(self) -> None:
        """Raises RuntimeError when closed or forked, or what made the executor fail."""
        self.check_not_forked()
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            lifetime.end_daemon_thread()
            raise RuntimeError("this LLM is closed")

    def call(self, function: Callable[[_core.Executor], T]) -> T:
        """Calls a function with the executor.

        Raises:
            RuntimeError: As `check_running`, also if another thread closes the executor meanwhile.
        """
        self.check_running()
        try:
            return function(self.executor)
        except RuntimeError:
            self.check_running()
            raise

    def check_not_forked(self) -> None:
        """Raises RuntimeError in a process that was forked from the one that built the LLM."""
        if self.is_forked:
            raise RuntimeError(
                f"this LLM was built in process {self._owner_pid} and cannot be used in process "
                f"{os.getpid()}, which was forked from it: fork() does not copy the threads of the "
                "engine. Build the LLM in the child process, or start the child with "
                'multiprocessing.get_context("spawn"); device "cuda" always needs "spawn"'
            )

    def start_polling(self) -> None:
        """Starts the polling thread unless it runs; the caller holds the lock.

        `threading.Thread.start` would leave a half-started thread behind when a Ctrl-C interrupts
        it. This call either starts a thread or does not, and a second thread ends at once.

        Raises:
            paceline.DeviceError: The system refuses a thread.
        """
        if self._polling_thread is not None:
            return
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            from paceline import _core

            raise _core.DeviceError(
                f"cannot start the thread that reads the engine's results: {error}; raise the "
                "limit on threads (ulimit -u, the pids limit of the container, or the memory for "
                "their stacks)"
            ) from error

    def forget(self, request_id: int) -> Session | None:
        """Drops a request and returns its session; the caller holds the lock."""
        self.open_samples.pop(request_id, None)
        return self.sessions.pop(request_id, None)

    def cancel_ignoring_failure(self, request_id: int, sample: int | None = None) -> None:
        """Cancels a request, or one sample, whose further output is not needed."""
        try:
            self.executor.cancel(request_id, sample)
        except Exception as error:
            # A failed executor runs nothing; the next call raises the cause.
            self._failure = self._failure or error

    def close(self) -> None:
        """Ends all sessions, joins both threads and frees the executor. Closing twice is fine."""
        try:
            self._close()
        except KeyboardInterrupt:
            self._close()  # otherwise a Ctrl-C would leave threads behind
            raise

    def _close(self) -> None:
        if self.is_forked:
            return
        with self.lock:
            self._is_closed = True
            self._end_sessions(RuntimeError("this LLM was closed while a request was running"))
            self.changed.notify_all()
            while self._polling_thread not in (None, threading.get_ident()):
                self.changed.wait()
        self.executor.close()
        engine_log.forward_in_background()

    def abandon(self) -> None:
        """Makes the dispatcher unusable in a forked child; see `lifetime`."""
        # In the parent, another thread may hold these.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._polling_thread = None
        self.is_forked = True
        self.sessions.clear()
        self.open_samples.clear()

    def _run(self) -> None:
        with self.lock:
            if self._polling_thread is not None:
                return
            self._polling_thread = threading.get_ident()
        try:
            while self._wait_for_work():
                events = self.executor.poll(timeout_ms=_POLL_TIMEOUT_MS)
                self._deliver_all(events)
                del events  # may hold arrays of logits
                engine_log.forward_in_background()
        except BaseException as error:
            engine_log.forward_in_background()
            with self.lock:
                self._failure = error
                self._end_sessions(error)
                self._stop_polling()

    def _wait_for_work(self) -> bool:
        """Waits until a request is open. Returns False if the polling thread has to end."""
        with self.lock:
            while not self.sessions and not self._is_closed:
                # Under the same lock as a new request, which then starts another thread.
                if not self.changed.wait(_IDLE_S) and not self.sessions:
                    break
            if self.sessions and not self._is_closed:
                return True
            self._stop_polling()
            return False

    def _stop_polling(self) -> None:
        self._polling_thread = None
        self.changed.notify_all()

    def _deliver_all(self, events: list[_core.RequestEvent]) -> None:
        with self.lock:
            sessions = dict.fromkeys(map(self._deliver, events))
        for session in sessions:
            if session is not None:
                session.notify()

    def _deliver(self, event: _core.RequestEvent) -> Session | None:
        """Hands an event over and returns its session; the caller holds the lock."""
        session = self.sessions.get(event.id)
        # Without a session, the request was cancelled and its session closed.
        if session is None:
            return None
        if event.finish_reason is not None:
            # Absent if the garbage collector has just closed the session in this thread.
            num_open = self.open_samples.get(event.id, 1) - 1
            if num_open == 0:
                self.forget(event.id)
            else:
                self.open_samples[event.id] = num_open
        session.put(event)
        return session

    def _end_sessions(self, cause: BaseException) -> None:
        """Tells every session that no event will come; the caller holds the lock."""
        for session in set(self.sessions.values()):
            session.put(cause)
        self.sessions.clear()
        self.open_samples.clear()
