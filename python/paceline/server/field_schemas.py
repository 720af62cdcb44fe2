# SPDX-License-Identifier: Apache-2.0
"""The fields of each route's body, with their JSON schemas for /openapi.json and /docs, and those
that are refused: fields.toml has them.

The values are checked where they are read; the tests compare both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline import limits, sampling
from paceline.server.structured import GUIDED_FIELDS
from paceline.server.thinking import EFFORTS
from paceline.server.tools import MAX_TOOLS
from paceline.speculative_fields import METHODS

Schema = dict[str, Any]
# By the name of a field.
Schemas = Mapping[str, Schema]
#: By field: what to do instead, and the values that are the same as leaving it out.
Refused = Mapping[str, tuple[str, tuple[Any, ...]]]

MAX_MESSAGES: Final = 4096
#: Of texts without an effect.
MAX_TEXT: Final = 512
ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_TABLES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("fields.toml").read_text(encoding="utf-8")
)
# What names in capitals stand for.
_NAMED: Final[dict[str, Any]] = {
    **{name: value for name, value in {**vars(limits), **vars(sampling)}.items() if name.isupper()},
    **{"MAX_MESSAGES": MAX_MESSAGES, "MAX_TEXT": MAX_TEXT, "MAX_TOOLS": MAX_TOOLS},
    **{"EFFORTS": list(EFFORTS), "METHODS": list(METHODS), "ROLES": list(ROLES)},
    **_TABLES["parts"],
}


def _filled(value: Any) -> Any:
    """A schema with what its names in capitals stand for."""
    if isinstance(value, str) and value in _NAMED:
        return _filled(_NAMED[value])
    if isinstance(value, dict):
        return {key: _filled(inner) for key, inner in value.items()}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def _set(name: str) -> Schemas:
    fields = {field: _filled(schema) for field, schema in _TABLES[name].items()}
    return {
        field: {"type": "boolean", "description": schema} if isinstance(schema, str) else schema
        for field, schema in fields.items()
    }


def _refused(name: str) -> Refused:
    def text(template: str) -> str:
        return re.sub(r"<(\w+)>", lambda found: _TABLES["texts"][found[1]], template)

    entries = _TABLES["refused"][name].items()
    return {field: (text(advice), tuple(values)) for field, (advice, *values) in entries}


def _those(fields: Schemas, *names: str) -> Schemas:
    return {name: fields[name] for name in names}


def _without(fields: Schemas, *names: str) -> Schemas:
    return {name: schema for name, schema in fields.items() if name not in names}


#: The parameters of `SamplingParams` that mean the same here.
SAMPLING: Final = _set("sampling")
#: Fields of every route that have no effect.
NO_EFFECT: Final = _set("no_effect")
_COMMON: Final = {**SAMPLING, **_set("common"), **NO_EFFECT}
COMPLETION_FIELDS: Final[Schemas] = {**_COMMON, **_set("completion")}
CHAT_FIELDS: Final[Schemas] = {**_COMMON, **_set("chat")}
# Of the APIs of one output, whose length has another name or is required.
SINGLE_SAMPLING: Final = _without(SAMPLING, "n", "max_tokens")
RESPONSE_FIELDS: Final[Schemas] = {
    **SINGLE_SAMPLING,
    **NO_EFFECT,
    **_those(CHAT_FIELDS, *GUIDED_FIELDS),
    **_those(CHAT_FIELDS, "cache_salt", "model", "stream", "logit_bias", "speculative"),
    **_those(CHAT_FIELDS, "x_receipt"),
    **_those(CHAT_FIELDS, "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    **_set("response"),
}
COUNT_FIELDS: Final[Schemas] = {
    **_those(CHAT_FIELDS, "model", "chat_template_kwargs"),
    **_set("count"),
}
MESSAGE_FIELDS: Final[Schemas] = {
    **COUNT_FIELDS,
    **_without(SINGLE_SAMPLING, "stop"),
    **_those(CHAT_FIELDS, "max_tokens", "stream", "logit_bias", "speculative", "cache_salt"),
    **_those(CHAT_FIELDS, "x_receipt"),
    **_set("message"),
}
TOKENIZE_FIELDS: Final[Schemas] = {
    **_those(CHAT_FIELDS, "model", "messages", "add_generation_prompt", "continue_final_message"),
    **_those(CHAT_FIELDS, "chat_template_kwargs", "tools"),
    **_set("tokenize"),
}
DETOKENIZE_FIELDS: Final[Schemas] = {**_those(CHAT_FIELDS, "model"), **_set("detokenize")}
DRAFTER_FIELDS: Final = _set("drafter")
#: The fields of the body of each route, by path.
FIELDS: Final[Mapping[str, Schemas]] = {
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/responses": RESPONSE_FIELDS,
    "/v1/messages": MESSAGE_FIELDS,
    "/v1/messages/count_tokens": COUNT_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
    "/v1/drafter": DRAFTER_FIELDS,
}

_REFUSED: Final = _refused("all")
REFUSED_IN_COMPLETIONS: Final[Refused] = {**_REFUSED, **_refused("completions")}
REFUSED_IN_CHATS: Final[Refused] = {**_REFUSED, **_refused("chats")}
REFUSED_IN_RESPONSES: Final[Refused] = {**_REFUSED, **_refused("responses")}
REFUSED_IN_MESSAGES: Final[Refused] = {**_REFUSED, **_refused("messages")}
REFUSED_IN_TOKENIZE: Final = _refused("tokenize")
