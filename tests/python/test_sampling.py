# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: accepted values, refused values and their messages."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from paceline import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.seed) == (1.0, 16, None)
    assert (params.stop_token_ids, params.ignore_eos) == ((), False)
    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.logit_bias, params.bad_words, params.allowed_token_ids) == ((), (), ())
    assert (params.min_tokens, params.stop, params.include_stop_str_in_output) == (0, (), False)


def test_values_are_stored() -> None:
    params = SamplingParams(temperature=0, max_tokens=np.int64(3), seed=2**64 - 1)
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 3, 2**64 - 1)
    assert type(params.max_tokens) is int
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(top_k=-1).top_k == SamplingParams(top_k=0).top_k == 0
    assert SamplingParams(top_p=np.float32(0.5)).top_p == 0.5
    for zero in (np.float32(0), np.float64(0), np.int64(0)):
        assert SamplingParams(temperature=zero).temperature == 0
    assert SamplingParams(logit_bias={9: 1, 2: -3.5}).logit_bias == ((2, -3.5), (9, 1.0))
    assert SamplingParams(bad_words=["a", [1, 2]]).bad_words == ("a", (1, 2))
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    for name in ("logit_bias", "bad_words", "allowed_token_ids", "stop"):
        assert getattr(SamplingParams(**{name: None}), name) == ()


def test_limits_are_allowed() -> None:
    params = SamplingParams(
        top_k=2**31 - 1,
        top_p=1,
        min_p=1,
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={i: 100 * (-1) ** i for i in range(1024)},
        bad_words=[[7] * 8] * 128,
        allowed_token_ids=range(5000),
        max_tokens=4,
        min_tokens=4,
        stop=["x" * 256] * 16,
    )
    assert (params.top_p, params.min_tokens, len(params.bad_words or ())) == (1.0, 4, 128)


def test_parameters_are_frozen_hashable_copies() -> None:
    params = SamplingParams(
        stop_token_ids=[1, 2], logit_bias={5: 1.0}, bad_words=["a", [1]], stop=["x"]
    )
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(params, seed=\.\.\.\)"):
        params.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del params.seed
    same = SamplingParams(
        stop_token_ids=(1, 2), logit_bias=[(5, 1)], bad_words=("a", (1,)), stop="x"
    )
    assert params == same and hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=1).seed == 1


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), -0.1, "1", None, True, 1e-46, 1.1e6, 1e39, 10**400],
)
def test_temperature(value: Any) -> None:
    allowed = r"0 \(greedy\), or a number from 1e-45 to 1e\+06"
    with pytest.raises(ValueError, match=rf"temperature is .*; allowed: {allowed}"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [0, -1, 2**31, "4", 1.0, True])
def test_max_tokens(value: Any) -> None:
    with pytest.raises(ValueError, match=r"max_tokens is .*; allowed: an integer from 1"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [-1, 2**64, 0.5, "0", False])
def test_seed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"seed is .*; allowed: an integer from 0"):
        SamplingParams(seed=value)


