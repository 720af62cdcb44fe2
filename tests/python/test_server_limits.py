# SPDX-License-Identifier: Apache-2.0
"""What the server refuses, at once and by name; clients that go away; and the end of the server."""

from __future__ import annotations

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
from running_server import JSON, RunningServer, read_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_BODY = 200_000
# Of one refusal, on two cores that other tests use too.
MAX_SECONDS = 0.1


@pytest.fixture(scope="module")
def server(plain_llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(
        plain_llm, max_body_bytes=MAX_BODY, read_timeout_s=0.5, max_queue=24
    ) as server:
        yield server
        server.wait_until_idle()


def completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": "a", **fields}


def chat(**fields: Any) -> tuple[str, Any]:
    return CHATS, {"messages": [{"role": "user", "content": "a"}], **fields}


def responses(**fields: Any) -> tuple[str, Any]:
    return "/v1/responses", {"input": "a", **fields}


def raw(text: str | bytes) -> tuple[str, Any]:
    return COMPLETIONS, text.encode() if isinstance(text, str) else text


def nested(depth: int) -> str:
    return '{"prompt": ' + "[" * depth + "]" * depth + "}"


# By field that the error names, or by status.
MALFORMED: list[tuple[str | int, tuple[str, Any]]] = [
    ("n", completion(n=10**9)),
    ("n", completion(n=0)),
    ("n", completion(n=-1)),
    ("n", completion(n=1.5)),
    ("n", completion(n="2")),
    ("n", completion(n=True)),
    ("n", completion(n=128)),  # more than the server ever holds
    ("max_tokens", completion(max_tokens=0)),
    ("max_tokens", completion(max_tokens=-5)),
    ("max_tokens", completion(max_tokens=2**40)),
    ("max_tokens", completion(max_tokens="all")),
    ("min_tokens", completion(min_tokens=17)),
    ("temperature", completion(temperature=-0.1)),
    ("temperature", completion(temperature=1e300)),
    ("temperature", completion(temperature="hot")),
    ("temperature", completion(temperature=[1])),
    ("top_p", completion(top_p=0)),
    ("top_p", completion(top_p=1.1)),
    ("top_k", completion(top_k=-2)),
    ("top_k", completion(top_k=2.5)),
    ("min_p", completion(min_p=2)),
    ("presence_penalty", completion(presence_penalty=3)),
    ("frequency_penalty", completion(frequency_penalty=-3)),
    ("repetition_penalty", completion(repetition_penalty=0)),
    ("seed", completion(seed=-1)),
    ("seed", completion(seed=2**64)),
    ("seed", completion(seed="x")),
    ("stop", completion(stop=[""])),
    ("stop", completion(stop=["x"] * 17)),
    ("stop", completion(stop="x" * 257)),
    ("stop", completion(stop=7)),
    ("stop", completion(stop=[7])),
    ("stop", completion(stop=list(range(30_000)))),
    ("stop_token_ids", completion(stop_token_ids=[-1])),
    ("stop_token_ids", completion(stop_token_ids=list(range(9)))),
    ("stop_token_ids", completion(stop_token_ids=[10**9])),
    ("logit_bias", completion(logit_bias={"x": 1})),
    ("logit_bias", completion(logit_bias={"-1": 1})),
    ("logit_bias", completion(logit_bias={"5": 101})),
    ("logit_bias", completion(logit_bias={str(10**9): 1})),
    ("logit_bias", completion(logit_bias={str(i): 1 for i in range(1025)})),
    ("logit_bias", completion(logit_bias=[1])),
    ("logprobs", completion(logprobs=-1)),
    ("logprobs", completion(logprobs=21)),
    ("logprobs", completion(logprobs=True)),
    ("bad_words", completion(bad_words=[" "])),
    ("allowed_token_ids", completion(allowed_token_ids=[-1])),
    ("allowed_token_ids", completion(allowed_token_ids=[10**6])),
    ("ignore_eos", completion(ignore_eos="yes")),
    ("skip_special_tokens", completion(skip_special_tokens=0)),
    ("stream", completion(stream="yes")),
    ("stream_options", completion(stream_options={"include_usage": True})),
    ("stream_options", completion(stream=True, stream_options=[])),
    ("include_usage", completion(stream=True, stream_options={"include_usage": 1})),
    ("usage", completion(stream=True, stream_options={"usage": True})),
    ("user", completion(user=7)),
    ("user", completion(user="x" * 513)),
    ("model", completion(model=7)),
    ("return_token_ids", completion(return_token_ids=1)),
    ("prompt", completion(prompt=None)),
    ("prompt", completion(prompt=[])),
    ("prompt", completion(prompt=7)),
    ("prompt", completion(prompt={"text": "a"})),
    ("prompt", completion(prompt=[[]])),
    ("prompt", completion(prompt=["a", 1])),
    ("prompt", completion(prompt=["a", None])),
    ("prompt", completion(prompt=[-1])),
    ("prompt", completion(prompt=[10**6])),
    ("prompt", completion(prompt=[2**70])),
    ("prompt", completion(prompt=[1, 2.5])),
    ("prompt", completion(prompt=[1, "a"])),
    ("prompt", completion(prompt=[1] * 3000)),
    ("prompt", completion(prompt="a" * 30_000)),
    ("prompt", completion(prompt=["a"] * 5000)),
    ("prompt", completion(prompt="\ud800")),
    ("prompt", completion(prompt="")),
    ("speculative", completion(speculative=[])),
    ("enabled", completion(speculative={"enabled": 2})),
    ("num_speculative_tokens", completion(speculative={"num_speculative_tokens": -1})),
    ("best_of", completion(best_of=2)),
    ("echo", completion(echo=True, stream=True)),
    ("echo", completion(echo=1)),
    ("suffix", completion(suffix="b")),
    ("guided_regex", completion(guided_regex=7)),
    ("guided_choice", completion(guided_choice=[])),
    ("guided_regex", completion(guided_regex="a", guided_json={})),
    ("structured_outputs", completion(structured_outputs={"structural_tag": "{}"})),
    ("structured_outputs", completion(structured_outputs={"regex": "a", "json": {}})),
    ("response_format", completion(response_format={"type": "xml"})),
    ("prompt_logprobs", completion(prompt_logprobs=65)),
    ("prompt_logprobs", completion(prompt_logprobs=1, stream=True)),
    ("echo", chat(echo=True)),
    ("use_beam_search", completion(use_beam_search=True)),
    ("truncate_prompt_tokens", completion(truncate_prompt_tokens=5)),
    ("messages", completion(messages=[])),
    ("top_kk", completion(top_kk=1)),
    ("top_kk", completion(top_kk=None)),
    ("__class__", completion(__class__="x")),
    ("chat_template", chat(chat_template="{{ 'a' * 1000000000000 }}")),
    ("chat_template_kwargs", chat(chat_template_kwargs=[1])),
    ("messages", chat(messages=None)),
    ("messages", chat(messages=[])),
    ("messages", chat(messages="hello")),
    ("messages", chat(messages=["hello"])),
    ("messages", chat(messages=[{"content": "a"}])),
    ("messages", chat(messages=[{"role": "user"}])),
    ("messages", chat(messages=[{"role": "wizard", "content": "a"}])),
    ("messages", chat(messages=[{"role": ["user"], "content": "a"}])),
    ("messages", chat(messages=[{"role": "user", "content": 7}])),
    ("messages", chat(messages=[{"role": "user", "content": "\udfff"}])),
    ("messages", chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
    ("messages", chat(messages=[{"role": "user", "content": [{"type": "dance"}]}])),
    ("messages", chat(messages=[{"role": "user", "content": "a"}] * 4097)),
    ("tools", chat(tools=[{"type": "function", "function": {"name": "f"}}])),
    ("tools", chat(tools={})),
    ("tools", chat(tools=[7])),
    ("tools", chat(tools=[{"type": "function", "function": {"name": "a b"}}])),
    ("tools", chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 1}}])),
    ("tools", chat(tools=[{"type": "function", "function": {"name": "f"}}] * 129)),
    ("tool_choice", chat(tool_choice="required")),
    ("tool_choice", chat(tool_choice={"type": "function", "function": {"name": "f"}})),
    ("parallel_tool_calls", chat(parallel_tool_calls=1)),
    ("messages", chat(messages=[{"role": "assistant", "tool_calls": 7}])),
    ("messages", chat(messages=[{"role": "assistant", "tool_calls": [{"function": {}}]}])),
    (
        "messages",
        chat(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                }
            ]
        ),
    ),
    ("chat_template", chat(chat_template="{{ 1 }}")),
    ("chat_template_kwargs", chat(chat_template_kwargs=[])),
    ("chat_template_kwargs", chat(chat_template_kwargs={"messages": []})),
    ("add_generation_prompt", chat(add_generation_prompt=True, continue_final_message=True)),
    ("top_logprobs", chat(top_logprobs=2)),
    ("top_logprobs", chat(logprobs=True, top_logprobs=100)),
    ("logprobs", chat(logprobs=2)),
    ("max_completion_tokens", chat(max_completion_tokens=3, max_tokens=4)),
    ("max_completion_tokens", chat(max_completion_tokens=0)),
    ("reasoning_effort", chat(reasoning_effort="low")),
    ("response_format", chat(response_format={"type": "json_schema"})),
    ("prompt", chat(prompt="a")),
    ("tokens", ("/detokenize", {"tokens": "a"})),
    ("tokens", ("/detokenize", {"tokens": [-1]})),
    ("messages", ("/tokenize", {})),
    ("prompt", ("/tokenize", {"prompt": 7})),
    (400, raw("")),
    (400, raw("{")),
    (400, raw("[]")),
    (400, raw("null")),
    (400, raw('"a"')),
    (400, raw('{"prompt": "a", "prompt": "b"}')),
    (400, raw('{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}')),
    (400, raw('{"prompt": "a", "temperature": NaN}')),
    (400, raw('{"prompt": "a", "temperature": Infinity}')),
    (400, raw('{"prompt": "a", "temperature": -Infinity}')),
    (400, raw('{"prompt": "a", "temperature": 1e400}')),
    (400, raw('{"prompt": "a", "seed": ' + "9" * 5000 + "}")),
    (400, raw(nested(63))),
    (400, raw(nested(65))),
    (400, raw(nested(50_000))),
    (400, raw('{"a":' * 20_000 + "1" + "}" * 20_000)),
    (400, raw(b'{"prompt": "\xff\xfe"}')),
    (400, raw(b"\x00" * 100)),
    (413, raw(b" " * (MAX_BODY + 1))),
    (404, completion(model="other")),
    (404, ("/v1/nonesuch", {})),
    (404, ("/v1/embeddings", {})),
    ("input", responses(input=None)),
    ("input", responses(input=[])),
    ("input", responses(input=7)),
    ("input", responses(input=[7])),
    ("input", responses(input=[{"role": "wizard", "content": "a"}])),
    ("input", responses(input=[{"role": "user", "content": 7}])),
    ("input", responses(input=[{"role": "user", "content": [{"type": "input_image"}]}])),
    ("input", responses(input=[{"type": "web_search_call"}])),
    ("input", responses(input=[{"type": "function_call", "name": 7}])),
    ("input", responses(input=[{"type": "function_call_output"}])),
    ("input", responses(input="\ud800")),
    ("input", responses(input=[{"role": "user", "content": "a"}] * 4097)),
    ("instructions", responses(instructions=7)),
    ("max_output_tokens", responses(max_output_tokens=0)),
    ("max_tokens", responses(max_tokens=5)),
    ("n", responses(n=2)),
    ("store", responses(store=True)),
    ("previous_response_id", responses(previous_response_id="resp_1")),
    ("text", responses(text={"format": {"type": "xml"}})),
    ("reasoning", responses(reasoning={"effort": "low"})),
    ("truncation", responses(truncation="auto")),
    ("tools", responses(tools=[{"type": "web_search"}])),
    ("tools", responses(tools=[{"type": "function", "name": "f"}])),
    ("metadata", responses(metadata=7)),
    (405, ("/v1/models", {})),
]


