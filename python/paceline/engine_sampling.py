# SPDX-License-Identifier: Apache-2.0
"""Converts `SamplingParams` to the arguments of one model's engine, which knows only token ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_text, quoted, shorten
from paceline.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_INT, MAX_STOP_TOKEN_IDS
from paceline.sampling import SamplingParams
from paceline.token_bound import min_num_tokens

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

# Longer strings are compared with the limit of tokens before they are tokenized.
_LONG_BAD_WORD: Final = 8 * MAX_BAD_WORD_TOKENS

# Parameters that are passed on unchanged, unless they have their default.
_PLAIN: Final = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_DEFAULTS: Final = SamplingParams()


def engine_arguments(params: SamplingParams, target: LoadedModel) -> dict[str, Any]:
    """Checks parameters against a model.

    Args:
        params: The parameters.
        target: The model that runs the request.

    Returns:
        The keyword arguments of `_core.Request`, except the prompt and the seed.

    Raises:
        ValueError: A token id is outside the vocabulary, a string cannot be tokenized, there are
            too many stop tokens or bad words, or no token may be sampled.
    """
    vocab_size = target.vocab_size
    bias = dict(params.logit_bias or ())
    allowed = sorted(set(params.allowed_token_ids or ()))
    _check_in_vocabulary("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_in_vocabulary("logit_bias", bias, vocab_size)
    _check_in_vocabulary("allowed_token_ids", allowed, vocab_size)
    if params.stop and target.tokenizer is None:
        raise ValueError(
            f"stop is {shorten(list(params.stop))}, but {target.path} has no tokenizer.json, so "
            "the output has no text; allowed: stop_token_ids instead"
        )
    stop_token_ids = _stop_token_ids(params, target)
    bad_words = _bad_words(params, target)
    _check_some_token_remains(params, allowed, stop_token_ids, bad_words, vocab_size)
    arguments: dict[str, Any] = {
        "temperature": params.temperature,
        # The engine ends every request at max_model_len.
        "max_tokens": MAX_INT if params.max_tokens is None else params.max_tokens,
        "stop_token_ids": stop_token_ids,
    }
    for name in _PLAIN:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            arguments[name] = value
    if params.n > 1:
        arguments["num_samples"] = params.n
    if bias:
        arguments["logit_bias"] = list(bias.items())
    if bad_words:
        arguments["bad_words"] = bad_words
    if allowed:
        arguments["allowed_token_ids"] = allowed
    for name in ("logprobs", "prompt_logprobs", "num_speculative_tokens", "speculative_method"):
        value = getattr(params, name)
        if value is not None:
            arguments[name] = value
    return arguments


def check_num_speculative_tokens(params: SamplingParams, k: int) -> None:
    """Raises ValueError if more drafts are asked for than the k of the engine; 0 = no drafter."""
    given = params.num_speculative_tokens
    if given is None or given <= k:
        return
    if k == 0:
        raise ValueError(
            f"num_speculative_tokens is {given}, but there is no drafter; allowed: 0, or a "
            "speculative_config that names one"
        )
    raise ValueError(
        f"num_speculative_tokens is {given}; allowed: 0 to {k}, the num_speculative_tokens of "
        "speculative_config, or a larger one there"
    )


def check_speculative_method(params: SamplingParams, methods: tuple[str, ...]) -> None:
    """Raises ValueError if the method that shall draft is none of those of the engine."""
    given = params.speculative_method
    if given is None or given in methods:
        return
    if not methods:
        raise ValueError(
            f"speculative_method is {given!r}, but there is no drafter; allowed: None, or a "
            "speculative_config that names one"
        )
    raise ValueError(
        f"speculative_method is {given!r}, which is not a method of this LLM; allowed: "
        f"{quoted(methods)}, or None for all"
    )


def _check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise ValueError(f"{name} has {token}; allowed: 0 to vocab_size - 1 = {vocab_size - 1}")


def _stop_token_ids(params: SamplingParams, target: LoadedModel) -> list[int]:
    """Returns all tokens that end the output, the checkpoint's own included."""
    stop = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop.update(target.eos_token_ids)
    if len(stop) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids and the checkpoint's end-of-sequence tokens "
            f"{shorten(list(target.eos_token_ids))} are {len(stop)} tokens together; "
            f"allowed: at most {MAX_STOP_TOKEN_IDS}"
        )
    return sorted(stop)


def _bad_words(params: SamplingParams, target: LoadedModel) -> list[list[int]]:
    """Returns the distinct token sequences that the output must not contain."""
    sequences: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(params.bad_words or ()):
        if isinstance(word, str):
            found = _tokenize_bad_word(f"bad_words[{i}]", word, target)
        else:
            found = [tuple(word)]
        for sequence in found:
            _check_in_vocabulary(f"bad_words[{i}]", sequence, target.vocab_size)
            sequences[sequence] = None
    num_tokens = sum(map(len, sequences))
    if len(sequences) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words are {len(sequences)} sequences with {num_tokens} tokens in all, counting "
            "strings with and without a leading space; allowed: at most "
            f"{MAX_BAD_WORDS} sequences with {MAX_BAD_WORD_TOKENS} tokens in all"
        )
    return [list(sequence) for sequence in sequences]


def _tokenize_bad_word(name: str, word: str, target: LoadedModel) -> list[tuple[int, ...]]:
    """Tokenizes a word as vLLM does: at the start of a text, and after a space.

    The second form counts only if the space became part of the first token, that is, if both forms
    have the same number of tokens and different first tokens.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"{name} is {shorten(word)}, but {target.path} has no tokenizer.json; "
            "allowed: sequences of token ids"
        )
    check_text(name, word)
    word = word.lstrip()
    least = min_num_tokens(target.tokenizer, word) if len(word) > _LONG_BAD_WORD else 0
    if least > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"{name} has {len(word)} characters, at least {least} tokens; "
            f"allowed: at most {MAX_BAD_WORD_TOKENS} tokens in all bad words"
        )
    tokenizer = target.tokenizer
    plain, spaced = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")
    )
    if not plain:
        raise ValueError(
            f"{name} is {shorten(word)}, which the tokenizer converts to no tokens; "
            "allowed: a string that has tokens, or a sequence of token ids"
        )
    if len(spaced) == len(plain) and spaced[0] != plain[0]:
        return [plain, spaced]
    return [plain]


def _check_some_token_remains(
    params: SamplingParams,
    allowed: list[int],
    stop_token_ids: list[int],
    bad_words: list[list[int]],
    vocab_size: int,
) -> None:
    """Refuses parameters that together exclude every token."""
    excluded = {sequence[0] for sequence in bad_words if len(sequence) == 1}
    if params.min_tokens:
        excluded.update(stop_token_ids)
    if allowed and excluded.issuperset(allowed):
        raise ValueError(
            f"allowed_token_ids is {shorten(allowed)}, but bad_words or min_tokens (which excludes "
            "stop tokens) exclude all of them; allowed: ids of which at least one is not excluded"
        )
    if not allowed and len(excluded) >= vocab_size:
        raise ValueError(
            f"bad_words and min_tokens exclude all {vocab_size} tokens; "
            "allowed: values that leave at least one"
        )
