# SPDX-License-Identifier: Apache-2.0
"""Requests while they run: their prompts, what counts their outputs, and their parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.outputs import CompletionOutput, RequestError, RequestOutput, StreamChunk
from paceline.server.fields import ChatCall
from paceline.server.formats import Part
from paceline.server.metrics import RequestFigures

if TYPE_CHECKING:
    from paceline.async_stream import ChunkStream
    from paceline.server.traces import RequestSpan


class RunContext(NamedTuple):
    """The server's part of a request.

    Attributes:
        model: The name of the model in the response.
        request_id: The end of the response's id.
        figures: Counts the outputs.
        span: The request's span; None = it has none.
        write: Makes a call beside the event loop.
        shows_cached_tokens: See `Service`.
    """

    model: str
    request_id: str
    figures: RequestFigures
    span: RequestSpan | None
    write: Callable[[Callable[[], bytes]], Awaitable[bytes]]
    shows_cached_tokens: bool


class Run(ABC):
    """Runs the prompts of a request, and counts their outputs."""

    def __init__(self, streams: Sequence[ChunkStream], context: RunContext) -> None:
        """Starts nothing.

        Args:
            streams: For each prompt its output.
            context: The server's part.
        """
        self.context = context
        self._streams = streams
        self._clocks = [context.figures.clock() for _ in streams]
        self._outputs: list[RequestOutput | None] = [None] * len(streams)

    async def start(self) -> None:
        """Queues all prompts; errors in them are raised here."""
        # One after another, so that requests without a seed get their seeds in order.
        for stream in self._streams:
            await stream.start()

    async def close(self) -> None:
        """Ends what still runs."""
        for stream in self._streams:
            await stream.aclose()

    @abstractmethod
    async def whole(self) -> dict[str, Any] | bytes:
        """Waits for all outputs and returns the response, or its JSON if it is long.

        Raises:
            RequestError: The engine failed to complete a prompt.
        """

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yields the response as server-sent events. A failure is one of them, and raises
        nothing."""

    def note(self, index: int, chunk: StreamChunk) -> None:
        """Counts a chunk and keeps the output of a prompt; raises its error."""
        self._clocks[index].note(chunk)
        if chunk.output is None:
            return
        self._outputs[index] = chunk.output
        self.context.figures.count(chunk.output)
        if self.context.span is not None:
            self.context.span.note_output(chunk.output)
        if chunk.output.error is not None:
            raise RequestError(chunk.output.error, [chunk.output])

    def note_error(self, error: Exception) -> None:
        """Notes an error in the request's span."""
        if self.context.span is not None:
            self.context.span.note_error(error)


class SingleRun(Run):
    """Runs a conversation, and divides its output into parts."""

    def __init__(self, stream: ChunkStream, call: ChatCall, context: RunContext) -> None:
        """Starts nothing.

        Args:
            stream: The output.
            call: The request.
            context: See `Run`.
        """
        super().__init__([stream], context)
        self._parser = call.make_parser()

    async def parts(self) -> AsyncGenerator[list[Part]]:
        """Yields the parts of the output as they become certain.

        Raises:
            RequestError: The engine failed to complete the request.
        """
        async for chunk in self._streams[0]:
            parts = self._parser.take(chunk.text, is_last=chunk.finished)
            self.note(0, chunk)
            yield parts

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompt, once the request is queued."""
        return len(self._streams[0].prompt_token_ids)

    @property
    def output(self) -> tuple[RequestOutput, CompletionOutput]:
        """The output, once it is complete."""
        (output,) = self._outputs
        assert output is not None
        (one,) = output.outputs
        return output, one
