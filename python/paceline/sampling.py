# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen. docs/sampling.md has the exact meanings."""

from __future__ import annotations

import dataclasses
import numbers
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.checks import check_int, check_keywords, check_text, shorten
from paceline.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_INT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)

# Stop strings are matched in Python.
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_LEN: Final = 256

_BYTES: Final = bytes | bytearray | memoryview  # sequences of integers that are not token ids


class _RefuseUnknownKeywords(type):
    """See `check_keywords`; a dataclass has no `__init__` to decorate."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        check_keywords(cls.__name__, kwargs, [field.name for field in fields])
        return super().__call__(*args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(metaclass=_RefuseUnknownKeywords):
    """Sampling of one request; names and meanings are vLLM's.

    All of it holds for every token, whether a drafter proposed it or not. Sequences and mappings
    are kept as tuples, so that parameters can be compared, hashed and shared.

    Attributes:
        n: Outputs for the prompt, 1 to 128, drawn independently of each other: output i is what a
            request with the seed `seed + i` (modulo 2**64) gives.
        temperature: 0 = greedy, else the logits are divided by it before the draw; up to 1e6.
        top_k: Draw from the most probable so many tokens; 0 or -1 = all, kept as 0.
        top_p: Draw from the fewest most probable tokens whose probabilities make up this much; in
            (0, 1], 1 = all.
        min_p: Draw from the tokens that are at least this many times as probable as the most
            probable one; in [0, 1], 0 = all.
        repetition_penalty: The logit of a token that is in the prompt or the output is divided by
            it where it is positive, else multiplied; > 0, 1 = off.
        presence_penalty: Taken off the logit of a token that is in the output; in [-2, 2].
        frequency_penalty: The same, times how often it is there; in [-2, 2].
        logit_bias: Added to logits: token id to bias in [-100, 100]; at most 1,024. Kept as pairs
            (id, bias), by id; None = none.
        bad_words: What the output never holds, as texts or as sequences of token ids. A text is
            tokenized with and without a space before it, see docs/sampling.md. At most 128
            sequences of 1,024 tokens in all; None = none.
        allowed_token_ids: The only tokens that may be drawn; empty or None = all.
        max_tokens: Most tokens to emit, >= 1. Prompt and output together also end at
            `max_model_len`.
        min_tokens: Nothing that ends a request does so before it has this many tokens: stop tokens
            are ruled out, stop strings are passed over; 0 to max_tokens.
        stop: A text, or several, that ends the request when it is in the output's text. At most 16
            of at most 256 characters; None = none. Special tokens are never in the text, so
            name those in `stop_token_ids`.
        include_stop_str_in_output: The text ends after the stop string; else before it.
        stop_token_ids: The request ends after any of these, besides the checkpoint's own
            end-of-sequence ids. The stop token is in `token_ids` and not in `text`. At most 8 in
            all; None = none.
        ignore_eos: Do not end at the checkpoint's end-of-sequence ids.
        seed: Same seed, prompt and model: same tokens, whatever else runs. None = derived from the
            LLM's seed and the number of the output, see `LLM.generate`.
        logprobs: Return how probable the target found each output token, and this many of the
            most probable tokens at its place; 0 = the token alone, None = nothing. At most the
            LLM's `max_logprobs`. They are those of the target's logits before all of the above.
        prompt_logprobs: The same for the prompt's tokens, but for the first.

    Raises:
        ValueError: A value that is not allowed; names the parameter.
        TypeError: A parameter that does not exist; lists those that do.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    bad_words: Sequence[str | Sequence[int]] | None = ()
    allowed_token_ids: Sequence[int] | None = ()
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        max_tokens = check_int("max_tokens", self.max_tokens, 1, MAX_INT)
        checked = {
            "n": check_int("n", self.n, 1, MAX_SAMPLES),
            "temperature": _check_temperature(self.temperature),
            "top_k": max(check_int("top_k", self.top_k, -1, MAX_INT), 0),
            "top_p": _check_number(
                "top_p", self.top_p, "a number above 0, at most 1", lambda value: 0 < value <= 1
            ),
            "min_p": _check_number(
                "min_p", self.min_p, "a number from 0 to 1", lambda value: 0 <= value <= 1
            ),
            "repetition_penalty": _check_number(
                "repetition_penalty",
                self.repetition_penalty,
                "a finite number > 0; 1 = off",
                lambda value: value > 0,
            ),
            "presence_penalty": _check_penalty("presence_penalty", self.presence_penalty),
            "frequency_penalty": _check_penalty("frequency_penalty", self.frequency_penalty),
            "logit_bias": _check_logit_bias(self.logit_bias),
            "bad_words": _check_bad_words(self.bad_words),
            "allowed_token_ids": _check_token_ids(
                "allowed_token_ids",
                () if self.allowed_token_ids is None else self.allowed_token_ids,
            ),
            "max_tokens": max_tokens,
            "min_tokens": _check_min_tokens(self.min_tokens, max_tokens),
            "stop": _check_stop(self.stop),
            "stop_token_ids": _check_stop_token_ids(self.stop_token_ids),
            "seed": None if self.seed is None else check_int("seed", self.seed, 0, MAX_SEED),
            "logprobs": _check_num_logprobs("logprobs", self.logprobs),
            "prompt_logprobs": _check_num_logprobs("prompt_logprobs", self.prompt_logprobs),
        }
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} is {shorten(getattr(self, name))}; allowed: True or False"
                )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _check_number(
    name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]
) -> float:
    """Checks a number as it is and as the 32-bit float that the engine computes with."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
            (rounded,) = struct.unpack("<f", struct.pack("<f", number))
        except OverflowError:
            number = rounded = float("inf")
        # Neither infinity nor NaN is in any of the ranges.
        if abs(rounded) < float("inf") and is_allowed(number) and is_allowed(rounded):
            return number
    raise ValueError(f"{name} is {shorten(value)}; allowed: {allowed}")


def _check_temperature(value: Any) -> float:
    # What is 0 as a 32-bit float only would be greedy without saying so.
    is_zero = isinstance(value, numbers.Real) and value == 0
    return _check_number(
        "temperature",
        value,
        f"0 (greedy), or a number from 1e-45 to {MAX_TEMPERATURE:g}",
        lambda number: is_zero or 0 < number <= MAX_TEMPERATURE,
    )


def _check_penalty(name: str, value: Any) -> float:
    return _check_number(
        name, value, "a number from -2 to 2; 0 = off", lambda number: -2 <= number <= 2
    )


def _check_min_tokens(value: Any, max_tokens: int) -> int:
    min_tokens = check_int("min_tokens", value, 0)
    if min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens is {min_tokens}; allowed: 0 to max_tokens = {max_tokens}, "
            "or a larger max_tokens"
        )
    return min_tokens


def _check_num_logprobs(name: str, value: Any) -> int | None:
    return None if value is None else check_int(name, value, 0, MAX_LOGPROBS)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{name} has {count} entries; allowed: at most {most}")


def _is_list(value: Any) -> bool:
    """Whether a value is a sequence, but neither a string nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | _BYTES)


