# SPDX-License-Identifier: Apache-2.0
"""Each limit has one value, which C++ exports and both C++ and Python enforce."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import EngineConfig, SamplingParams, SpeculativeConfig, _core
from paceline.loader import load_checkpoint
from paceline.option_schema import ENGINE, SPECULATIVE
from paceline.reports import capabilities

LIMITS: dict[str, Any] = {
    **_core.limits(),
    **{option.name: option.high for option in (ENGINE | SPECULATIVE).values() if option.high},
}
OPTIONS = {"max_model_len": 64, "kv_cache_bytes": 8 << 20, "max_num_seqs": 2, "max_logprobs": 64}
NGRAM = {"num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def executor(target_dir: Path) -> Iterator[_core.Executor]:
    executor = _core.Executor(load_checkpoint(target_dir).model, None, OPTIONS)
    yield executor
    executor.close()


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [
        ("max_num_seqs", {}, "max_num_seqs"),
        ("block_size", {}, "block_size"),
        ("num_threads", {}, "num_threads"),
        ("max_num_batched_tokens", {}, "prefill_chunk_size"),
        ("max_num_batched_tokens", {}, "max_num_batched_tokens"),
        ("logprobs", {}, "max_logprobs"),
        ("num_speculative_tokens", NGRAM, "num_speculative_tokens"),
        ("prompt_lookup_max", NGRAM, "prompt_lookup_max"),
        ("draft_proposals", {}, "draft_proposals"),
    ],
)
def test_options_of_the_engine(
    target_dir: Path, name: str, options: dict[str, Any], option: str
) -> None:
    model = load_checkpoint(target_dir).model
    limit = LIMITS[name]
    beyond = OPTIONS | options | {option: limit + 1}
    with raises(ValueError, f"{option} is {limit + 1}; allowed: ", f"to {limit}"):
        _core.Executor(model, None, beyond)
    if name in ("block_size", "num_threads", "logprobs"):
        _core.Executor(model, None, OPTIONS | {option: limit}).close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_samples", LIMITS["n"] + 1),
        ("temperature", LIMITS["temperature"] * 2),
        ("stop_token_ids", list(range(LIMITS["stop_token_ids"] + 1))),
        ("logit_bias", [(0, 1.0)] * (LIMITS["logit_bias"] + 1)),
        ("bad_words", [[1]] * (LIMITS["bad_words"] + 1)),
        ("bad_words", [[1] * (LIMITS["bad_word_tokens"] + 1)]),
        ("logprobs", LIMITS["logprobs"] + 1),
    ],
    ids=["n", "temperature", "stop", "bias", "words", "word tokens", "logprobs"],
)
def test_requests(executor: _core.Executor, name: str, value: Any) -> None:
    with raises(ValueError, name, "allowed: "):
        executor.add_request([1], **{name: value})


def test_python_has_the_same_limits_under_its_own_names() -> None:
    for name in ("max_num_seqs", "block_size", "num_threads", "max_num_batched_tokens"):
        limit = LIMITS[name]
        assert getattr(EngineConfig(**{name: limit}), name) == limit
        with raises(ValueError, f"{name} is {limit + 1}; allowed: an integer from 1 to {limit}"):
            EngineConfig(**{name: limit + 1})
    for name in ("n", "logprobs", "prompt_logprobs"):
        limit = LIMITS[name.removeprefix("prompt_")]
        assert getattr(SamplingParams(**{name: limit}), name) == limit
        with raises(ValueError, f"{name} is {limit + 1}; allowed: ", f"to {limit}"):
            SamplingParams(**{name: limit + 1})
    most = LIMITS["temperature"]
    assert SamplingParams(temperature=most).temperature == most
    with raises(ValueError, "temperature is ", f"to {most:g}"):
        SamplingParams(temperature=most * 1.001)
    for name in ("stop_token_ids", "logit_bias", "bad_words"):
        many = [[1]] * LIMITS[name] if name == "bad_words" else range(LIMITS[name])
        pairs = {token: 1.0 for token in range(LIMITS[name] + 1)}
        with raises(ValueError, f"{name} has {LIMITS[name] + 1} entries", f"most {LIMITS[name]}"):
            SamplingParams(**{name: pairs if name == "logit_bias" else [*many, many[0]]})
    with raises(ValueError, "bad_words has ", f"at most {LIMITS['bad_word_tokens']}"):
        SamplingParams(bad_words=[[1] * (LIMITS["bad_word_tokens"] + 1)])


def test_python_has_the_same_limits_of_speculation() -> None:
    def config(**changes: Any) -> SpeculativeConfig:
        return SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 2} | changes)

    k = LIMITS["num_speculative_tokens"]
    assert config(num_speculative_tokens=k).num_speculative_tokens == k
    with raises(ValueError, "num_speculative_tokens", f"from 1 to {k}"):
        config(num_speculative_tokens=k + 1)
    most = LIMITS["prompt_lookup_max"]
    with raises(ValueError, "prompt_lookup_max", f"from 1 to {most}"):
        config(prompt_lookup_max=most + 1)
    most = LIMITS["draft_proposals"]
    sampled = {"method": "draft_model", "model": "a", "rejection_sample_method": "standard"}
    assert config(**sampled).draft_proposals == LIMITS["default_draft_proposals"]
    with raises(ValueError, "draft_proposals", f"from 1 to {most}"):
        config(**sampled, x={"draft_proposals": most + 1})


def test_capabilities_have_them_too() -> None:
    found = capabilities()
    assert found["max_num_speculative_tokens"] == LIMITS["num_speculative_tokens"]
    assert found["max_draft_proposals"] == LIMITS["draft_proposals"]
    assert found["block_sizes"] == {"min": 1, "max": LIMITS["block_size"]}
    assert found["max_num_seqs"] == {"min": 1, "max": LIMITS["max_num_seqs"]}
    assert found["max_n"] == LIMITS["n"]
