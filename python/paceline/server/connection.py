# SPDX-License-Identifier: Apache-2.0
"""Work for a connection, which ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Final, TypeVar

from starlette.responses import Response

from paceline.server.bodies import ClientGone, Receive

_T = TypeVar("_T")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# A client that reads nothing for this long, while its buffers are full, is cut off.
SLOW_READER_S: Final = 30.0


class JsonResponse(Response):
    """A JSON value in UTF-8. Bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Converts the value."""
        return content if isinstance(content, bytes) else to_json(content)


def to_json(value: Any) -> bytes:
    """Converts a value to JSON without spaces, in UTF-8; lone surrogates are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def to_json_in_pieces(value: Any) -> bytes:
    """Does what `to_json` does, for a long value in a worker: it lets other threads run."""
    return "".join(json.JSONEncoder(separators=(",", ":")).iterencode(value)).encode()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine, and cancels it when the client goes away.

    Args:
        receive: The connection, whose request has been read.
        work: What to run.

    Returns:
        Its result.

    Raises:
        ClientGone: The client has gone away.
        Exception: What the coroutine raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, gone)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. Ends when the client goes away, or reads nothing for long."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], Awaitable[None]]) -> None:
        """Takes over an iterator.

        Args:
            events: The body, piece by piece. It raises nothing.
            on_end: Called in any case, also if nothing could be sent.
        """
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._blocked_since: float | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Sends the events."""
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            while not (sender.done() or gone.done() or self._is_stuck()):
                await asyncio.wait(
                    (sender, gone),
                    timeout=SLOW_READER_S / 2,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, gone)
            await self._on_end()

    def _is_stuck(self) -> bool:
        since = self._blocked_since
        return since is not None and time.monotonic() - since > SLOW_READER_S

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            self._blocked_since = time.monotonic()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._blocked_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: Mapping[str, Any]) -> bytes:
    """Makes one server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Makes one server-sent event that has the name of its type."""
    return f"event: {data['type']}\n".encode() + event(data)


END: Final = b"data: [DONE]\n\n"
