# SPDX-License-Identifier: Apache-2.0
"""/v1/messages: the text is that of a chat, events add up to the whole message, and blocks of tools
become messages of chats and back."""

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

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "max_tokens": 64,
}


def events_of(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream, whose names are checked."""
    found = []
    with server.send(MESSAGES, body | {"stream": True}) as response:
        assert response.status == 200, response.read()
        while line := response.readline():
            name = line.removeprefix(b"event: ").strip().decode()
            event = json.loads(response.readline().removeprefix(b"data: "))
            assert response.readline() == b"\n" and event["type"] == name
            found.append(event)
    return found


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make, as clients of Anthropic make it."""
    first, ping, *events, delta, stop = events
    assert ping == {"type": "ping"} and stop == {"type": "message_stop"}
    assert (first["type"], delta["type"]) == ("message_start", "message_delta")
    message: dict[str, Any] = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    content, is_open, text = message["content"], False, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append(event["content_block"])
            is_open, text = True, ""
            continue
        assert is_open and event["index"] == len(content) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(text)
            continue
        assert event["type"] == "content_block_delta"
        change = dict(event["delta"])
        kind = change.pop("type")
        ((key, value),) = change.items()
        assert kind == {"partial_json": "input_json_delta"}.get(key, f"{key}_delta") and value
        if key == "partial_json":
            text += value
        else:
            content[-1][key] += value
    assert not is_open
    usage = message["usage"] | delta["usage"]
    return message | delta["delta"] | {"usage": usage, "metrics": delta["metrics"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {key: value for key, value in block.items() if key != "id"} for block in message["content"]
    ]
    assert message["id"].startswith("msg_")
    kept = ("role", "type", "model", "stop_reason", "stop_sequence")
    return {key: message[key] for key in kept} | {"content": blocks}


def test_the_text_is_that_of_a_chat(server: RunningServer, llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "class Stack:"},
    ]
    params = SamplingParams(seed=3, max_tokens=12, top_k=40)
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    text = output.outputs[0].text
    one, two = ({"type": "text", "text": part} for part in ("class ", "Stack:"))
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    more: dict[str, Any] = {"seed": 3, "max_tokens": 12, "top_k": 40, "metadata": {"user_id": "u"}}
    for given, instructions in (("class Stack:", "Be brief."), ([one, two], system)):
        body = more | {
            "messages": [{"role": "user", "content": given}],
            "system": instructions,
            "model": "served",
        }
        message = server.result(MESSAGES, body)
        assert message["content"] == [{"type": "text", "text": text}]
        assert message["role"] == "assistant" and message["type"] == "message"
        assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
        usage = message["usage"]
        cached = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + cached == len(output.prompt_token_ids)
        assert usage["output_tokens"] == 12 and message["model"] == "served"
        count = server.result(COUNT, {key: body[key] for key in ("messages", "system", "model")})
        assert count == {"input_tokens": len(output.prompt_token_ids)}
    events = events_of(server, body)
    assert sum(event["type"] == "content_block_delta" for event in events) > 1
    assert without_ids(added_up(events)) == without_ids(message)
    assert added_up(events_of(server, body))["usage"]["output_tokens"] == 12


def test_why_a_message_ends(server: RunningServer, says: Any) -> None:
    body = QUESTION | {"messages": [{"role": "user", "content": "class Stack:"}], "seed": 3}
    whole = server.result(MESSAGES, body)["content"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    message = server.result(MESSAGES, body | {"stop_sequences": [stop]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == whole[: whole.index(stop)]
    message = server.result(MESSAGES, body | {"max_tokens": 5000, "ignore_eos": True})
    assert message["stop_reason"] == "model_context_window_exceeded"
    says("Yes")
    assert server.result(MESSAGES, body)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_calls_and_thoughts_are_blocks(llm: LLM, says: Any, length: int) -> None:
    with RunningServer(llm, tool_call_parser="openai") as server:
        asked = says(test_server_tools.HARMONY, length=length, on=server)
        body = QUESTION | {"tools": [TOOL], "tool_choice": {"type": "auto"}}
        message = server.result(MESSAGES, body)
        thought, call = message["content"]
        assert thought == {"type": "thinking", "thinking": "Think.", "signature": ""}
        assert call["id"].startswith("toolu_") and call["name"] == "weather"
        assert (call["type"], call["input"]) == ("tool_use", {"city": "Paris"})
        assert message["stop_reason"] == "tool_use"
        assert asked[0]["tools"] == test_server_tools.TOOLS
        assert without_ids(added_up(events_of(server, body))) == without_ids(message)


@pytest.mark.parametrize("length", [1, 1000])
def test_text_comes_before_calls(server: RunningServer, says: Any, length: int) -> None:
    says(f"I look.\n{test_server_tools.CALL}\n{test_server_tools.CALL}", length=length)
    body = QUESTION | {"tools": [TOOL]}
    message = server.result(MESSAGES, body)
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["text", "tool_use", "tool_use"]
    assert len({block.get("id") for block in message["content"]}) == 3
    assert without_ids(added_up(events_of(server, body))) == without_ids(message)


def test_arguments_that_are_no_object_are_text(llm: LLM, says: Any) -> None:
    with RunningServer(llm, tool_call_parser="openai") as server:
        says(test_server_tools.HARMONY.replace('{"city": "Paris"}', '{"city": '), on=server)
        message = server.result(MESSAGES, QUESTION | {"tools": [TOOL]})
        assert message["content"][1] == {"type": "text", "text": '{"city":'}
        assert message["stop_reason"] == "end_turn"


def test_blocks_make_a_conversation(server: RunningServer, says: Any) -> None:
    asked = says("Yes")
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    rain = [{"type": "text", "text": "It "}, {"type": "text", "text": "rains."}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": rain, "is_error": False}
    body = QUESTION | {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    use,
                    use | {"id": "t2", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    result,
                    {"type": "tool_result", "tool_use_id": "t2"},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "tools": [TOOL],
    }
    server.result(MESSAGES, body)
    call = {"type": "function"}
    assert asked[0]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": [
                call
                | {"id": "t1", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
                call | {"id": "t2", "function": {"name": "weather", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "It rains.", "name": "weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "", "name": "weather"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    assert asked[0]["add_generation_prompt"] is True


def test_a_message_of_the_assistant_at_the_end_is_continued(
    server: RunningServer, llm: LLM
) -> None:
    conversation = [
        {"role": "user", "content": "class Stack:"},
        {"role": "assistant", "content": "def push"},
    ]
    (output,) = llm.chat(
        conversation,
        SamplingParams(seed=1, max_tokens=6),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    message = server.result(MESSAGES, {"messages": conversation, "max_tokens": 6, "seed": 1})
    assert message["content"][0]["text"] == output.outputs[0].text
    count = server.result(COUNT, {"messages": conversation})
    assert count["input_tokens"] == len(output.prompt_token_ids)


def test_a_required_tool_is_called(server: RunningServer, says: Any) -> None:
    asked = says(test_server_tools.CALL)
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "any"}):
        server.result(MESSAGES, QUESTION | {"tools": [TOOL], "tool_choice": choice})
        assert asked[-1]["params"].structured_outputs is not None
    named = {"type": "tool", "name": "weather"}
    server.result(MESSAGES, QUESTION | {"tools": [TOOL], "tool_choice": named})
    assert asked[-1]["params"].structured_outputs is not None
    server.result(MESSAGES, QUESTION | {"tools": [TOOL], "tool_choice": {"type": "none"}})
    assert asked[-1]["tools"] is None and asked[-1]["params"].structured_outputs is None


def test_thinking_is_the_switch_of_the_template(server: RunningServer, says: Any) -> None:
    asked = says("Yes")
    for more, expected in (
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"enable_thinking": False},
        ),
        ({}, None),
    ):
        server.result(MESSAGES, QUESTION | more)
        assert asked[-1]["chat_template_kwargs"] == expected
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    server.result(MESSAGES, QUESTION | {"output_config": {"format": schema}})
    assert asked[-1]["params"].structured_outputs.json == '{"type": "object"}'


def user(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens is missing", {"max_tokens": None}),
    ("max_tokens is 0", {"max_tokens": 0}),
    ("messages is 'a'", {"messages": "a"}),
    ("messages is []", {"messages": []}),
    ("belong in the field system", {"messages": [{"role": "system", "content": "a"}]}),
    ("messages[0]['content'] is 7", {"messages": [{"role": "user", "content": 7}]}),
    ("allowed: blocks of the types 'text', 'tool_result'", user({"type": "image"})),
    ("messages[0]['content'][0]['text'] is None", user({"type": "text"})),
    ("['tool_use_id'] is None", user({"type": "tool_result"})),
    (
        "content'][0]['content'][0] is",
        user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
    ),
    (
        '"name": ..., "input": {...}}',
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
    ),
    ("system is 7", {"system": 7}),
    ("system[0] is", {"system": [{"type": "image"}]}),
    ('"input_schema": {...}}', {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ('"input_schema": {...}}', {"tools": [{"name": "f"}]}),
    ("tool_choice is", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
    ("tool_choice is", {"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}),
    ("tool_choice is", {"tool_choice": {"type": "any"}}),
    ("tools has none such", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}),
    (
        "disable_parallel_tool_use is true",
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    ("stop_sequences is 'a'", {"stop_sequences": "a"}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
    ("temperature is -1", {"temperature": -1}),
    ("top_k is", {"top_k": "a"}),
    ("thinking is", {"thinking": {"type": "on"}}),
    ("budget_tokens is 0", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ("output_config.effort is 'huge'", {"output_config": {"effort": "huge"}}),
    ("output_config.format is", {"output_config": {"format": {"type": "xml"}}}),
    ("metadata: unknown field 'a'", {"metadata": {"a": "b"}}),
    ("service_tier is 'fast'", {"service_tier": "fast"}),
    ("mcp_servers is not supported", {"mcp_servers": []}),
    ("the name is stop_sequences", {"stop": ["a"]}),
    ("unknown field 'max_token'", {"max_token": 1}),
    ("stream is 1", {"stream": 1}),
]


def test_malformed_requests_are_refused_by_name(server: RunningServer) -> None:
    before = server.llm.stats()["num_finished"]
    for expected, change in MALFORMED:
        status, answer = server.ask(MESSAGES, QUESTION | change)
        assert status == 400, (change, answer)
        assert answer["type"] == "error" and set(answer) == {"type", "error", "request_id"}
        assert answer["error"]["type"] == "invalid_request_error"
        assert expected in answer["error"]["message"], answer
    status, answer = server.ask(COUNT, QUESTION)
    assert status == 400 and "max_tokens is not supported" in answer["error"]["message"]
    assert server.llm.stats()["num_finished"] == before


def test_errors_have_the_form_of_the_api(llm: LLM) -> None:
    with RunningServer(llm, api_keys=["k"], max_body_bytes=2000) as server:
        for path, headers, body, status, kind in (
            (MESSAGES, {}, QUESTION, 401, "authentication_error"),
            (COUNT, {"x-api-key": "K"}, QUESTION, 401, "authentication_error"),
            (MESSAGES, {"x-api-key": "k"}, QUESTION | {"model": "m"}, 404, "not_found_error"),
            (MESSAGES, {"x-api-key": "k"}, {"a": "b" * 3000}, 413, "request_too_large"),
            (MESSAGES, {"x-api-key": "k"}, b"{", 400, "invalid_request_error"),
        ):
            with server.send(path, body, headers=headers) as response:
                answer = json.loads(response.read())
                assert (response.status, answer["error"]["type"]) == (status, kind)
                assert answer["request_id"] == response.headers["request-id"]
        status, answer = server.ask(MESSAGES, headers={"x-api-key": "k"})
        assert status == 405 and answer["type"] == "error"


def test_both_headers_of_a_key_are_accepted(llm: LLM) -> None:
    with RunningServer(llm, api_keys=["k", "l"]) as server:
        for headers, status in (
            ({"x-api-key": "k", "anthropic-version": "2023-06-01"}, 200),
            ({"x-api-key": "l"}, 200),
            ({"authorization": "Bearer k"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "k"}, 200),
            ({"authorization": "Basic k"}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ):
            assert (
                server.ask(COUNT, {"messages": QUESTION["messages"]}, headers=headers)[0] == status
            )
            assert server.ask("/version", headers=headers)[0] == status


def test_a_failure_is_the_last_event(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    says("abc")

    async def fails(self: Any) -> Any:
        raise RuntimeError("the engine has failed")
        yield

    monkeypatch.setattr(test_server_tools.MadeUp, "__aiter__", fails)
    *_, last = events_of(server, QUESTION)
    assert last["error"] == {"type": "overloaded_error", "message": "the engine has failed"}
    status, answer = server.ask(MESSAGES, QUESTION)
    assert status == 503 and answer["error"]["message"] == "the engine has failed"