@pytest.mark.parametrize("value", [3, "12", [1.0], [-1], ["1"], list(range(9))])
def test_stop_token_ids(value: Any) -> None:
    with pytest.raises(ValueError, match=r"stop_token_ids.*; allowed: "):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("top_k", [-2, 2**31, 1.0, "5", None, True], "an integer from -1 to 2147483647"),
        ("top_p", [0, -0.1, 1.01, float("nan"), "1", None, True, 1e-60], "above 0, at most 1"),
        ("min_p", [-0.1, 1.01, float("nan"), "0", None, False], "a number from 0 to 1"),
        (
            "repetition_penalty",
            [0, -1.0, float("inf"), float("nan"), "1", None, 1e39, 1e-60],
            "a finite number > 0; 1 = off",
        ),
        ("presence_penalty", [-2.01, 2.01, float("nan"), "0", None], "from -2 to 2; 0 = off"),
        ("frequency_penalty", [-2.01, 2.01, float("inf"), [], None], "from -2 to 2; 0 = off"),
        ("min_tokens", [-1, "1", 1.0, None, True], "an integer >= 0"),
        ("min_tokens", [17], "0 to max_tokens = 16, or a larger max_tokens"),
        ("logit_bias", ["12", 3, b"ab"], "a mapping from token ids to numbers"),
        ("logit_bias", [[1], [(1, 2, 3)], [[1]]], "pairs of a token id and a number"),
        ("logit_bias", [{-1: 0}, {"1": 0}, {1.0: 0}, {True: 0}], "an integer from 0"),
        ("logit_bias", [{1: 100.1}, {1: "2"}, {1: float("nan")}, {1: None}], "from -100 to 100"),
        ("logit_bias", [[(1, 2.0), (1, 3.0)]], "once"),
        ("logit_bias", [dict.fromkeys(range(1025), 1.0)], "at most 1024"),
        (
            "bad_words",
            ["ab", 3, {"a"}, b"ab"],
            "a sequence of strings or of sequences of token ids",
        ),
        ("bad_words", [[3], [None]], "a sequence of token ids"),
        ("bad_words", [[[-1]], [["a"]]], "an integer from 0"),
        ("bad_words", [["a", ""], [" "], ["\n"]], "not all whitespace"),
        ("bad_words", [[[]]], "at least one token id"),
        ("bad_words", [["a"] * 129], "at most 128"),
        ("bad_words", [[[1] * 1000, [2] * 25]], "at most 1024"),
        ("allowed_token_ids", ["12", 3, {1}], "a sequence of token ids"),
        ("allowed_token_ids", [[-1], [1.0], ["1"], [True]], "an integer from 0"),
        ("stop", [3, b"ab", {"a"}], "a string or a sequence of strings"),
        ("stop", [["a", 3], [["a"]], [None]], "a string; token ids belong in stop_token_ids"),
        ("stop", ["", ["a", ""], "x" * 257], "1 to 256"),
        ("stop", [["a"] * 17], "at most 16"),
        ("include_stop_str_in_output", [1, None, "yes"], "True or False"),
    ],
)
def test_other_values_are_refused(name: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError) as refused:
            SamplingParams(**{name: value})
        message = str(refused.value)
        assert name in message and "; allowed: " in message
        assert allowed in message


def test_messages_name_the_parameter_and_the_value() -> None:
    for params, message in (
        ({"top_p": 0}, "top_p is 0; allowed: a number above 0, at most 1"),
        ({"logit_bias": {7: 101}}, "logit_bias[7] is 101; allowed: a number from -100 to 100"),
        ({"bad_words": ["a", [1, -1]]}, "bad_words[1][1] is -1; allowed: an integer from 0"),
        ({"stop": ["a", ""]}, "stop[1] has 0 characters; allowed: 1 to 256"),
        ({"stop": ""}, "stop has 0 characters; allowed: 1 to 256"),
    ):
        with pytest.raises(ValueError) as refused:
            SamplingParams(**params)  # type: ignore[arg-type]
        assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "name",
    [
        "ignore_eos",
        "include_stop_str_in_output",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ],
)
def test_switches(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 1; allowed: True or False"):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="stop is 'a', but detokenize is False; allowed: detok"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop == ()


def test_no_limit() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=2**31 - 1).max_tokens is None
    with pytest.raises(ValueError, match=r"min_tokens is .*; allowed: an integer from 0"):
        SamplingParams(max_tokens=None, min_tokens=2**31)


@pytest.mark.parametrize("key", ["best_of", "truncate_prompt_tokens", "topk"])
def test_unknown_parameters_are_refused(key: str) -> None:
    with pytest.raises(
        TypeError, match=f"no parameter '{key}' .*: n, temperature, top_k, .*, seed"
    ):
        SamplingParams(**{key: 1})