def _check_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not _is_list(value):
        raise ValueError(
            f"{name} is {shorten(value)} ({type(value).__name__}); allowed: a sequence of token ids"
        )
    return tuple(check_int(f"{name}[{i}]", token, 0, MAX_INT) for i, token in enumerate(value))


def _check_stop_token_ids(value: Any) -> tuple[int, ...]:
    token_ids = _check_token_ids("stop_token_ids", () if value is None else value)
    _check_count("stop_token_ids", len(token_ids), MAX_STOP_TOKEN_IDS)
    return token_ids


def _check_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not _is_list(pairs):
        raise ValueError(
            f"logit_bias is {shorten(value)} ({type(value).__name__}); "
            "allowed: a mapping from token ids to numbers"
        )
    _check_count("logit_bias", len(pairs), MAX_LOGIT_BIAS)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not _is_list(pair) or len(pair) != 2:
            raise ValueError(
                f"logit_bias has {shorten(pair)}; allowed: pairs of a token id and a number"
            )
        token = check_int("a token of logit_bias", pair[0], 0, MAX_INT)
        if token in biases:
            raise ValueError(f"logit_bias has token {token} twice; allowed: once")
        biases[token] = _check_number(
            f"logit_bias[{token}]",
            pair[1],
            "a number from -100 to 100",
            lambda number: -100 <= number <= 100,
        )
    return tuple(sorted(biases.items()))


def _check_bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        return ()
    if not _is_list(value):
        raise ValueError(
            f"bad_words is {shorten(value)} ({type(value).__name__}); "
            "allowed: a sequence of strings or of sequences of token ids"
        )
    _check_count("bad_words", len(value), MAX_BAD_WORDS)
    words: list[str | tuple[int, ...]] = []
    for i, word in enumerate(value):
        if isinstance(word, str | _BYTES):
            check_text(f"bad_words[{i}]", word, "a string or a sequence of token ids")
        if not isinstance(word, str):
            token_ids = _check_token_ids(f"bad_words[{i}]", word)
            if not token_ids:
                raise ValueError(f"bad_words[{i}] is empty; allowed: at least one token id")
            words.append(token_ids)
        elif word.strip():
            words.append(word)
        else:
            raise ValueError(
                f"bad_words[{i}] is {shorten(word)}; allowed: a string that is not all whitespace, "
                "since leading whitespace does not count, or a sequence of token ids"
            )
    num_tokens = sum(len(word) for word in words if not isinstance(word, str))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words has {num_tokens} token ids in all; allowed: at most {MAX_BAD_WORD_TOKENS}"
        )
    return tuple(words)


def _check_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, _BYTES):
        check_text("stop", value, "a string or a sequence of strings")
    strings = (value,) if isinstance(value, str) else value
    if not _is_list(strings):
        raise ValueError(
            f"stop is {shorten(value)} ({type(value).__name__}); "
            "allowed: a string or a sequence of strings"
        )
    _check_count("stop", len(strings), MAX_STOP_STRINGS)
    for i, string in enumerate(strings):
        name = "stop" if isinstance(value, str) else f"stop[{i}]"
        check_text(name, string, "a string; token ids belong in stop_token_ids")
        if not 1 <= len(string) <= MAX_STOP_STRING_LEN:
            raise ValueError(
                f"{name} has {len(string)} characters; allowed: 1 to {MAX_STOP_STRING_LEN}"
            )
    return tuple(strings)
