# SPDX-License-Identifier: Apache-2.0
"""The fields of Anthropic's /v1/messages, and the conversation that its content blocks make."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from paceline.checks import check_text, shorten
from paceline.limits import MAX_INT
from paceline.sampling import SamplingParams
from paceline.server.bodies import Fields, object_of
from paceline.server.errors import refusal, wrong_field
from paceline.server.field_schemas import (
    COUNT_FIELDS,
    MESSAGE_FIELDS,
    REFUSED_IN_MESSAGES,
    SINGLE_SAMPLING,
    Refused,
)
from paceline.server.fields import (
    ChatCall,
    ServedModel,
    check_conversation,
    message_form,
    single_wishes,
    take_tools,
)
from paceline.server.structured import params_of_format
from paceline.server.thinking import with_effort, with_switch
from paceline.structured_outputs import StructuredOutputsParams

_SAMPLING: Final = tuple(name for name in SINGLE_SAMPLING if name != "stop")
_REFUSED_IN_COUNTS: Final[Refused] = {
    **REFUSED_IN_MESSAGES,
    **{
        name: ("it says nothing of the prompt; leave it out", ())
        for name in MESSAGE_FIELDS
        if name not in COUNT_FIELDS
    },
}
_TIERS: Final = MESSAGE_FIELDS["service_tier"]["enum"]


class _Prompt(NamedTuple):
    """The prompt of a request, and the form of its output."""

    messages: list[Any]
    arguments: dict[str, Any]
    structured: StructuredOutputsParams | None
    calls: StructuredOutputsParams | None


def read_message(
    given: dict[str, Any],
    model: ServedModel,
) -> ChatCall:
    """Reads the body of a request to /v1/messages; see `fields.read_chat`."""
    fields = Fields(given)
    prompt = _take_prompt(fields, model)
    most = fields.take_int("max_tokens", 1, MAX_INT)
    if most is None:
        raise refusal("max_tokens is missing; allowed: an integer of at least 1", "max_tokens")
    default = dataclasses.replace(model.params, max_tokens=most)
    make_parser, default = message_form(
        fields, default, prompt.structured, prompt.calls, model, prompt.arguments
    )
    stops = _take_stops(fields)
    wishes = single_wishes(fields, default, _SAMPLING, stop=stops)
    _take_no_effect(fields)
    fields.finish(MESSAGE_FIELDS, REFUSED_IN_MESSAGES)
    return ChatCall(prompt.messages, prompt.arguments, make_parser, wishes)


def read_counted(
    given: dict[str, Any],
    model: ServedModel,
) -> tuple[list[Any], dict[str, Any]]:
    """Reads the body of a request to /v1/messages/count_tokens.

    Returns:
        The conversation, and the keyword arguments for its template.

    Raises:
        ApiError: As for `read_message`.
        ValueError: Likewise.
    """
    fields = Fields(given)
    prompt = _take_prompt(fields, model)
    fields.finish(COUNT_FIELDS, _REFUSED_IN_COUNTS)
    return prompt.messages, prompt.arguments


def _take_prompt(
    fields: Fields,
    model: ServedModel,
) -> _Prompt:
    model.check_name(fields.take_text("model"))
    messages = _conversation(fields.take("messages"))
    system = fields.take("system")
    if system is not None:
        messages.insert(0, {"role": "system", "content": _text("system", system, "system")})
    _make_tools_of_chats(fields)
    tools, calls = take_tools(fields, model.text_format)
    with object_of(fields, "output_config", ("effort", "format")) as output:
        effort, form = output.take("effort"), output.take("format")
    structured = None if form is None else params_of_format("output_config.format", form)
    variables = fields.take_object("chat_template_kwargs")
    is_on, thinking = _take_thinking(fields), model.thinking
    variables = with_switch(variables, is_on, thinking)
    if is_on is not None:
        thinking = thinking._replace(switch=None)  # which an effort would set
    # As Anthropic's API does, a message of the assistant at the end is continued.
    is_continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    arguments = {
        "add_generation_prompt": not is_continued,
        "continue_final_message": is_continued,
        "chat_template_kwargs": with_effort(variables, effort, thinking, "output_config.effort"),
        "tools": tools,
    }
    return _Prompt(check_conversation(messages, "messages"), arguments, structured, calls)


def _take_stops(fields: Fields) -> list[Any]:
    stops = fields.take("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise wrong_field("stop_sequences", stops, "a list of strings")
    try:
        SamplingParams(stop=stops)
    except ValueError as error:
        raise refusal(str(error).replace("stop", "stop_sequences", 1), "stop_sequences") from None
    return stops or []


def _take_no_effect(fields: Fields) -> None:
    with object_of(fields, "metadata", ("user_id",)) as metadata:
        metadata.take_text("user_id")
    tier = fields.take("service_tier")
    if tier is not None and tier not in _TIERS:
        raise wrong_field("service_tier", tier, ", ".join(_TIERS))


def _take_thinking(fields: Fields) -> bool | None:
    """Takes whether the model is to think; None = as it does by itself."""
    given = fields.peek("thinking")
    display = {"display": ("thinking is sent in any case", ("summarized",))}
    with object_of(fields, "thinking", ("type", "budget_tokens"), display) as inner:
        kind = inner.take("type")
        inner.take_int("budget_tokens", 1, MAX_INT)  # no effect: max_tokens limits the output
    if given is None:
        return None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise wrong_field(
            "thinking", given, "an object of type 'enabled', 'disabled' or 'adaptive'"
        )
    return None if kind == "adaptive" else kind == "enabled"


# ---- tools ---------------------------------------------------------------------------------------


def _make_tools_of_chats(fields: Fields) -> None:
    """Gives tools and their choice the form of chats."""
    tools = fields.peek("tools")
    if isinstance(tools, list):
        fields.replace("tools", [_chat_tool(index, tool) for index, tool in enumerate(tools)])
    choice = fields.peek("tool_choice")
    if choice is None:
        return
    names = ("type", "name", "disable_parallel_tool_use")
    with object_of(fields, "tool_choice", names) as inner:
        kind = inner.take("type")
        name = inner.take_text("name")
        is_single = inner.take_bool("disable_parallel_tool_use")
    made: Any = {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))
    if kind == "tool":
        made = {"type": "function", "function": {"name": name}}
    if made is None or (name is not None) != (kind == "tool"):
        raise refusal(
            f"tool_choice is {shorten(choice)}; allowed: an object of type 'auto', 'any' or "
            "'none', or of type 'tool' with a name",
            "tool_choice",
        )
    if is_single and kind == "auto":
        raise refusal(
            "tool_choice: disable_parallel_tool_use is true; allowed: false, because the model "
            "decides how many tools it calls, or the type 'any' or 'tool'",
            "tool_choice",
        )
    fields.replace("tool_choice", made)
    fields.replace("parallel_tool_calls", not is_single)


def _chat_tool(index: int, tool: Any) -> dict[str, Any]:
    is_own = isinstance(tool, dict) and tool.get("type") in (None, "custom")
    if not is_own or not isinstance(tool.get("input_schema"), dict):
        raise wrong_field(
            f"tools[{index}]", tool, '{"name": ..., "description": ..., "input_schema": {...}}'
        )
    function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


# ---- messages ------------------------------------------------------------------------------------


def _conversation(given: Any) -> list[dict[str, Any]]:
    """Makes messages of chats, whose calls and results of tools are messages of their own."""
    if not isinstance(given, list) or not given:
        raise wrong_field(
            "messages", given, 'a list of at least one message {"role": ..., "content": ...}'
        )
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools, by the id of a call
    for index, message in enumerate(given):
        name = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            advice = "; instructions belong in the field system" if role == "system" else ""
            raise wrong_field(
                name, message, f"an object whose role is 'user' or 'assistant'{advice}", "messages"
            )
        content = message.get("content")
        if isinstance(content, str):
            made.append({"role": role, "content": check_text(f"{name}['content']", content)})
            continue
        kinds = ("text", "tool_result") if role == "user" else ("text", "thinking", "tool_use")
        blocks = _blocks(f"{name}['content']", content, kinds)
        made += _of_user(blocks, names) if role == "user" else [_of_assistant(blocks, names)]
    return made


def _of_user(blocks: list[tuple[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    """Makes messages of a user's blocks: results of tools, and the text between them."""
    made: list[dict[str, Any]] = []
    for name, block in blocks:
        if block["type"] == "text":
            part = {"type": "text", "text": check_text(f"{name}['text']", block.get("text"))}
            if made and made[-1]["role"] == "user":
                made[-1]["content"].append(part)
            else:
                made.append({"role": "user", "content": [part]})
            continue
        of = check_text(f"{name}['tool_use_id']", block.get("tool_use_id"))
        content = block.get("content")
        text = "" if content is None else _text(f"{name}['content']", content, "messages")
        message = {"role": "tool", "tool_call_id": of, "content": text}
        made.append(message | ({"name": names[of]} if of in names else {}))
    return made


