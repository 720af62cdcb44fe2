# SPDX-License-Identifier: Apache-2.0
"""Runs the prompts of a request and makes its response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling import WITH_TEXT
from paceline.server.connection import END, event, to_json_in_pieces
from paceline.server.errors import as_api_error
from paceline.server.runs import Run, RunContext
from paceline.server.shapes import Shape, metrics_of, prompt_logprobs_of, usage, usage_of

if TYPE_CHECKING:
    from paceline.async_stream import ChunkStream

# Entries of a response that the event loop makes itself, in some milliseconds.
_MAX_SHORT_RESPONSE: Final = 2048


class Generation(Run):
    """The prompts of a completion or a chat, and their outputs."""

    def __init__(self, streams: Sequence[ChunkStream], shape: Shape, context: RunContext) -> None:
        """Starts nothing.

        Args:
            streams: See `Run`.
            shape: The JSON of the route.
            context: See `Run`.
        """
        super().__init__(streams, context)
        self._shape = shape
        self._wishes = shape.wishes
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any] | bytes:
        """See `Run`."""
        params = self._wishes.params
        has_offsets = params.logprobs is not None or params.return_token_sources
        offsets: dict[tuple[int, int], list[int]] = {}
        async with contextlib.aclosing(_merged(self._streams)) as chunks:
            async for index, chunk in chunks:
                if has_offsets:
                    offsets.setdefault((index, chunk.sample), []).extend(chunk.text_offsets)
                self.note(index, chunk)
        outputs = [output for output in self._outputs if output is not None]
        if self._num_entries(outputs) <= _MAX_SHORT_RESPONSE:
            return self._response(outputs, offsets)
        return await self.context.write(lambda: to_json_in_pieces(self._response(outputs, offsets)))

    def _num_entries(self, outputs: Sequence[RequestOutput]) -> int:
        """How many tokens the response describes, each with its best ones."""
        wishes = self._wishes
        of_output = 1 + (wishes.params.logprobs or 0) + bool(wishes.params.receipt)
        of_prompt = 0
        shows_prompt = (
            wishes.echoes or wishes.returns_token_ids or wishes.params.receipt == WITH_TEXT
        )
        if shows_prompt or wishes.params.prompt_logprobs is not None:
            of_prompt = 1 + (wishes.params.prompt_logprobs or 0)
        return sum(
            of_output * len(one.token_ids) + of_prompt * len(output.prompt_token_ids)
            for output in outputs
            for one in output.outputs
        )

    def _response(
        self, outputs: Sequence[RequestOutput], offsets: Mapping[tuple[int, int], list[int]]
    ) -> dict[str, Any]:
        params = self._wishes.params
        choices = []
        for index, output in enumerate(outputs):
            for one in output.outputs:
                choice = self._shape.whole(one, output, offsets.get((index, one.index), []))
                choices.append({"index": self._choice_index(index, one.index)} | choice)
        response = self._head(self._shape.name) | {
            "choices": choices,
            "usage": usage_of(outputs, shows_cached=self.context.shows_cached_tokens),
            "metrics": metrics_of(outputs),
        }
        if self._wishes.returns_token_ids and len(outputs) == 1:
            response["prompt_token_ids"] = outputs[0].prompt_token_ids
        if params.prompt_logprobs is not None and self._wishes.is_chat:
            response["prompt_logprobs"] = prompt_logprobs_of(outputs[0])
        return response

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the response as server-sent events, one for each iteration and output.

        An error ends it: it is the last event but one.
        """
        try:
            async with contextlib.aclosing(_merged(self._streams)) as chunks:
                async for piece in self._pieces(chunks):
                    yield event(piece)
        except Exception as error:
            self.note_error(error)
            yield event(as_api_error(error).body())
        yield END

    async def _pieces(
        self, chunks: AsyncIterator[tuple[int, StreamChunk]]
    ) -> AsyncIterator[dict[str, Any]]:
        head = self._head(self._shape.chunk_name)
        wishes = self._wishes
        num_prompt = sum(len(stream.prompt_token_ids) for stream in self._streams)
        num_output = 0
        begun: set[int] = set()
        async for index, chunk in chunks:
            self.note(index, chunk)
            num_output += len(chunk.token_ids)
            number = self._choice_index(index, chunk.sample)
            prompt_token_ids = self._streams[index].prompt_token_ids
            choice = self._shape.chunk(chunk, prompt_token_ids, is_first=number not in begun)
            if choice is None:
                continue
            piece = head | {"choices": [{"index": number} | choice]}
            if wishes.returns_token_ids and not begun and len(self._streams) == 1:
                piece["prompt_token_ids"] = prompt_token_ids
            begun.add(number)
            if wishes.has_continuous_usage:
                piece["usage"] = usage(num_prompt, num_output)
            yield piece
        if wishes.includes_usage:
            outputs = [output for output in self._outputs if output is not None]
            yield head | {
                "choices": [],
                "usage": usage_of(outputs, shows_cached=self.context.shows_cached_tokens),
                "metrics": metrics_of(outputs),
            }

    def _choice_index(self, prompt: int, sample: int) -> int:
        return prompt * self._wishes.params.n + sample

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self._shape.id_prefix + self.context.request_id,
            "object": name,
            "created": self._created,
            "model": self.context.model,
        }


async def _merged(
    streams: Sequence[ChunkStream],
) -> AsyncGenerator[tuple[int, StreamChunk]]:
    """Yields the chunks of several streams as they come, with the index of their stream."""
    try:
        if len(streams) == 1:
            async for chunk in streams[0]:
                yield 0, chunk
            return
        inbox: asyncio.Queue[tuple[int, StreamChunk | BaseException | None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(_forward(index, stream, inbox))
            for index, stream in enumerate(streams)
        ]
        try:
            num_open = len(tasks)
            while num_open > 0:
                index, item = await inbox.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for stream in streams:
            await stream.aclose()


async def _forward(
    index: int,
    stream: ChunkStream,
    inbox: asyncio.Queue[tuple[int, StreamChunk | BaseException | None]],
) -> None:
    try:
        async for chunk in stream:
            inbox.put_nowait((index, chunk))
        inbox.put_nowait((index, None))
    except Exception as error:
        inbox.put_nowait((index, error))
