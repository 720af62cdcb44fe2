# SPDX-License-Identifier: Apache-2.0
"""Requests whose output goes to event loops.

The thread that polls the engine turns events into chunks and appends them to the feed of their
request. It then wakes each event loop once, however many requests and tokens an iteration had. A
task takes the chunks that its feed has, so a slow one never holds up anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from paceline.dispatcher import Dispatcher, Session, SessionClosed
from paceline.grammar_queue import GrammarQueue
from paceline.outputs import StreamChunk
from paceline.request import Request, RequestGroup

if TYPE_CHECKING:
    from paceline import _core
    from paceline.grammar import Grammars

# Prompts are rendered and tokenized beside the event loop; the tokenizer releases the GIL.
_NUM_WORKERS: Final = 2
# Longest time that an event loop waits for the dispatcher's lock.
_MAX_LOCK_WAIT_S: Final = 0.05


class LoopBell:
    """Wakes the tasks of one event loop, with one call however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts silent."""
        self.loop = loop
        self._ringing: deque[Feed] = deque()
        self._is_scheduled = False

    def ring(self, feeds: Sequence[Feed]) -> None:
        """Wakes the tasks that wait for feeds; called by any thread.

        Raises:
            RuntimeError: The loop is closed.
        """
        self._ringing.extend(feeds)
        try:
            # A loop that is closed between the call and `_wake` drops `_wake` in silence.
            if self.loop.is_closed():
                raise RuntimeError("Event loop is closed")
            # `_wake` resets this before it empties the queue, so no feed is left in it.
            if not self._is_scheduled:
                self._is_scheduled = True
                self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self._is_scheduled = False
            self._ringing.clear()
            raise

    def _wake(self) -> None:
        self._is_scheduled = False
        while self._ringing:
            self._ringing.popleft().wake()


class Feed:
    """A request between the polling thread, which fills it, and a task, which empties it.

    Attributes:
        name: The request's id among those of its `AsyncLLM`; "" until the request is queued, if the
            caller gave it none.
        bell: Of the event loop that the task runs in.
        chunks: What the task has not taken yet.
        failure: Why no further chunk will come; None if there is no such reason.
        group: The request's samples; None until it is queued.
        engine_id: The request's id in the engine; None until it is queued.
        is_cancelled: Whether the task reads no further chunks.
        is_aborted: Whether the caller wants the output so far.
    """

    def __init__(self, name: str, bell: LoopBell) -> None:
        """Starts without a request."""
        self.name = name
        self.bell = bell
        self.chunks: deque[StreamChunk] = deque()
        self.failure: BaseException | None = None
        self.group: RequestGroup | None = None
        self.engine_id: int | None = None
        self.is_cancelled = False
        self.is_aborted = False
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Waits until there is something to take; called in the event loop."""
        self._waiter = self.bell.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Ends `wait`; called in the event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class FeedSession(Session):
    """All requests of an `AsyncLLM`. Thread-safe.

    The dispatcher refers to it while a request runs, and it does not refer to the `AsyncLLM`. The
    dispatcher's lock guards it: a second lock could block the first, because the garbage collector
    may cancel a request in any thread.

    Attributes:
        workers: The threads that prepare requests.
        grammars: Compiles their grammars before that.
    """

    def __init__(self, dispatcher: Dispatcher, grammars: Grammars) -> None:
        """Starts without requests.

        Args:
            dispatcher: The dispatcher of the engine.
            grammars: Of the model.
        """
        super().__init__(dispatcher)
        self.grammars = GrammarQueue(grammars)
        self.workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="paceline-prompts")
        self._events: deque[_core.RequestEvent] = deque()
        self._by_engine_id: dict[int, Feed] = {}
        self._by_name: dict[str, Feed] = {}
        self._closed = ""  # who was closed; "" while it is open
        # A bell lives as long as a feed of its loop.
        self._bells: weakref.WeakValueDictionary[int, LoopBell] = weakref.WeakValueDictionary()

    # ---- in event loops and worker threads -----------------------------------------------------

    def check_open(self) -> None:
        """Raises RuntimeError: closed or forked; or what made the engine fail."""
        self._dispatcher.check_running()
        if self._closed:
            raise RuntimeError(f"{self._closed} is closed")

    def open_feed(self, name: str | None, loop: asyncio.AbstractEventLoop) -> Feed:
        """Starts a feed for a request that is not queued yet.

        Raises:
            ValueError: A request with this name is running.
            RuntimeError: As for `check_open`.
        """
        self.check_open()
        # Without the lock: only this thread runs the loop, and `setdefault` is atomic.
        bell = self._bells.get(id(loop))
        if bell is None or bell.loop is not loop:
            bell = self._bells[id(loop)] = LoopBell(loop)
        feed = Feed(name or "", bell)
        if name is not None and self._by_name.setdefault(name, feed) is not feed:
            raise ValueError(
                f"request_id is {name!r}, which a running request has; allowed: an id that no "
                "running request has, or None"
            )
        return feed

    def start(self, feed: Feed, requests: Sequence[Request]) -> None:
        """Queues the request of a feed, unless it was cancelled.

        Args:
            feed: The feed.
            requests: The samples of the request.

        Raises:
            RuntimeError: As for `add_requests`.
            ValueError: As for `add_requests`.
        """
        request = requests[0].for_engine(self._dispatcher.make_request)
        feed.group = RequestGroup(requests)
        queued_at = time.monotonic()
        with self._dispatcher.lock:
            if feed.is_cancelled:
                return
            self.check_open()
            (engine_id,) = self.add_requests([request])
            # Under the lock: no event comes before the feed is known and has a name.
            self._by_engine_id[engine_id] = feed
            feed.engine_id = engine_id
            self._name(feed, str(engine_id))
            for sample in requests:
                sample.request_id, sample.queued_at = feed.name, queued_at
            if feed.is_aborted:
                self._abort(feed)

    def _name(self, feed: Feed, default: str) -> None:
        while not feed.name:
            if self._by_name.setdefault(default, feed) is feed:
                feed.name = default
            default += "'"  # a caller has chosen this name

    def abort(self, name: str) -> None:
        """Ends a request. Its feed ends with the output so far. Unknown names are ignored."""
        self._dispatcher.check_not_forked()
        feed = self._by_name.get(name)
        if feed is not None and not feed.is_aborted:
            feed.is_aborted = True
            self._do_soon(self._abort, feed)

    def _do_soon(self, action: Callable[[Feed], None], feed: Feed) -> None:
        """Does something under the dispatcher's lock, in a worker if another thread keeps it.

        A thread keeps it for long if it queues requests while the weights are updated.
        """
        lock = self._dispatcher.lock
        if not lock.acquire(timeout=_MAX_LOCK_WAIT_S):
            with contextlib.suppress(RuntimeError):  # the workers have ended, and so have requests
                self.workers.submit(self._do, action, feed)
            return
        try:
            action(feed)
        finally:
            lock.release()

    def _do(self, action: Callable[[Feed], None], feed: Feed) -> None:
        with self._dispatcher.lock:
            action(feed)

    def _abort(self, feed: Feed) -> None:
        if feed.engine_id is None or feed.group is None:
            return  # `start` comes back to it
        for request in feed.group.samples:
            request.is_aborted = True
            self.cancel(feed.engine_id, request.sample)

    def cancel_feed(self, feed: Feed) -> None:
        """Cancels and forgets the request of a feed whose task reads no further chunks."""
        if self._dispatcher.is_forked:
            return
        feed.is_cancelled = True
        self._do_soon(self._cancel_feed, feed)

    def _cancel_feed(self, feed: Feed) -> None:
        if feed.engine_id is not None:
            self._by_engine_id.pop(feed.engine_id, None)
            self.discard(feed.engine_id)
        self._forget_name(feed)

    def _forget_name(self, feed: Feed) -> None:
        if self._by_name.get(feed.name) is feed:
            del self._by_name[feed.name]

    def close(self, name: str = "this AsyncLLM") -> None:
        """Cancels all requests; their tasks get RuntimeError. Closing twice is fine.

        Args:
            name: Who is closed, for errors.
        """
        self._closed = self._closed or name
        super().close()
        if not self._dispatcher.is_forked:
            self.grammars.close(f"{self._closed} is closed")
            self.workers.shutdown(wait=False)

    # ---- in the polling thread -----------------------------------------------------------------

    def put(self, item: _core.RequestEvent | BaseException) -> None:
        """Receives an event, or why no event will come. The caller holds the dispatcher's lock."""
        if not isinstance(item, BaseException):
            self._events.append(item)
            return
        if isinstance(item, SessionClosed):
            item = RuntimeError(f"{self._closed} was closed while a request was running")
        feeds, self._by_engine_id = list(self._by_engine_id.values()), {}
        for feed in feeds:
            feed.failure = item
        self._ring(feeds)

    def notify(self) -> None:
        """Turns the events of a poll into chunks and wakes the event loops."""
        changed: dict[Feed, None] = {}
        while self._events:
            event = self._events.popleft()
            self.count_end(event)
            feed = self._by_engine_id.get(event.id)
            if feed is None:
                continue  # cancelled
            changed[feed] = None
            try:
                self._take(feed, event)
            except Exception as error:  # of the tokenizer, for example
                feed.failure = error
                self.cancel_feed(feed)
        for feed in self._ring(list(changed)):
            self.cancel_feed(feed)

    def _take(self, feed: Feed, event: _core.RequestEvent) -> None:
        assert feed.group is not None
        chunk = feed.group.take(event)
        if chunk is None:
            return
        if feed.group.is_to_cancel(event.sample):
            # The last event, which has the counters, then follows at once.
            self.cancel(event.id, event.sample)
        if chunk.output is not None:
            with self._dispatcher.lock:
                self._by_engine_id.pop(event.id, None)
                self._forget_name(feed)
        feed.chunks.append(chunk)

    def _ring(self, feeds: Sequence[Feed]) -> list[Feed]:
        """Wakes the tasks of feeds. Returns the feeds whose loop is closed."""
        by_bell: dict[LoopBell, list[Feed]] = {}
        for feed in feeds:
            by_bell.setdefault(feed.bell, []).append(feed)
        orphaned = []
        for bell, rung in by_bell.items():
            try:
                bell.ring(rung)
            except RuntimeError:
                orphaned += rung
        return orphaned
