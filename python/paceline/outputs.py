# SPDX-License-Identifier: Apache-2.0
"""The results of a request."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """The target's log-probability of a token at a position, before sampling parameters.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        rank: 1 + the number of more probable tokens at the position. Equally probable tokens have
            the same rank.
        decoded_token: The token as text, also for special tokens. None if the checkpoint has no
            tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


# How a token came; see `CompletionOutput.token_sources`.
TokenSource = Literal["accepted", "corrected", "bonus", "plain"]

# Logprobs at one position by token id: the actual token first, then the most probable ones in
# descending order.
TokenLogprobs = dict[int, Logprob]


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        text: The completion as text, without the stop token, and without special tokens unless
            `SamplingParams.skip_special_tokens` is False. It ends before the stop string, or after
            it with `include_stop_str_in_output`. Empty with `detokenize=False` or if the checkpoint
            has no tokenizer.
        token_ids: The tokens of the completion. The last one may be the stop token, or the token
            that completed a stop string.
        logprobs: With `SamplingParams.logprobs`, one dict from token ids to `Logprob` for each of
            `token_ids`: the token itself first, then the most probable tokens in descending order.
            A token that is both occurs once. None otherwise.
        finish_reason: "stop" (a stop token or a stop string), "length" (max_tokens or
            max_model_len was reached), "abort" (`AsyncLLM.abort`) or "error". None while the
            completion is not finished.
        stop_reason: The stop string, or the member of `stop_token_ids`, that ended the output; or
            "max_model_len" if that cut it before max_tokens. None otherwise, including at the
            checkpoint's own end-of-sequence tokens.
        cumulative_logprob: The sum of the logprobs of `token_ids`. None without `logprobs`.
        index: Index of the completion among the `SamplingParams.n` of the request, from 0.
        token_sources: With `SamplingParams.return_token_sources`, how each of `token_ids` came:

            - "accepted": it was drafted, and the target accepted it.
            - "corrected": the target's token in place of a draft that it rejected.
            - "bonus": the target's token after drafts that it all accepted.
            - "plain": the target's token of an iteration without drafts.

            None otherwise. The tokens depend on the seed alone, their sources also on k and on
            preemption.
        receipt: With `SamplingParams.receipt`, plain JSON types that name the model, the request
            and the tokens, and from which `paceline verify` replays the output (docs/receipts.md).
            None otherwise, while the completion is not finished, if it failed, and if
            `update_weights` has replaced the weights since the request was made.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    index: int = 0
    token_sources: list[TokenSource] | None = None
    receipt: dict[str, Any] | None = None

    def finished(self) -> bool:
        """Returns whether the completion is finished."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times and counters of one request, over all its outputs, measured by the engine.

    Until the request is finished, the numbers of tokens and the total time are those so far, and
    all else is None.

    Attributes:
        num_prompt_tokens: Number of tokens of the prompt.
        num_output_tokens: Number of tokens of all outputs.
        time_to_first_token_ms: Time from queueing to the first token. None without tokens.
        generation_time_ms: Time from the first token to the end of the last output. None without
            tokens.
        total_time_ms: Time from queueing to the end of the last output.
        mean_itl_ms: Mean inter-token latency: the generation time of an output, divided by its
            tokens after the first delivery. None without such tokens.
        tokens_per_second: 1000 / mean_itl_ms. None if that is None.
        speculative_decoding: None without speculative decoding. Otherwise a dict with vLLM's names
            (a rate without a denominator is None):

            - mean_acceptance_length: tokens per iteration with drafts, bonus token included.
            - draft_acceptance_rate: accepted drafts / verified drafts.
            - acceptance_histogram [k + 1]: iterations with drafts, by number of accepted drafts.
            - acceptance_histogram_by_draft_length {"d": [d + 1]}: the same for each number d of
              verified drafts.
            - acceptance_per_position [k]: accepted / verified drafts at each draft position; None
              at a position that was never verified.
            - num_spec_steps: iterations with drafts.
            - num_draft_tokens, num_accepted_draft_tokens: verified and accepted drafts.
            - num_discarded_draft_tokens: drafts beyond the end of an output, which are not
              verified.
            - num_spec_tokens: k: the request's own `SamplingParams.num_speculative_tokens`, or
              that of the engine.
            - mean_draft_length: verified drafts per iteration with drafts: the k that was used.
            - drafter: the method that drafted, such as "eagle3". With prompt lookup in front of
              it, that of the model, unless the request chose a method.
            - drafters {method: {num_spec_steps, num_draft_tokens, num_accepted_draft_tokens}}: the
              three counts for each method whose drafts were verified. Two have some where prompt
              lookup stands in front of a model, and where the drafter has changed.

            After a stop string the counters include the tokens that the engine generated beyond the
            output.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    total_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the metrics as plain JSON types, without `speculative_decoding` if it is None."""
        result = dataclasses.asdict(self)
        if self.speculative_decoding is None:
            del result["speculative_decoding"]
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of a request.

    Attributes:
        prompt: The prompt as a string. None if it was given as token ids only.
        prompt_token_ids: The prompt as token ids.
        outputs: The `SamplingParams.n` completions, by index.
        metrics: Times and counters.
        error: The error of the first completion whose `finish_reason` is "error". None if there is
            none.
        prompt_logprobs: With `SamplingParams.prompt_logprobs`, one dict for each of
            `prompt_token_ids`, as in `CompletionOutput.logprobs`; the first entry is None, because
            no token precedes the first. None otherwise, and if the request failed before the whole
            prompt was processed.
        request_id: The request's name: its number among the requests of its LLM, unless the
            caller gave it one.
        finished: Whether all completions are finished. Only `AsyncLLM.generate` returns outputs
            that are not.
        num_cached_tokens: Prompt tokens of the first completion whose KV was taken over from the
            prefix cache instead of being computed. (The other completions of a prompt take it over
            from the first.) 0 until the request is finished.
        is_refused: Whether `error` says that the request is not allowed: its parameters exclude all
            that its grammar allows, or an engine in another process (`paceline serve --replicas`)
            refuses it. An engine of this process refuses a request with ValueError instead.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    request_id: str = ""
    finished: bool = True
    num_cached_tokens: int = 0
    is_refused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChunk:
    """The tokens that one iteration added to one output of a request.

    Attributes:
        index: Index of the prompt among those given to `LLM.stream`.
        text: New text. It contains whole characters only: the bytes of an incomplete character come
            with a later chunk. Text that may be the beginning of a stop string is also held back.
        token_ids: New tokens, including those whose text comes with a later chunk.
        finished: Whether this is the last chunk of the output.
        output: In the last chunk of the request, when all its outputs have ended, the complete
            result. None in all other chunks.
        logprobs: The logprobs of `token_ids`, as in `CompletionOutput`. None without
            `SamplingParams.logprobs`.
        prompt_logprobs: As in `RequestOutput`, in the first chunk that has tokens. None in all
            other chunks.
        sample: Index of the output among the `SamplingParams.n` of the request, from 0.
        num_drafted: Drafts that the iteration verified for this output.
        num_accepted: How many of them it accepted. The first `num_accepted` of `token_ids` are
            accepted drafts. The token behind them, if there is one, is the target's own;
            `token_sources` says so token by token.
        text_offsets: For each of `token_ids`, the number of characters of the output before the
            text of that token. A character of several tokens belongs to the last one. Where a stop
            string cuts the text, offsets may lie beyond its end.
        finish_reason: In the last chunk of the output, as in `CompletionOutput`. None in all other
            chunks.
        stop_reason: Likewise.
        receipt: Likewise.
    """

    index: int
    text: str
    token_ids: list[int]
    finished: bool
    output: RequestOutput | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    sample: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    text_offsets: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    receipt: dict[str, Any] | None = None

    @property
    def token_sources(self) -> list[TokenSource]:
        """How each of `token_ids` came; see `CompletionOutput.token_sources`."""
        return token_sources(len(self.token_ids), self.num_drafted, self.num_accepted)


