# SPDX-License-Identifier: Apache-2.0
"""A log whose reader has stopped holds up nobody."""

from __future__ import annotations

import http.client
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from paceline.background_log import BackgroundHandler
from time_limits import HANG_LIMIT_S

LONG = "x" * 1000


def read_for(descriptor: int, until: bytes) -> bytes:
    """What a pipe gives up to a text."""
    seen = b""
    while until not in seen:
        part = os.read(descriptor, 1 << 16)
        assert part
        seen += part
    return seen


@pytest.mark.serial
def test_lines_beyond_the_queue_are_counted() -> None:
    reader, writer = os.pipe()
    handler = BackgroundHandler(writer, max_lines=10)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.Logger("some")
    logger.addHandler(handler)
    started = time.monotonic()
    for number in range(2000):  # the pipe has room for some 65 of these
        logger.warning("%d %s", number, LONG)
    assert time.monotonic() - started < 10
    seen = read_for(reader, b"read in time\n").decode()
    handler.flush()
    logger.warning("afterwards")
    seen += read_for(reader, b"afterwards\n").decode()
    lost = sum(int(found) for found in re.findall(r"^(\d+) lines of the log", seen, re.M))
    written = [int(found) for found in re.findall(r"^WARNING (\d+) x{1000}$", seen, re.M)]
    assert written == sorted(written) and len(written) + lost == 2000
    assert lost > 1000 and seen.endswith("WARNING afterwards\n")


def test_the_last_lines_are_written_before_the_exit() -> None:
    code = (
        "import logging; from paceline.background_log import start_background_log; "
        "log = start_background_log('INFO', '%(message)s'); log.tell('first'); "
        "[logging.info('%d', i) for i in range(1000)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["first", *map(str, range(1000))]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_server_whose_log_nobody_reads_serves_and_ends(is_closed: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", "--port", str(port), "--access-log"]
    command += ["--max-model-len", "128"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            read_for(process.stderr.fileno(), b"serving")
            if is_closed:
                process.stderr.close()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_LIMIT_S)
            # Each line has the id, so that these are some 200 KB.
            for _ in range(1000):
                connection.request("GET", "/version", headers={"x-request-id": "i" * 128})
                response = connection.getresponse()
                response.read()
                assert response.status == 200
            connection.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_LIMIT_S) == 0
        finally:
            process.kill()
