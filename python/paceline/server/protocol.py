# SPDX-License-Identifier: Apache-2.0
"""A connection: what is written, and how long its client may be waited for."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from typing import Any, Final, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.server.connection import SLOW_READER_S
from paceline.server.sockets import Connections

# The parser takes some 15 microseconds for each chunk of a body, however short: 10 ms for these.
_PIECE_BYTES: Final = 4096
# Longest time that one turn of the event loop parses what has come.
_TURN_S: Final = 0.005


class Corked:
    """A transport that sends what is written in one turn of the event loop at once: the parts of a
    response come one by one, and each would be a packet and a call of the system. It reads only
    while neither uvicorn nor `hold_reading` stops it."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Takes over a transport."""
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._is_held = False
        self._is_paused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends a part, together with those that follow in this turn."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Sends what is left and closes the connection."""
        self._flush()
        self._transport.close()

    def pause_reading(self) -> None:
        """Reads nothing until `resume_reading`."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Ends `pause_reading`."""
        self._is_paused = False
        self._read_again()

    def hold_reading(self) -> None:
        """Reads nothing until `release_reading`."""
        self._is_held = True
        self._transport.pause_reading()

    def release_reading(self) -> None:
        """Ends `hold_reading`."""
        self._is_held = False
        self._read_again()

    def _read_again(self) -> None:
        if not (self._is_held or self._is_paused):
            self._transport.resume_reading()


class _Parsing(Protocol):
    def parse_piece(self) -> bool:
        """Parses a piece of what has come; returns whether there is more."""


class Pieces:
    """Parses what connections have received piece by piece, for a few milliseconds in one turn of
    the event loop, however many they are."""

    def __init__(self) -> None:
        """Starts without connections."""
        self._waiting: deque[_Parsing] = deque()

    def add(self, connection: _Parsing) -> None:
        """Parses what a connection has received, from the next turn on."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._parse)
        self._waiting.append(connection)

    def _parse(self) -> None:
        end = time.monotonic() + _TURN_S
        try:
            while self._waiting and time.monotonic() < end:
                connection = self._waiting.popleft()
                if connection.parse_piece():
                    self._waiting.append(connection)
        finally:  # one that fails holds up no other
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._parse)


class _Wait(enum.Enum):
    """The thing that a connection waits for, if for its client."""

    HEADERS = enum.auto()
    BODY = enum.auto()
    READER = enum.auto()


def protocol_class(connections: Connections, read_timeout_s: float) -> type[asyncio.Protocol]:
    """Makes a protocol that tells `connections` when it waits for its client, and ends the wait.

    Args:
        connections: The connections of the server.
        read_timeout_s: Longest time for the headers of a request. `read_body` limits its body.

    Returns:
        The class, for uvicorn.
    """

    pieces = Pieces()

    class Connection(H11Protocol):
        _wait: _Wait | None = None
        _timer: asyncio.TimerHandle | None = None
        _num_unread: int | None = None
        _is_lost = False

        def connection_made(self, transport: Any) -> None:
            corked: Any = Corked(transport, self.loop)
            self._corked: Corked = corked
            self._unparsed = bytearray()
            super().connection_made(corked)
            self._note_wait()

        def data_received(self, data: bytes) -> None:
            if len(data) <= _PIECE_BYTES and not self._unparsed:
                super().data_received(data)
                self._note_wait()
                return
            if not self._unparsed:
                pieces.add(self)
            self._unparsed += data
            self._corked.hold_reading()

        def parse_piece(self) -> bool:
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            if piece and not self._is_lost:
                super().data_received(piece)
                self._note_wait()
            if self._is_lost or self._corked.is_closing():
                self._unparsed.clear()
            elif not self._unparsed:
                self._corked.release_reading()
            return bool(self._unparsed)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._note_wait()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._note_wait()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._note_wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._is_lost = True
            self._set_timer(None)
            super().connection_lost(exc)
            connections.remove(self)

        def abort(self) -> None:
            self.transport.abort()

        def _note_wait(self) -> None:
            wait: _Wait | None = None
            if self.flow.write_paused:
                wait = _Wait.READER
            elif self.cycle is None or self.cycle.response_complete:
                wait = _Wait.HEADERS
            elif self.cycle.more_body:
                wait = _Wait.BODY
            if wait is self._wait or self._is_lost:
                return
            self._wait = wait
            self._num_unread = None
            if wait is None:
                connections.note_busy(self)
            else:
                connections.note_waiting(self)
            times = {_Wait.HEADERS: read_timeout_s, _Wait.READER: SLOW_READER_S}
            self._set_timer(None if wait is None else times.get(wait))

        def _set_timer(self, delay_s: float | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if delay_s is None else self.loop.call_later(delay_s, self._end_wait)

        def _end_wait(self) -> None:
            num_unread = self.transport.get_write_buffer_size()
            if num_unread and (self._num_unread is None or num_unread < self._num_unread):
                # A client that reads slowly may go on; one that reads nothing may not.
                self._num_unread = num_unread
                self._set_timer(SLOW_READER_S)
            elif num_unread or self.transport.is_closing():
                self.transport.abort()
            else:
                self.transport.close()

    return Connection