class RequestError(RuntimeError):
    """The engine failed to complete a request. Other requests are not affected.

    Attributes:
        outputs: The outputs of all prompts of the call, in their order. Failed ones have an
            `error`.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self) -> tuple[Any, ...]:
        # The inherited one leaves `outputs` out of the arguments; __dict__ may have notes.
        return type(self), (str(self), self.outputs), self.__dict__


def token_sources(num_tokens: int, num_drafted: int, num_accepted: int) -> list[TokenSource]:
    """Says how the first tokens of an iteration came.

    Args:
        num_tokens: Number of tokens, at most one more than `num_accepted`.
        num_drafted: Drafts that the iteration verified.
        num_accepted: How many of them it accepted.

    Returns:
        The sources; see `CompletionOutput.token_sources`.
    """
    own: TokenSource = "bonus"
    if num_drafted == 0:
        own = "plain"
    elif num_accepted < num_drafted:
        own = "corrected"
    sources: list[TokenSource] = ["accepted"] * min(num_accepted, num_tokens)
    return sources if num_accepted >= num_tokens else [*sources, own]


def added_counters(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums `RequestEvent.counters`. Lists are summed element by element; one may be shorter, where
    the drafter has changed in between."""
    first, *others = counters
    total = dict(first)
    for other in others:
        for name, value in other.items():
            if isinstance(value, list):
                pairs = itertools.zip_longest(total[name], value, fillvalue=0)
                total[name] = [a + b for a, b in pairs]
            else:
                total[name] += value
    return total


