# SPDX-License-Identifier: Apache-2.0
"""Runs the prompts of a request and makes its response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline.outputs import RequestError, RequestOutput, StreamChunk
from paceline.server.connection import END, event, to_json_in_pieces
from paceline.server.errors import as_api_error
from paceline.server.metrics import RequestFigures
from paceline.server.shapes import Shape, metrics_of, prompt_logprobs_of, usage, usage_of

if TYPE_CHECKING:
    from paceline.async_stream import ChunkStream
    from paceline.server.traces import RequestSpan

# Entries of a response that the event loop makes itself, in some milliseconds.
_MAX_SHORT_RESPONSE: Final = 2048


class Generation:
    """The prompts of one request and their outputs."""

    def __init__(
        self,
        streams: Sequence[ChunkStream],
        model: str,
        shape: Shape,
        figures: RequestFigures,
        write: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        request_id: str,
        span: RequestSpan | None = None,
        *,
        shows_cached_tokens: bool = True,
    ) -> None:
        """Starts nothing.

        Args:
            streams: For each prompt its output.
            model: The name of the model in responses.
            shape: The JSON of the route.
            figures: Counts the outputs.
            write: Makes a call beside the event loop.
            request_id: The end of the response's id.
            span: The request's span; None = it has none.
            shows_cached_tokens: See `Service`.
        """
        self._shows_cached_tokens = shows_cached_tokens
        self._span = span
        self._figures = figures
        self._write = write
        self._clocks = [figures.clock() for _ in streams]
        self._shape = shape
        self._wishes = shape.wishes
        self._streams = streams
        self._outputs: list[RequestOutput | None] = [None] * len(streams)
        self._id = shape.id_prefix + request_id
        self._model = model
        self._created = int(time.time())

    async def start(self) -> None:
        """Queues all prompts; errors in them are raised here."""
        # One after another, so that requests without a seed get their seeds in order.
        for stream in self._streams:
            await stream.start()

    async def close(self) -> None:
        """Ends what still runs."""
        for stream in self._streams:
            await stream.aclose()

    async def whole(self) -> dict[str, Any] | bytes:
        """Waits for all outputs and returns the response, or its JSON if it is long.

        Raises:
            RequestError: The engine failed to complete a prompt.
        """
        params = self._wishes.params
        has_offsets = params.logprobs is not None or params.return_token_sources
        offsets: dict[tuple[int, int], list[int]] = {}
        async with contextlib.aclosing(_merged(self._streams)) as chunks:
            async for index, chunk in chunks:
                if has_offsets:
                    offsets.setdefault((index, chunk.sample), []).extend(chunk.text_offsets)
                self._note(index, chunk)
        outputs = [output for output in self._outputs if output is not None]
        if self._num_entries(outputs) <= _MAX_SHORT_RESPONSE:
            return self._response(outputs, offsets)
        return await self._write(lambda: to_json_in_pieces(self._response(outputs, offsets)))

    def _num_entries(self, outputs: Sequence[RequestOutput]) -> int:
        """How many tokens the response describes, each with its best ones."""
        wishes = self._wishes
        of_output = 1 + (wishes.params.logprobs or 0)
        of_prompt = 0
        if wishes.echoes or wishes.returns_token_ids or wishes.params.prompt_logprobs is not None:
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
            "usage": usage_of(outputs, shows_cached=self._shows_cached_tokens),
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
            if self._span is not None:
                self._span.note_error(error)
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
            self._note(index, chunk)
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
                "usage": usage_of(outputs, shows_cached=self._shows_cached_tokens),
                "metrics": metrics_of(outputs),
            }

    def _note(self, index: int, chunk: StreamChunk) -> None:
        """Keeps the output of a prompt; raises its error."""
        self._clocks[index].note(chunk)
        if chunk.output is not None:
            self._figures.count(chunk.output)
            if self._span is not None:
                self._span.note_output(chunk.output)
            self._outputs[index] = chunk.output
            if chunk.output.error is not None:
                raise RequestError(chunk.output.error, [chunk.output])

    def _choice_index(self, prompt: int, sample: int) -> int:
        return prompt * self._wishes.params.n + sample

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._model}


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
