# SPDX-License-Identifier: Apache-2.0
"""Hostile grammars beside other requests: nothing waits for them, and all ends within bounds."""

from __future__ import annotations

import json
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import paceline.grammar_queue
from hostile_grammars import children, resident_bytes, slow_schema, trial_pid, wait_for_children
from paceline import LLM
from paceline.console import EXIT_OK
from paceline.demo import find_demo
from paceline.running_llm import internals
from paceline.structured_outputs import StructuredOutputsParams
from running_server import RunningServer
from test_grammar_limits import random_lark, random_regex, random_schema
from test_server_options import port_of, serve

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PLAIN = {"prompt": "x = ", "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    demo = find_demo("draft_model")
    with LLM(demo.target, max_model_len=1024) as llm, RunningServer(llm) as server:
        server.result(COMPLETIONS, PLAIN | {"guided_regex": "warm"})
        yield server


def hostile(index: int) -> dict[str, Any]:
    return PLAIN | {"guided_json": slow_schema(index)}


def timed(server: RunningServer, body: dict[str, Any]) -> float:
    begin = time.monotonic()
    server.result(COMPLETIONS, body)
    return time.monotonic() - begin


@pytest.mark.serial
def test_plain_requests_do_not_wait_for_hostile_grammars(server: RunningServer) -> None:
    server.result(COMPLETIONS, PLAIN | {"guided_choice": ["known"]})
    before, pid = resident_bytes(), trial_pid(server.llm)
    answers: list[tuple[int, Any]] = []

    def attack(index: int) -> None:
        answers.append(server.ask(COMPLETIONS, hostile(index)))

    threads = [threading.Thread(target=attack, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    wait_for_children(server.llm, 2)
    plain, known, most = [], [], 0
    while any(thread.is_alive() for thread in threads):
        plain.append(timed(server, PLAIN))
        known.append(timed(server, PLAIN | {"guided_choice": ["known"]}))
        tried = children(pid)
        assert len(tried) <= 4  # two, and those that the system is ending
        most = max(most, resident_bytes() - before + sum(map(resident_bytes, tried)))
    for thread in threads:
        thread.join()
    # Eight of them take 8 s on two free cores; no request waits for even one of them.
    assert statistics.median(plain) < 0.5 and max(plain) < 1.5, sorted(plain)
    assert statistics.median(known) < 0.5 and max(known) < 1.5, sorted(known)
    assert most < 500 << 20
    for status, answer in answers:
        assert status == 400, answer
        assert "takes more than 2 s of CPU time or 128 MiB to compile" in answer["error"]["message"]
        assert answer["error"]["param"] == "structured_outputs"
    server.wait_until_idle()


@pytest.mark.serial
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_ends_its_compilation(
    server: RunningServer, is_streamed: bool
) -> None:
    body = hostile(20 + is_streamed) | {"stream": is_streamed}
    data = json.dumps(body).encode()
    with server.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
        )
        wait_for_children(server.llm, 1)
    wait_for_children(server.llm, 0, timeout_s=10)
    # It was not judged, but ended.
    params = StructuredOutputsParams(json=body["guided_json"])
    assert internals(server.llm).requests.grammars.find(params) is None
    server.wait_until_idle()


@pytest.mark.serial
def test_too_many_grammars_at_a_time_are_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline.grammar_queue, "MAX_WAITING", 1)
    clients = [server.connect() for _ in range(3)]
    try:
        for index, client in enumerate(clients):
            data = json.dumps(hostile(30 + index)).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(data), data)
            )
        wait_for_children(server.llm, 2)
        with server.send(COMPLETIONS, hostile(40)) as response:
            answer = json.loads(response.read())
            assert response.status == 429 and response.headers["retry-after"] == "1", answer
        assert answer["error"]["code"] == "queue_full"
        assert "1 grammars of structured_outputs wait to be compiled" in answer["error"]["message"]
        assert timed(server, PLAIN) < 1.5
    finally:
        for client in clients:
            client.close()
    wait_for_children(server.llm, 0)
    server.wait_until_idle()


@pytest.mark.serial
def test_sigterm_does_not_wait_for_a_compilation() -> None:
    with serve("--port", "0") as process:
        try:
            port = port_of(process)
            data = json.dumps(hostile(50) | {"max_tokens": 4}).encode()
            client = socket.create_connection(("127.0.0.1", port), 30)
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(data), data)
            )
            (trials,) = children_when_there_are(process.pid)
            children_when_there_are(trials)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            answer = client.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"the server is about to end" in answer, answer
            assert process.wait(30) == EXIT_OK
            assert time.monotonic() - begin < 5
            client.close()
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while resident_bytes(trials):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_when_there_are(pid: int) -> list[int]:
    deadline = time.monotonic() + 20
    while not (found := children(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_contradictions_are_the_requests_fault(server: RunningServer) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    contradictions: list[dict[str, Any]] = [
        {"guided_json": schema, "guided_regex": "a"},
        {"response_format": form, "guided_choice": ["a"]},
        {"response_format": form, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"regex": "a", "json": schema}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": None}},
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"guided_json": {"type": "string", "minLength": 5, "maxLength": 3}},
        {"guided_json": {"type": "array", "minItems": 2, "maxItems": 1}},
        {"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"guided_json": {"allOf": [{"minimum": 4, "type": "integer"}, {"maximum": 3}]}},
        {"guided_json": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}},
        {"guided_json": {"enum": []}},
        {"guided_json": {"type": "object", "required": ["a"], "additionalProperties": False}},
        {"guided_json": {"type": "integer", "x-guidance": {"item_separator": 3}}},
        {"guided_regex": "a", "bad_words": ["a"]},
        {"guided_regex": "a", "allowed_token_ids": [7]},
        {"guided_choice": ["a"], "ignore_eos": True},
        {"guided_grammar": "start: start"},
        {"guided_grammar": "start: A\nA: /[^\\s\\S]/"},
    ]
    for body in contradictions:
        status, answer = server.ask(COMPLETIONS, PLAIN | body)
        assert status == 400 and answer["error"]["message"], (body, status, answer)
    assert server.result(COMPLETIONS, PLAIN | {"guided_choice": ["ok"]})


@pytest.mark.parametrize("seed", range(3))
def test_random_input_is_no_internal_error(server: RunningServer, seed: int) -> None:
    rng = random.Random(1000 + seed)
    fields = ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "response_format",
              "structured_outputs", "allowed_token_ids", "bad_words", "logit_bias", "min_tokens",
              "stop")  # fmt: skip
    for _ in range(60):
        body: dict[str, Any] = {}
        for field in rng.sample(fields, rng.randint(1, 2)):
            body[field] = rng.choice(
                (
                    random_schema(rng),
                    random_regex(rng),
                    random_lark(rng),
                    [random_regex(rng), random_lark(rng)],
                    {"type": "json_schema", "json_schema": {"schema": random_schema(rng)}},
                    {rng.choice(("json", "regex", "grammar", "choice")): random_schema(rng)},
                    [rng.randint(-1, 5000)],
                )
            )
        status, answer = server.ask(COMPLETIONS, PLAIN | body)
        assert status in (200, 400), (body, status, answer)
    server.wait_until_idle()
