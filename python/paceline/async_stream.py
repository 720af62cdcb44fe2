# SPDX-License-Identifier: Apache-2.0
"""What `AsyncLLM` returns: asynchronous iterators over the output of one request."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from paceline.outputs import (
    CompletionOutput,
    RequestError,
    RequestOutput,
    StreamChunk,
    TokenLogprobs,
)
from paceline.request import running_metrics

if TYPE_CHECKING:
    from paceline.async_feeds import Feed, FeedSession
    from paceline.grammar import CompiledGrammar
    from paceline.request import Request
    from paceline.structured_outputs import StructuredOutputsParams

_T = TypeVar("_T")

# A task that never has to wait lets others run after this many items.
_MAX_ITEMS_AT_ONCE: Final = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a request is made.

    Attributes:
        prepare: Makes its samples in a worker thread. Takes the compiled grammar; None without one.
        structured: What its output must look like; None if it is free.
        compute_digests: Computes what its receipt says of the model; None without a receipt.
    """

    prepare: Callable[[CompiledGrammar | None], list[Request]]
    structured: StructuredOutputsParams | None
    compute_digests: Callable[[], object] | None


class AsyncStream(AsyncIterator[_T], Generic[_T]):
    """An asynchronous iterator over the output of one request. The request starts with the first
    item.

    Cancelling the task that waits for an item, `aclose`, and deleting the iterator, as leaving an
    `async for` does, cancel the request. One task at a time may wait for an item, and all items
    belong to one event loop.
    """

    def __init__(
        self,
        owner: object,
        session: FeedSession,
        prepare: Callable[[], Plan],
        name: str | None,
    ) -> None:
        """Starts nothing.

        Args:
            owner: An object that is kept alive until the output ends.
            session: Runs the request.
            prepare: Called in the event loop.
            name: The request's id; None = it gets one.
        """
        self._is_done = False
        self._owner: object | None = owner
        self._session = session
        self._prepare: Callable[[], Plan] | None = prepare
        self._given_name = name
        self._feed: Feed | None = None
        self._is_waiting = False
        self._num_at_once = 0

    @property
    def request_id(self) -> str:
        """The request's id. If the caller gave it none, it is "" until the request is queued."""
        return (self._given_name or "") if self._feed is None else self._feed.name

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as token ids; empty until the request is queued."""
        group = None if self._feed is None else self._feed.group
        return [] if group is None else group.samples[0].prompt_token_ids

    async def __anext__(self) -> _T:
        """Waits for the next item.

        Raises:
            StopAsyncIteration: The output has ended, or the iterator was closed.
            RequestError: The engine failed to complete the request.
            RuntimeError: The LLM is closed, this process is a fork of the one that built it, or
                another task or event loop waits for this request.
            Exception: As for `LLM.generate`.
        """
        if self._is_waiting:
            raise RuntimeError("another task waits for the next item of this request")
        if self._is_done:
            raise StopAsyncIteration
        self._is_waiting = True
        try:
            item = await self._next()
        except BaseException:
            self._close()
            raise
        finally:
            self._is_waiting = False
        if item is None:
            raise StopAsyncIteration
        return item

    async def start(self) -> None:
        """Starts the request unless it has started; otherwise, the first item starts it.

        Returns when the request is queued, so that errors in it are known before its output.

        Raises:
            Exception: As for the first item.
        """
        if self._is_waiting:
            raise RuntimeError("another task waits for the next item of this request")
        if self._feed is not None or self._is_done:
            return
        self._is_waiting = True
        try:
            self._session.check_usable()
            await self._start()
        except BaseException:
            self._close()
            raise
        finally:
            self._is_waiting = False

    async def _next(self) -> _T | None:
        self._session.check_usable()
        feed = self._feed or await self._start()
        if feed.bell.loop is not asyncio.get_running_loop():
            raise RuntimeError("this request belongs to another event loop")
        if self._num_at_once == _MAX_ITEMS_AT_ONCE:
            self._num_at_once = 0
            await asyncio.sleep(0)
        while not self._is_done:
            if feed.chunks:
                self._num_at_once += 1
                return self._take(feed)
            if feed.failure is not None:
                raise feed.failure
            self._num_at_once = 0
            await feed.wait()
        return None

    async def _start(self) -> Feed:
        loop = asyncio.get_running_loop()
        prepare, self._prepare = self._prepare, None
        assert prepare is not None
        session = self._session
        feed = self._feed = session.open_feed(self._given_name, loop)
        plan = prepare()
        # Apart from the workers, so that no grammar delays other requests.
        grammar = None
        if plan.structured is not None:
            grammar = await session.grammars.compile(plan.structured)
        if plan.compute_digests is not None:  # the first time takes seconds, for large models
            await loop.run_in_executor(None, plan.compute_digests)
        await loop.run_in_executor(
            session.workers, lambda: session.start(feed, plan.prepare(grammar))
        )
        return feed

    @abstractmethod
    def _take(self, feed: Feed) -> _T:
        """Makes an item of the chunks of a feed, which has some. Sets `_is_done` with the last."""

    def _close(self) -> None:
        # A request whose last item was taken has ended, and nothing knows it any more.
        is_open, self._is_done = not self._is_done, True
        self._owner = None
        if is_open and self._feed is not None:
            self._session.cancel_feed(self._feed)

    async def aclose(self) -> None:
        """Cancels the request unless it has ended, and ends the iteration. Closing twice is
        fine."""
        self._close()
        if self._feed is not None:
            self._feed.wake()

    def __del__(self) -> None:
        if not getattr(self, "_is_done", True):
            self._close()


class ChunkStream(AsyncStream[StreamChunk]):
    """The pieces of an output, one for each iteration. `AsyncLLM.stream` returns it."""

    def _take(self, feed: Feed) -> StreamChunk:
        chunk = feed.chunks.popleft()
        self._is_done = chunk.output is not None
        return chunk


class OutputStream(AsyncStream[RequestOutput]):
    """The output so far, again and again. `AsyncLLM.generate` and `AsyncLLM.chat` return it."""

    _partials: list[_Partial] | None = None
    _prompt_logprobs: list[TokenLogprobs | None] | None = None

    def _take(self, feed: Feed) -> RequestOutput:
        """Merges all chunks, so that a slow task gets few outputs."""
        assert feed.group is not None
        if self._partials is None:
            self._partials = [_Partial(sample) for sample in feed.group.samples]
        chunks: deque[StreamChunk] = feed.chunks
        while chunks:
            chunk = chunks.popleft()
            if chunk.output is not None:
                self._is_done = True
                if chunk.output.error is not None:
                    raise RequestError(chunk.output.error, [chunk.output])
                return chunk.output
            self._partials[chunk.sample].add(chunk)
            self._prompt_logprobs = chunk.prompt_logprobs or self._prompt_logprobs
        first = feed.group.samples[0]
        outputs = [partial.completion() for partial in self._partials]
        return RequestOutput(
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=outputs,
            metrics=running_metrics(first, sum(len(output.token_ids) for output in outputs)),
            prompt_logprobs=self._prompt_logprobs,
            request_id=feed.name,
            finished=False,
        )


class _Partial:
    """The output so far of one sample, as the task knows it."""

    def __init__(self, sample: Request) -> None:
        self._sample = sample
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._cumulative_logprob: float | None = None
        self._finished: CompletionOutput | None = None

    def add(self, chunk: StreamChunk) -> None:
        """Adds a chunk."""
        if chunk.finished:  # while other samples run
            self._finished = self._sample.completion()
            return
        self._text += chunk.text
        self._token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self._logprobs = (self._logprobs or []) + chunk.logprobs
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + sum(
                logprobs[token].logprob
                for token, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=True)
            )

    def completion(self) -> CompletionOutput:
        """Returns the output so far."""
        if self._finished is not None:
            return self._finished
        return CompletionOutput(
            text=self._text,
            token_ids=list(self._token_ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=None,
            cumulative_logprob=self._cumulative_logprob,
            index=self._sample.sample,
        )