def _of_assistant(blocks: list[tuple[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    """Makes a message of an assistant's blocks."""
    parts, thoughts, calls = [], [], []
    for name, block in blocks:
        if block["type"] == "text":
            text = check_text(f"{name}['text']", block.get("text"))
            parts.append({"type": "text", "text": text})
        elif block["type"] == "thinking":
            thoughts.append(check_text(f"{name}['thinking']", block.get("thinking")))
        else:
            of, tool = block.get("id"), block.get("name")
            arguments = block.get("input")
            if not isinstance(of, str) or not isinstance(tool, str):
                raise refusal(
                    f"{name} is {shorten(block)}; allowed: "
                    '{"type": "tool_use", "id": ..., "name": ..., "input": {...}}',
                    "messages",
                )
            if not isinstance(arguments, dict):
                raise wrong_field(f"{name}['input']", arguments, "an object", "messages")
            names[of] = tool
            function = {"name": tool, "arguments": arguments}
            calls.append({"id": of, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": parts or (None if calls else "")}
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _blocks(
    name: str, content: Any, kinds: Collection[str], param: str = "messages"
) -> list[tuple[str, Any]]:
    """Checks the kinds of content blocks.

    Returns:
        Each block, and its name in errors.

    Raises:
        ApiError: There are none, or one is of another kind.
    """
    if not isinstance(content, list) or not content:
        raise wrong_field(name, content, "a string, or a list of at least one block", param)
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise refusal(
                f"{name}[{index}] is {shorten(block)}; allowed: blocks of the types "
                f"{', '.join(map(repr, kinds))}",
                param,
            )
    return [(f"{name}[{index}]", block) for index, block in enumerate(content)]


def _text(name: str, content: Any, param: str) -> str:
    """The text of a content: a string, or blocks of it."""
    if isinstance(content, str):
        return check_text(name, content)
    if content == [] and param == "messages":
        return ""
    return "".join(
        check_text(f"{each}['text']", block.get("text"))
        for each, block in _blocks(name, content, ("text",), param)
    )