def test_malformed_requests_are_refused_at_once(server: RunningServer) -> None:
    """All in one test, one after the other: none of them harms those that follow."""
    before = server.llm.stats()
    wrong = []
    for expected, (path, body) in MALFORMED:
        seconds = []
        for _ in range(3):  # a busy machine may be slow at times
            started = time.monotonic()
            status, answer = server.ask(path, body)
            seconds.append(time.monotonic() - started)
            if seconds[-1] < MAX_SECONDS:
                break
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert len(error["message"]) < 2100
        is_right = status == (expected if isinstance(expected, int) else 400)
        if isinstance(expected, str):
            is_right &= error["param"] == expected
        if not is_right or min(seconds) >= MAX_SECONDS:
            shown = body if isinstance(body, bytes) else json.dumps(body)
            wrong.append(f"{path} {shown[:80]!r}: {status} {min(seconds):.3f} s {error}")
    distinct = {
        (path, body if isinstance(body, bytes) else json.dumps(body))
        for _, (path, body) in MALFORMED
    }
    assert len(distinct) == len(MALFORMED) >= 150
    assert wrong == []
    after = server.llm.stats()
    # Nothing reached the engine, which goes on.
    assert after["num_finished"] == before["num_finished"]
    assert after["num_cancelled"] == before["num_cancelled"]
    assert server.result(COMPLETIONS, {"prompt": "a"})["choices"][0]["finish_reason"] == "length"


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
    with RunningServer(plain_llm, api_key="secret") as server:
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
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
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
        assert "closed while a request was running" in last["error"]["message"]


def read_events_after(first: bytes, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """All events of a stream whose first line was read."""
    assert response.readline() == b"\n"
    yield json.loads(first[6:])
    yield from read_events(response)
