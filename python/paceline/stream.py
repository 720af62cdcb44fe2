# SPDX-License-Identifier: Apache-2.0
"""Requests that run: from the engine's deliveries to text and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.logprobs import LogprobReader
from paceline.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    StreamChunk,
    TokenLogprobs,
    speculative_metrics,
)
from paceline.stop_strings import StopStringFilter

if TYPE_CHECKING:
    from paceline import _core
    from paceline.detokenizer import IncrementalDetokenizer
    from paceline.dispatcher import Dispatcher
    from paceline.sampling import SamplingParams


class RequestStream(Iterator[StreamChunk]):
    """Running requests, as an iterator over what they emit. Made by `LLM.stream`.

    Used by one thread at a time. Closing it, leaving its `with` block or dropping it cancels what
    still runs.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        requests: Sequence[Request],
        *,
        num_speculative_tokens: int | None,
        owner: object,
    ) -> None:
        """Queues the requests; all or none.

        Args:
            dispatcher: Of the engine.
            requests: What to run.
            num_speculative_tokens: k; None without speculation.
            owner: Kept alive while requests run.
        """
        self._num_open = 0
        self._session = dispatcher.open()
        self._num_speculative_tokens = num_speculative_tokens
        self._owner: object | None = owner
        self._requests: dict[int, Request] = {}
        try:
            for request in requests:
                request_id = self._session.add_request(request.prompt_token_ids, request.sampling)
                self._requests[request_id] = request
                self._num_open += 1
        except BaseException:
            self.close()
            raise

    def __next__(self) -> StreamChunk:
        """Waits for the next delivery of any of the requests.

        Raises:
            StopIteration: All have ended, or the stream was closed.
            RuntimeError: The LLM was closed.
            KeyboardInterrupt: Ctrl-C; the requests are cancelled.
        """
        if self._num_open == 0:
            self.close()
            raise StopIteration
        try:
            event = self._session.get()
            request = self._requests[event.id]
            # What was on its way when a stop string was found is counted and not shown.
            while request.stop_string is not None and event.finish_reason is None:
                request.count(event)
                event = self._session.get()
                request = self._requests[event.id]
            num_before = len(request.token_ids)
            token_ids, text = request.push(event)
            output = None
            if event.finish_reason is not None:
                self._num_open -= 1
                output = request.finish(event, self._num_speculative_tokens)
            elif request.stop_string is not None:
                # The last event, which has the counters, comes at once.
                self._session.cancel(event.id)
        except BaseException:
            self.close()
            raise
        return StreamChunk(
            index=request.index,
            text=text,
            token_ids=token_ids,
            finished=output is not None,
            output=output,
            logprobs=None if request.logprobs is None else request.logprobs[num_before:],
            prompt_logprobs=request.take_prompt_logprobs(),
        )

    def close(self) -> None:
        """Cancels what still runs. Closing twice is fine."""
        self._num_open = 0
        self._session.close()
        self._owner = None

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_num_open", 0):
            self.close()


class Request:
    """A checked request and what it has emitted so far."""

    def __init__(
        self,
        index: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        sampling: Mapping[str, Any],
        detokenizer: IncrementalDetokenizer | None,
        logprobs: LogprobReader | None = None,
    ) -> None:
        """Starts without output.

        Args:
            index: Position among the prompts of the call.
            prompt: The prompt as text; None when it came as token ids.
            prompt_token_ids: The prompt.
            params: How to sample.
            sampling: The same for the engine, with the seed and all stop tokens in effect.
            detokenizer: None: the output has no text.
            logprobs: Reads what the engine says of tokens; None: they have no text there.
        """
        self.index = index
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sampling = sampling
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._logprob_reader = logprobs or LogprobReader(None)
        self._has_given_prompt_logprobs = False
        self.text_parts: list[str] = []
        self.num_first_tokens = 0
        self.histogram_by_draft_length: dict[int, list[int]] = {}
        self._stop_token_ids = frozenset(sampling.get("stop_token_ids", ()))
        self._stop_filter: StopStringFilter | None = None
        if params.stop:
            self._stop_filter = StopStringFilter(
                params.stop, includes_stop=params.include_stop_str_in_output
            )

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the request; None: none yet."""
        return None if self._stop_filter is None else self._stop_filter.found

    def count(self, event: _core.RequestEvent) -> None:
        """Counts a delivery's drafts."""
        if event.num_drafted:
            row = self.histogram_by_draft_length.setdefault(
                event.num_drafted, [0] * (event.num_drafted + 1)
            )
            row[event.num_accepted] += 1

    def push(self, event: _core.RequestEvent) -> tuple[list[int], str]:
        """Takes a delivery, of which nothing counts once a stop string is complete.

        Token by token, so that the output does not depend on how it was cut into deliveries.

        Returns:
            The tokens and the text that it adds.
        """
        self.count(event)
        num_before = len(self.token_ids)
        text = ""
        for token in event.token_ids:
            if self.stop_string is not None:
                break
            self.token_ids.append(token)
            # A stop token ends the request and is no text.
            if self.detokenizer is not None and token not in self._stop_token_ids:
                text += self._filter(self.detokenizer.push(token))
        if event.finish_reason is not None and self.stop_string is None:
            text += self._flush()
        if num_before == 0:
            self.num_first_tokens = len(self.token_ids)
        self.text_parts.append(text)
        self._push_logprobs(event, len(self.token_ids) - num_before)
        return self.token_ids[num_before:], text

    def _push_logprobs(self, event: _core.RequestEvent, num_tokens: int) -> None:
        """Takes the logprobs of a delivery, of whose tokens the first `num_tokens` count."""
        if self.logprobs is not None and num_tokens > 0:
            self.logprobs += self._logprob_reader.read(event.logprobs[:num_tokens])
        if self.params.prompt_logprobs is not None and self.prompt_logprobs is None:
            places = event.prompt_logprobs
            if places is not None:
                self.prompt_logprobs = [None, *self._logprob_reader.read(places)]

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The logprobs of the prompt, once, as soon as they are there."""
        if self.prompt_logprobs is None or self._has_given_prompt_logprobs:
            return None
        self._has_given_prompt_logprobs = True
        return self.prompt_logprobs

    def _filter(self, text: str) -> str:
        if self._stop_filter is None or not text:
            return text
        may_stop = len(self.token_ids) > self.params.min_tokens
        return self._stop_filter.push(text, may_stop=may_stop)

    def _flush(self) -> str:
        """Ends the text; what was held back may complete a stop string too."""
        text = "" if self.detokenizer is None else self._filter(self.detokenizer.flush())
        if self._stop_filter is not None and self._stop_filter.found is None:
            text += self._stop_filter.flush()
        return text

    def finish(
        self, event: _core.RequestEvent, num_speculative_tokens: int | None
    ) -> RequestOutput:
        """Takes the last delivery, after `push`."""
        assert event.finish_reason is not None
        is_failed = False
        finish_reason: str = event.finish_reason
        stop_reason: str | int | None = self.stop_string
        if stop_reason is not None:
            finish_reason = "stop"  # whatever the engine did since
        elif finish_reason in ("error", "cancelled"):
            is_failed, finish_reason = True, "error"
        elif finish_reason == "stop" and self.token_ids[-1] in self.params.stop_token_ids:
            stop_reason = self.token_ids[-1]
        completion = CompletionOutput(
            text="".join(self.text_parts),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cumulative_logprob=self._cumulative_logprob(),
        )
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            metrics=self._metrics(event, num_speculative_tokens),
            error=(event.error or "the engine cancelled the request") if is_failed else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        places = zip(self.token_ids, self.logprobs, strict=True)
        return math.fsum(place[token].logprob for token, place in places)

    def _metrics(self, event: _core.RequestEvent, k: int | None) -> RequestMetrics:
        first_ms = generation_ms = itl_ms = rate = None
        if self.token_ids and event.first_token_us:
            first_ms = (event.first_token_us - event.arrival_us) / 1e3
            generation_ms = (event.finish_us - event.first_token_us) / 1e3
            num_timed = len(self.token_ids) - self.num_first_tokens
            if num_timed > 0 and generation_ms > 0:
                itl_ms = generation_ms / num_timed
                rate = 1e3 / itl_ms
        return RequestMetrics(
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=len(self.token_ids),
            time_to_first_token_ms=first_ms,
            generation_time_ms=generation_ms,
            total_time_ms=(event.finish_us - event.arrival_us) / 1e3,
            mean_itl_ms=itl_ms,
            tokens_per_second=rate,
            speculative_decoding=None
            if k is None
            else speculative_metrics(dict(event.counters), self.histogram_by_draft_length, k),
        )
