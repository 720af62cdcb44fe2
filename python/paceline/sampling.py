# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams`: how the tokens of a request are sampled. docs/sampling.md defines it."""

from __future__ import annotations

import dataclasses
import numbers
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Never

from paceline import limits
from paceline.checks import (
    check_bool,
    check_int,
    check_text,
    check_unknown,
    quoted,
    shorten,
    wrong_type,
    wrong_value,
)
from paceline.speculative_fields import METHODS
from paceline.structured_outputs import StructuredOutputsParams

#: The value of `SamplingParams.receipt` for a receipt that shows its inputs.
WITH_TEXT: Final = "with_text"

# Stop strings are matched in Python.
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_LEN: Final = 256

_BYTES: Final = bytes | bytearray | memoryview  # sequences of integers that are not token ids


@dataclasses.dataclass(init=False, unsafe_hash=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and meanings.

    They apply to every token in the same way, whether a drafter proposed it or not. Sequences and
    mappings are stored as tuples, so that parameters can be compared, hashed and shared. They do
    not change; `dataclasses.replace(params, max_tokens=64)` makes a copy with other values.

    Attributes:
        n: Number of outputs, 1 to 128. They are sampled independently: output i is the output of a
            request with the seed `seed + i` (modulo 2**64).
        temperature: Divides the logits before sampling; at most 1e6. 0 = greedy.
        top_k: Sample from the top_k most likely tokens. 0 or -1 = all; stored as 0.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to at
            least top_p; above 0, at most 1. 1 = all.
        min_p: Sample from tokens whose probability is at least min_p times that of the most likely
            token; 0 to 1. 0 = all.
        repetition_penalty: Penalizes tokens that occur in the prompt or the output: divides their
            logit if it is positive, else multiplies it; above 0. 1 = off.
        presence_penalty: Subtracted from the logit of tokens that occur in the output; -2 to 2.
        frequency_penalty: Subtracted from the logit of a token once for each of its occurrences in
            the output; -2 to 2.
        logit_bias: Added to the logits: a mapping from token ids to biases from -100 to 100, with
            at most 1,024 entries. Stored as pairs (token id, bias) in order of token id.
        bad_words: Text the output must not contain, as strings or as sequences of token ids.
            Strings are tokenized with and without a leading space; see docs/sampling.md. At most
            128 sequences with 1,024 tokens in all.
        allowed_token_ids: The only tokens that may be sampled. Empty or None = all.
        max_tokens: Largest number of output tokens, at least 1. An output also ends when prompt and
            output together reach `max_model_len`. None = only then.
        min_tokens: Number of output tokens before a stop token is allowed or a stop string ends the
            output; 0 to max_tokens.
        stop: A string, or a sequence of strings, that ends the output when its text contains it. At
            most 16 strings of at most 256 characters. The text has no special tokens, unless
            `skip_special_tokens` is False; name those in `stop_token_ids`.
        include_stop_str_in_output: Whether the text ends after the stop string instead of before
            it.
        stop_token_ids: Tokens that end the output, in addition to the checkpoint's end-of-sequence
            tokens; at most 8 with those. The stop token is part of `token_ids` but not of `text`.
        ignore_eos: Continue after the checkpoint's end-of-sequence tokens.
        seed: Seed of the request, 0 to 2**64 - 1. The same seed, prompt and model give the same
            tokens, whatever else runs. None = derived from the LLM's seed; see `LLM.generate`.
        logprobs: Return the target's log-probabilities of each output token and of this many most
            likely tokens at its position, at most the LLM's `max_logprobs`. They are computed from
            the raw logits, before all parameters above. 0 = only the output token; None = none.
        prompt_logprobs: The same for the tokens of the prompt, except the first.
        receipt: Return a receipt of each output, with which `paceline verify` replays it; see
            `CompletionOutput.receipt`. True = with digests of the prompt and of other texts,
            "with_text" = with these themselves, as token ids.
        detokenize: Convert the output to text. False = `text` is empty, which saves time where only
            `token_ids` are needed. Not allowed with `stop`.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: False = an added token that follows another one has its bare
            text, without the space that some tokenizers put between tokens. Only matters if
            `skip_special_tokens` is False.
        num_speculative_tokens: Most drafts that an iteration verifies for the request, 0 (plain
            decoding) to k. With "coupled", the default `rejection_sample_method`, it changes times
            and no token; see docs/sampling.md for "standard" and "block". None = k.
        speculative_method: Which of the LLM's methods may draft for the request, where prompt
            lookup stands in front of a model: "ngram" for prompt lookup alone, or the model's
            method, such as "eagle3", for the model alone. It changes times and no token. None = all
            of them.
        structured_outputs: What the output must look like: `StructuredOutputsParams`, or a mapping
            with its parameters. The output ends when that is complete, so `max_tokens` must
            suffice. Requires the package llguidance.
        return_token_sources: Say of each output token how it came: as an accepted draft, or as
            which of the target's own tokens; see `CompletionOutput.token_sources`.

    Raises:
        ValueError: A value is not allowed. The message names the parameter.
        TypeError: A parameter does not exist. The message lists those that do.
    """

    n: Final[int]
    temperature: Final[float]
    top_k: Final[int]
    top_p: Final[float]
    min_p: Final[float]
    repetition_penalty: Final[float]
    presence_penalty: Final[float]
    frequency_penalty: Final[float]
    logit_bias: Final[tuple[tuple[int, float], ...]]
    bad_words: Final[tuple[str | tuple[int, ...], ...]]
    allowed_token_ids: Final[tuple[int, ...]]
    max_tokens: Final[int | None]
    min_tokens: Final[int]
    stop: Final[tuple[str, ...]]
    include_stop_str_in_output: Final[bool]
    stop_token_ids: Final[tuple[int, ...]]
    ignore_eos: Final[bool]
    seed: Final[int | None]
    logprobs: Final[int | None]
    prompt_logprobs: Final[int | None]
    receipt: Final[bool | Literal["with_text"]]
    detokenize: Final[bool]
    skip_special_tokens: Final[bool]
    spaces_between_special_tokens: Final[bool]
    num_speculative_tokens: Final[int | None]
    speculative_method: Final[str | None]
    structured_outputs: Final[StructuredOutputsParams | None]
    return_token_sources: Final[bool]

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None,
        bad_words: Sequence[str | Sequence[int]] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        stop: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        seed: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        receipt: bool | Literal["with_text"] = False,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        num_speculative_tokens: int | None = None,
        speculative_method: str | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        return_token_sources: bool = False,
        **unknown: Never,
    ) -> None:
        """Checks and stores the parameters; see the class."""
        check_unknown("SamplingParams", SamplingParams.__init__, unknown)
        if max_tokens is not None:
            max_tokens = check_int("max_tokens", max_tokens, 1, limits.MAX_INT)
        checked: dict[str, Any] = {
            "n": check_int("n", n, 1, limits.MAX_SAMPLES),
            "temperature": _check_temperature(temperature),
            "top_k": max(check_int("top_k", top_k, -1, limits.MAX_INT), 0),
            "top_p": _check_number(
                "top_p", top_p, "a number above 0, at most 1", lambda value: 0 < value <= 1
            ),
            "min_p": _check_number(
                "min_p", min_p, "a number from 0 to 1", lambda value: 0 <= value <= 1
            ),
            "repetition_penalty": _check_number(
                "repetition_penalty",
                repetition_penalty,
                "a finite number > 0; 1 = off",
                lambda value: value > 0,
            ),
            "presence_penalty": _check_penalty("presence_penalty", presence_penalty),
            "frequency_penalty": _check_penalty("frequency_penalty", frequency_penalty),
            "logit_bias": _check_logit_bias(logit_bias),
            "bad_words": _check_bad_words(bad_words),
            "allowed_token_ids": _check_token_ids(
                "allowed_token_ids",
                () if allowed_token_ids is None else allowed_token_ids,
            ),
            "max_tokens": max_tokens,
            "min_tokens": _check_min_tokens(min_tokens, max_tokens),
            "stop": _check_stop(stop),
            "include_stop_str_in_output": check_bool(
                "include_stop_str_in_output", include_stop_str_in_output
            ),
            "stop_token_ids": _check_stop_token_ids(stop_token_ids),
            "ignore_eos": check_bool("ignore_eos", ignore_eos),
            "seed": None if seed is None else check_int("seed", seed, 0, limits.MAX_SEED),
            "logprobs": _check_num_logprobs("logprobs", logprobs),
            "prompt_logprobs": _check_num_logprobs("prompt_logprobs", prompt_logprobs),
            "receipt": _check_receipt(receipt),
            "detokenize": check_bool("detokenize", detokenize),
            "skip_special_tokens": check_bool("skip_special_tokens", skip_special_tokens),
            "spaces_between_special_tokens": check_bool(
                "spaces_between_special_tokens", spaces_between_special_tokens
            ),
            "num_speculative_tokens": None
            if num_speculative_tokens is None
            else check_int(
                "num_speculative_tokens", num_speculative_tokens, 0, limits.MAX_SPECULATIVE_TOKENS
            ),
            "speculative_method": _check_method(speculative_method),
            "structured_outputs": StructuredOutputsParams.of(structured_outputs),
            "return_token_sources": check_bool("return_token_sources", return_token_sources),
        }
        if checked["structured_outputs"] is not None and checked["ignore_eos"]:
            raise ValueError(
                "ignore_eos is True and structured_outputs is given, whose outputs end with an "
                "end-of-sequence token; allowed: one of them"
            )
        if checked["stop"] and not detokenize:
            raise ValueError(
                f"stop is {shorten(stop)}, but detokenize is False; allowed: detokenize=True, "
                "because stop strings are found in the text, or stop_token_ids instead"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    # Not dataclass(frozen=True), whose message does not say what to do.
    def __setattr__(self, name: str, value: Never) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{name} cannot be set: SamplingParams do not change, because requests share them; use "
            f"params = dataclasses.replace(params, {name}=...)"
        )

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"{name} cannot be deleted")


def _is_real(value: Any) -> bool:
    # numbers.Real takes long to ask.
    return type(value) in (float, int) or isinstance(value, numbers.Real)


def _check_number(
    name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]
) -> float:
    """Checks a number both exactly and as the 32-bit float that the engine uses."""
    if _is_real(value) and not isinstance(value, bool):
        try:
            number = float(value)
            (rounded,) = struct.unpack("<f", struct.pack("<f", number))
        except OverflowError:
            number = rounded = float("inf")
        # No range contains infinity or NaN.
        if abs(rounded) < float("inf") and is_allowed(number) and is_allowed(rounded):
            return number
    raise wrong_value(name, value, allowed)


def _check_temperature(value: Any) -> float:
    # A number that only rounds to 0 would silently become greedy.
    is_zero = _is_real(value) and value == 0
    return _check_number(
        "temperature",
        value,
        f"0 (greedy), or a number from 1e-45 to {limits.MAX_TEMPERATURE:g}",
        lambda number: is_zero or 0 < number <= limits.MAX_TEMPERATURE,
    )


def _check_penalty(name: str, value: Any) -> float:
    return _check_number(
        name, value, "a number from -2 to 2; 0 = off", lambda number: -2 <= number <= 2
    )


def _check_min_tokens(value: Any, max_tokens: int | None) -> int:
    min_tokens = check_int("min_tokens", value, 0, limits.MAX_INT if max_tokens is None else None)
    if max_tokens is not None and min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens is {min_tokens}; allowed: 0 to max_tokens = {max_tokens}, "
            "or a larger max_tokens"
        )
    return min_tokens


def _check_receipt(value: Any) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value == WITH_TEXT):
        return value
    raise wrong_value("receipt", value, f"True, False or {WITH_TEXT!r}")


def _check_method(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value in METHODS):
        return value
    raise wrong_value("speculative_method", value, f"None, or one of {quoted(METHODS)}")


def _check_num_logprobs(name: str, value: Any) -> int | None:
    return None if value is None else check_int(name, value, 0, limits.MAX_LOGPROBS)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{name} has {count} entries; allowed: at most {most}")


def _is_list(value: Any) -> bool:
    """Returns whether a value is a sequence, but neither a string nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | _BYTES)


