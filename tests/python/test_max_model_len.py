# SPDX-License-Identifier: Apache-2.0
"""The length of requests: its default, and what is said of a request that it cuts or refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import LLM, SamplingParams
from running_server import RunningServer
from tiny_models import TinySpec, make

OWN_LENGTH = 32_768
ENGINE: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "show_progress": False}
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def long_dir() -> Path:
    """A model made for more than 4,096 tokens."""
    return make(TinySpec("llama", seed=1, max_position=OWN_LENGTH))


def lines_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and "max_model_len" in record.getMessage() + " samples of up to"
    ]


def test_the_default_is_the_length_of_the_model(
    long_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    with LLM(long_dir, **ENGINE) as llm:
        assert llm.max_model_len == OWN_LENGTH
        assert llm.capabilities()["configured"]["max_model_len"] == OWN_LENGTH
        rule = llm.memory_report()["kv_cache_rule"]
        assert rule == "default: enough for 2 sequences of 4096 tokens, or for one of 32768"
        prompt = [5] * 5000
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))
        assert output.error is None and len(output.outputs[0].token_ids) == 2
    assert not lines_of(caplog, logging.WARNING)
    (line,) = (one for one in caplog.messages if "The engine has started" in one)
    assert "2 samples of up to 32768 tokens (the length that the model supports)" in line


def test_a_long_request_has_the_tokens_of_a_short_limit(long_dir: Path) -> None:
    """The limit changes no output."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
    with LLM(long_dir, **ENGINE) as llm, LLM(long_dir, max_model_len=64, **ENGINE) as short:
        (expected,), (actual,) = llm.generate([PROMPT], params), short.generate([PROMPT], params)
        assert actual.outputs == expected.outputs


def test_a_default_that_the_pool_shortens_is_said(
    long_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    with LLM(long_dir, kv_cache_bytes=1 << 20, **ENGINE) as llm:
        length = llm.max_model_len
        assert 16 < length < OWN_LENGTH and length % 16 == 0
        (line,) = lines_of(caplog, logging.WARNING)
        assert line.startswith(f"max_model_len is {length} by default: the most for which the KV ")
        assert "kv_cache_bytes" in line and "of the 32768 tokens that the model supports" in line
        # The longest request runs.
        params = SamplingParams(temperature=0, max_tokens=1)
        (output,) = llm.generate([[5] * (length - 1)], params)
        assert output.error is None
        with raises(ValueError, f"{length} tokens; allowed: at most {length - 1}", "raise max_mod"):
            llm.generate([[5] * length], params)


def test_a_drafter_may_shorten_the_default(
    long_dir: Path,
    copy_of: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    draft = copy_of(TinySpec("llama", seed=2, max_position=8192))
    config = {"model": str(draft), "num_speculative_tokens": 2}
    with LLM(long_dir, speculative_config=config, **ENGINE) as llm:
        assert llm.max_model_len == 8192
    (line,) = lines_of(caplog, logging.WARNING)
    assert "the length that the drafter supports, of the 32768 tokens" in line
    with raises(ValueError, "max_model_len is 9000", "supports only 8192", "max_model_len=8192"):
        LLM(long_dir, speculative_config=config, max_model_len=9000, **ENGINE)


@pytest.fixture(scope="module")
def short(long_dir: Path) -> Iterator[LLM]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with LLM(long_dir, max_model_len=24, chat_template=template, **ENGINE) as llm:
        yield llm


@pytest.mark.parametrize(
    ("max_tokens", "count", "stop_reason"),
    [(5, 5, None), (21, 21, None), (22, 21, "max_model_len"), (None, 21, "max_model_len")],
)
def test_an_output_that_the_limit_cuts_says_so(
    short: LLM, max_tokens: int | None, count: int, stop_reason: str | None
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=2)
    (output,) = short.generate([PROMPT], params)
    for one in output.outputs:
        assert (len(one.token_ids), one.finish_reason) == (count, "length")
        assert one.stop_reason == stop_reason
    reasons = {
        (chunk.finish_reason, chunk.stop_reason)
        for chunk in short.stream([PROMPT], params)
        if chunk.finished
    }
    assert reasons == {("length", stop_reason)}


def test_a_server_says_so(short: LLM) -> None:
    text = {"temperature": 0, "ignore_eos": True}
    with RunningServer(short) as server:
        for most, expected in ((4, None), (1000, "max_model_len")):
            body = text | {"prompt": PROMPT, "max_tokens": most}
            (choice,) = server.result("/v1/completions", body)["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", expected)
            *_, last = server.events("/v1/completions", body)
            assert last["choices"][0]["stop_reason"] == expected
            body = text | {"input": "ab", "max_output_tokens": most}
            details = server.result("/v1/responses", body)["incomplete_details"]
            stated = {} if expected is None else {"stop_reason": expected}
            assert details == {"reason": "max_output_tokens"} | stated
        body = text | {"prompt": [5] * 24}
        status, answer = server.ask("/v1/completions", body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "raise max_model_len" in answer["error"]["message"]


def test_a_prompt_beyond_the_model_has_no_false_advice(short: LLM) -> None:
    with pytest.raises(ValueError, match="max_model_len is 24") as error:
        short.generate([[5] * OWN_LENGTH])
    assert "raise" not in str(error.value)
