# SPDX-License-Identifier: Apache-2.0
"""How families write reasoning and tool calls, and parsers that take the text piece by piece.

A parser gives the same parts however the text is divided. What is not a call after all, such as
JSON that is broken, is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from paceline.server.gemma_calls import read_gemma_call
from paceline.server.json_values import OUTPUT_DECODER, read_json
from paceline.server.qwen_calls import read_qwen_call


class Part(NamedTuple):
    """A part of an output.

    Attributes:
        kind: "content", "reasoning" or "call".
        text: The text; of a call, its arguments as JSON.
        name: The function of a call.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""


class Parser:
    """Divides the text of one output into parts. This one takes all of it for content."""

    def push(self, text: str) -> list[Part]:
        """Takes the next piece and returns what is certain by now."""
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        """Returns the rest, when the output has ended."""
        return []

    def take(self, text: str, *, is_last: bool) -> list[Part]:
        """Takes the next piece, and the end of the output after the last one."""
        return self.push(text) + (self.finish() if is_last else [])


# ---- tags: Hermes, Qwen, Gemma 4 -----------------------------------------------------------------

ReadCall = Callable[[str], Part | None]


class TagParser(Parser):
    """Calls between tags, and reasoning between others."""

    def __init__(
        self,
        call_tags: tuple[str, str],
        read_call: ReadCall,
        thought_tags: tuple[str, str] | None,
        *,
        is_thinking: bool = False,
        drops_breaks: bool = False,
    ) -> None:
        """Starts outside of all tags, or in reasoning.

        Args:
            call_tags: Before and after a call.
            read_call: Reads what is between them; None if it is no call.
            thought_tags: Before and after reasoning; None if there are none.
            is_thinking: The prompt ends with the tag before reasoning.
            drops_breaks: Line breaks beside the tags of reasoning belong to them.
        """
        self._call_tags = call_tags
        self._read_call = read_call
        self._thought_tags = thought_tags
        self._opening = [call_tags[0], *([thought_tags[0]] if thought_tags else [])]
        # The tag that the text is behind.
        self._open = thought_tags[0] if thought_tags and is_thinking else None
        self._drops_breaks = drops_breaks
        self._is_after_tag = drops_breaks and is_thinking
        self._breaks = ""  # of reasoning, which are dropped at its end
        self._text = ""  # not given yet
        self._space = ""  # whitespace, which is dropped before a call

    def push(self, text: str) -> list[Part]:
        """See `Parser`."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Takes what is certain from the text; returns whether more may be."""
        if self._open is None:
            found = [(self._text.find(tag), tag) for tag in self._opening if tag in self._text]
            if found:
                at, tag = min(found)
                self._add_content(parts, self._text[:at])
                self._text = self._text[at + len(tag) :]
                self._open = tag
                self._is_after_tag = self._drops_breaks and tag != self._call_tags[0]
                return True
            kept = _held_back(self._text, self._opening)
            self._add_content(parts, self._text[: len(self._text) - kept])
            self._text = self._text[len(self._text) - kept :]
            return False
        is_call = self._open == self._call_tags[0]
        closing = self._call_tags[1] if is_call else self._thought_tags[1]  # type: ignore[index]
        at = self._text.find(closing)
        if not is_call:
            end = len(self._text) - _held_back(self._text, [closing]) if at < 0 else at
            self._add_reasoning(parts, self._text[:end])
        if at < 0:
            self._text = self._text if is_call else self._text[end:]
            return False
        if is_call:
            self._add_call(parts, self._text[:at], closing)
        self._text = self._text[at + len(closing) :]
        self._open = None
        self._is_after_tag = self._drops_breaks and not is_call
        self._breaks = ""
        return True

    def _add_reasoning(self, parts: list[Part], text: str) -> None:
        if self._drops_breaks:
            text = self._breaks + text
            bare = text.rstrip("\n")
            self._breaks = text[len(bare) :]
            text = bare.lstrip("\n") if self._is_after_tag else bare
            self._is_after_tag = self._is_after_tag and not text
        if text:
            parts.append(Part("reasoning", text))

    def _add_content(self, parts: list[Part], text: str) -> None:
        if self._is_after_tag:
            text = text.lstrip("\n")
            self._is_after_tag = not text
        text = self._space + text
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if bare:
            parts.append(Part("content", bare))

    def _add_call(self, parts: list[Part], text: str, closing: str) -> None:
        call = self._read_call(text)
        if call is None:
            self._add_content(parts, self._call_tags[0] + text + closing)
        else:
            self._space = ""
            parts.append(call)

    def finish(self) -> list[Part]:
        """See `Parser`."""
        parts: list[Part] = []
        rest, self._text = self._text, ""
        if self._open is None:
            rest = self._space + rest
            if rest:
                parts.append(Part("content", rest))
        elif self._open == self._call_tags[0]:
            # An end-of-sequence token may take the place of the closing tag.
            self._add_call(parts, rest, "")
        else:
            self._add_reasoning(parts, rest)
        return parts


