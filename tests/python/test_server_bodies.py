# SPDX-License-Identifier: Apache-2.0
"""Large and hostile bodies: what they cost is bounded, and the event loop goes on meanwhile."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loop_lag import LoopLag
from paceline import LLM
from paceline.sampling import SamplingParams
from paceline.server.admission import MAX_SHORT_BODY
from paceline.server.bodies import parse_object
from paceline.server.errors import ApiError
from paceline.server.fields import ServedModel
from paceline.server.garbage import without_collections
from paceline.server.json_values import JsonRefused, Quota, parse_json
from paceline.server.response_fields import read_response
from paceline.server.service import DEFAULT_MAX_BODY_BYTES
from paceline.server.thinking import Thinking
from running_server import JSON, RunningServer, open_demo

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# 50 ms, on a machine that is three times as slow.
MAX_STALL_S = 3 * 0.05
NUM_ATTEMPTS = 5
CALL = '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_demo() as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(llm, tool_call_parser="hermes", max_queue=24) as server:
        yield server
        server.wait_until_idle()
        assert server.service.body_bytes.num_held == 0


def full(head: str, piece: str, tail: str) -> bytes:
    """As long a body as the server takes."""
    room = DEFAULT_MAX_BODY_BYTES - len(head) - len(tail)
    return (head + piece * (room // len(piece)) + tail).encode()


HOSTILE: dict[str, tuple[str, int, bytes]] = {
    "brackets": (COMPLETIONS, 400, full('{"prompt":', "[", "")),
    "lists": (COMPLETIONS, 400, full('{"prompt":[', "[],", "1]}")),
    "deep lists": (COMPLETIONS, 400, full('{"prompt":[', "[" * 60 + "]" * 60 + ",", "1]}")),
    "objects": (COMPLETIONS, 400, full('{"prompt":[', "{},", "1]}")),
    "strings": (COMPLETIONS, 400, full('{"stop":[', '"",', '""]}')),
    "numbers": (COMPLETIONS, 400, full('{"stop":[', "1,", "1]}")),
    "token ids": (COMPLETIONS, 400, full('{"prompt":[', "12345,", "1]}")),
    "escapes": (COMPLETIONS, 400, full('{"prompt":"', "\\n", '"}')),
    "invalid": (COMPLETIONS, 400, full('{"prompt":[', "1,,", "")),
    "unknown fields": (
        COMPLETIONS,
        400,
        ("{" + ",".join(f'"{i}":1' for i in range(600_000)) + "}").encode(),
    ),
    "messages": (CHATS, 400, full('{"messages":[', '{"role":"user","content":"a"},', "1]}")),
    "function calls": (RESPONSES, 400, full('{"input":[', CALL + ",", CALL + "]}")),
    "many function calls": (
        RESPONSES,
        200,
        f'{{"input":[{",".join([CALL] * 26_000)}],"max_output_tokens":1}}'.encode(),
    ),
    "arguments": (
        RESPONSES,
        400,
        full('{"input":[' + CALL[:-3].replace("{}", '{\\"a\\":['), "[],", '1]}"}]}'),
    ),
    "a long text to tokenize": ("/tokenize", 400, full('{"prompt":"', "def f(x): ", '"}')),
    "token ids to decode": ("/detokenize", 400, full('{"tokens":[', "123,", "1]}")),
}


@pytest.mark.serial
@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_stalls_the_event_loop(server: RunningServer, name: str) -> None:
    """Other processes may take the cores at any moment: the best of some attempts counts, each
    compared with an idle server just before."""
    path, expected, body = HOSTILE[name]
    lag = LoopLag(server.loop)
    stalls = []
    for _ in range(NUM_ATTEMPTS):
        with lag.measure():
            time.sleep(0.1)
        idle = lag.largest
        with lag.measure():
            status, answer = server.ask(path, body)
        assert status == expected, answer
        stalls.append(lag.largest - idle)
        if stalls[-1] < MAX_STALL_S:
            return
    raise AssertionError(stalls)


@pytest.mark.serial
def test_no_framing_stalls_the_event_loop(server: RunningServer) -> None:
    """Bodies in chunks of one byte, from several clients at a time."""
    start = head(COMPLETIONS, 1).replace(b"content-length: 1", b"transfer-encoding: chunked")
    sent = start + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n"
    lag = LoopLag(server.loop)

    def send(connection: socket.socket) -> bytes:
        connection.sendall(sent)
        return connection.recv(1000)

    stalls = []
    for _ in range(NUM_ATTEMPTS):
        with lag.measure():
            time.sleep(0.1)
        idle = lag.largest
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            connections = [stack.enter_context(server.connect()) for _ in range(4)]
            with lag.measure():
                answers = list(pool.map(send, connections))
        assert all(answer.startswith(b"HTTP/1.1 400") for answer in answers), answers
        stalls.append(lag.largest - idle)
        if stalls[-1] < MAX_STALL_S:
            return
    raise AssertionError(stalls)


@pytest.mark.serial
def test_no_long_response_stalls_the_event_loop(server: RunningServer) -> None:
    """Its body is short: the response repeats the best tokens of the prompt for each output."""
    asked = {"prompt": [5] * 1000, "n": 8, "max_tokens": 1, "prompt_logprobs": 20, "seed": 1}
    choices = [server.result(COMPLETIONS, asked | {"n": 1})["choices"][0]["prompt_logprobs"]]
    lag = LoopLag(server.loop)
    stalls = []
    for _ in range(NUM_ATTEMPTS):
        with lag.measure():
            time.sleep(0.1)
        idle = lag.largest
        with lag.measure(), server.send(COMPLETIONS, asked) as response:
            text = response.read()
        answer = json.loads(text)
        assert [choice["prompt_logprobs"] for choice in answer["choices"]] == choices * 8
        stalls.append(lag.largest - idle)
        if stalls[-1] < MAX_STALL_S:
            return
    raise AssertionError(stalls)


def test_large_requests_that_are_right_are_read() -> None:
    part = {"type": "text", "text": "What does this do? [1, {2}]"}
    for given in (
        {"prompt": [12_345] * 1_000_000},
        {"prompt": [[i % 50_000 for i in range(8192)]] * 128},
        {"messages": [{"role": "user", "content": [part, part]}] * 4096},
        {"prompt": 'if a[i] == {\'"\': "\\n"}: # é\n' * 200_000},
        {
            "schema": {
                f"field{i}": {"type": "string", "enum": ["a", "b"], "maxLength": i}
                for i in range(8_000)
            }
        },
    ):
        body = json.dumps(given).encode()
        assert len(body) > MAX_SHORT_BODY
        assert parse_object(body) == given


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {
            rng.choice(["a", "é", "\n", ""]) + str(i): random_value(rng, depth - 1)
            for i in range(rng.randrange(5))
        }
    if kind == 5:  # as long as what is read at once, and longer
        return [rng.choice([0, -1, 2.5, 1e20, 10**9]) for _ in range(rng.choice([3, 4000, 9000]))]
    return [None, True, rng.randrange(-(10**12), 10**12), rng.random(), 'a "\\\u1234'][kind]


def test_the_parser_reads_what_json_reads() -> None:
    rng = random.Random(7)
    num_invalid = 0
    for _ in range(150):
        value = random_value(rng, 4)
        text = json.dumps(
            value,
            indent=rng.choice([None, 1]),
            ensure_ascii=rng.random() < 0.5,
            separators=rng.choice([None, (",", ":"), (" ,", " :\n")]),
        )
        assert parse_json(text, Quota()) == value
        for _ in range(8):  # with one character less, more, or another
            at = rng.randrange(len(text) + 1)
            if rng.random() < 0.3:
                at = min(at, 40)
            wrong = text[:at] + rng.choice(["", *'[]{}",:1-.e n\\']) + text[at + 1 :]
            expected = error = None
            try:
                expected = json.loads(wrong)
            except ValueError as raised:
                error = raised
            if error is None:
                assert parse_json(wrong, Quota(), is_strict=False) == expected, wrong[:200]
                continue
            num_invalid += 1
            with pytest.raises(ValueError):
                parse_json(wrong, Quota(), is_strict=False)
    assert num_invalid > 200


def test_parsed_texts_leave_nothing_to_the_garbage_collector() -> None:
    """Requests have tens of thousands of short texts, and one collection of what each left behind
    would hold up the event loop."""
    texts = ['{"a": [{"b": 1}, {"c": []}], "d": {"a": NaN}}', '{"a": {"a": 1}, "b": [', "[1]]"]
    gc.collect()
    with without_collections():
        for text in texts:
            for is_strict in (False, True):
                with contextlib.suppress(ValueError):
                    parse_json(text, Quota(), is_strict=is_strict)
        assert gc.collect() == 0


def test_the_garbage_collector_passes_over_what_was_there_before_the_server(llm: LLM) -> None:
    with RunningServer(llm):
        for _ in range(2):
            assert gc.get_freeze_count() > 10_000
            assert len(gc.get_objects()) < 10_000
            with RunningServer(llm):  # and another one that ends before
                pass


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ('{"a": 1, "b": %s}' % ("[" * 64 + "]" * 64 + " " * MAX_SHORT_BODY), "b", "too deeply"),
        ('{"a": [%s1]}' % ("[]," * 300_000), "a", "too many values"),
        (json.dumps({"a": {str(i): 1 for i in range(300_000)}}), "a", "too many values"),
        ('{"b": [%s1]}' % ("1," * 300_000), "b", "too many values"),
        ('{"a": {"b": 1, "b": 2}, "c": "%s"}' % ("x" * MAX_SHORT_BODY), None, "twice"),
        ('{"a": NaN, "c": "%s"}' % ("x" * MAX_SHORT_BODY), None, "NaN"),
    ],
)  # fmt: skip
def test_a_refused_body_names_the_field(text: str, field: str | None, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        parse_object(text.encode())
    assert caught.value.status == 400 and caught.value.param == field
    deepest = '{"b": %s}' % ("[" * 63 + "]" * 63 + " " * MAX_SHORT_BODY)  # fmt: skip
    assert parse_object(deepest.encode()) == json.loads(deepest)


def test_arguments_of_all_calls_share_one_limit(server: RunningServer) -> None:
    arguments = json.dumps({"a": [[]] * 60_000})
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    status, answer = server.ask(RESPONSES, {"input": [call] * 5})
    assert status == 400 and answer["error"]["param"] == "input"
    assert "has arguments whose JSON has too many values" in answer["error"]["message"]
    with pytest.raises(JsonRefused):
        parse_json("[" * 65 + "]" * 65, Quota())


def test_function_calls_are_read_in_linear_time() -> None:
    """Measured in CPU time of this thread, which other processes hardly change."""
    model = ServedModel(SamplingParams(), lambda _: None, None, Thinking())

    def seconds(num_calls: int) -> float:
        times = []
        for _ in range(3):
            given = {"input": [json.loads(CALL) for _ in range(num_calls)]}
            started = time.thread_time()
            call = read_response(given, model)
            times.append(time.thread_time() - started)
            (message,) = call.messages
            assert len(message["tool_calls"]) == num_calls
        return min(times)

    few, many = seconds(6_000), seconds(48_000)
    # Linear time is 8 times as much, and quadratic time 64 times.
    assert many < 20 * few, (few, many)


def head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_bodies_together_are_limited(llm: LLM) -> None:
    """Long ones that do not end take no more than their share, and keep no short one out."""
    size = 200_000
    with RunningServer(llm, max_body_bytes=size) as server, contextlib.ExitStack() as stack:
        total = server.service.body_bytes
        assert total.limit == 8 * size

        def begin(num_bytes: int, kind: bytes = b"") -> socket.socket:
            connection = stack.enter_context(server.connect())
            connection.sendall((kind or head(COMPLETIONS, size)) + b" " * num_bytes)
            return connection

        held = [begin(size - 1) for _ in range(8)]
        wait_for(lambda: total.num_held == 8 * (size - 1))
        with server.send(COMPLETIONS, b" " * 20_000) as refused:
            assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
            assert json.loads(refused.read())["error"]["code"] == "bodies_full"
        # One whose length is not known before it comes.
        chunked = head(COMPLETIONS, 1).replace(b"content-length: 1", b"transfer-encoding: chunked")
        late = begin(0, chunked + b"5000\r\n" + b" " * 0x5000 + b"\r\n")
        assert late.recv(1000).startswith(b"HTTP/1.1 503")
        assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
        for connection in held:
            connection.close()
        wait_for(lambda: total.num_held == 0)
        for _ in range(20):
            status, answer = server.ask(COMPLETIONS, {"prompt": [1] * 40_000})
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        body = {"prompt": [1] * 10, "max_tokens": 400, "ignore_eos": True, "stream": True}
        spaces = b" " * MAX_SHORT_BODY
        with server.send(COMPLETIONS, json.dumps(body).encode() + spaces) as running:
            assert running.status == 200 and running.readline()
            assert total.num_held == 0  # nothing needs the body of a request that runs
            running.close()


def test_a_body_of_100_mb_is_answered(server: RunningServer) -> None:
    """Clients read no answer before they have sent everything."""
    for _ in range(3):
        status, answer = server.ask(COMPLETIONS, b" " * 100 * 2**20)
        assert status == 413 and "max-body-bytes" in answer["error"]["message"]


# ---- /tokenize and /detokenize -------------------------------------------------------------------


@pytest.mark.parametrize("has_bound", [True, False])
def test_texts_that_are_too_long_are_not_tokenized(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, has_bound: bool
) -> None:
    if not has_bound:
        for module in ("paceline.prompts", "paceline.server.tokens"):
            monkeypatch.setattr(f"{module}.min_num_tokens", lambda *_: 0)
    text = "def f(x): " * 700_000
    conversation = [{"role": "user", "content": text}]
    for body, param in (({"prompt": text}, "prompt"), ({"messages": conversation}, "messages")):
        started = time.process_time()
        status, answer = server.ask("/tokenize", body)
        assert time.process_time() - started < 3, param  # tokenizing takes ten times as long
        assert status == 400 and answer["error"]["param"] == param, answer
        assert answer["error"]["code"] == "context_length_exceeded"
    tokens = [5] * (server.llm.max_model_len + 1)
    status, answer = server.ask("/detokenize", {"tokens": tokens})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert server.result("/detokenize", {"tokens": tokens[1:]})["prompt"]


def test_tokenizing_is_admitted_and_ends_with_its_client(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.llm.target.tokenizer
    assert tokenizer is not None
    may_go_on = threading.Event()
    texts: list[str] = []
    encode = type(tokenizer).encode

    def slow_encode(self: Any, text: str, **options: Any) -> list[int]:
        texts.append(text)
        assert may_go_on.wait(30)
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", slow_encode)
    admission = server.service.admission
    body = json.dumps({"prompt": "abandoned"}).encode()
    with contextlib.ExitStack() as stack:
        stack.callback(may_go_on.set)
        connections = [stack.enter_context(server.connect()) for _ in range(admission.limit)]
        for connection in connections:
            connection.sendall(head("/tokenize", len(body)) + body)
        wait_for(lambda: admission.num_open == admission.limit and len(texts) == 2)
        for path in ("/tokenize", "/detokenize", COMPLETIONS):
            status, answer = server.ask(path, {"prompt": "a"})
            assert status == 429 and answer["error"]["code"] == "queue_full"
        for connection in connections:
            connection.close()
        wait_for(lambda: admission.num_open == 0)
        may_go_on.set()
    assert server.result("/tokenize", {"prompt": "ab"})["count"] > 0
    assert texts == ["abandoned"] * 2 + ["ab"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": "a"}]),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
        ("chat_template_kwargs", {}),
        ("tools", []),
    ],
)
def test_a_prompt_and_fields_of_a_conversation(
    server: RunningServer, field: str, value: Any
) -> None:
    status, answer = server.ask("/tokenize", {"prompt": "a", field: value})
    assert status == 400 and answer["error"]["param"] == field
    assert answer["error"]["message"] == (
        f"{field} is given, and prompt is; allowed: prompt, or messages and what goes with them"
    )


# ---- random requests -----------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2.5, 10**30, "", "a", "auto", "\ud800", [], [1], ["a"], [None],
    [[]], [[1]], [{}], {}, {"a": 1}, {"type": "function"}, {"type": "json_schema"},
    {"type": "text"}, {"enabled": False}, {"effort": "low"}, [{"role": "user", "content": "a"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "reasoning", "content": [1]}],
    [{"type": "function_call_output", "output": {}}], {"format": {"type": "json_object"}},
    {"name": "f", "type": "function"},
]  # fmt: skip


def test_no_combination_of_fields_is_an_internal_error(server: RunningServer) -> None:
    fields = server.result("/v1/capabilities")["server"]["fields"] | {
        "/tokenize": [
            "model", "prompt", "messages", "add_special_tokens", "return_token_strs", "tools",
            "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
        ],
        "/detokenize": ["model", "tokens"],
        "/v1/messages/count_tokens": ["model", "messages", "system", "tools", "thinking"],
    }  # fmt: skip
    needed = {
        COMPLETIONS: {"prompt": "a", "max_tokens": 1},
        CHATS: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        RESPONSES: {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    rng = random.Random(11)
    seen: dict[int, int] = {}
    for path, names in fields.items():
        for _ in range(120):
            body = dict(needed.get(path, {})) if rng.random() < 0.8 else {}
            for name in rng.sample(names, min(len(names), rng.randrange(4))):
                body[name] = rng.choice(VALUES)
            if rng.random() < 0.1:
                body["no_such_field"] = rng.choice(VALUES)
            with server.send(path, body, headers=JSON) as response:
                text = response.read()
            assert response.status in (200, 400, 404), (path, body, text)
            seen[response.status] = seen.get(response.status, 0) + 1
    assert min(seen[200], seen[400]) > 100, seen
