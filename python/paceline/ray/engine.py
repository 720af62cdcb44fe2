# SPDX-License-Identifier: Apache-2.0
"""The deployment whose replicas have an engine each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from paceline import _core
from paceline.dispatcher import Dispatcher, Session
from paceline.llm import LLM
from paceline.replicas.messages import EngineEvent, Facts
from paceline.request import engine_request
from paceline.running_llm import internals


class Engine:
    """An engine, which takes and gives token ids."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Loads the models.

        Args:
            arguments: Those of `LLM`.
        """
        self._llm = LLM(**arguments)
        self._dispatcher = internals(self._llm).dispatcher
        self._grammars = internals(self._llm).requests.grammars
        self._grammars.read_tokenizer(compiles=False)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def facts(self) -> Facts:
        """Returns what the server must know of the engine."""
        return Facts.of(self._llm, self._dispatcher.executor)

    async def generate(
        self, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Runs a request. Closing the iterator cancels it.

        Args:
            prompt: Token ids.
            sampling: Further arguments, as for `engine_request`.

        Yields:
            ("begin", name of the replica), then ("events", list of `EngineEvent`), whose id is 0,
            and at last ("stats", the result of `_core.Executor.stats`).

        Raises:
            ValueError: The engine refuses the request.
            RuntimeError: The engine has failed.
        """
        yield "begin", self._name
        request = await asyncio.to_thread(self._make_request, prompt, sampling)
        num_open = request.num_samples
        session = _QueueSession(self._dispatcher, asyncio.get_running_loop())
        try:
            session.add_requests([request])
            while num_open > 0:
                events = await session.take()
                num_open -= sum(event.finish_reason is not None for event in events)
                yield "events", [EngineEvent.of(event, 0) for event in events]
        finally:
            session.close()
        yield "stats", self._dispatcher.executor.stats()

    def _make_request(self, prompt: list[int], sampling: dict[str, Any]) -> _core.Request:
        if "grammar" in sampling:
            self._grammars.ensure(sampling["grammar"])
        return engine_request(prompt, sampling, self._grammars)

    async def check_health(self) -> None:
        """Raises an error if the engine has failed, so that Ray replaces the replica."""
        self._dispatcher.call(lambda executor: executor.stats())


class _QueueSession(Session):
    """A session whose events go to one task of an event loop."""

    def __init__(self, dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(dispatcher)
        self._loop = loop
        self._items: asyncio.Queue[_core.RequestEvent | BaseException] = asyncio.Queue()

    def put(self, item: _core.RequestEvent | BaseException) -> None:
        """Receives an event, or why no event will come, in the polling thread."""
        if not isinstance(item, BaseException):
            self.count_end(item)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def take(self) -> list[_core.RequestEvent]:
        """Waits for events and returns all that there are.

        Raises:
            Exception: Why no event will come.
        """
        items = [await self._items.get()]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        events = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            events.append(item)
        return events