def _held_back(text: str, tags: list[str]) -> int:
    """The length of the longest end of a text that may be the beginning of a tag."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


def read_json_call(text: str) -> Part | None:
    """Reads {"name": ..., "arguments": {...}}; Llama 3 calls the latter "parameters"."""
    try:
        call = read_json(text)
    except (ValueError, RecursionError):
        return None
    return _as_call(call)


def _as_call(call: Any) -> Part | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return Part("call", arguments, call["name"])
    if not isinstance(arguments, dict):
        return None
    return Part("call", json.dumps(arguments, ensure_ascii=False), call["name"])


# ---- Llama 3 -------------------------------------------------------------------------------------


class JsonParser(Parser):
    """An output that is calls as JSON, from its first character on, or text."""

    _TAG: Final = "<|python_tag|>"

    def __init__(self) -> None:
        """Starts at the beginning."""
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        """See `Parser`."""
        if self._is_text:
            return super().push(text)
        self._text += text
        begin = self._text.lstrip()
        if not begin or begin[0] == "{" or self._TAG.startswith(begin[: len(self._TAG)]):
            return []
        self._is_text = True
        text, self._text = self._text, ""
        return [Part("content", text)]

    def finish(self) -> list[Part]:
        """See `Parser`."""
        calls: list[Part] = []
        rest = self._text.strip().removeprefix(self._TAG).strip()
        while rest:
            try:
                value, end = OUTPUT_DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                value, end = None, 0
            call = _as_call(value)
            if call is None:
                return [Part("content", self._text)]
            calls.append(call)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
        if not calls and self._text:
            return [Part("content", self._text)]
        return calls


# ---- GPT-OSS -------------------------------------------------------------------------------------


class HarmonyParser(Parser):
    """Messages in channels: analysis is reasoning, and messages to functions are calls."""

    _MARKS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>",
                     "<|call|>", "<|return|>")  # fmt: skip
    _MARK: Final = re.compile("|".join(map(re.escape, _MARKS)))
    _RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([\w.-]+)")

    def __init__(self) -> None:
        """Starts in a header: the prompt ends with the beginning of a message."""
        self._text = ""
        self._header = ""
        self._is_body = False
        self._has_begun = False
        self._arguments = ""

    def push(self, text: str) -> list[Part]:
        """See `Parser`."""
        self._text += text
        parts: list[Part] = []
        while mark := self._MARK.search(self._text):
            self._take(parts, self._text[: mark.start()])
            self._text = self._text[mark.end() :]
            self._pass(parts, mark[0])
        end = len(self._text) - _held_back(self._text, list(self._MARKS))
        self._take(parts, self._text[:end])
        self._text = self._text[end:]
        return parts

    def finish(self) -> list[Part]:
        """See `Parser`."""
        parts: list[Part] = []
        self._take(parts, self._text)
        self._text = ""
        self._end(parts)
        if not self._has_begun and self._header:  # no message: the model has left the format
            parts.append(Part("content", self._header))
        return parts

    def _take(self, parts: list[Part], text: str) -> None:
        """Takes text between two marks."""
        if not text:
            return
        if not self._is_body:
            self._header += text
        elif self._recipient is not None:
            self._arguments += text
        elif "analysis" in self._header:
            parts.append(Part("reasoning", text))
        else:
            parts.append(Part("content", text))

    def _pass(self, parts: list[Part], mark: str) -> None:
        if mark == "<|message|>":
            self._is_body = self._has_begun = True
        elif mark in ("<|channel|>", "<|constrain|>") and not self._is_body:
            self._header += " "
        else:
            self._end(parts)

    def _end(self, parts: list[Part]) -> None:
        """Ends a message."""
        recipient = self._recipient
        if self._is_body and recipient is not None:
            parts.append(Part("call", self._arguments.strip() or "{}", recipient))
        if self._is_body:
            self._header = ""
        self._is_body = False
        self._arguments = ""

    @property
    def _recipient(self) -> str | None:
        found = self._RECIPIENT.search(self._header)
        return None if found is None else found[1]


# ---- which one -----------------------------------------------------------------------------------


class MakeParser(Protocol):
    """Makes a parser for one output."""

    def __call__(self, tools: Sequence[Any] = (), *, is_thinking: bool = False) -> Parser:
        """Makes it.

        Args:
            tools: Those that may be called.
            is_thinking: The prompt ends within reasoning.
        """


class Format(NamedTuple):
    """How a family writes.

    Attributes:
        name: Its name, vLLM's where there is one.
        make: Makes a parser for one output.
        is_always_read: Whether it is there without tools too. Its tags may be special tokens.
        thought: The tag before reasoning, if a prompt may end with it; empty if none does.
    """

    name: str
    make: MakeParser
    is_always_read: bool
    thought: str = ""


def _of(make: Callable[[], Parser]) -> MakeParser:
    """A format whose parser needs to know nothing."""
    return lambda tools=(), *, is_thinking=False: make()


def _gemma_parser() -> Parser:
    return TagParser(
        ("<|tool_call>", "<tool_call|>"),
        lambda text: None if (call := read_gemma_call(text)) is None else Part("call", *call),
        ("<|channel>", "<channel|>"),
    )


def _hermes_parser() -> Parser:
    return TagParser(("<tool_call>", "</tool_call>"), read_json_call, None)


def _thinking_parser(read_call: ReadCall, is_thinking: bool) -> Parser:
    return TagParser(
        ("<tool_call>", "</tool_call>"),
        read_call,
        ("<think>", "</think>"),
        is_thinking=is_thinking,
        drops_breaks=True,
    )


def _qwen3_parser(tools: Sequence[Any] = (), *, is_thinking: bool = False) -> Parser:
    # Without tools a call is content. Reasoning is read in any case.
    return _thinking_parser(read_json_call if tools else lambda text: None, is_thinking)


def _coder_parser(tools: Sequence[Any] = (), *, is_thinking: bool = False) -> Parser:
    def read_call(text: str) -> Part | None:
        call = read_qwen_call(text, tools)
        return None if call is None else Part("call", *call)

    return _thinking_parser(read_call, is_thinking)


FORMATS: Final[Mapping[str, Format]] = {
    one.name: one
    for one in (
        Format("hermes", _of(_hermes_parser), False),
        Format("qwen3", _qwen3_parser, True, "<think>"),
        Format("qwen3_coder", _coder_parser, True, "<think>"),
        Format("llama3_json", _of(JsonParser), False),
        Format("gemma4", _of(_gemma_parser), True),
        Format("openai", _of(HarmonyParser), True),
    )
}


def format_of(template: str) -> Format | None:
    """Finds the format in which a chat template writes calls; None for an unknown one."""
    if "<|channel|>" in template:
        return FORMATS["openai"]
    if "<|tool_call>" in template:
        return FORMATS["gemma4"]
    if "<tool_call>" in template:
        if "<function=" in template:
            return FORMATS["qwen3_coder"]
        return FORMATS["qwen3" if "<think>" in template else "hermes"]
    if "<|start_header_id|>" in template and "tools" in template:
        return FORMATS["llama3_json"]
    return None
