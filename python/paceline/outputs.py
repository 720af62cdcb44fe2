# SPDX-License-Identifier: Apache-2.0
"""What a request gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """How probable the target found a token at a place, whatever the sampling parameters.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 and how many tokens are more probable there; equals share a rank.
        decoded_token: The token as text, special tokens included; None when the checkpoint has no
            tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


# At one place: the token that is there, then the most probable ones, best first; by token id.
TokenLogprobs = dict[int, Logprob]


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The text that continues a prompt.

    Attributes:
        text: The output tokens as text, without special tokens and without the stop token; it ends
            before a stop string, or after it with `include_stop_str_in_output`. Empty when the
            checkpoint has no tokenizer.
        token_ids: The output tokens, up to the stop token or the token that completed a stop
            string, which is included.
        logprobs: With `SamplingParams.logprobs`, for each of `token_ids` a dict from token ids to
            `Logprob`: the token itself first, then the most probable ones, best first, where a
            token that is both is there once. Else None.
        finish_reason: "stop" (a stop token or a stop string), "length" (max_tokens or
            max_model_len) or "error".
        stop_reason: The stop string, or the id among `stop_token_ids`, that ended the request; else
            None, also at the checkpoint's own end-of-sequence ids.
        cumulative_logprob: The sum of the logprobs of `token_ids`; None without `logprobs`.
        index: Which of the request's outputs, from 0.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    index: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times and counters of one request, measured by the engine; of all its outputs together.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Tokens of the outputs.
        time_to_first_token_ms: From queueing to the first token; None without tokens.
        generation_time_ms: From the first token to the last output's end; None without tokens.
        total_time_ms: From queueing to the last output's end.
        mean_itl_ms: Generation time of an output per token after its first delivery; None without
            such tokens.
        tokens_per_second: The same as a rate.
        speculative_decoding: None without speculation, else a dict with vLLM's names. After a stop
            string it counts all that the engine did, tokens beyond the output included:
            mean_acceptance_length (tokens per drafted iteration, bonus token included),
            draft_acceptance_rate, acceptance_histogram [k + 1] (drafted iterations by accepted
            drafts), acceptance_histogram_by_draft_length {"d": [d + 1]}, num_spec_steps,
            num_accepted_draft_tokens, num_draft_tokens, num_spec_tokens (k),
            acceptance_per_position [k] (of the times draft i was verified, the share kept; None if
            it never was) and num_discarded_draft_tokens (never judged: beyond the end of the
            request). Rates without a denominator are None.
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
        """Returns the metrics as plain JSON types; `speculative_decoding` is absent when None."""
        result = dataclasses.asdict(self)
        if self.speculative_decoding is None:
            del result["speculative_decoding"]
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        prompt: The prompt as text; None when it came as token ids.
        prompt_token_ids: The prompt as token ids.
        outputs: The `SamplingParams.n` completions, by index.
        metrics: Times and counters.
        error: What happened to the first of the outputs whose `finish_reason` is "error"; None
            without one.
        prompt_logprobs: With `SamplingParams.prompt_logprobs`, for each of `prompt_token_ids` what
            `CompletionOutput.logprobs` has for the output; None for the first, which nothing comes
            before. None without it, and when the request failed before the prompt was through.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one iteration added to one output of a request.

    Attributes:
        index: Position of the prompt among those given to `LLM.stream`.
        text: New text. Never part of a character: bytes that do not make one yet come with a later
            chunk. Nor the beginning of what may become a stop string.
        token_ids: New tokens; also those whose text comes later.
        finished: The output has ended; its last chunk.
        output: All of the request in its last chunk, when its last output has ended; else None.
        logprobs: Of `token_ids`, as in `CompletionOutput`; None without `SamplingParams.logprobs`.
        prompt_logprobs: As in `RequestOutput`, in the first chunk that has tokens; else None.
        sample: Which of the request's outputs, from 0.
    """

    index: int
    text: str
    token_ids: list[int]
    finished: bool
    output: RequestOutput | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    sample: int = 0


class RequestError(RuntimeError):
    """The engine gave up on a request while it ran. The other requests are not affected.

    Attributes:
        outputs: All outputs of the call, in the order of the prompts; failed ones have an `error`.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self) -> tuple[Any, ...]:
        # The inherited one leaves `outputs` out of the arguments; __dict__ may have notes.
        return type(self), (str(self), self.outputs), self.__dict__


def added_counters(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up `RequestEvent.counters`, lists element by element."""
    first, *others = counters
    total = dict(first)
    for other in others:
        for name, value in other.items():
            if isinstance(value, list):
                total[name] = [a + b for a, b in zip(total[name], value, strict=True)]
            else:
                total[name] += value
    return total


def speculative_metrics(
    counters: dict[str, Any], histogram_by_draft_length: dict[int, list[int]], num_spec_tokens: int
) -> dict[str, Any]:
    """Names the engine's counters as vLLM does; see `RequestMetrics.speculative_decoding`.

    Args:
        counters: `RequestEvent.counters` of the last event, of all outputs together.
        histogram_by_draft_length: Per number of verified drafts d, [d + 1] iterations by accepted.
        num_spec_tokens: k.

    Returns:
        The dict.
    """
    num_steps = counters["num_iterations"]
    num_drafted = counters["num_draft_tokens"]
    num_accepted = counters["num_accepted_tokens"]
    histogram = [0] * (num_spec_tokens + 1)
    for row in histogram_by_draft_length.values():
        for num, count in enumerate(row):
            histogram[num] += count
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else None,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {
            str(length): row for length, row in sorted(histogram_by_draft_length.items())
        },
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": num_spec_tokens,
        "acceptance_per_position": [
            accepted / drafted if drafted else None
            for accepted, drafted in zip(
                counters["accepted_per_position"], counters["drafted_per_position"], strict=True
            )
        ],
        "num_discarded_draft_tokens": counters["num_discarded_tokens"],
    }
