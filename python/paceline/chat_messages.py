# SPDX-License-Identifier: Apache-2.0
"""Checks conversations and tools, and rebuilds them out of plain data for a template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.checks import bytes_advice, check_text, shorten, wrong_type, wrong_value

Message = Mapping[str, Any]
Conversation = Sequence[Message]

_MEDIA_TYPES: Final = (
    "audio",
    "audio_url",
    "file",
    "image",
    "image_url",
    "input_audio",
    "input_file",
    "input_image",
    "video",
    "video_url",
)
# Names under which the reasoning of a message comes; templates read the first or the second.
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")

_ALLOWED_MESSAGES: Final = (
    'a conversation, i.e. a list of messages {"role": ..., "content": ...}, or a list of '
    "conversations"
)


class TextParts(list[Any]):
    """Content in parts. A template that takes it for a string fails instead of writing Python."""

    def __repr__(self) -> str:
        raise PartsAsText

    __str__ = __repr__


class PartsAsText(Exception):
    """A template writes content in parts as a string."""


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[list[Any]]:
    """Checks one conversation or several, and copies them as plain data.

    Returns:
        One list of messages per conversation.

    Raises:
        ValueError: A message is malformed. The message of the error says which.
        NotImplementedError: A message has an image or another part that is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        advice = "; put the message into a list" if isinstance(messages, Mapping) else ""
        raise wrong_type(
            "messages", messages, f"{_ALLOWED_MESSAGES}{bytes_advice(messages)}{advice}"
        )
    if not messages:
        raise ValueError(f"messages is empty; allowed: {_ALLOWED_MESSAGES}")
    if not isinstance(messages[0], list | tuple):
        return [_conversation("messages", messages)]
    for index, conversation in enumerate(messages):
        if not isinstance(conversation, list | tuple) or not conversation:
            raise ValueError(
                f"messages[{index}] is {shorten(conversation)}; allowed in a list of "
                "conversations: lists of at least one message"
            )
    return [_conversation(f"messages[{i}]", each) for i, each in enumerate(messages)]


def _conversation(name: str, messages: Any) -> list[Any]:
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, given: Any) -> dict[str, Any]:
    message = plain_data(name, given)
    if not isinstance(message, dict):
        raise ValueError(
            f"{name} is {shorten(given)} ({type(given).__name__}); allowed: a message, i.e. a dict "
            f'{{"role": ..., "content": ...}}{bytes_advice(given)}'
        )
    if "role" not in message:
        raise ValueError(
            f"{name} is {shorten(message)}, which has no 'role'; allowed: a message with a role, "
            "e.g. 'user'"
        )
    if len(message) == 1:
        raise ValueError(f"{name} is {shorten(message)}, which has no 'content'")
    check_text(f"{name}['role']", message["role"])
    content = message.get("content")
    _check_content(f"{name}['content']", content, message["role"])
    if isinstance(content, list) and message["role"] != "tool":
        message["content"] = TextParts(content)
    reasoning = next(
        (message[key] for key in _REASONING_KEYS if message.get(key) is not None), None
    )
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _check_content(name: str, content: Any, role: str) -> None:
    if content is None:
        return
    if isinstance(content, list | tuple):
        for index, part in enumerate(content):
            _check_part(f"{name}[{index}]", part, role)
        return
    # The result of a tool may be any JSON.
    if role != "tool":
        check_text(name, content, "a string, None, or a list of parts")


def _check_part(name: str, part: Any, role: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _MEDIA_TYPES:
        raise NotImplementedError(
            f"{name} has type {kind!r}, which is not supported yet; this version reads parts of "
            "type 'text'"
        )
    if kind == "text":
        check_text(f"{name}['text']", part.get("text"))
    elif kind is not None or role != "tool":
        raise wrong_value(name, part, '{"type": "text", "text": ...}')


def list_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    """Checks tools and copies them as plain data.

    Raises:
        ValueError: A tool is not a dict.
    """
    if tools is None:
        return None
    allowed = 'a list of dicts {"type": "function", "function": {"name": ..., "parameters": ...}}'
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise wrong_type("tools", tools, allowed)
    for index, tool in enumerate(tools):
        if callable(tool) and not isinstance(tool, Mapping):
            raise ValueError(
                f"tools[{index}] is the function {getattr(tool, '__name__', shorten(tool))!r}; "
                f"allowed: {allowed}. transformers.utils.get_json_schema makes one of a function"
            )
        if not isinstance(tool, Mapping):
            raise wrong_type(f"tools[{index}]", tool, allowed)
    return [plain_data(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def plain_data(name: str, value: Any) -> Any:
    """Rebuilds a value out of str, int, float, bool, None, list, tuple and dict.

    The process that renders templates gets no objects of other classes. Dataclasses, pydantic
    models and NumPy scalars become their contents; anything else, the name of its type, as
    transformers does.

    Args:
        name: Its name in error messages.
        value: The value.

    Raises:
        ValueError: It is nested too deeply, or a string is not valid Unicode.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply, or contains itself") from None


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"
