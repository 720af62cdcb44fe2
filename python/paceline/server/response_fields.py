# SPDX-License-Identifier: Apache-2.0
"""The fields of /v1/responses, and the conversation that its items make."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from paceline.checks import check_text, shorten
from paceline.limits import MAX_INT
from paceline.server.bodies import Fields, object_of
from paceline.server.errors import refusal, wrong_field
from paceline.server.field_schemas import (
    REFUSED_IN_RESPONSES,
    RESPONSE_FIELDS,
    ROLES,
    SINGLE_SAMPLING,
)
from paceline.server.fields import (
    ChatCall,
    ServedModel,
    check_conversation,
    message_form,
    single_wishes,
    take_tools,
)
from paceline.server.no_effect import take_no_effect
from paceline.server.structured import GUIDED_FIELDS, params_of_format, take_structured
from paceline.server.thinking import with_effort

_TEXT_PARTS: Final = ("input_text", "output_text", "text")


def read_response(
    given: dict[str, Any],
    model: ServedModel,
) -> ChatCall:
    """Reads the body of a request to /v1/responses; see `fields.read_chat`."""
    fields = Fields(given)
    model.check_name(fields.take_text("model"))
    instructions = fields.take_text("instructions")
    messages = _conversation(fields.take("input"))
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    shown_tools = fields.peek("tools") or []
    fields.replace("tools", _chat_tools(shown_tools))
    shown_choice = fields.peek("tool_choice") or "auto"
    tools, calls = take_tools(fields, model.text_format)
    structured = take_structured(fields, GUIDED_FIELDS)
    with object_of(fields, "text", ("format", "verbosity")) as text:
        output_format = text.take("format")
        take_no_effect(text, ("verbosity",))
    summary = ("the reasoning itself is in the response; leave it out", ("auto",))
    summaries = {"summary": summary, "generate_summary": summary}
    with object_of(fields, "reasoning", ("effort",), summaries) as reasoning:
        effort = reasoning.take("effort")
    if output_format is not None and structured is None:
        structured = params_of_format("text.format", output_format)
    elif output_format is not None:
        raise refusal(
            "text.format is given, and another form of the output is; allowed: one of them", "text"
        )
    arguments = {
        "chat_template_kwargs": with_effort(
            fields.take_object("chat_template_kwargs"), effort, model.thinking, "reasoning.effort"
        ),
        "tools": tools,
    }
    make_parser, default = message_form(fields, model.params, structured, calls, model, arguments)
    most = fields.take_int("max_output_tokens", 1, MAX_INT)
    if most is not None:
        default = dataclasses.replace(default, max_tokens=most)
    wishes = single_wishes(fields, default, SINGLE_SAMPLING)
    passive = take_no_effect(fields)
    shown = {
        "instructions": instructions,
        "max_output_tokens": most,
        "temperature": wishes.params.temperature,
        "top_p": wishes.params.top_p,
        "tools": shown_tools,
        "tool_choice": shown_choice,
        "metadata": passive.get("metadata", {}),
        "user": passive.get("user"),
        "reasoning": {"effort": effort, "summary": None},
    }
    fields.finish(RESPONSE_FIELDS, REFUSED_IN_RESPONSES)
    return ChatCall(check_conversation(messages, "input"), arguments, make_parser, wishes, shown)


def _chat_tools(tools: Any) -> Any:
    """Makes tools of chats, whose function is an object of its own; others are checked later."""
    if not isinstance(tools, list):
        return tools
    made = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise wrong_field(
                f"tools[{index}]", tool, '{"type": "function", "name": ..., "parameters": {...}}'
            )
        function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
        made.append({"type": "function", "function": function})
    return made


def _conversation(given: Any) -> list[dict[str, Any]]:
    """Makes messages of the items of an input."""
    if isinstance(given, str):
        return [{"role": "user", "content": check_text("input", given)}]
    if not isinstance(given, list) or not given:
        raise wrong_field("input", given, "a string, or a list of at least one item")
    messages: list[dict[str, Any]] = []
    reasoning: list[str] = []  # of the next message of the assistant
    for index, item in enumerate(given):
        name = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong_field(name, item, "an object", "input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            text = _text(f"{name}['content']", item.get("content") or [], ("reasoning_text",))
            reasoning += [text] if text else []
            continue
        if kind == "message":
            if item.get("role") not in ROLES:
                raise wrong_field(f"{name}['role']", item.get("role"), ", ".join(ROLES), "input")
            content = item.get("content")
            message = {"role": item.get("role"), "content": _text(name, content, _TEXT_PARTS)}
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
            }
            before = messages[-1] if messages else {}
            if before.get("role") == "assistant" and not reasoning:
                before.setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            text = _text(f"{name}['output']", item.get("output"), _TEXT_PARTS)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        else:
            raise refusal(
                f"{name} has type {shorten(kind)}; allowed: 'message', 'function_call', "
                "'function_call_output' and 'reasoning'",
                "input",
            )
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"], reasoning = "".join(reasoning), []
        messages.append(message)
    return messages


def _text(name: str, content: Any, kinds: tuple[str, ...]) -> str:
    """The text of a content: a string, or parts of it."""
    if isinstance(content, str):
        return check_text(name, content)
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise refusal(
                f"{name} has {shorten(part)}; allowed: a string, or parts "
                f'{{"type": {kinds[0]!r}, "text": ...}}',
                "input",
            )
        texts.append(check_text(f"{name}['text']", part.get("text")))
    return "".join(texts)
