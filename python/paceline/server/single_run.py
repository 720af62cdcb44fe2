# SPDX-License-Identifier: Apache-2.0
"""A request with one output while it runs, whatever its route makes of the output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from paceline.outputs import CompletionOutput, RequestError, RequestOutput, StreamChunk
from paceline.server.fields import ChatCall
from paceline.server.formats import Part
from paceline.server.metrics import RequestFigures

if TYPE_CHECKING:
    from paceline.async_stream import ChunkStream
    from paceline.server.traces import RequestSpan


class SingleRun(ABC):
    """Runs a conversation, divides its output into parts, and counts it."""

    def __init__(
        self,
        stream: ChunkStream,
        call: ChatCall,
        figures: RequestFigures,
        span: RequestSpan | None,
    ) -> None:
        """Starts nothing.

        Args:
            stream: The output.
            call: The request.
            figures: Counts the output.
            span: The request's span; None = it has none.
        """
        self._stream = stream
        self._figures = figures
        self._clock = figures.clock()
        self._span = span
        self._parser = None if call.make_parser is None else call.make_parser()
        self._output: RequestOutput | None = None

    async def start(self) -> None:
        """Queues the request; errors in it are raised here."""
        await self._stream.start()

    async def close(self) -> None:
        """Ends the request."""
        await self._stream.aclose()

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Waits for the output and returns the response; see `parts`."""

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yields the response as server-sent events. A failure is the last one."""

    async def parts(self) -> AsyncGenerator[list[Part]]:
        """Yields the parts of the output as they become certain.

        Raises:
            RequestError: The engine failed to complete the request.
        """
        async for chunk in self._stream:
            yield self._parts_of(chunk)

    def _parts_of(self, chunk: StreamChunk) -> list[Part]:
        self._clock.note(chunk)
        if self._parser is None:
            parts = [Part("content", chunk.text)] if chunk.text else []
        else:
            parts = self._parser.push(chunk.text)
            parts += self._parser.finish() if chunk.finished else []
        if chunk.output is not None:
            self._output = chunk.output
            self._figures.count(chunk.output)
            if self._span is not None:
                self._span.note_output(chunk.output)
            if chunk.output.error is not None:
                raise RequestError(chunk.output.error, [chunk.output])
        return parts

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompt, once the request is queued."""
        return len(self._stream.prompt_token_ids)

    @property
    def output(self) -> tuple[RequestOutput, CompletionOutput]:
        """The output, once it is complete."""
        assert self._output is not None
        (one,) = self._output.outputs
        return self._output, one

    def note_error(self, error: Exception) -> None:
        """Notes an error in the request's span."""
        if self._span is not None:
            self._span.note_error(error)
