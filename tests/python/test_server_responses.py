# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: the text is that of a chat, and events add up to the whole response."""

from __future__ import annotations

import json
from typing import Any

import pytest

import test_server_tools
from paceline import LLM, SamplingParams
from running_server import RunningServer

# Fixtures: a demo with the template of Qwen3, its server, and what makes up its answers.
llm = test_server_tools.llm
server = test_server_tools.server
says = test_server_tools.says

RESPONSES = "/v1/responses"
TOOL = {"type": "function"} | test_server_tools.TOOLS[0]["function"]  # type: ignore[operator]


def events_of(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream, whose names and numbers are checked."""
    found = []
    with server.send(RESPONSES, body | {"stream": True}) as response:
        assert response.status == 200
        while line := response.readline():
            name = line.removeprefix(b"event: ").strip().decode()
            event = json.loads(response.readline().removeprefix(b"data: "))
            assert response.readline() == b"\n"
            assert event["type"] == name and event.pop("sequence_number") == len(found)
            found.append(event)
    return found


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events of a stream make."""
    items: list[dict[str, Any]] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert event["output_index"] == len(items) - 1
        if name == "content_part.added":
            item["content"].append(event["part"])
        elif name in ("output_text.delta", "reasoning_text.delta"):
            assert event["item_id"] == item["id"]
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif name in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif name == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif name == "output_item.done":
            item["status"] = "completed"
            assert event["item"] == item
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in items
    ]


def test_the_text_is_that_of_a_chat(server: RunningServer, llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "class Stack:"},
    ]
    params = SamplingParams(seed=3, max_tokens=12)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    text = output.outputs[0].text
    body = {"instructions": "Be brief.", "seed": 3, "max_output_tokens": 12}
    parts = [{"type": "input_text", "text": "class "}, {"type": "input_text", "text": "Stack:"}]
    for given in ("class Stack:", [{"role": "user", "content": parts}]):
        response = server.result(RESPONSES, body | {"input": given})
        (item,) = response["output"]
        assert item["content"] == [{"type": "output_text", "text": text, "annotations": []}]
        assert item["role"] == "assistant" and item["type"] == "message"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["input_tokens"] == len(output.prompt_token_ids)
    assert response["usage"]["output_tokens"] == 12
    assert response["model"] == "served" and response["store"] is False
    assert response["instructions"] == "Be brief." and response["max_output_tokens"] == 12

    events = events_of(server, body | {"input": "class Stack:"})
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.incomplete"
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(response["output"])
    assert added_up(events) == last["output"] and last["usage"] == response["usage"]
    assert sum(event["type"] == "response.output_text.delta" for event in events) > 1


@pytest.mark.parametrize("length", [1, 1000])
def test_calls_and_reasoning_are_items(llm: LLM, says: Any, length: int) -> None:
    with RunningServer(llm, tool_call_parser="openai") as server:
        says(test_server_tools.HARMONY, length=length, on=server)
        body = {"input": "How is the weather?", "tools": [TOOL]}
        response = server.result(RESPONSES, body)
        reasoning, call = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Think."}]
        assert (call["type"], call["name"]) == ("function_call", "weather")
        assert json.loads(call["arguments"]) == {"city": "Paris"}
        assert response["status"] == "completed" and response["tools"] == [TOOL]
        events = events_of(server, body)
        assert events[-1]["type"] == "response.completed"
        last = events[-1]["response"]["output"]
        assert added_up(events) == last and without_ids(last) == without_ids(response["output"])


def test_items_make_a_conversation(server: RunningServer, says: Any) -> None:
    asked = says("Yes")
    body = {
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "It rains."},
            {"type": "message", "role": "user", "content": "And now?"},
        ],
        "tools": [TOOL],
    }
    server.result(RESPONSES, body)
    call = {"type": "function"}
    assert asked[0]["tools"] == test_server_tools.TOOLS
    assert asked[0]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                call | {"id": "c1", "function": {"name": "weather", "arguments": {}}},
                call | {"id": "c2", "function": {"name": "weather", "arguments": {"a": 1}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
        {"role": "user", "content": "And now?"},
    ]


def test_a_failure_is_the_last_event(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    says("abc")

    async def fails(self: Any) -> Any:
        raise RuntimeError("the engine has failed")
        yield

    monkeypatch.setattr(test_server_tools.MadeUp, "__aiter__", fails)
    events = events_of(server, {"input": "a"})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "the engine has failed"
    status, answer = server.ask(RESPONSES, {"input": "a"})
    assert status == 503 and answer["error"]["message"] == "the engine has failed"
