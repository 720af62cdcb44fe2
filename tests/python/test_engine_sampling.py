# SPDX-License-Identifier: Apache-2.0
"""The sampling arguments of the engine: token ids only. Refusals are in test_bad_input.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline import LLM, SamplingParams, _core
from paceline.engine_sampling import engine_arguments
from paceline.loader import TokenizerInfo

# A leading space becomes part of the first token of a word if the vocabulary has such a token.
_PIECES = ["<unk>", " ", "a", "b", "c", "ab", " a", " c", " ab"]
_ID = {piece: index for index, piece in enumerate(_PIECES)}


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """A tokenizer as a model has it."""
    return TokenizerInfo(Path("tokenizer.json"), tokenizer.to_str().encode())


def target(**changes: Any) -> Any:
    """The attributes of a model that `engine_arguments` uses, with a tiny vocabulary."""
    merges = [("a", "b"), (" ", "a"), (" ", "c"), (" ", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab=_ID, merges=merges, unk_token="<unk>"))
    # The engine gets only the tokens of the word.
    tokenizer.post_processor = None
    known: dict[str, Any] = {
        "path": "folder",
        "vocab_size": len(_PIECES),
        "eos_token_ids": (0,),
        "tokenizer": tokenizer_info(tokenizer),
    }
    return SimpleNamespace(**known | changes)


def bad_words(*words: Any, **changes: Any) -> list[list[str]]:
    """Returns the token sequences of the words as strings."""
    arguments = engine_arguments(SamplingParams(bad_words=words), target(**changes))
    return [[_PIECES[token] for token in sequence] for sequence in arguments["bad_words"]]


def test_defaults_are_left_out() -> None:
    assert engine_arguments(SamplingParams(), target()) == {
        "temperature": 1.0,
        "max_tokens": 16,
        "stop_token_ids": [0],
    }


def test_all_parameters_together() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias={4: 2, 1: -1},
        bad_words=[[3, 2], "b"],
        allowed_token_ids=[4, 2, 2],
        max_tokens=9,
        min_tokens=2,
        stop="x",
        stop_token_ids=[5],
        seed=3,
    )
    assert engine_arguments(params, target()) == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": [(1, -1.0), (4, 2.0)],
        "bad_words": [[3, 2], [3]],
        "allowed_token_ids": [2, 4],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [0, 5],
    }


def test_end_of_sequence_may_be_ignored() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[5])
    assert engine_arguments(params, target())["stop_token_ids"] == [5]


# ---- bad words ---------------------------------------------------------------------------------


def test_a_word_is_tokenized_at_the_start_and_after_a_space() -> None:
    assert bad_words("a") == [["a"], [" a"]]
    assert bad_words("c") == [["c"], [" c"]]
    assert bad_words("ab") == [["ab"], [" ab"]]
    assert bad_words("ca") == [["c", "a"], [" c", "a"]]


def test_a_space_that_is_a_separate_token_adds_nothing() -> None:
    assert bad_words("b") == [["b"]]  # " b" is two tokens


def test_a_tokenizer_that_always_adds_a_space() -> None:
    tokenizer = target().tokenizer.tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="always")
    assert bad_words("a", tokenizer=tokenizer_info(tokenizer)) == [[" a"]]


def test_leading_whitespace_of_a_word_is_ignored() -> None:
    assert bad_words(" a") == bad_words("\n a") == bad_words("a")


def test_equal_sequences_are_passed_once() -> None:
    assert bad_words("a", " a", [_ID["a"]], "a") == [["a"], [" a"]]


def test_special_tokens_around_a_word_are_left_out(llm: LLM) -> None:
    (sequence, *_) = engine_arguments(SamplingParams(bad_words=["xy"]), llm.target)["bad_words"]
    assert llm.target.tokenizer is not None
    assert llm.target.tokenizer.decode(sequence) == "xy" and len(sequence) == 2


def test_a_word_without_tokens_is_refused() -> None:
    empty = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match=r"bad_words\[0\] is 'z', which .* no tokens"):
        bad_words("z", tokenizer=tokenizer_info(empty))


# ---- the engine --------------------------------------------------------------------------------


def test_the_engine_accepts_all_arguments() -> None:
    params = SamplingParams(
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={4: 2},
        bad_words=["a"],
        allowed_token_ids=[2, 3],
        min_tokens=2,
    )
    signature = (_core.Request.__init__.__doc__ or "").split("\n")[0]
    for name in engine_arguments(params, target()):
        assert f"{name}: " in signature
