# SPDX-License-Identifier: Apache-2.0
"""Limits of the server: keys, queue, HTTP; clients that go away; and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, DeviceError
from paceline.request import Request
from paceline.server.protocol import Corked
from running_server import JSON, RunningServer, read_events
from time_limits import HANG_LIMIT_S

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_BODY = 200_000


@pytest.fixture(scope="module")
def server(plain_llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(
        plain_llm, max_body_bytes=MAX_BODY, read_timeout_s=0.5, max_queue=24
    ) as server:
        yield server
        server.wait_until_idle()


def test_values_that_mean_nothing_are_taken(server: RunningServer) -> None:
    """Clients send fields with their defaults."""
    neutral = {
        "echo": False,
        "suffix": None,
        "best_of": None,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "stop": None,
        "use_beam_search": False,
        "user": "me",
    }
    server.result(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | neutral)


def test_a_prompt_that_is_too_long_has_a_code(server: RunningServer) -> None:
    """Clients shorten a conversation when they see it."""
    for body in ({"prompt": [1] * 3000}, {"prompt": "a" * 30_000}):
        status, answer = server.ask(COMPLETIONS, body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert server.ask(COMPLETIONS, {"prompt": 7})[1]["error"]["code"] is None


def test_an_unknown_field_gets_a_hint(server: RunningServer) -> None:
    _, answer = server.ask(COMPLETIONS, {"prompt": "a", "max_token": 3})
    assert "did you mean max_tokens?" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_other_content_types_are_refused(server: RunningServer) -> None:
    """A web page can send these without asking."""
    status, _ = server.ask(COMPLETIONS, b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert status == 415


def test_a_name_of_another_host_is_refused_without_a_key(server: RunningServer) -> None:
    for host, expected in (("evil.example", 403), ("localhost:1", 200), ("[::1]:80", 200)):
        assert server.ask("/v1/models", headers={"host": host})[0] == expected


def test_the_key_is_needed_everywhere_but_for_health(plain_llm: LLM) -> None:
    with RunningServer(plain_llm, api_keys=["secret"]) as server:
        assert server.ask("/health")[0] == 200
        for path, body in (
            ("/v1/models", None),
            ("/version", None),
            ("/nonesuch", None),
            ("/tokenize", {"prompt": "a"}),
            (COMPLETIONS, {"prompt": "a"}),
        ):
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                status, answer = server.ask(path, body, headers=given)
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret", "host": "any.example"}
        assert server.ask(COMPLETIONS, {"prompt": "a"}, headers=right)[0] == 200


@pytest.mark.serial
def test_a_full_queue_answers_429(server: RunningServer) -> None:
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 32}
    with server.send(COMPLETIONS, long | {"stream": True}) as running:
        assert running.status == 200
        started = time.monotonic()
        with server.send(COMPLETIONS, {"prompt": "b"}) as refused:
            assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
            assert json.loads(refused.read())["error"]["code"] == "queue_full"
        assert time.monotonic() - started < 1
        assert server.service.admission.num_open == 32
        running.close()
    server.wait_until_idle()
    assert server.ask(COMPLETIONS, {"prompt": "b"})[0] == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(server: RunningServer, streams: bool) -> None:
    cancelled = server.llm.stats()["num_cancelled"]
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 8, "stream": streams}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_LIMIT_S)
    connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
    while server.llm.stats()["num_running"] < 8:
        time.sleep(0.001)
    connection.close()
    server.wait_until_idle()
    assert server.llm.stats()["num_cancelled"] == cancelled + 8


def test_a_client_that_goes_away_harms_no_other(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "seed": 1, "stream": True}
    alone = [event["choices"][0]["text"] for event in server.events(COMPLETIONS, body)]
    with server.send(COMPLETIONS, body) as stays:
        for _ in range(5):
            with server.send(COMPLETIONS, body | {"n": 2}) as leaves:
                leaves.readline()
        texts = [event["choices"][0]["text"] for event in read_events(stays)]
    assert "".join(texts) == "".join(alone)


def test_a_client_that_reads_nothing_is_cut_off(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.connection.SLOW_READER_S", 0.3)
    # Some 20 MB: more than the buffers of all kinds between the two ends.
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 8, "logprobs": 20}
    with server.send(COMPLETIONS, body | {"stream": True}) as response:
        assert response.status == 200
        server.wait_until_idle()
        with pytest.raises((OSError, http.client.HTTPException)):  # the stream has no end
            response.read()


def test_a_request_that_fails_ends_alone(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    whole = server.result(COMPLETIONS, body)["choices"][0]["text"]
    push = Request.push

    def fails_for_two(request: Request, event: Any) -> Any:
        if request.params.seed == 2 and len(request.token_ids) > 50:
            raise RuntimeError("no such luck")
        return push(request, event)

    monkeypatch.setattr(Request, "push", fails_for_two)
    with server.send(COMPLETIONS, body | {"stream": True}) as other:
        status, answer = server.ask(COMPLETIONS, body | {"seed": 2})
        assert status == 503 and answer["error"]["message"] == "no such luck"
        *events, last = server.events(COMPLETIONS, body | {"seed": 2})
        assert len(events) > 10 and last["error"]["type"] == "server_error"
        texts = [event["choices"][0]["text"] for event in read_events(other)]
    assert "".join(texts) == whole
    server.wait_until_idle()


@pytest.mark.serial
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nhost: local",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea",
    ],
)
def test_slow_headers_end_the_connection(server: RunningServer, sent: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        started = time.monotonic()
        while connection.recv(1000):
            pass
        assert 0.2 < time.monotonic() - started < 5


def test_a_slow_body_is_refused(server: RunningServer) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    with server.connect() as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 20_000 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    ],
)
def test_malformed_http_is_refused(server: RunningServer, sent: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")
    assert server.ask("/health")[0] == 200


def test_a_body_without_a_length_is_limited(server: RunningServer) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(head + piece * 5)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_failed_engine_is_not_healthy(target_dir: Path) -> None:
    """A supervisor that polls /health can restart the server."""
    with LLM(target_dir, device="cpu", max_num_seqs=1) as llm, RunningServer(llm) as server:
        assert server.ask("/health")[0] == 200
        llm._dispatcher._failure = DeviceError("the device has stopped")
        for path, body in (
            ("/health", None),
            ("/metrics", None),
            (COMPLETIONS, {"prompt": "a"}),
            (COMPLETIONS, {"prompt": "a", "stream": True}),
            (CHATS, {"messages": [{"role": "user", "content": "a"}]}),
        ):
            status, answer = server.ask(path, body)
            assert status == 503 and answer["error"]["message"] == "the device has stopped", path
        assert server.ask("/v1/models")[0] == 200


def test_requests_go_on_while_the_server_ends(plain_llm: LLM) -> None:
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "seed": 1}
    with RunningServer(plain_llm) as server:
        whole = server.result(COMPLETIONS, body)["choices"][0]["text"]
        running = server.send(COMPLETIONS, body | {"stream": True})
        first = running.readline()
        server.stop_soon()
        with running:
            rest = list(read_events_after(first, running))
        assert "".join(event["choices"][0]["text"] for event in rest) == whole
        # Another one gets 503, until the socket is closed.
        with contextlib.suppress(OSError):
            assert server.ask(COMPLETIONS, body)[0] == 503
            assert server.ask("/health")[0] == 503
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_a_second_signal_cuts_requests_off(plain_llm: LLM) -> None:
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 8, "stream": True}
    with RunningServer(plain_llm) as server:
        running = server.send(COMPLETIONS, body)
        first = running.readline()
        server.stop_soon()
        server.stop_soon()
        with running:
            *_, last = read_events_after(first, running)
        assert last["error"]["type"] == "server_error"
        message = last["error"]["message"]
        assert message == "the server was closed while a request was running"


def read_events_after(first: bytes, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """All events of a stream whose first line was read."""
    assert response.readline() == b"\n"
    yield json.loads(first[6:])
    yield from read_events(response)


def test_a_fault_of_ours_is_one_request_s_and_is_logged(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("lost")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.server.app.read_completion", fails)
        status, answer = server.ask(COMPLETIONS, {"prompt": "a"})
    assert status == 500 and "internal error: KeyError" in answer["error"]["message"]
    assert "/v1/completions failed" in caplog.text and "fails" in caplog.text
    server.result(COMPLETIONS, {"prompt": "a", "max_tokens": 1})


def test_what_is_written_in_one_turn_of_the_loop_is_sent_at_once() -> None:
    class Transport:
        def __init__(self) -> None:
            self.sent: list[bytes] = []
            self.is_closed = False

        def write(self, data: bytes) -> None:
            self.sent.append(data)

        def close(self) -> None:
            self.is_closed = True

        def is_closing(self) -> bool:
            return self.is_closed

    async def main() -> None:
        transport = Transport()
        corked = Corked(transport, asyncio.get_running_loop())
        corked.write(b"a")
        corked.write(b"b")
        assert transport.sent == [] and not corked.is_closing()
        await asyncio.sleep(0)
        assert transport.sent == [b"ab"]
        corked.write(b"c")
        corked.close()
        assert transport.sent == [b"ab", b"c"] and corked.is_closing()
        corked.write(b"d")
        await asyncio.sleep(0)
        assert transport.sent == [b"ab", b"c"]

    asyncio.run(main())
