# SPDX-License-Identifier: Apache-2.0
"""Runs the server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn

from paceline.server.app import make_app
from paceline.server.garbage import without_old_objects
from paceline.server.guard import MAX_HEADER_BYTES
from paceline.server.protocol import protocol_class
from paceline.server.service import Service
from paceline.server.sockets import Acceptor, Connections

_logger = logging.getLogger("paceline")

# After the requests that drain have been cut off: time to send them the error.
_LAST_WORDS_S: Final = 5


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
        connections = Connections(service.limits.max_connections)
        config = uvicorn.Config(
            make_app(service),
            http=protocol_class(connections, service.limits.read_timeout_s),
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
        self._uvicorn = _Uvicorn(config, connections, on_ready)

    def run(self, *, handles_signals: bool) -> None:
        """Serves until `stop` is called or, with `handles_signals`, for SIGTERM, SIGINT or SIGHUP,
        which stays ignored if it is, as by nohup."""

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            if handles_signals:
                numbers = [signal.SIGTERM, signal.SIGINT]
                if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                    numbers.append(signal.SIGHUP)
                for number in numbers:
                    loop.add_signal_handler(number, self.stop)
            try:
                await self._uvicorn.serve([self._socket])
            finally:
                if self._cut_off is not None:
                    self._cut_off.cancel()

        with without_old_objects(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve())

    def stop(self) -> None:
        """Ends the server once its requests have ended; called in the event loop. A second call
        cuts them off."""
        service = self._service
        if service.is_draining:
            self._cut_off_requests()
            return
        service.is_draining = True
        service.allm.stop_compiling("the server is about to end; send the request to another one")
        self._uvicorn.should_exit = True
        _logger.info(
            "the server ends; %d outputs have %g s left. Press Ctrl-C again, or send a second "
            "signal, to end them at once",
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
    """Handles no signals, accepts connections itself, and says when it does."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._on_ready = on_ready
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Without sockets it listens nowhere: asyncio's own way of accepting knows no limit, and
        # tries again for ever when there are no more file descriptors.
        await super().startup([])
        for listener in sockets or ():
            self._acceptors.append(Acceptor(listener, self._connections, self._make_protocol))
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
