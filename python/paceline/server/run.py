# SPDX-License-Identifier: Apache-2.0
"""Runs the server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.server.app import make_app
from paceline.server.guard import MAX_HEADER_BYTES
from paceline.server.service import Service

_logger = logging.getLogger("paceline")

# After the requests that drain have been cut off: time to send them the error.
_LAST_WORDS_S: Final = 5


def open_socket(host: str, port: int) -> socket.socket:
    """Takes an address, without listening there yet.

    Args:
        host: A name or an address.
        port: 0 = any free port.

    Returns:
        The bound socket.

    Raises:
        ValueError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host is {host!r}: {error}; allowed: a name or an address") from None
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        opened.close()
        raise ValueError(
            f"{host}:{port} cannot be used: {error.strerror}; choose another --host or --port"
        ) from None
    return opened


def is_loopback(opened: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ipaddress.ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback


class Server:
    """A server over one socket."""

    def __init__(
        self,
        service: Service,
        opened: socket.socket,
        *,
        drain_timeout_s: float,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts nothing.

        Args:
            service: What is served.
            opened: The socket.
            drain_timeout_s: How long requests may go on once the server has been told to end.
            on_ready: Called when the server accepts connections.
        """
        self._service = service
        self._socket = opened
        self._drain_timeout_s = drain_timeout_s
        self._cut_off: asyncio.TimerHandle | None = None
        config = uvicorn.Config(
            make_app(service),
            http=_protocol_class(service.limits.read_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=max(1, round(service.limits.read_timeout_s)),
            timeout_graceful_shutdown=int(drain_timeout_s) + 1 + _LAST_WORDS_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._uvicorn = _Uvicorn(config, on_ready)

    def run(self, *, handles_signals: bool) -> None:
        """Serves until `stop` is called or, with `handles_signals`, for SIGTERM or SIGINT."""

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            if handles_signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self.stop)
            try:
                await self._uvicorn.serve([self._socket])
            finally:
                if self._cut_off is not None:
                    self._cut_off.cancel()

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve())

    def stop(self) -> None:
        """Ends the server once its requests have ended; called in the event loop. A second call
        cuts them off."""
        service = self._service
        if service.is_draining:
            self._cut_off_requests()
            return
        service.is_draining = True
        self._uvicorn.should_exit = True
        _logger.info(
            "the server ends; %d outputs have %g s left",
            service.admission.num_open,
            self._drain_timeout_s,
        )
        self._cut_off = asyncio.get_running_loop().call_later(
            self._drain_timeout_s, self._cut_off_requests
        )

    def _cut_off_requests(self) -> None:
        if self._service.admission.num_open:
            _logger.warning("%d outputs are cut off", self._service.admission.num_open)
        # Their tasks get an error, which they send to their clients.
        self._service.allm.close_requests("the server")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which is faster, if it is installed; else asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
        "uvloop"
    ).new_event_loop
    return factory


class _Uvicorn(uvicorn.Server):
    """Handles no signals, and says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


class _Corked:
    """A transport that sends what is written in one turn of the event loop at once: the parts of a
    response come one by one, and each would be a packet and a call of the system."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()


def _protocol_class(read_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol that closes connections on which the headers of a request take too long."""

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            corked: Any = _Corked(transport, self.loop)
            super().connection_made(corked)
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_headers(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()  # a request has begun; `read_body` limits the rest of it
            elif self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(read_timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol
