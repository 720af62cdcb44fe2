# SPDX-License-Identifier: Apache-2.0
"""Requests, and how the events of the engine become their outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline.capture import Step
from paceline.detokenizer import IncrementalDetokenizer
from paceline.logprobs import LogprobReader
from paceline.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    StreamChunk,
    TokenLogprobs,
    TokenSource,
    added_counters,
    speculative_metrics,
    token_sources,
)
from paceline.stop_strings import StopStringFilter

if TYPE_CHECKING:
    from paceline import _core
    from paceline.capture import Capture
    from paceline.grammar import CompiledGrammar, Grammars
    from paceline.receipts.maker import ReceiptForm
    from paceline.sampling import SamplingParams

# In the engine's error of a sample that no token is left for.
_RULED_OUT: Final = "rule out all tokens"


class Request:
    """One sample of a checked request, and its output so far."""

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
        sample: int = 0,
        grammars: Grammars | None = None,
        max_model_len: int | None = None,
        grammar: CompiledGrammar | None = None,
        drafter: str | None = None,
        capture: Capture | None = None,
        receipt: ReceiptForm | None = None,
    ) -> None:
        """Starts without output.

        Args:
            index: Index among the prompts of the call.
            prompt: The prompt as a string; None if it was given as token ids.
            prompt_token_ids: The prompt as token ids.
            params: The sampling parameters.
            sampling: The same as keyword arguments of `engine_request`, with all stop tokens in
                effect. The seed is added when the request is queued.
            detokenizer: Decodes the output; None if the output has no text.
            logprobs: Converts the engine's logprobs; None if their tokens have no text.
            sample: Index among the request's samples.
            grammars: Of the model; None where `sampling` has no grammar.
            max_model_len: The length at which the engine ends the request; None = unknown.
            grammar: That of `sampling`, which the request keeps from being compiled again.
            drafter: The method that drafts; None without speculative decoding.
            capture: Takes the request when it has ended; None = nothing does.
            receipt: Makes the receipt; None = there is none.
        """
        self.index = index
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sampling = sampling
        self.detokenizer = detokenizer
        self.sample = sample
        self.drafter = drafter
        self.capture = capture
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._grammar = grammar
        self._receipt_form = receipt
        self.receipt: dict[str, Any] | None = None  # once the output is finished
        # Set when the request is queued.
        self.seed = 0  # of this sample
        self.request_id = ""
        self.queued_at = 0.0  # time.monotonic()
        self.is_aborted = False  # the caller has ended it
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []  # of `token_ids`; see `StreamChunk`
        self._num_characters = 0  # decoded so far, including text that is held back
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.token_sources: list[TokenSource] | None = [] if params.return_token_sources else None
        self._logprob_reader = logprobs or LogprobReader(None)
        self._has_given_prompt_logprobs = False
        self.text_parts: list[str] = []
        self.num_first_tokens = 0
        self.steps: list[Step] = []  # with a capture
        self.histogram_by_draft_length: dict[int, list[int]] = {}
        # By method: iterations with drafts, verified and accepted drafts.
        self.drafts_by_method: dict[str, list[int]] = {}
        self.last_event: _core.RequestEvent | None = None
        self._stop_token_ids = frozenset(sampling.get("stop_token_ids", ()))
        self._stop_filter: StopStringFilter | None = None
        if params.stop:
            self._stop_filter = StopStringFilter(
                params.stop, includes_stop=params.include_stop_str_in_output
            )

    def for_engine(self, make: Callable[..., _core.Request] | None = None) -> _core.Request:
        """Returns the engine's request, of which this is one sample.

        Args:
            make: Takes the arguments instead of `engine_request`.
        """
        if make is not None:
            return make(self.prompt_token_ids, **self.sampling)
        return engine_request(self.prompt_token_ids, self.sampling, self._grammars)

    @property
    def is_finished(self) -> bool:
        """Returns whether `finish` was called."""
        return self.last_event is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the output; None if there is none yet."""
        return None if self._stop_filter is None else self._stop_filter.found

    def count(self, event: _core.RequestEvent) -> None:
        """Counts the drafts of an event."""
        if event.num_drafted:
            row = self.histogram_by_draft_length.setdefault(
                event.num_drafted, [0] * (event.num_drafted + 1)
            )
            row[event.num_accepted] += 1
            counted = self.drafts_by_method.setdefault(event.drafter, [0, 0, 0])
            counted[0] += 1
            counted[1] += event.num_drafted
            counted[2] += event.num_accepted

    def push(self, event: _core.RequestEvent) -> tuple[list[int], str]:
        """Adds the tokens of an event, up to the one that completes a stop string.

        It adds them one by one, so that the output does not depend on how events divide it.

        Returns:
            The new tokens and the new text.
        """
        self.count(event)
        num_before = len(self.token_ids)
        text = ""
        for token in event.token_ids:
            if self.stop_string is not None:
                break
            self.token_ids.append(token)
            self.text_offsets.append(self._num_characters)
            # A stop token ends the request and is not part of the text.
            if self.detokenizer is not None and token not in self._stop_token_ids:
                decoded = self.detokenizer.push(token)
                self._num_characters += len(decoded)
                text += self._filter(decoded)
        if event.finish_reason is not None and self.stop_string is None:
            text += self._flush()
        if num_before == 0:
            self.num_first_tokens = len(self.token_ids)
        self.text_parts.append(text)
        num_new = len(self.token_ids) - num_before
        self._push_logprobs(event, num_new)
        if self.token_sources is not None:
            self.token_sources += token_sources(num_new, event.num_drafted, event.num_accepted)
        if self.capture is not None and (num_new or event.num_drafted):
            self.steps.append(Step(num_new, event.num_drafted, event.num_accepted))
        return self.token_ids[num_before:], text

    def _push_logprobs(self, event: _core.RequestEvent, num_tokens: int) -> None:
        """Adds the logprobs of the first `num_tokens` tokens of an event."""
        if self.logprobs is not None and num_tokens > 0:
            self.logprobs += self._logprob_reader.read(event.logprobs[:num_tokens])
        if self.params.prompt_logprobs is not None and self.prompt_logprobs is None:
            positions = event.prompt_logprobs
            if positions is not None:
                self.prompt_logprobs = [None, *self._logprob_reader.read(positions)]

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Returns the logprobs of the prompt once, as soon as they are available; else None."""
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
        """Ends the text. Text that was held back may still complete a stop string."""
        text = "" if self.detokenizer is None else self._filter(self.detokenizer.flush())
        if self._stop_filter is not None and self._stop_filter.found is None:
            text += self._stop_filter.flush()
        return text

    def finish(self, event: _core.RequestEvent) -> None:
        """Stores the last event, after `push`."""
        assert event.finish_reason is not None
        self.last_event = event
        reason, _ = self.reasons
        if self._receipt_form is not None and reason is not None and self.error is None:
            self.receipt = self._receipt_form.fill(self.seed, self.token_ids, reason)

    @property
    def error(self) -> str | None:
        """The error that ended the sample; None if there was none, or none yet."""
        event = self.last_event
        if event is None or self.stop_string is not None:
            return None  # after a stop string, later events of the engine do not matter
        if event.finish_reason not in ("error", "cancelled"):
            return None
        if self.is_aborted and event.finish_reason == "cancelled":
            return None
        return event.error or "the engine cancelled the request"

    @property
    def contradicts_its_grammar(self) -> bool:
        """Returns whether the output failed since the parameters exclude all that is allowed."""
        if self.params.structured_outputs is None:
            return False
        return self.error is not None and _RULED_OUT in self.error

    @property
    def reasons(self) -> tuple[str | None, str | int | None]:
        """The finish reason and the stop reason; None and None while the output is not finished."""
        if self.last_event is None:
            return None, None
        if self.stop_string is not None:
            return "stop", self.stop_string
        if self.error is not None:
            return "error", None
        finish_reason = self.last_event.finish_reason
        if finish_reason == "cancelled":
            return "abort", None
        if finish_reason == "length" and self._is_cut():
            return "length", "max_model_len"
        if finish_reason == "stop" and self.token_ids[-1] in (self.params.stop_token_ids or ()):
            return "stop", self.token_ids[-1]
        return finish_reason, None

    def _is_cut(self) -> bool:
        """Returns whether the engine's limit has ended an output before max_tokens."""
        longest, most = self._max_model_len, self.params.max_tokens
        if longest is None or len(self.prompt_token_ids) + len(self.token_ids) < longest:
            return False
        return most is None or len(self.token_ids) < most

    def completion(self) -> CompletionOutput:
        """Returns the output so far; later tokens do not change it."""
        finish_reason, stop_reason = self.reasons
        return CompletionOutput(
            text="".join(self.text_parts),
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cumulative_logprob=self._cumulative_logprob(),
            index=self.sample,
            token_sources=None if self.token_sources is None else list(self.token_sources),
            receipt=self.receipt,
        )

    def _cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        positions = zip(self.token_ids, self.logprobs, strict=True)
        return math.fsum(logprobs[token].logprob for token, logprobs in positions)


def engine_request(
    prompt_token_ids: list[int], sampling: Mapping[str, Any], grammars: Grammars | None
) -> _core.Request:
    """Makes a request for the engine of this process.

    Args:
        prompt_token_ids: The prompt.
        sampling: Keyword arguments of `_core.Request`; "grammar" stands for "constraints" and is
            the text of a compiled grammar, of this process or another one.
        grammars: Of the model; None where there is no grammar.
    """
    from paceline import _core

    arguments = dict(sampling)
    grammar = arguments.pop("grammar", None)
    if grammar is not None:
        assert grammars is not None
        count = arguments.get("num_samples", 1)
        arguments["constraints"] = grammars.constraints(grammar, count)
    return _core.Request(prompt_token_ids, **arguments)


class RequestGroup:
    """The samples of one prompt while they run."""

    def __init__(self, samples: Sequence[Request]) -> None:
        """Starts without output.

        Args:
            samples: All samples of the request, in order.
        """
        self.samples = samples

    def take(self, event: _core.RequestEvent) -> StreamChunk | None:
        """Adds an event of one of the samples.

        Returns:
            What it adds to the output; None for tokens that were in flight when a stop string was
            found, which are counted but not returned.
        """
        request = self.samples[event.sample]
        if request.stop_string is not None and event.finish_reason is None:
            request.count(event)
            return None
        num_before = len(request.token_ids)
        token_ids, text = request.push(event)
        output = None
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        if event.finish_reason is not None:
            request.finish(event)
            finish_reason, stop_reason = request.reasons
            if all(sample.is_finished for sample in self.samples):
                output = request_output(self.samples)
                if request.capture is not None:
                    request.capture.add(
                        output,
                        [sample.steps for sample in self.samples],
                        temperature=request.params.temperature,
                        drafter=request.drafter,
                    )
        return StreamChunk(
            index=request.index,
            text=text,
            token_ids=token_ids,
            finished=request.is_finished,
            output=output,
            logprobs=None if request.logprobs is None else request.logprobs[num_before:],
            prompt_logprobs=request.take_prompt_logprobs(),
            sample=request.sample,
            num_drafted=event.num_drafted,
            num_accepted=event.num_accepted,
            text_offsets=request.text_offsets[num_before:],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            receipt=request.receipt,
        )

    def is_to_cancel(self, sample: int) -> bool:
        """Returns whether a stop string has ended a sample that the engine still runs."""
        request = self.samples[sample]
        return request.stop_string is not None and not request.is_finished


def request_output(samples: Sequence[Request]) -> RequestOutput:
    """Combines the samples of one request, finished or not.

    Args:
        samples: All samples of the request, in order.

    Returns:
        The output of the request, so far.
    """
    first = samples[0]
    return RequestOutput(
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[sample.completion() for sample in samples],
        metrics=_metrics(samples),
        error=next((sample.error for sample in samples if sample.error is not None), None),
        prompt_logprobs=first.prompt_logprobs,
        request_id=first.request_id,
        finished=all(sample.is_finished for sample in samples),
        num_cached_tokens=0 if first.last_event is None else first.last_event.num_cached_tokens,
        # The attribute is one of events of replicas alone.
        is_refused=getattr(first.last_event, "is_refused", False)
        or any(sample.contradicts_its_grammar for sample in samples),
    )


def running_metrics(request: Request, num_output_tokens: int) -> RequestMetrics:
    """Returns what is known of a request that has not ended.

    Args:
        request: One of its samples.
        num_output_tokens: Number of tokens of all its samples.
    """
    return RequestMetrics(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=num_output_tokens,
        time_to_first_token_ms=None,
        generation_time_ms=None,
        total_time_ms=(time.monotonic() - request.queued_at) * 1e3,
        mean_itl_ms=None,
        tokens_per_second=None,
        speculative_decoding=None,
    )


def _metrics(samples: Sequence[Request]) -> RequestMetrics:
    num_prompt_tokens = len(samples[0].prompt_token_ids)
    num_output_tokens = sum(len(sample.token_ids) for sample in samples)
    events = [sample.last_event for sample in samples if sample.last_event is not None]
    if len(events) < len(samples):
        return running_metrics(samples[0], num_output_tokens)
    arrival_us = events[0].arrival_us
    finish_us = max(event.finish_us for event in events)
    first_ms = generation_ms = itl_ms = rate = None
    timed = [
        (sample, event)
        for sample, event in zip(samples, events, strict=True)
        if sample.token_ids and event.first_token_us
    ]
    if timed:
        first_token_us = min(event.first_token_us for _, event in timed)
        first_ms = (first_token_us - arrival_us) / 1e3
        generation_ms = (max(event.finish_us for _, event in timed) - first_token_us) / 1e3
        num_timed = sum(len(sample.token_ids) - sample.num_first_tokens for sample, _ in timed)
        spent_ms = sum(event.finish_us - event.first_token_us for _, event in timed) / 1e3
        if num_timed > 0 and spent_ms > 0:
            itl_ms = spent_ms / num_timed
            rate = 1e3 / itl_ms
    histogram_by_draft_length: dict[int, list[int]] = {}
    for sample in samples:
        for length, row in sample.histogram_by_draft_length.items():
            total = histogram_by_draft_length.setdefault(length, [0] * len(row))
            histogram_by_draft_length[length] = [a + b for a, b in zip(total, row, strict=True)]
    drafts_by_method: dict[str, list[int]] = {}
    for sample in samples:
        for method, row in sample.drafts_by_method.items():
            total = drafts_by_method.setdefault(method, [0, 0, 0])
            drafts_by_method[method] = [a + b for a, b in zip(total, row, strict=True)]
    counters = added_counters([dict(event.counters) for event in events])
    k = len(counters["drafted_per_position"])  # the largest that the request has run with
    return RequestMetrics(
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        time_to_first_token_ms=first_ms,
        generation_time_ms=generation_ms,
        total_time_ms=(finish_us - arrival_us) / 1e3,
        mean_itl_ms=itl_ms,
        tokens_per_second=rate,
        speculative_decoding=None
        if not k
        else speculative_metrics(
            counters, histogram_by_draft_length, drafts_by_method, k, samples[0].drafter
        ),
    )
