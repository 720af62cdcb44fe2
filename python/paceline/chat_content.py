# SPDX-License-Identifier: Apache-2.0
"""The form in which a chat template reads content: as a string, or as a list of text parts.

Many templates skip content of the form that they do not read, without an error, so that the words
of a message would be lost. A probe of each role shows which form a template reads, and messages
get that form.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from paceline import chat_process
from paceline.chat_messages import PartsAsText, TextParts

Form = Literal["string", "parts", "any"]

_FIRST: Final = "PacelineFirstPart"
_SECOND: Final = "PacelineSecondPart"
_BOTH: Final = re.compile(rf"{_FIRST}\s*{_SECOND}")
_QUESTION: Final = {"role": "user", "content": "Question"}
_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {}}}
    ],
}
# A probe has three messages at most.
_MAX_CPU_S: Final = 1.0


@functools.lru_cache(maxsize=256)
def form_of(template: str, role: str, special_tokens: tuple[tuple[str, str], ...]) -> Form:
    """Finds the form in which a template reads the content of a role.

    Args:
        template: The template.
        role: The role.
        special_tokens: The variables of the template that are special tokens.

    Returns:
        "string" or "parts" if it reads only that form; "any" if both, or if the probe cannot tell.
    """
    tokens = dict(special_tokens)
    as_string = _probe(template, role, _FIRST + _SECOND, tokens)
    parts = TextParts({"type": "text", "text": text} for text in (_FIRST, _SECOND))
    as_parts = _probe(template, role, parts, tokens)
    if _FIRST + _SECOND in as_string:
        return "any" if _BOTH.search(as_parts) else "string"
    if _BOTH.search(as_parts):
        return "parts"
    # A template that the probe does not suit may still read strings, as nearly all do.
    return "any" if _FIRST in as_parts else "string"


def _probe(template: str, role: str, content: Any, tokens: Mapping[str, str]) -> str:
    """Renders a conversation with a message of a role; "" if the template fails."""
    message = {"role": role, "content": content}
    if role in ("system", "developer"):
        messages = [message, _QUESTION]
    elif role == "user":
        messages = [message]
    elif role == "tool":
        messages = [_QUESTION, _CALL, message | {"tool_call_id": "call12345", "name": "f"}]
    else:
        messages = [_QUESTION, message]
    variables = {
        "documents": None,
        **tokens,
        "messages": messages,
        "tools": None,
        "add_generation_prompt": True,
    }
    try:
        return chat_process.render(template, variables, _MAX_CPU_S)
    except (chat_process.TemplateError, PartsAsText):
        return ""


def with_form(message: dict[str, Any], form: Form) -> dict[str, Any]:
    """Returns a message whose text has a form. Content that is no text stays as it is."""
    content = message.get("content")
    if form == "parts" and isinstance(content, str):
        return message | {"content": TextParts([{"type": "text", "text": content}])}
    if form == "string" and isinstance(content, list | tuple):
        texts = [part["text"] for part in content if _is_text(part)]
        # The result of a tool may be a list of anything.
        if len(texts) == len(content) and (texts or message["role"] != "tool"):
            return message | {"content": "".join(texts)}
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"