def _check_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not _is_list(value):
        raise wrong_type(name, value, "a sequence of token ids")
    # A list may have a million ids, and a server has other requests.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= limits.MAX_INT:
        return tuple(value)
    return tuple(
        check_int(f"{name}[{i}]", token, 0, limits.MAX_INT) for i, token in enumerate(value)
    )


def _check_stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if _is_list(value):
        _check_count("stop_token_ids", len(value), limits.MAX_STOP_TOKEN_IDS)
    return _check_token_ids("stop_token_ids", value)


def _check_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not _is_list(pairs):
        raise wrong_type("logit_bias", value, "a mapping from token ids to numbers")
    _check_count("logit_bias", len(pairs), limits.MAX_LOGIT_BIAS)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not _is_list(pair) or len(pair) != 2:
            raise ValueError(
                f"logit_bias has {shorten(pair)}; allowed: pairs of a token id and a number"
            )
        token = check_int("a token of logit_bias", pair[0], 0, limits.MAX_INT)
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
        raise wrong_type("bad_words", value, "a sequence of strings or of sequences of token ids")
    _check_count("bad_words", len(value), limits.MAX_BAD_WORDS)
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
                "because leading whitespace is ignored, or a sequence of token ids"
            )
    num_tokens = sum(len(word) for word in words if not isinstance(word, str))
    if num_tokens > limits.MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words has {num_tokens} token ids in all; allowed: at most "
            f"{limits.MAX_BAD_WORD_TOKENS}"
        )
    return tuple(words)


def _check_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, _BYTES):
        check_text("stop", value, "a string or a sequence of strings")
    strings = (value,) if isinstance(value, str) else value
    if not _is_list(strings):
        raise wrong_type("stop", value, "a string or a sequence of strings")
    _check_count("stop", len(strings), MAX_STOP_STRINGS)
    for i, string in enumerate(strings):
        name = "stop" if isinstance(value, str) else f"stop[{i}]"
        check_text(name, string, "a string; token ids belong in stop_token_ids")
        if not 1 <= len(string) <= MAX_STOP_STRING_LEN:
            raise ValueError(
                f"{name} has {len(string)} characters; allowed: 1 to {MAX_STOP_STRING_LEN}"
            )
    return tuple(strings)
