# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams` as the engine of one model takes them: token ids only, inside its vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_text
from paceline.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS
from paceline.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

# Passed on as they are. What has its default is left out.
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
        target: The model whose engine runs the request.

    Returns:
        Keyword arguments of `_core.Request`, but for the prompt and the seed.

    Raises:
        ValueError: A token id outside the vocabulary, a text that the model's tokenizer cannot
            turn into tokens, too many stop tokens or bad words, or no token that may be drawn.
    """
    vocab_size = target.vocab_size
    bias = dict(params.logit_bias or ())
    allowed = sorted(set(params.allowed_token_ids or ()))
    _check_in_vocabulary("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_in_vocabulary("logit_bias", bias, vocab_size)
    _check_in_vocabulary("allowed_token_ids", allowed, vocab_size)
    if params.stop and target.tokenizer is None:
        raise ValueError(
            f"stop is {list(params.stop)!r:.60}, but {target.path} has no tokenizer.json, so that "
            "the output has no text; allowed: stop_token_ids"
        )
    stop_token_ids = _stop_token_ids(params, target)
    bad_words = _bad_words(params, target)
    _check_some_token_is_left(params, allowed, stop_token_ids, bad_words, vocab_size)
    arguments: dict[str, Any] = {
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
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
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            arguments[name] = value
    return arguments


def _check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise ValueError(f"{name} has {token}; allowed: 0 to vocab_size - 1 = {vocab_size - 1}")


def _stop_token_ids(params: SamplingParams, target: LoadedModel) -> list[int]:
    """All ids that end a request."""
    stop = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop.update(target.eos_token_ids)
    if len(stop) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids and the checkpoint's end-of-sequence ids "
            f"{list(target.eos_token_ids)} are {len(stop)} ids together; "
            f"allowed: at most {MAX_STOP_TOKEN_IDS}"
        )
    return sorted(stop)


def _bad_words(params: SamplingParams, target: LoadedModel) -> list[list[int]]:
    """The sequences of tokens that are never completed, each once."""
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
            f"bad_words are {len(sequences)} sequences of {num_tokens} tokens in all, texts with "
            f"and without a space before them; allowed: at most {MAX_BAD_WORDS} sequences of "
            f"{MAX_BAD_WORD_TOKENS} tokens"
        )
    return [list(sequence) for sequence in sequences]


def _tokenize_bad_word(name: str, word: str, target: LoadedModel) -> list[tuple[int, ...]]:
    """vLLM's rule: the word as it starts a text, and as it follows a space.

    The second counts only where the space has become part of the first token: as many tokens, and
    another first one.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"{name} is {word!r:.60}, but {target.path} has no tokenizer.json; "
            "allowed: sequences of token ids"
        )
    check_text(name, word)
    tokenizer = target.tokenizer.tokenizer
    word = word.lstrip()
    plain, spaced = (
        tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}")
    )
    if not plain:
        raise ValueError(
            f"{name} is {word!r:.60}, for which the tokenizer has no tokens; "
            "allowed: a text that has tokens, or a sequence of token ids"
        )
    if len(spaced) == len(plain) and spaced[0] != plain[0]:
        return [plain, spaced]
    return [plain]


def _check_some_token_is_left(
    params: SamplingParams,
    allowed: list[int],
    stop_token_ids: list[int],
    bad_words: list[list[int]],
    vocab_size: int,
) -> None:
    """Refuses what would rule out every token at once."""
    ruled_out = {sequence[0] for sequence in bad_words if len(sequence) == 1}
    if params.min_tokens:
        ruled_out.update(stop_token_ids)
    if allowed and ruled_out.issuperset(allowed):
        raise ValueError(
            f"allowed_token_ids is {allowed!r:.60}, and bad_words or min_tokens (which rules out "
            "stop tokens) rule out all of them; allowed: ids of which at least one may be drawn"
        )
    if not allowed and len(ruled_out) >= vocab_size:
        raise ValueError(
            f"bad_words and min_tokens rule out all {vocab_size} tokens; "
            "allowed: those that leave at least one"
        )
