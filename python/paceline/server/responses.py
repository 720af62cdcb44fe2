# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: one output as a list of items, whole or as events."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from paceline.server.connection import named_event
from paceline.server.errors import as_api_error
from paceline.server.fields import ChatCall
from paceline.server.formats import Part
from paceline.server.runs import RunContext, SingleRun
from paceline.server.shapes import metrics_of, receipt_of

if TYPE_CHECKING:
    from paceline.async_stream import ChunkStream

Event = dict[str, Any]


class ResponseRun(SingleRun):
    """A request to /v1/responses while it runs."""

    def __init__(self, stream: ChunkStream, call: ChatCall, context: RunContext) -> None:
        """Starts nothing; see `SingleRun`."""
        super().__init__(stream, call, context)
        self._items = Items()
        self._head: dict[str, Any] = {
            "id": f"resp_{context.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": context.model,
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **call.shown,
        }

    async def whole(self) -> dict[str, Any]:
        """See `Run`."""
        async for parts in self.parts():
            self._items.take(parts)
        self._items.end()
        return self._response()

    async def events(self) -> AsyncIterator[bytes]:
        """See `Run`."""
        number = 0
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                yield named_event(event | {"sequence_number": number})
                number += 1

    async def _events(self) -> Any:
        begun = self._head | {"status": "in_progress", "output": [], "usage": None, "error": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        try:
            async for parts in self.parts():
                for event in self._items.take(parts):
                    yield event
        except Exception as error:
            self.note_error(error)
            failed = {"code": "server_error", "message": as_api_error(error).message}
            response = begun | {"status": "failed", "error": failed}
            yield {"type": "response.failed", "response": response}
            return
        for event in self._items.end():
            yield event
        response = self._response()
        yield {"type": f"response.{response['status']}", "response": response}

    def _response(self) -> dict[str, Any]:
        output, one = self.output
        is_cut = one.finish_reason == "length"
        details = {"reason": "max_output_tokens"} if is_cut else None
        if details is not None and one.stop_reason is not None:
            details["stop_reason"] = str(one.stop_reason)  # the reason has no word for it
        num_input, num_output = len(output.prompt_token_ids), len(one.token_ids)
        usage: dict[str, Any] = {
            "input_tokens": num_input,
            "output_tokens": num_output,
            "total_tokens": num_input + num_output,
        }
        if self.context.shows_cached_tokens:
            usage["input_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": details,
            "output": self._items.made,
            "usage": usage,
            "metrics": metrics_of([output]),
            **receipt_of(one),
        }


class Items:
    """The items of a response, and the events that make them.

    Attributes:
        made: The items so far. The last one may grow.
    """

    def __init__(self) -> None:
        """Starts without items."""
        self.made: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of the item that grows

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """Adds parts of the output."""
        events: list[Event] = []
        for part in parts:
            if part.kind == "call":
                events += self.end()
                events += self._add_call(part)
                continue
            if self._open != part.kind:
                events += self.end()
                events += self._begin(part.kind)
            self.made[-1]["content"][0]["text"] += part.text
            delta = {"delta": part.text}
            if part.kind == "content":
                delta["logprobs"] = []  # type: ignore[assignment]
            events.append(self._event(f"{self._name}.delta", delta))
        return events

    def end(self) -> list[Event]:
        """Ends the item that grows, if there is one."""
        if self._open is None:
            return []
        item = self.made[-1]
        item["status"] = "completed"
        (part,) = item["content"]
        events = [
            self._event(f"{self._name}.done", {"text": part["text"]}),
            self._event("content_part.done", {"part": part}),
            self._item_event("done"),
        ]
        self._open = None
        return events

    def _begin(self, kind: str) -> list[Event]:
        self._open = kind
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}
        if kind == "content":
            part = {"type": "output_text", "text": "", "annotations": []}
            item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
        self.made.append(item | {"status": "in_progress", "content": [part]})
        added = self._item_event("added")
        added["item"] |= {"content": []}
        return [added, self._event("content_part.added", {"part": dict(part)})]

    def _add_call(self, part: Part) -> list[Event]:
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": part.name,
            "arguments": part.text,
            "status": "completed",
        }
        self.made.append(item)
        begun = self._item_event("added")
        begun["item"] |= {"arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": len(self.made) - 1}
        name = "response.function_call_arguments"
        return [
            begun,
            {"type": f"{name}.delta", **place, "delta": part.text},
            {"type": f"{name}.done", **place, "arguments": part.text, "name": part.name},
            self._item_event("done"),
        ]

    @property
    def _name(self) -> str:
        return "output_text" if self._open == "content" else "reasoning_text"

    def _event(self, name: str, fields: dict[str, Any]) -> Event:
        """An event of the only content of the last item."""
        place = {"output_index": len(self.made) - 1, "content_index": 0}
        return {
            "type": f"response.{name}",
            "item_id": self.made[-1]["id"],
            **place,
            **fields,
        }

    def _item_event(self, name: str) -> Event:
        item = dict(self.made[-1])
        index = len(self.made) - 1
        return {"type": f"response.output_item.{name}", "output_index": index, "item": item}
