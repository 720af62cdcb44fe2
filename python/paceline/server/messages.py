# SPDX-License-Identifier: Apache-2.0
"""/v1/messages of Anthropic's API: one output as a list of content blocks, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from paceline.outputs import CompletionOutput
from paceline.server.connection import named_event
from paceline.server.errors import as_api_error
from paceline.server.fields import ChatCall
from paceline.server.formats import Part
from paceline.server.json_values import read_json
from paceline.server.runs import RunContext, SingleRun
from paceline.server.shapes import metrics_of, receipt_of

if TYPE_CHECKING:
    from paceline.async_stream import ChunkStream

Event = dict[str, Any]


class MessageRun(SingleRun):
    """A request to /v1/messages while it runs."""

    def __init__(self, stream: ChunkStream, call: ChatCall, context: RunContext) -> None:
        """Starts nothing; see `SingleRun`."""
        super().__init__(stream, call, context)
        self._blocks = Blocks()
        self._head: dict[str, Any] = {
            "id": f"msg_{context.request_id}",
            "type": "message",
            "role": "assistant",
            "model": context.model,
        }

    async def whole(self) -> dict[str, Any]:
        """See `Run`."""
        async for parts in self.parts():
            self._blocks.take(parts)
        self._blocks.end()
        output, one = self.output
        return {
            **self._head,
            "content": self._blocks.made,
            **self._stop(one),
            "usage": self._usage(),
            "metrics": metrics_of([output]),
            **receipt_of(one),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """See `Run`."""
        begun = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.num_prompt_tokens, "output_tokens": 0},
        }
        yield named_event({"type": "message_start", "message": begun})
        yield named_event({"type": "ping"})
        try:
            async for parts in self.parts():
                for event in self._blocks.take(parts):
                    yield named_event(event)
        except Exception as error:
            self.note_error(error)
            yield named_event(as_api_error(error).message_body(self.context.request_id))
            return
        for event in self._blocks.end():
            yield named_event(event)
        output, one = self.output
        yield named_event(
            {
                "type": "message_delta",
                "delta": self._stop(one),
                "usage": self._usage(),
                "metrics": metrics_of([output]),
                **receipt_of(one),
            }
        )
        yield named_event({"type": "message_stop"})

    def _stop(self, one: CompletionOutput) -> dict[str, Any]:
        """Says why the output has ended."""
        sequence = None
        if one.finish_reason == "length":
            is_cut = one.stop_reason == "max_model_len"
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif isinstance(one.stop_reason, str):
            reason, sequence = "stop_sequence", one.stop_reason
        else:
            reason = "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Makes the usage, whose input tokens are those that the prefix cache did not have."""
        output, one = self.output
        num_prompt, num_cached = len(output.prompt_token_ids), 0
        if self.context.shows_cached_tokens:
            num_cached = output.num_cached_tokens
        return {
            "input_tokens": num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": len(one.token_ids),
        }


class Blocks:
    """The content blocks of a message, and the events that make them.

    Attributes:
        made: The blocks so far. The last one may grow.
        has_calls: Whether one of them is a call of a tool.
    """

    def __init__(self) -> None:
        """Starts without blocks."""
        self.made: list[dict[str, Any]] = []
        self.has_calls = False
        self._open: str | None = None  # the type of the block that grows

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """Adds parts of the output."""
        events: list[Event] = []
        for part in parts:
            arguments = _arguments(part) if part.kind == "call" else None
            if arguments is not None:
                events += self._add_call(part, arguments)
            else:
                # Arguments that are no object are no call, but words of the model.
                kind = "thinking" if part.kind == "reasoning" else "text"
                events += self._add_text(kind, part.text)
        return events

    def end(self) -> list[Event]:
        """Ends the block that grows, if there is one."""
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": len(self.made) - 1}]

    def _add_text(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open != kind:
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events += self._begin(empty)
            self._open = kind
        self.made[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _add_call(self, part: Part, arguments: dict[str, Any]) -> list[Event]:
        self.has_calls = True
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": part.name}
        events = self._begin(block | {"input": {}})
        self._open = "tool_use"
        self.made[-1]["input"] = arguments
        delta = self._delta({"type": "input_json_delta", "partial_json": part.text})
        return [*events, delta, *self.end()]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        ended = self.end()
        self.made.append(block)
        index = len(self.made) - 1
        return [
            *ended,
            {"type": "content_block_start", "index": index, "content_block": dict(block)},
        ]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.made) - 1, "delta": delta}


def _arguments(part: Part) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        found = read_json(part.text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
