# SPDX-License-Identifier: Apache-2.0
"""Tools in chats: they reach the template, and calls come back in OpenAI's form.

No tiny model writes calls, so the text of the model is made up; all else is real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from running_server import RunningServer

CHATS = "/v1/chat/completions"
TEMPLATES = Path(__file__).resolve().parents[1] / "support" / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
QUESTION = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A demo with the template of Qwen3."""
    demo = find_demo("draft_model")
    template = (TEMPLATES / "qwen3.jinja").read_text()
    with LLM(demo.target, device="cpu", max_model_len=1024, chat_template=template) as llm:
        yield llm


QWEN_CALL = (
    "I look.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def qwen_server() -> Iterator[RunningServer]:
    """A demo with the template of Qwen3.5."""
    demo = find_demo("draft_model")
    template = (TEMPLATES / "qwen3_5.jinja").read_text()
    with (
        LLM(demo.target, device="cpu", max_model_len=1024, chat_template=template) as llm,
        RunningServer(llm) as server,
    ):
        assert server.service.text_format is not None
        assert server.service.text_format.name == "qwen3_coder"
        assert server.service.thinking.begins == (True, True, False)
        yield server


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(llm) as server:
        assert server.service.text_format is not None
        assert server.service.text_format.name == "qwen3"
        yield server


class MadeUp:
    """A stream whose outputs have these texts, in pieces of a few characters."""

    prompt_token_ids = (1, 2, 3)

    def __init__(self, texts: list[str], length: int) -> None:
        self._texts = texts
        self._length = length

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        metrics = RequestMetrics(3, 9, 1.0, 1.0, 2.0, 1.0, 1000.0, None)
        outputs = [
            CompletionOutput(text, [5] * 9, None, "stop", index=index)
            for index, text in enumerate(self._texts)
        ]
        for text in self._texts[:-1]:
            assert text
        for index, text in enumerate(self._texts):
            for at in range(0, len(text), self._length):
                yield StreamChunk(0, text[at : at + self._length], [5], False, None, sample=index)
            whole = RequestOutput(None, [1, 2, 3], outputs, metrics)
            is_last = index == len(self._texts) - 1
            yield StreamChunk(
                0, "", [], True, whole if is_last else None, sample=index, finish_reason="stop"
            )


@pytest.fixture
def says(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the model of a server say something; returns what it was asked."""

    def say(*texts: str, length: int = 3, on: RunningServer = server) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def stream_chat(messages: Any, params: SamplingParams, **rendering: Any) -> MadeUp:
            asked.append({"messages": messages, "params": params, **rendering})
            return MadeUp(list(texts), length)

        monkeypatch.setattr(on.allm, "stream_chat", stream_chat)
        return asked

    return say


def joined(events: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str]:
    """The message that the chunks of a choice add up to, and the finish reason."""
    message: dict[str, Any] = {"content": None}
    reason = ""
    for event in events:
        (choice,) = event["choices"]
        if choice["index"] != index:
            continue
        reason = choice["finish_reason"] or reason
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                calls = message.setdefault("tool_calls", [])
                for call in value:
                    assert call["index"] == len(calls)
                    calls.append({k: v for k, v in call.items() if k != "index"})
            elif value:
                message[key] = (message.get(key) or "") + value
    return message, reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return message | {"tool_calls": [call | {"id": ""} for call in calls]}


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_calls_come_back(server: RunningServer, says: Any, length: int) -> None:
    asked = says(f"I look.\n{CALL}\n{CALL}", length=length)
    body = {"messages": QUESTION, "tools": TOOLS}
    (choice,) = server.result(CHATS, body)["choices"]
    assert asked[0]["tools"] == TOOLS
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look." and len(message["tool_calls"]) == 2
    function = message["tool_calls"][1]["function"]
    assert function == {"name": "weather", "arguments": '{"city": "Paris"}'}
    streamed, reason = joined(server.events(CHATS, body))
    assert reason == "tool_calls" and without_ids(streamed) == without_ids(message)


@pytest.mark.parametrize("length", [1, 3, 1000])
@pytest.mark.parametrize("text", ["", "I look.\n"])
def test_a_stream_of_calls_has_no_empty_deltas(
    server: RunningServer, says: Any, text: str, length: int
) -> None:
    says(f"{text}{CALL}\n{CALL}", length=length)
    body: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS}
    choices = [event["choices"][0] for event in server.events(CHATS, body)]
    first, *between, last = [choice["delta"] for choice in choices]
    assert first["role"] == "assistant" and ("content" in first or "tool_calls" in first)
    assert all(delta and "role" not in delta for delta in between)
    assert all(delta.get("content") != "" for delta in between)
    assert last == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(between) + 1) + [
        "tool_calls"
    ]
    # With more than text, each chunk says something.
    more = server.events(CHATS, body | {"return_token_ids": True})
    num_ids = sum(len(event["choices"][0]["token_ids"]) for event in more)
    assert num_ids == -(-len(f"{text}{CALL}\n{CALL}") // length)


def test_an_answer_without_a_call_is_content(server: RunningServer, says: Any) -> None:
    says("It rains", "It <b>snows")
    body = {"messages": QUESTION, "tools": TOOLS, "n": 2}
    first, second = server.result(CHATS, body)["choices"]
    assert first["message"] == {"role": "assistant", "content": "It rains"}
    assert second["message"]["content"] == "It <b>snows" and second["finish_reason"] == "stop"
    events = server.events(CHATS, body)
    assert joined(events, 1) == ({"role": "assistant", "content": "It <b>snows"}, "stop")


def test_only_a_call_has_no_content(server: RunningServer, says: Any) -> None:
    says(CALL)
    (choice,) = server.result(CHATS, {"messages": QUESTION, "tools": TOOLS})["choices"]
    assert choice["message"]["content"] is None


def test_without_tools_the_text_stays(server: RunningServer, says: Any) -> None:
    asked = says(CALL)
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = server.result(CHATS, {"messages": QUESTION} | body)["choices"]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
        assert asked[-1]["tools"] is None


def test_channels_are_read_without_tools_too(llm: LLM, says: Any) -> None:
    with RunningServer(llm, tool_call_parser="openai") as server:
        asked = says(HARMONY, on=server)
        (choice,) = server.result(CHATS, {"messages": QUESTION})["choices"]
        assert asked[0]["params"].skip_special_tokens is False  # the marks are special tokens
        message = choice["message"]
        assert message["reasoning"] == "Think." and message["content"] is None
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        streamed, _ = joined(server.events(CHATS, {"messages": QUESTION}))
        assert without_ids(streamed) == without_ids(message)
        raw = {"messages": QUESTION, "skip_special_tokens": False}
        (choice,) = server.result(CHATS, raw)["choices"]
        assert choice["message"]["content"] == HARMONY


def test_tools_and_calls_reach_the_template(server: RunningServer, llm: LLM, says: Any) -> None:
    """Clients send arguments as a string; templates want the object."""
    call = {"id": "call_1", "type": "function"}
    arguments = {"city": "Paris"}
    text = {"name": "weather", "arguments": json.dumps(arguments)}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call | {"function": text}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    ]
    answer = server.result("/tokenize", {"messages": messages, "tools": TOOLS})
    expected = [dict(message) for message in messages]
    function = {"name": "weather", "arguments": arguments}
    expected[1] = messages[1] | {"tool_calls": [call | {"function": function}]}
    ids = llm.get_tokenizer().apply_chat_template(
        expected, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert answer["tokens"] == ids
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 4, "temperature": 0}
    (output,) = llm.chat(
        expected, SamplingParams(temperature=0, max_tokens=4), tools=TOOLS, use_tqdm=False
    )
    (choice,) = server.result(CHATS, body)["choices"]
    assert choice["message"]["content"] == output.outputs[0].text
    asked = says("Yes")  # a template may write arguments of either kind, so look at them too
    server.result(CHATS, body)
    assert asked[0]["messages"] == expected


def test_text_in_parts_reaches_a_template_that_reads_strings(
    server: RunningServer, llm: LLM
) -> None:
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]
    in_parts = {"messages": [{"role": "user", "content": parts}]}
    whole = server.result("/tokenize", {"messages": QUESTION})["tokens"]
    assert server.result("/tokenize", in_parts)["tokens"] == whole
    wishes = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    assert server.result(CHATS, in_parts | wishes)["prompt_token_ids"] == whole
    (output,) = llm.chat(in_parts["messages"], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == whole
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    status, answer = server.ask(CHATS, {"messages": [{"role": "user", "content": [image]}]})
    assert status == 400
    message = answer["error"]["message"]
    with pytest.raises(NotImplementedError, match="'image_url', which is not supported") as caught:
        llm.chat([{"role": "user", "content": [image]}], use_tqdm=False)
    assert str(caught.value) in message and "/" not in message


def test_tools_are_refused_where_calls_cannot_be_read(plain_llm: LLM) -> None:
    with RunningServer(plain_llm) as server:
        status, answer = server.ask(CHATS, {"messages": QUESTION, "tools": TOOLS})
    assert status == 400 and answer["error"]["param"] == "tools"
    assert "--tool-call-parser" in answer["error"]["message"]


# ---- Qwen3.5 -------------------------------------------------------------------------------------


def test_a_prompt_of_qwen3_5_ends_within_reasoning(qwen_server: RunningServer, says: Any) -> None:
    body = {"messages": QUESTION, "tools": TOOLS}
    says(QWEN_CALL, on=qwen_server)
    (choice,) = qwen_server.result(CHATS, body)["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert message["reasoning"] == "I look."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({}, "Fine.", "Hm."),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "Fine.", "Hm."),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Hm.\n</think>\n\nFine.", None),
        ({"reasoning_effort": "none"}, "Hm.\n</think>\n\nFine.", None),
        ({"skip_special_tokens": False}, "Hm.\n</think>\n\nFine.", None),
    ],
)
def test_the_switch_of_thinking_says_where_an_output_begins(
    fields: dict[str, Any],
    content: str,
    reasoning: str | None,
    qwen_server: RunningServer,
    says: Any,
) -> None:
    says("Hm.\n</think>\n\nFine.", on=qwen_server)
    body = {"messages": QUESTION, **fields}
    (choice,) = qwen_server.result(CHATS, body)["choices"]
    assert choice["message"]["content"] == content
    assert choice["message"].get("reasoning") == reasoning


def test_calls_of_qwen3_5_cannot_be_required(qwen_server: RunningServer) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    status, answer = qwen_server.ask(CHATS, body)
    assert status == 400
    assert "'qwen3_coder', which is no JSON" in answer["error"]["message"]
