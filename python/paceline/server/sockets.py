# SPDX-License-Identifier: Apache-2.0
"""The listening socket, and how many connections it gives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from paceline.server.service import DEFAULT_MAX_CONNECTIONS

_logger = logging.getLogger("paceline")

# Connections that wait for the kernel's part; clients beyond them try again.
_BACKLOG: Final = 2048
# The soft limit of open files is raised up to here, as far as the hard limit allows.
_MOST_FILES: Final = 65_536
# For the files of the model, of replicas, of Python and of libraries.
_OTHER_FILES: Final = 256
# Connections that are taken before the event loop does other things.
_ACCEPTED_AT_ONCE: Final = 64
# A connection is not closed in favour of another one before its request could be read.
_LEAST_WAIT_S: Final = 0.1
# Until a failed accept is tried again.
_RETRY_S: Final = 0.5
# Between two lines about connections in the log.
_LOG_INTERVAL_S: Final = 60.0
# Other errors than these are those of one connection, which has gone.
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
    """Returns whether only this machine can reach a socket."""
    return ipaddress.ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback


def raise_file_limit() -> int:
    """Raises the process's soft limit of open files, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


def max_connections(given: int | None, num_files: int) -> int:
    """Chooses how many connections may be open.

    Args:
        given: The option; None = the default.
        num_files: How many files the process may open.

    Returns:
        The number.

    Raises:
        ValueError: There are not as many files.
    """
    most = max(num_files - _OTHER_FILES, num_files // 2, 1)
    if given is None:
        return min(DEFAULT_MAX_CONNECTIONS, most)
    if not 1 <= given <= most:
        raise ValueError(
            f"--max-connections is {given}; allowed: 1 to {most}, as the process may open "
            f"{num_files} files. `ulimit -n` raises that"
        )
    return given


class Connection(Protocol):
    """The methods of a connection that `Connections` calls."""

    def abort(self) -> None:
        """Closes it at once; `Connections.remove` follows in a later turn of the event loop."""


class Connections:
    """The open connections of a server, and which of them wait for their clients. For one event
    loop.

    Attributes:
        limit: The largest number of connections.
        num_open: How many are open.
    """

    def __init__(self, limit: int) -> None:
        """Starts without connections."""
        self.limit = limit
        self.num_open = 0
        self._on_change: Callable[[], None] = lambda: None
        # Since when; the longest wait first.
        self._waiting: OrderedDict[Connection, float] = OrderedDict()

    def on_change(self, call: Callable[[], None]) -> None:
        """Has `call` called whenever a connection ends or begins to wait."""
        self._on_change = call

    def note_waiting(self, connection: Connection) -> None:
        """A connection waits for its client: for a request, for its body, or to be read."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = time.monotonic()
        self._on_change()

    def note_busy(self, connection: Connection) -> None:
        """A connection does not wait for its client."""
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """A connection has ended."""
        self._waiting.pop(connection, None)
        self.num_open -= 1
        self._on_change()

    def close_longest_waiting(self) -> float | None:
        """Closes the connection that has waited longest for its client.

        Returns:
            0 if there was one; seconds until there is one; None if all are being served.
        """
        for connection, since in self._waiting.items():
            left_s = since + _LEAST_WAIT_S - time.monotonic()
            if left_s > 0:
                return left_s
            del self._waiting[connection]
            connection.abort()
            return 0.0
        return None


class Acceptor:
    """Takes connections from a listening socket as long as there is room for them.

    Without room, the connection that has waited longest for its client makes room for a new one. If
    all of them are being served, new ones wait in the kernel: nothing fails, and nothing spins.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """Listens; called in the event loop.

        Args:
            listener: A bound socket, which the caller closes.
            connections: Counts the connections. Each protocol calls `remove` when it has lost its
                connection.
            make_protocol: Makes the protocol of a connection.
        """
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_reading = False
        self._is_closed = False
        self._logged = -_LOG_INTERVAL_S
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        connections.on_change(self._note_change)
        self._resume()

    def close(self) -> None:
        """Takes no more connections."""
        self._is_closed = True
        self._pause(None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._connections.num_open >= self._connections.limit:
                self._make_room(None)
                return
            try:
                taken, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._make_room(error.strerror)
                return
            taken.setblocking(False)
            self._connections.num_open += 1
            task = self._loop.create_task(self._connect(taken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, taken: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, taken)
        except OSError:  # the client has gone
            taken.close()
            self._connections.num_open -= 1

    def _make_room(self, lack: str | None) -> None:
        """Closes a connection for a new one, or waits until one can be closed.

        Args:
            lack: Why none could be accepted; None = the limit is reached.
        """
        wait_s = self._connections.close_longest_waiting()
        self._log(
            "%d connections are open, and no more are accepted: %s; %s",
            self._connections.num_open,
            lack or "--max-connections is reached",
            "all are being served, and new ones wait"
            if wait_s is None
            else "those that have waited longest for their clients are closed for new ones",
        )
        # After 0, its end follows in the next turn.
        if wait_s != 0:
            self._pause(_RETRY_S if wait_s is None and lack else wait_s)

    def _note_change(self) -> None:
        # Until the end of a pause with a time, only the end of a connection makes room.
        has_room = self._connections.num_open < self._connections.limit
        if not self._is_reading and (self._retry is None or has_room):
            self._resume()

    def _resume(self) -> None:
        self._cancel_retry()
        if not (self._is_reading or self._is_closed):
            self._is_reading = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self, retry_s: float | None) -> None:
        """Takes no connections until `_note_change`, or for some seconds."""
        self._cancel_retry()
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._listener.fileno())
        if retry_s is not None and not self._is_closed:
            self._retry = self._loop.call_later(retry_s, self._resume)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _log(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_INTERVAL_S:
            self._logged = now
            _logger.warning(message, *values)
