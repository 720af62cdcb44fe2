# SPDX-License-Identifier: Apache-2.0
"""LLM.stream: the same output piece by piece, and what ends it early."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from paceline import (
    LLM,
    RequestOutput,
    SamplingParams,
)
from time_limits import HANG_LIMIT_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS: list[Any] = ["def read(", [1, 2, 3], "x = 1\ny", [40] * 33]
LONG = SamplingParams(temperature=1.0, max_tokens=1500, seed=0)


def wait_until_idle(llm: LLM, timeout_s: float = HANG_LIMIT_S) -> dict[str, Any]:
    """Waits until no request runs or waits, and returns the statistics."""
    end = time.monotonic() + timeout_s
    while True:
        stats = llm._executor.stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        assert time.monotonic() < end, stats
        time.sleep(0.01)


def test_stream_returns_what_generate_returns(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=30, seed=i) for i in range(len(PROMPTS))]
    expected = llm.generate(PROMPTS, params)
    texts = [""] * len(PROMPTS)
    token_ids: list[list[int]] = [[] for _ in PROMPTS]
    outputs: list[RequestOutput | None] = [None] * len(PROMPTS)
    for chunk in llm.stream(PROMPTS, params):
        texts[chunk.index] += chunk.text
        token_ids[chunk.index] += chunk.token_ids
        assert outputs[chunk.index] is None, "nothing comes after the last chunk"
        assert chunk.finished == (chunk.output is not None)
        outputs[chunk.index] = chunk.output
    for i, output in enumerate(expected):
        streamed = outputs[i]
        assert streamed is not None and streamed.outputs == output.outputs
        assert (texts[i], token_ids[i]) == (output.outputs[0].text, output.outputs[0].token_ids)


def test_streamed_text_never_splits_a_character() -> None:
    spec = tiny_models.TinySpec("qwen3", seed=1, vocab_size=272, tokenizer_size=272)
    folder = tiny_models.make(spec)
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=2)
    with LLM(folder) as llm:
        whole = llm.generate("é", params)[0].outputs[0]
        pieces = [chunk.text for chunk in llm.stream("é", params)]
        assert llm.target.tokenizer is not None
        decoded = llm.target.tokenizer.decode(whole.token_ids)
    assert "".join(pieces) == whole.text
    assert whole.text.replace("�", "") == decoded.replace("�", "")


def test_closing_a_stream_cancels(llm: LLM) -> None:
    with llm.stream(["a", "b"], LONG) as stream:
        assert next(stream).token_ids
    wait_until_idle(llm)
    assert list(stream) == []
    assert llm._executor.check_integrity() == ""


def test_deleting_a_stream_cancels(llm: LLM) -> None:
    before = llm._executor.stats()["num_emitted_tokens"]
    stream = llm.stream("a", LONG)
    next(stream)
    del stream
    gc.collect()
    assert wait_until_idle(llm)["num_emitted_tokens"] - before < LONG.max_tokens
    llm.stream("a", LONG)  # never consumed
    gc.collect()
    wait_until_idle(llm)


def test_cancelled_requests_do_not_change_others(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=9)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    neighbours = llm.stream(["q", "r", "s"], LONG)
    next(neighbours)
    stream = llm.stream(PROMPTS, params)
    outputs: dict[int, list[int]] = {}
    for number, chunk in enumerate(stream):
        if number == 10:
            neighbours.close()
        if chunk.output is not None:
            outputs[chunk.index] = chunk.output.outputs[0].token_ids
    assert [outputs[i] for i in range(len(PROMPTS))] == expected


@pytest.fixture
def heeded_ctrl_c() -> Iterator[None]:
    """Installs Python's own handler of Ctrl-C. A shell that runs the tests in the background makes
    them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_ctrl_c")
def test_ctrl_c_cancels(llm: LLM) -> None:
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    many = SamplingParams(max_tokens=2000, seed=0)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:  # until the signal arrives, on a machine of any speed
            llm.generate(["a"] * 8, many)
    wait_until_idle(llm)
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 24


def test_a_stream_keeps_its_llm_alive(target_dir: Path) -> None:
    stream = LLM(target_dir).stream("a", GREEDY)
    gc.collect()
    assert sum(len(chunk.token_ids) for chunk in stream) == 24
