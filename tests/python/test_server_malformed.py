# SPDX-License-Identifier: Apache-2.0
"""Malformed requests, bodies of a million entries, and templates that would never end: each is
refused at once and by name, and holds up no other request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from running_server import RunningServer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_BODY = 200_000
# Of one refusal, on two cores that other tests use too.
MAX_SECONDS = 0.1


@pytest.fixture(scope="module")
def server(plain_llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(plain_llm, max_body_bytes=MAX_BODY, max_queue=24) as server:
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
    ("stream_options", completion(stream=True, stream_options={"include_usage": 1})),
    ("stream_options", completion(stream=True, stream_options={"usage": True})),
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
    ("speculative", completion(speculative={"enabled": 2})),
    ("speculative", completion(speculative={"num_speculative_tokens": -1})),
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
    ("reasoning_effort", chat(reasoning_effort="enormous")),
    ("reasoning_effort", chat(reasoning_effort=1)),
    ("verbosity", chat(verbosity="chatty")),
    ("verbosity", completion(verbosity="low")),
    ("service_tier", chat(service_tier="first class")),
    ("service_tier", completion(service_tier=["auto"])),
    ("metadata", chat(metadata=["a"])),
    ("metadata", completion(metadata={"a": 1})),
    ("safety_identifier", chat(safety_identifier=7)),
    ("prompt_cache_key", chat(prompt_cache_key="k" * 513)),
    ("prompt_cache_retention", chat(prompt_cache_retention="1h")),
    ("store", chat(store=True)),
    ("best_of", completion(best_of=True)),
    ("best_of", completion(best_of=1, n=2)),
    ("include_reasoning", chat(include_reasoning=False)),
    (
        "stream_options",
        completion(stream=True, stream_options={"include_obfuscation": True}),
    ),
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
    ("reasoning", responses(reasoning={"effort": "enormous"})),
    ("reasoning", responses(reasoning={"summary": "detailed"})),
    ("reasoning", responses(reasoning="low")),
    ("reasoning_effort", responses(reasoning_effort="low")),
    ("text", responses(text={"verbosity": "chatty"})),
    ("truncation", responses(truncation="auto")),
    ("tools", responses(tools=[{"type": "web_search"}])),
    ("tools", responses(tools=[{"type": "function", "name": "f"}])),
    ("metadata", responses(metadata=7)),
    (405, ("/v1/models", {})),
]


@pytest.mark.serial
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


MILLION = 10**6  # entries, as many as the default --max-body-bytes holds


def large_requests(count: int) -> dict[str, tuple[str, tuple[str, Any]]]:
    """Requests with up to `count` entries, and the field that the error names."""
    message = {"role": "user", "content": "a"}
    return {
        "stop strings": ("stop", completion(stop=["x"] * count)),
        "stop tokens": ("stop_token_ids", completion(stop_token_ids=[5] * count)),
        "bad words": ("bad_words", completion(bad_words=["x"] * count)),
        "biases": ("logit_bias", completion(logit_bias={str(i): 1 for i in range(count // 2)})),
        "prompts": ("prompt", completion(prompt=["a"] * count)),
        "lists": ("prompt", completion(prompt=[[1]] * count)),
        "nested lists": ("prompt", completion(prompt=[[[[[]]]]] * (count // 4))),
        "messages": ("messages", chat(messages=[message] * (count // 7))),
        "text": ("prompt", completion(prompt="a" * (8 * count))),
    }


def test_a_million_entries_are_refused_in_linear_time(plain_llm: LLM) -> None:
    """Measured in CPU time of this process, which other processes hardly change."""
    with RunningServer(plain_llm) as server:

        def refusal_seconds(name: str, param: str, path: str, body: Any) -> float:
            data = json.dumps(body).encode()
            seconds = []
            for _ in range(3):
                started = time.process_time()
                status, answer = server.ask(path, data)
                seconds.append(time.process_time() - started)
                assert status == 400 and answer["error"]["param"] == param, (name, answer)
            return min(seconds)

        few, many = large_requests(MILLION // 8), large_requests(MILLION)
        for name, (param, (path, body)) in many.items():
            of_few = refusal_seconds(name, param, *few[name][1])
            of_many = refusal_seconds(name, param, path, body)
            # Linear time is 8 times as much, and quadratic time 64 times.
            assert of_many < 20 * of_few + 0.1, (name, of_few, of_many)


@pytest.mark.serial
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages[0].content * 1000000000000 }}",
    ],
)
def test_a_hostile_template_holds_up_no_other_request(template: str, target_dir: Path) -> None:
    with (
        LLM(target_dir, device="cpu", max_num_seqs=2, chat_template=template) as llm,
        RunningServer(llm) as server,
        server.send(COMPLETIONS, {"prompt": [1], "max_tokens": 1}) as before,
    ):
        assert before.status == 200
        with ThreadPoolExecutor(1) as pool:
            path, body = chat(max_tokens=1)
            hostile = pool.submit(server.ask, path, body)
            seconds = []
            while not hostile.done() or not seconds:
                started = time.monotonic()
                assert server.ask("/health")[0] == 200
                seconds.append(time.monotonic() - started)
        status, answer = hostile.result()
        assert status == 400 and "chat_template exceeds a limit" in answer["error"]["message"], (
            answer
        )
        # The template is rendered in another thread, which shares Python's lock.
        assert sorted(seconds)[len(seconds) // 2] < 0.25