def speculative_metrics(
    counters: dict[str, Any],
    histogram_by_draft_length: dict[int, list[int]],
    drafts_by_method: Mapping[str, Sequence[int]],
    num_spec_tokens: int,
    drafter: str | None,
) -> dict[str, Any]:
    """Converts the engine's counters to vLLM's names.

    Args:
        counters: `RequestEvent.counters` of the last events, summed over all outputs.
        histogram_by_draft_length: For each number d of verified drafts, the iterations by number of
            accepted drafts [d + 1].
        drafts_by_method: For each method that drafted, the iterations, and the verified and the
            accepted drafts.
        num_spec_tokens: k.
        drafter: The method that drafted.

    Returns:
        The dict that `RequestMetrics.speculative_decoding` describes.
    """
    histogram = [0] * (num_spec_tokens + 1)
    for row in histogram_by_draft_length.values():
        for num, count in enumerate(row):
            histogram[num] += count
    return {
        **acceptance(
            num_steps=counters["num_iterations"],
            num_drafted=counters["num_draft_tokens"],
            num_accepted=counters["num_accepted_tokens"],
            drafted_per_position=counters["drafted_per_position"],
            accepted_per_position=counters["accepted_per_position"],
        ),
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {
            str(length): row for length, row in sorted(histogram_by_draft_length.items())
        },
        "num_spec_tokens": num_spec_tokens,
        "num_discarded_draft_tokens": counters["num_discarded_tokens"],
        "mean_draft_length": (
            counters["num_draft_tokens"] / counters["num_iterations"]
            if counters["num_iterations"]
            else None
        ),
        "drafter": drafter,
        "drafters": {
            method: drafter_counts(*row) for method, row in sorted(drafts_by_method.items())
        },
    }


def drafter_counts(num_steps: int, num_drafted: int, num_accepted: int) -> dict[str, int]:
    """Returns what became of the drafts of one method, with the names of `acceptance`."""
    return {
        "num_spec_steps": num_steps,
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
    }


def acceptance(
    *,
    num_steps: int,
    num_drafted: int,
    num_accepted: int,
    drafted_per_position: Sequence[int],
    accepted_per_position: Sequence[int],
) -> dict[str, Any]:
    """Returns counts of drafts and the rates that follow from them, with vLLM's names.

    Args:
        num_steps: Verify windows with drafts.
        num_drafted: Drafts verified in them.
        num_accepted: Drafts accepted.
        drafted_per_position: [k] times that draft i was verified.
        accepted_per_position: [k] times that draft i was accepted.
    """
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else None,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "acceptance_per_position": [
            accepted / drafted if drafted else None
            for accepted, drafted in zip(accepted_per_position, drafted_per_position, strict=True)
        ],
    }
