# SPDX-License-Identifier: Apache-2.0
"""Structured output through HTTP: every field, required calls, and grammars that are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.server.formats import FORMATS
from paceline.server.structured import calls_grammar, in_format
from paceline.structured_outputs import StructuredOutputsParams
from running_server import RunningServer

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPLATES = Path(__file__).resolve().parents[1] / "support" / "chat_templates"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "maximum": 9},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
PLACE = {"$defs": {"c": {"enum": ["Rome", "Oslo"]}}, "type": "object",
         "properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"],
         "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time", "parameters": PLACE}},
]
QUESTION = [{"role": "user", "content": "How is the weather?"}]
LAST = {"max_tokens": 150, "seed": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A demo with the template of Qwen3."""
    demo = find_demo("draft_model")
    template = (TEMPLATES / "qwen3.jinja").read_text()
    config = demo.speculative_config()
    with (
        LLM(
            demo.target, speculative_config=config, max_model_len=1024, chat_template=template
        ) as llm,
        RunningServer(llm) as server,
    ):
        yield server


def text_of(server: RunningServer, **body: Any) -> str:
    (choice,) = server.result(COMPLETIONS, {"prompt": "x = ", **LAST, **body})["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


def test_fields_of_vllm_and_openai_mean_the_same(server: RunningServer) -> None:
    params = SamplingParams(max_tokens=150, seed=3, structured_outputs={"json": SCHEMA})
    (output,) = server.llm.generate("x = ", params)
    text = output.outputs[0].text
    jsonschema.validate(json.loads(text), SCHEMA)
    for body in (
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": FORMAT},
        {"response_format": FORMAT, "speculative": {"enabled": False}},
    ):
        assert text_of(server, **body) == text
    events = server.events(
        COMPLETIONS, {"prompt": "x = ", "guided_json": SCHEMA, "stream": True, **LAST}
    )
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert text_of(server, guided_choice=["yes", "no"]) in ("yes", "no")
    assert text_of(server, guided_regex="[ab]{3}c").endswith("c")
    assert text_of(server, guided_grammar='root ::= "a" | "b"') in ("a", "b")


def test_chats_and_responses(server: RunningServer) -> None:
    body = {"messages": QUESTION, "response_format": FORMAT, **LAST}
    (choice,) = server.result(CHATS, body)["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    body = {"input": "Who?", "text": {"format": form}, "max_output_tokens": 150, "seed": 3}
    (item,) = server.result(RESPONSES, body)["output"]
    jsonschema.validate(json.loads(item["content"][0]["text"]), SCHEMA)


def test_a_call_can_be_required(server: RunningServer) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "parallel_tool_calls": False, **LAST}
    (choice,) = server.result(CHATS, body | {"tool_choice": "required"})["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)
    for name in ("weather", "time"):
        named = {"type": "function", "function": {"name": name}}
        (choice,) = server.result(CHATS, body | {"tool_choice": named})["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    named = {"type": "function", "name": "time"}
    body = {"input": "Which time?", "tools": tools, "tool_choice": named, "seed": 3}
    calls = [
        item for item in server.result(RESPONSES, body)["output"] if item["type"] == "function_call"
    ]
    assert [call["name"] for call in calls] == ["time"]


@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3_json"])
def test_calls_in_every_format_are_read(server: RunningServer, name: str) -> None:
    grammar = calls_grammar(TOOLS, FORMATS[name], is_one=True)
    params = SamplingParams(max_tokens=200, seed=1, temperature=0.0, structured_outputs=grammar)
    text = server.llm.generate("x", params)[0].outputs[0].text
    parser = FORMATS[name].make(TOOLS)
    parts = parser.push(text) + parser.finish()
    assert parts and {part.kind for part in parts} == {"call"}
    for part in parts:
        jsonschema.validate(json.loads(part.text), PLACE)


def test_messages_of_gpt_oss_keep_their_channels() -> None:
    """The demo lacks the marks; that llguidance reads the grammars, a vocabulary of bytes shows."""
    import llguidance

    marks = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|return|>"]
    texts = [bytes([byte]) for byte in range(256)] + [b"\xff" + mark.encode() for mark in marks]

    class Bytes:
        eos_token_id = 256 + marks.index("<|return|>")
        bos_token_id = None
        tokens = texts
        special_token_ids = range(256, 256 + len(marks))

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))

    def ids(text: str) -> list[int]:
        found: list[int] = []
        while text:
            mark = next((mark for mark in marks if text.startswith(mark)), None)
            found += [256 + marks.index(mark)] if mark else text[0].encode()
            text = text[len(mark or text[0]) :]
        return found

    def accepts(params: StructuredOutputsParams, text: str) -> bool:
        assert params.grammar is not None
        matcher = llguidance.LLMatcher(
            tokenizer, llguidance.LLMatcher.grammar_from_lark(params.grammar)
        )
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(ids(text)) and matcher.is_accepting()

    thought = "<|channel|>analysis<|message|>Hm, {1}.<|end|><|start|>assistant"
    message = in_format(StructuredOutputsParams(json=SCHEMA), FORMATS["openai"])
    final = '<|channel|>final<|message|>{"name": "a", "n": 3}'
    assert accepts(message, final) and accepts(message, thought + final)
    assert not accepts(message, final.replace("3", '"3"')) and not accepts(message, thought)
    calls = calls_grammar(TOOLS, FORMATS["openai"], is_one=False)
    call = '<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"city": "Oslo"}'
    assert accepts(calls, call) and accepts(calls, thought + call)
    assert not accepts(calls, call.replace("time", "sum"))


@pytest.mark.serial
def test_refusals_are_quick_and_harm_nobody(server: RunningServer) -> None:
    wide = {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(12)]}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    alternatives = " | ".join(f'"x{i}"' for i in range(3000))
    cases = [
        ("unclosed group", {"guided_regex": "a("}),
        ("invalid regex", {"guided_regex": "(" * 3000 + ")" * 3000}),
        ("no grammar that this version supports", {"guided_grammar": "start: (((("}),
        ("Unimplemented keys", {"guided_json": {"not": {}}}),
        ("schema too large", {"guided_json": wide}),
        ("nested too deeply", {"guided_json": deep}),
        ("allowed: at most 65536", {"guided_regex": "a" * 70_000}),
        ("ignore_eos is True", {"guided_regex": "a", "ignore_eos": True}),
        ("fewer alternatives at a time", {"guided_grammar": f"start: {alternatives}"}),
    ]
    text_of(server, guided_regex="a")  # the tokenizer is read
    for expected, body in cases:
        begin = time.monotonic()
        status, answer = server.ask(COMPLETIONS, {"prompt": "x", **body})
        assert status == 400 and expected in json.dumps(answer), (expected, answer)
        assert time.monotonic() - begin < 1
    contradictions = [
        {"tools": TOOLS, "response_format": FORMAT},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none_such"}}},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "any"},
    ]
    for body in contradictions:
        status, answer = server.ask(CHATS, {"messages": QUESTION, **body})
        assert status == 400 and "allowed" in json.dumps(answer), answer
    assert text_of(server, guided_choice=["fine"]) == "fine"
