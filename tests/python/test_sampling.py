# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: what is read, what is refused and how."""

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


def test_values_are_kept() -> None:
    params = SamplingParams(temperature=0, max_tokens=np.int64(3), seed=2**64 - 1)
    assert (params.temperature, params.max_tokens, params.seed) == (0.0, 3, 2**64 - 1)
    assert type(params.max_tokens) is int
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_is_frozen_hashable_and_copies() -> None:
    params = SamplingParams(stop_token_ids=[1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1, 2)))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=1).seed == 1


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), -0.1, "1", None, True]
)
def test_temperature(value: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*; allowed: a finite number >= 0"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [0, -1, 2**31, "4", 1.0, True, None])
def test_max_tokens(value: Any) -> None:
    with pytest.raises(ValueError, match=r"max_tokens is .*; allowed: an integer from 1"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [-1, 2**64, 0.5, "0", False])
def test_seed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"seed is .*; allowed: an integer from 0"):
        SamplingParams(seed=value)


@pytest.mark.parametrize("value", [3, "12", [1.0], [-1], ["1"], list(range(9)), None])
def test_stop_token_ids(value: Any) -> None:
    with pytest.raises(ValueError, match=r"stop_token_ids.*; allowed: "):
        SamplingParams(stop_token_ids=value)


def test_ignore_eos() -> None:
    with pytest.raises(ValueError, match="ignore_eos is 1; allowed: True or False"):
        SamplingParams(ignore_eos=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "presence_penalty", "stop", "n"])
def test_parameters_that_are_not_there_yet(key: str) -> None:
    with pytest.raises(TypeError, match=f"no parameter '{key}' .*temperature, max_tokens, seed"):
        SamplingParams(**{key: 1})
