# SPDX-License-Identifier: Apache-2.0
"""Connections of the server: however many there are, /health answers and the log stays short."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import LLM
from paceline.server.sockets import max_connections
from running_server import RunningServer
from time_limits import HANG_LIMIT_S

COMPLETIONS = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LIMIT = 24


@contextlib.contextmanager
def many_connections(port: int, number: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections on which a client sends the same and reads nothing."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(number):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), HANG_LIMIT_S))
            with contextlib.suppress(OSError):  # it has been closed
                one.sendall(sent)
            opened.append(one)
        yield opened


def num_closed(connections: list[socket.socket]) -> int:
    """How many of them the server has closed; what they have received is read."""
    closed = 0
    for one in connections:
        one.setblocking(False)
        try:
            while one.recv(1 << 16):
                pass
            closed += 1
        except BlockingIOError:
            pass
        except OSError:
            closed += 1
    return closed


@pytest.mark.serial
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost: local",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        HEAD + b"content-length: 100\r\n\r\n{",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200,  # much more than buffers have room for
    ],
    ids=["nothing", "half a head", "a request", "half a body", "no reader"],
)
def test_others_are_served_while_idle_connections_hold_all_places(
    plain_llm: LLM, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        RunningServer(plain_llm, max_connections=LIMIT) as server,
        many_connections(server.port, 3 * LIMIT, sent) as held,
    ):
        started = time.monotonic()
        for _ in range(3):
            assert server.ask("/health")[0] == 200
            assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
        assert time.monotonic() - started < 15
        assert num_closed(held) >= 2 * LIMIT
        assert num_closed(held[:LIMIT]) == LIMIT  # those that have waited longest
    lines = [line for line in caplog.messages if "--max-connections is reached" in line]
    assert len(lines) == 1


def test_new_connections_wait_while_all_are_served(
    plain_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of those that are served is closed, however long that takes."""
    may_end = threading.Event()

    def convert() -> dict[str, bool]:
        assert may_end.wait(HANG_LIMIT_S)
        return {"has_waited": True}

    monkeypatch.setattr("paceline.server.tokens.read_tokenize", lambda *_: convert)
    with (
        RunningServer(plain_llm, max_connections=2) as server,
        ThreadPoolExecutor(2) as pool,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(may_end.set)
        served = [pool.submit(server.result, "/tokenize", {"prompt": "a"}) for _ in range(2)]
        deadline = time.monotonic() + HANG_LIMIT_S
        while server.service.admission.num_open < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        third = stack.enter_context(server.connect())
        third.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert select.select([third], [], [], 0.5)[0] == []
        may_end.set()
        assert [one.result(HANG_LIMIT_S) for one in served] == [{"has_waited": True}] * 2
        assert third.recv(1000).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_reads_is_given_up(
    plain_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.protocol.SLOW_READER_S", 0.2)
    with RunningServer(plain_llm, read_timeout_s=0.5) as server, server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200)
        with pytest.raises(ConnectionResetError):
            for _ in range(int(HANG_LIMIT_S * 10)):
                connection.sendall(b" ")
                time.sleep(0.1)


@pytest.mark.serial
def test_a_client_that_reads_slowly_gets_the_whole_answer(
    plain_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.protocol.SLOW_READER_S", 0.5)
    request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with RunningServer(plain_llm, read_timeout_s=0.5) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sendall(request * 99 + last)
        parts = []
        for _ in range(30):  # three times as long as a client that reads nothing is waited for
            time.sleep(0.05)
            parts.append(connection.recv(1 << 14))
        while part := connection.recv(1 << 20):
            parts.append(part)
    assert b"".join(parts).count(b"HTTP/1.1 200 OK") == 100


SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from paceline.__main__ import main
sys.argv[:3] = ["paceline"]
sys.exit(main())
"""


@contextlib.contextmanager
def serve(soft: int, hard: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of the demo in a process that may open so many files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(soft), str(hard), "serve", "--port", str(port)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate()


def test_file_descriptors_do_not_run_out() -> None:
    with serve(128, 128, "--max-model-len", "128") as (process, port):
        assert process.stderr is not None
        while "serving" not in process.stderr.readline():
            assert process.poll() is None
        with many_connections(port, 300, b""):
            time.sleep(1)
            for _ in range(2):
                with socket.create_connection(("127.0.0.1", port), HANG_LIMIT_S) as asks:
                    asks.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    assert asks.recv(100).startswith(b"HTTP/1.1 200")
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 128
            process.send_signal(signal.SIGTERM)
            rest = process.communicate(timeout=HANG_LIMIT_S)[1]
        assert process.returncode == 0
        assert "Traceback" not in rest and len(rest) < 5000


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 900)); "
        "from paceline.server.sockets import raise_file_limit; "
        "print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "900 (900, 900)\n"


def test_the_default_leaves_files_for_others() -> None:
    assert max_connections(None, 65_536) == 4096
    assert max_connections(None, 1024) == 768
    assert max_connections(None, 100) == 50
    assert max_connections(700, 1024) == 700
    for wrong in (0, -1, 769):
        with pytest.raises(ValueError, match=r"--max-connections is .*allowed: 1 to 768, .*ulimit"):
            max_connections(wrong, 1024)


def test_more_connections_than_files_are_refused_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with serve(256, 256, "--max-connections", "200", "--model", str(tmp_path)) as (process, _):
        _, error = process.communicate(timeout=HANG_LIMIT_S)
    assert most >= 256 and process.returncode == 2
    assert "--max-connections is 200; allowed: 1 to 128, as the process may open 256" in error
