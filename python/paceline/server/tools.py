# SPDX-License-Identifier: Apache-2.0
"""Checks the tools of a request, and the calls in its messages."""

from __future__ import annotations

import re
from typing import Any, Final

from paceline.checks import shorten
from paceline.server.errors import refusal, wrong_field
from paceline.server.json_values import JsonRefused, Quota, parse_json

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)


def check_tools(tools: Any) -> list[Any] | None:
    """Checks tools in OpenAI's form.

    Returns:
        The tools; None if there are none.

    Raises:
        ApiError: They are malformed.
    """
    if tools is None or tools == []:
        return None
    allowed = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise wrong_field("tools", tools, f"a list of at most {MAX_TOOLS} of {allowed}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise wrong_field(f"tools[{index}]", tool, allowed)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refusal(
                f"tools[{index}] has the name {shorten(name)}; allowed: 1 to 64 letters, digits, "
                "'_', '-' and '.'",
                "tools",
            )
        if not isinstance(function.get("parameters", {}), dict):
            raise refusal(
                f"tools[{index}] has parameters {shorten(function['parameters'])}; allowed: a JSON "
                "schema, which is an object",
                "tools",
            )
    return tools


def chosen_tools(tools: list[Any] | None, choice: Any) -> list[Any] | None:
    """Reads tool_choice.

    Args:
        tools: The tools.
        choice: "auto", "none", "required", or an object that names a function.

    Returns:
        The tools of which one must be called; None if none must be.

    Raises:
        ApiError: It is something else, or there is no such tool.
    """
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        found = tools
    else:
        named = choice if isinstance(choice, dict) and choice.get("type") == "function" else {}
        function = named.get("function", named)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise refusal(
                f"tool_choice is {shorten(choice)}; allowed: 'auto', 'none', 'required' or "
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        found = [tool for tool in tools or [] if tool["function"]["name"] == name]
    if not found:
        raise refusal(
            f"tool_choice is {shorten(choice)}, but tools has none such; allowed: a tool of tools",
            "tool_choice",
        )
    return found


def check_tool_calls(
    name: str, message: dict[str, Any], param: str, quota: Quota
) -> dict[str, Any]:
    """Checks the calls of a message and makes objects of their arguments, as templates expect.

    Args:
        name: The name of the message in errors.
        message: The message, which is not changed.
        param: The field of the request that it comes from.
        quota: Counts the values of all arguments of the request.

    Returns:
        The message for the template.

    Raises:
        ApiError: A call is malformed.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise wrong_field(f"{name}['tool_calls']", calls, "a list", param)
    made = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refusal(
                f"{name}['tool_calls'][{index}] is {shorten(call)}; allowed: "
                '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
                param,
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}", quota, is_strict=False)
            except JsonRefused as error:
                raise refusal(
                    f"{name}['tool_calls'][{index}] has arguments whose JSON {error}", param
                ) from None
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            raise refusal(
                f"{name}['tool_calls'][{index}] has arguments "
                f"{shorten(function.get('arguments'))}; allowed: an object, or one as JSON",
                param,
            )
        made.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": made}
