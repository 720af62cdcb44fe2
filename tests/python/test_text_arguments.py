# SPDX-License-Identifier: Apache-2.0
"""Every argument that takes text or token ids refuses bytes and lone surrogates by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from errors import raises
from paceline import LLM, SamplingParams

BYTES = [b"ab", bytearray(b"ab"), memoryview(b"ab")]
PARAMETERS = ["allowed_token_ids", "bad_words", "logit_bias", "stop", "stop_token_ids"]


@pytest.fixture(params=["generate", "stream", "logits"])
def call(llm: LLM, request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """A method that takes a prompt."""
    method: Callable[[Any], Any] = getattr(llm, request.param)
    return method


@pytest.mark.parametrize("value", BYTES)
def test_bytes_are_not_a_prompt(call: Callable[[Any], Any], value: Any) -> None:
    kind = f"({type(value).__name__})"
    with raises(ValueError, "prompt", kind, "allowed: a string"):
        call(value)
    with raises(ValueError, "[0] is", kind, "allowed:", "token id"):
        call([value])


def test_lone_surrogates_are_not_in_a_prompt(call: Callable[[Any], Any]) -> None:
    with raises(ValueError, r"prompt has '\ud800' at character 1", "allowed: valid Unicode"):
        call("a\ud800b")


@pytest.mark.parametrize("value", [None, 3, np.array(3), {1, 2}])
def test_other_types_are_not_a_prompt(call: Callable[[Any], Any], value: Any) -> None:
    with raises(ValueError, "prompt", f"({type(value).__name__})", "allowed: a string"):
        call(value)


@pytest.mark.parametrize("value", BYTES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_bytes_are_not_a_parameter(name: str, value: Any) -> None:
    with raises(ValueError, f"{name} is", f"({type(value).__name__})", "allowed:"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", BYTES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_bytes_are_not_in_a_list(name: str, value: Any) -> None:
    with raises(ValueError, name, "allowed:"):
        SamplingParams(**{name: [value]})


@pytest.mark.parametrize("name", ["bad_words", "stop"])
def test_lone_surrogates_are_not_in_a_parameter(name: str) -> None:
    with raises(ValueError, rf"{name}[1] has '\udc80' at character 1", "allowed: valid Unicode"):
        SamplingParams(**{name: ["fine", "a\udc80"]})
