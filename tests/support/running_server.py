# SPDX-License-Identifier: Apache-2.0
"""An HTTP server in a thread of the tests, and a client for it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from paceline import LLM, AsyncLLM
from paceline.demo import find_demo
from paceline.server.run import Server
from paceline.server.service import Limits, Service
from paceline.server.sockets import open_socket
from paceline.server.traces import Traces
from time_limits import HANG_LIMIT_S

#: Seconds that requests have to end when a server closes.
DRAIN_S = 30.0
JSON = {"content-type": "application/json"}


def open_demo(**engine: Any) -> LLM:
    """The demo with a draft model, on the CPU."""
    demo = find_demo("draft_model")
    settings = {"max_num_seqs": 8, "device": "cpu", "show_progress": False} | engine
    return LLM(demo.target, speculative_config=demo.speculative_config(), **settings)


class RunningServer:
    """Serves an LLM until the `with` block ends. The LLM stays open."""

    def __init__(
        self,
        llm: LLM,
        *,
        api_keys: Sequence[str] = (),
        cors_origins: Sequence[str] = (),
        salts_by_key: bool = False,
        shows_cached_tokens: bool = True,
        allows_drafter_changes: bool = False,
        tool_call_parser: str = "auto",
        traces: Traces | None = None,
        **limits: Any,
    ) -> None:
        self.llm = llm
        self.allm = AsyncLLM.from_llm(llm)
        self.service = Service(
            self.allm,
            ["served", "alias"],
            limits=Limits(**limits),
            api_keys=api_keys,
            cors_origins=cors_origins,
            salts_by_key=salts_by_key,
            shows_cached_tokens=shows_cached_tokens,
            allows_drafter_changes=allows_drafter_changes,
            has_vllm_metrics=True,
            has_access_log=True,
            tool_call_parser=tool_call_parser,
            traces=traces,
        )
        opened = open_socket("127.0.0.1", 0)
        self.port = opened.getsockname()[1]
        self._is_ready = threading.Event()
        self._server = Server(
            self.service, opened, drain_timeout_s=DRAIN_S, on_ready=self._note_loop
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"handles_signals": False})

    def _note_loop(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_ready.set()

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self._is_ready.wait(HANG_LIMIT_S)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_soon()
        self._thread.join(HANG_LIMIT_S)
        assert not self._thread.is_alive()
        self.service.close()
        self.allm.close()

    def stop_soon(self) -> None:
        """Does what SIGTERM does."""
        self.loop.call_soon_threadsafe(self._server.stop)

    def connect(self) -> socket.socket:
        """Opens a connection."""
        return socket.create_connection(("127.0.0.1", self.port), HANG_LIMIT_S)

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, headers: Any = None
    ) -> http.client.HTTPResponse:
        """Sends a request, as JSON unless it is bytes; returns the response, not yet read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_LIMIT_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(
            method or ("GET" if data is None else "POST"), path, data, JSON | (headers or {})
        )
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Sends a request and returns its status and its JSON."""
        with self.send(path, body, **options) as response:
            text = response.read()
            return response.status, json.loads(text) if text else None

    def result(self, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of a request that succeeds."""
        status, answer = self.ask(path, body, **options)
        assert status == 200, answer
        return answer

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a streamed request."""
        with self.send(path, body | {"stream": True}) as response:
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(read_events(response))

    def wait_until_idle(self) -> None:
        """Waits until no output runs, and checks that all blocks are free."""
        deadline = time.monotonic() + HANG_LIMIT_S
        while self.service.admission.num_open or self._num_running():
            assert time.monotonic() < deadline, (self.service.admission.num_open, self.llm.stats())
            time.sleep(0.002)
        assert all(group["held_blocks"] == 0 for group in self.llm.stats()["kv_groups"])
        assert self.llm._executor.check_integrity() == ""

    def _num_running(self) -> int:
        stats = self.llm.stats()
        return int(stats["num_running"] + stats["num_waiting"])


def read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream up to [DONE], which must end it."""
    while line := response.readline():
        assert line.startswith(b"data: ") and response.readline() == b"\n", line
        if line == b"data: [DONE]\n":
            assert response.read() == b""
            return
        yield json.loads(line[6:])
    raise AssertionError("the stream has no [DONE]")
