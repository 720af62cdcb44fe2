# SPDX-License-Identifier: Apache-2.0
"""What requests say of the form of outputs, and the grammars of tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from paceline.checks import shorten
from paceline.server.bodies import Fields
from paceline.server.errors import refusal, wrong_field
from paceline.server.formats import Format
from paceline.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputsParams

# vLLM's older names.
_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
#: Those of /v1/responses, which has its own in place of response_format.
GUIDED_FIELDS: Final = ("structured_outputs", *_GUIDED)
STRUCTURED_FIELDS: Final = ("response_format", *GUIDED_FIELDS)

# The formats whose calls are JSON between the tags of a call.
_JSON_IN_TAGS: Final = ("hermes", "qwen3")

# The reasoning of GPT-OSS, which may come before its final message or its call.
_ANALYSIS: Final = (
    '<|channel|> "analysis" <|message|> REASONING <|end|> <|start|> "assistant"',
    "REASONING: /(?s:.*)/",
)


def take_structured(
    fields: Fields, names: Sequence[str] = STRUCTURED_FIELDS
) -> StructuredOutputsParams | None:
    """Takes what an output must look like; None if it is free.

    Args:
        fields: The fields of the request.
        names: Those of them that may say it.

    Raises:
        ApiError: A field is malformed, or more than one is given.
        ValueError: Likewise.
    """
    given = {name: fields.take(name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    made = [
        (name, params)
        for name, value in given.items()
        if (params := _params_of(name, value)) is not None
    ]
    if len(made) > 1:
        names = [name for name, _ in made]
        raise refusal(f"{' and '.join(names)} are given; allowed: one of them", names[1])
    return made[0][1] if made else None


def _params_of(name: str, value: Any) -> StructuredOutputsParams | None:
    if name in _GUIDED:
        return _make(name, {_GUIDED[name]: value})
    if name == "structured_outputs":
        if not isinstance(value, dict):
            raise wrong_field(name, value, "an object")
        return _make(name, value)
    return params_of_format(name, value)


def params_of_format(name: str, value: Any) -> StructuredOutputsParams | None:
    """Reads OpenAI's format of a response.

    Args:
        name: The field, for errors.
        value: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", ...}; the schema
            is in an object "json_schema", or beside the type as in /v1/responses.

    Returns:
        What the output must look like; None for text.

    Raises:
        ApiError: It is something else.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _make(name, {"json_object": True})
    if kind != "json_schema":
        raise refusal(
            f'{name} is {shorten(value)}; allowed: {{"type": "text"}}, {{"type": "json_object"}} '
            'or {"type": "json_schema", ...}',
            name.partition(".")[0],
        )
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise refusal(
            f"{name} has the schema {shorten(schema)}; allowed: a JSON schema, which is an object",
            name.partition(".")[0],
        )
    return _make(name, {"json": schema})


def _make(name: str, arguments: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**arguments)
    except (TypeError, ValueError) as error:
        raise refusal(f"{name}: {error}", name.partition(".")[0]) from None


# ---- in the formats of families ------------------------------------------------------------------


def in_format(
    params: StructuredOutputsParams, text_format: Format | None
) -> StructuredOutputsParams:
    """Puts the form of a message into the format in which the model writes messages.

    Raises:
        ApiError: The format has no place for it.
    """
    if text_format is None or text_format.name != "openai":
        return params  # a message is its text
    if params.json is None and not params.json_object:
        raise refusal(
            "this model writes its messages in channels, where only JSON can be required; allowed: "
            "response_format, guided_json or structured_outputs with json or json_object"
        )
    analysis, reasoning = _ANALYSIS
    schema = params.json or '{"type": "object"}'
    return StructuredOutputsParams(
        grammar=f"start: analysis? final\nanalysis: {analysis}\n"
        f'final: <|channel|> "final" <|message|> body\nbody: %json {schema}\n{reasoning}\n'
    )


def calls_grammar(
    tools: Sequence[dict[str, Any]], text_format: Format, *, is_one: bool
) -> StructuredOutputsParams:
    """The grammar of an output that calls tools.

    Args:
        tools: Those that may be called.
        text_format: How the model writes calls.
        is_one: Whether there is exactly one call, else there may be more.

    Raises:
        ApiError: Calls of this format are no JSON, or the schemas are too long.
    """
    calls, rules = [], []
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
        name = json.dumps(function["name"], ensure_ascii=False)
        arguments = f"arguments_{index}"
        if text_format.name in _JSON_IN_TAGS:
            begin = f'<tool_call>\n{{"name": {name}, "arguments": '
            calls.append(f"{_quoted(begin)} {arguments} {_quoted('}' + chr(10) + '</tool_call>')}")
        elif text_format.name == "llama3_json":
            begin = f'{{"name": {name}, "parameters": '
            calls.append(f'{_quoted(begin)} {arguments} "}}"')
        elif text_format.name == "openai":
            header = f"commentary to=functions.{function['name']} "
            calls.append(
                f'<|channel|> {_quoted(header)} <|constrain|> "json" <|message|> {arguments}'
            )
        else:
            raise refusal(
                "tool_choice requires a call, but this model writes calls in the format "
                f"{text_format.name!r}, which is no JSON; allowed: 'auto' or 'none'",
                "tool_choice",
            )
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(calls)))}")
    rules += [f"call_{index}: {call}" for index, call in enumerate(calls)]
    if text_format.name == "openai":
        analysis, reasoning = _ANALYSIS
        start = "start: analysis? call"  # a call ends the output
        rules += [f"analysis: {analysis}", reasoning]
    elif is_one:
        start = "start: call"
    else:
        separator = '"\\n"' if text_format.name in _JSON_IN_TAGS else '"; "'
        start = f"start: call ({separator} call)*"
    grammar = "\n".join([start, *rules, ""])
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise refusal(
            f"tools make a grammar of {len(grammar)} characters; allowed with this tool_choice: at "
            f"most {MAX_GRAMMAR_CHARS}",
            "tools",
        )
    return StructuredOutputsParams(grammar=grammar)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
