# SPDX-License-Identifier: Apache-2.0
"""The fields of each route's body, with their JSON schemas for /openapi.json and /docs.

The values are checked where they are read; the tests compare both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.limits import (
    MAX_BAD_WORDS,
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)
from paceline.sampling import MAX_STOP_STRING_LEN, MAX_STOP_STRINGS
from paceline.server.no_effect import CHOICES, MAX_TEXT, NO_EFFECT
from paceline.server.structured import GUIDED_FIELDS
from paceline.server.thinking import EFFORTS
from paceline.server.tools import MAX_TOOLS

Schema = dict[str, Any]
# By the name of a field.
Schemas = Mapping[str, Schema]

MAX_MESSAGES: Final = 4096
ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_NO_EFFECT: Final = "Has no effect."


def _integer(least: int, most: int, text: str) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "description": text}


def _number(least: float, most: float, text: str) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most, "description": text}


def _above_0(text: str, **more: Any) -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, **more, "description": text}


def _switch(text: str) -> Schema:
    return {"type": "boolean", "description": text}


def _text(text: str, **more: Any) -> Schema:
    return {"type": "string", **more, "description": text}


def _choice(values: tuple[str, ...], text: str) -> Schema:
    return {"type": "string", "enum": list(values), "description": text}


def _object(text: str, properties: Schema | None = None) -> Schema:
    if properties is None:
        return {"type": "object", "description": text}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "description": text,
    }


def _list(items: Schema, text: str, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more, "description": text}


_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
_TOKENS: Final[Schema] = {"type": "array", "items": _TOKEN}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LEN}
_PARTS: Final[Schema] = {"type": "array", "items": {"type": "object", "required": ["type"]}}
_CONTENT: Final[Schema] = {"anyOf": [{"type": "string"}, _PARTS]}


def _messages(roles: tuple[str, ...], text: str, content: Schema) -> Schema:
    message = {
        "type": "object",
        "properties": {"role": {"type": "string", "enum": list(roles)}, "content": content},
        "required": ["role"],
    }
    return _list(message, text, minItems=1, maxItems=MAX_MESSAGES)


def _tools(required: list[str], text: str) -> Schema:
    return _list({"type": "object", "required": required}, text, maxItems=MAX_TOOLS)


# The parameters of `SamplingParams` that mean the same here.
SAMPLING: Final[Schemas] = {
    "n": _integer(1, MAX_SAMPLES, "How many outputs a prompt gets."),
    "temperature": _number(0, MAX_TEMPERATURE, "0 takes the likeliest token."),
    "top_k": _integer(-1, MAX_INT, "Only the k likeliest tokens; 0 and -1 = all."),
    "top_p": _above_0("Only the likeliest tokens of this probability together.", maximum=1),
    "min_p": _number(0, 1, "Only tokens of this share of the likeliest one's probability."),
    "repetition_penalty": _above_0("Divides the logits of tokens that were there; 1 = off."),
    "presence_penalty": _number(-2, 2, "Subtracted from the logits of tokens of the output."),
    "frequency_penalty": _number(-2, 2, "The same for each time that a token was there."),
    "bad_words": _list(
        {"anyOf": [{"type": "string", "minLength": 1}, {**_TOKENS, "minItems": 1}]},
        "Strings, or lists of token ids, that the output does not contain.",
        maxItems=MAX_BAD_WORDS,
    ),
    "allowed_token_ids": _list(_TOKEN, "The only tokens that may be sampled."),
    "max_tokens": _integer(1, MAX_INT, "The longest output."),
    "min_tokens": _integer(0, MAX_INT, "Nothing stops the output before; at most max_tokens."),
    "stop": {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}],
        "description": "Strings that end the output.",
    },
    "include_stop_str_in_output": _switch("Whether the output keeps its stop string."),
    "stop_token_ids": _list(_TOKEN, "Tokens that end the output.", maxItems=MAX_STOP_TOKEN_IDS),
    "ignore_eos": _switch("Whether the end-of-sequence token does not end the output."),
    "seed": _integer(0, MAX_SEED, "A seed gives the same output again."),
    "skip_special_tokens": _switch("Whether the text leaves out special tokens."),
    "spaces_between_special_tokens": _switch("Whether there are spaces between special tokens."),
}
_COMMON: Final[Schemas] = {
    **SAMPLING,
    "model": _text("The name of the model; it may be left out."),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
        "description": "By token id what is added to its logit.",
    },
    "stream": _switch("Whether the output is sent while it grows, as server-sent events."),
    "stream_options": _object(
        "Only with stream.",
        {
            "include_usage": _switch("Whether the last event has the usage."),
            "continuous_usage_stats": _switch("Whether each event has it."),
            "include_obfuscation": {"const": False, "description": _NO_EFFECT},
        },
    ),
    "logprobs": _integer(0, MAX_LOGPROBS, "How many logprobs each token has beside its own."),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS, "The same for the prompt; not with stream."),
    "return_token_ids": _switch("Whether token ids are sent with the text."),
    "return_token_sources": _switch("Whether each token says how it came."),
    "return_tokens_as_token_ids": _switch("Whether logprobs name tokens token_id:ID."),
    "speculative": _object(
        "Fewer drafts for this request.",
        {
            "enabled": _switch("false = none."),
            "num_speculative_tokens": _integer(
                0, MAX_SPECULATIVE_TOKENS, "The most drafts of an iteration."
            ),
        },
    ),
    "cache_salt": _text(
        "Only requests of the same salt share the prefix cache.", minLength=1, maxLength=512
    ),
    "best_of": _integer(1, MAX_SAMPLES, "Equals n."),
    "response_format": _object("What the output must look like, in OpenAI's form."),
    "structured_outputs": _object("The same in vLLM's form."),
    "guided_json": {
        "anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}],
        "description": "A JSON schema of the output.",
    },
    "guided_regex": _text("A regular expression of the output."),
    "guided_choice": _list({"type": "string"}, "What the output may be.", minItems=1),
    "guided_grammar": _text("A grammar of the output."),
    "metadata": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": _NO_EFFECT,
    },
    **{
        name: _text(_NO_EFFECT, maxLength=MAX_TEXT)
        for name in ("prompt_cache_key", "safety_identifier", "user")
    },
    **{name: _choice(CHOICES[name], _NO_EFFECT) for name in NO_EFFECT if name in CHOICES},
}


def _those(fields: Schemas, *names: str) -> Schemas:
    return {name: fields[name] for name in names}


def _without(fields: Schemas, *names: str) -> Schemas:
    return {name: schema for name, schema in fields.items() if name not in names}


COMPLETION_FIELDS: Final[Schemas] = {
    **_COMMON,
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {**_TOKENS, "minItems": 1},
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "anyOf": [
                        {"type": "string", "minLength": 1},
                        {**_TOKENS, "minItems": 1},
                    ]
                },
            },
        ],
        "description": "A text, a list of token ids, or a list of those.",
    },
    "echo": _switch("Whether the prompt comes before the output; not with stream."),
}
CHAT_FIELDS: Final[Schemas] = {
    **_COMMON,
    "messages": _messages(
        ROLES,
        "The conversation.",
        {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}, {"type": "object"}]},
    ),
    "max_completion_tokens": _integer(1, MAX_INT, "Another name of max_tokens."),
    "logprobs": _switch("Whether tokens have logprobs."),
    "top_logprobs": _integer(0, MAX_LOGPROBS, "How many beside the token's own."),
    "add_generation_prompt": _switch("Whether the model begins a message."),
    "continue_final_message": _switch("Whether it continues the last one."),
    "chat_template_kwargs": _object("Variables of the chat template."),
    "tools": _tools(["type", "function"], "Functions that the model may call."),
    "tool_choice": {
        "anyOf": [
            {"type": "string", "enum": ["auto", "none", "required"]},
            {"type": "object", "required": ["type"]},
        ],
        "description": "Which tool is called.",
    },
    "parallel_tool_calls": _switch("false = one call; only if a call is required."),
    "reasoning_effort": _choice(EFFORTS, "How much the model thinks."),
    "verbosity": _choice(CHOICES["verbosity"], _NO_EFFECT),
}
# Of the APIs of one output, whose length has another name or is required.
SINGLE_SAMPLING: Final[Schemas] = _without(SAMPLING, "n", "max_tokens")
RESPONSE_FIELDS: Final[Schemas] = {
    **SINGLE_SAMPLING,
    **_those(CHAT_FIELDS, *NO_EFFECT, *GUIDED_FIELDS),
    **_those(CHAT_FIELDS, "cache_salt", "model", "stream", "logit_bias", "speculative"),
    **_those(CHAT_FIELDS, "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    "input": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": "object"}},
        ],
        "description": "A text, or the items of a conversation.",
    },
    "instructions": _text("A system message."),
    "max_output_tokens": _integer(1, MAX_INT, "The longest output."),
    "tools": _tools(["type", "name"], "Functions that the model may call."),
    "text": _object(
        "The form of the output.",
        {
            "format": {"type": "object", "description": "As response_format of chats."},
            "verbosity": CHAT_FIELDS["verbosity"],
        },
    ),
    "reasoning": _object(
        "How much the model thinks.",
        {
            "effort": _choice(EFFORTS, "How much the model thinks."),
            "summary": {"const": "auto", "description": _NO_EFFECT},
            "generate_summary": {"const": "auto", "description": _NO_EFFECT},
        },
    ),
}
COUNT_FIELDS: Final[Schemas] = {
    **_those(CHAT_FIELDS, "model", "chat_template_kwargs"),
    "messages": _messages(("user", "assistant"), "The conversation.", _CONTENT),
    "system": {**_CONTENT, "description": "Instructions."},
    "tools": _tools(["name", "input_schema"], "Tools that the model may call."),
    "tool_choice": {
        "type": "object",
        "properties": {
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": {"type": "string"},
            "disable_parallel_tool_use": {"type": "boolean"},
        },
        "required": ["type"],
        "additionalProperties": False,
        "description": "Which tool is called.",
    },
    "thinking": {
        "type": "object",
        "properties": {
            "type": {"enum": ["enabled", "disabled", "adaptive"]},
            "budget_tokens": _integer(1, MAX_INT, _NO_EFFECT),
            "display": {"const": "summarized", "description": _NO_EFFECT},
        },
        "required": ["type"],
        "additionalProperties": False,
        "description": "Whether the model thinks.",
    },
    "output_config": _object(
        "The form of the output, and how much the model thinks.",
        {
            "format": {"type": "object", "description": "A JSON schema of the output."},
            "effort": _choice(EFFORTS, "How much the model thinks."),
        },
    ),
}
MESSAGE_FIELDS: Final[Schemas] = {
    **COUNT_FIELDS,
    **_without(SINGLE_SAMPLING, "stop"),
    **_those(CHAT_FIELDS, "max_tokens", "stream", "logit_bias", "speculative", "cache_salt"),
    "stop_sequences": _list(_STOP, "Strings that end the output.", maxItems=MAX_STOP_STRINGS),
    "metadata": _object(_NO_EFFECT, {"user_id": {"type": "string"}}),
    "service_tier": _choice(("auto", "standard_only"), _NO_EFFECT),
}
TOKENIZE_FIELDS: Final[Schemas] = {
    **_those(CHAT_FIELDS, "model", "messages", "add_generation_prompt", "continue_final_message"),
    **_those(CHAT_FIELDS, "chat_template_kwargs", "tools"),
    "prompt": _text("The text; or else messages."),
    "add_special_tokens": _switch("Whether the tokenizer adds special tokens."),
    "return_token_strs": _switch("Whether the tokens are there as strings too."),
}
DETOKENIZE_FIELDS: Final[Schemas] = {
    **_those(CHAT_FIELDS, "model"),
    "tokens": _list(_TOKEN, "The token ids."),
}
