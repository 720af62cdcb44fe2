# SPDX-License-Identifier: Apache-2.0
"""LLM: streams that several threads use, and a Ctrl-C at every point of a start."""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StreamChunk
from paceline.loader import LoadedModel, load_checkpoint
from time_limits import HANG_LIMIT_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=1.0, max_tokens=1500, seed=0)
# Far longer than a test takes; a thread that is blocked forever exceeds it.


def started(call: Callable[[], Any]) -> Future[Any]:
    """Runs a call in a daemon thread, which does not keep a failing test from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# ---- streams in several threads ------------------------------------------------------------------


def test_closing_a_stream_wakes_the_thread_that_waits(plain_llm: LLM) -> None:
    # The dispatcher's lock keeps further events away, so that the consumer waits for one.
    stream = plain_llm.stream("a", LONG)
    with plain_llm._dispatcher.lock:
        consumer = started(lambda: list(stream))
        time.sleep(0.1)
        assert not consumer.done()
        stream.close()
    consumer.result(HANG_LIMIT_S)
    assert list(stream) == []
    assert plain_llm.generate("a", GREEDY)


def test_closing_a_stream_ends_a_busy_consumer(plain_llm: LLM) -> None:
    stream = plain_llm.stream(["a", "b"], LONG)
    next(stream)
    consumer = started(lambda: list(stream))
    stream.close()
    consumer.result(HANG_LIMIT_S)
    assert not plain_llm._dispatcher.sessions


def test_consumers_share_the_chunks_of_a_stream(plain_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=3)
    prompts = ["a", "b", "c"]
    expected = plain_llm.generate(prompts, params)
    for _ in range(5):
        stream = plain_llm.stream(prompts, params)
        consumers = [started(lambda stream=stream: list(stream)) for _ in range(3)]
        taken: list[list[StreamChunk]] = [consumer.result(HANG_LIMIT_S) for consumer in consumers]
        chunks = [chunk for chunks in taken for chunk in chunks]
        finished = {chunk.index: chunk.output for chunk in chunks if chunk.output is not None}
        assert sum(chunk.output is not None for chunk in chunks) == len(prompts)
        assert [finished[i].outputs for i in range(3)] == [o.outputs for o in expected]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 600


def test_many_streams_are_closed_while_they_are_consumed(plain_llm: LLM) -> None:
    def consume_and_close(seed: int) -> None:
        stream = plain_llm.stream(["a"] * 4, SamplingParams(max_tokens=6 + seed % 20, seed=seed))
        consumer = started(lambda: list(stream))
        time.sleep(seed % 7 / 1e3)
        stream.close()
        consumer.result(HANG_LIMIT_S)

    def consume_and_close_several(seeds: range) -> None:
        for seed in seeds:
            consume_and_close(seed)

    closers = [started(lambda i=i: consume_and_close_several(range(i, 60, 4))) for i in range(4)]
    for closer in closers:
        closer.result(HANG_LIMIT_S)
    assert not plain_llm._dispatcher.sessions and not plain_llm._dispatcher.open_samples


# ---- a Ctrl-C at every point ---------------------------------------------------------------------


# Python handles signals only after these instructions.
_INTERRUPTIBLE = ("CALL", "JUMP_BACKWARD", "RESUME", "SEND")


def interrupted_at(number: int, call: Callable[[], Any], traced: tuple[str, ...]) -> bool:
    """Raises KeyboardInterrupt at one of the points where a Ctrl-C can interrupt a call.

    Args:
        number: Which point, from 1, counted over all frames of the traced functions.
        call: What to call.
        traced: Names of the functions and methods whose instructions count.

    Returns:
        Whether the call has that many points.
    """
    count = 0
    previous: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        is_point = False
        if event == "call":
            if frame.f_code.co_qualname not in traced:
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            is_point = True
        elif event == "exception":
            previous[frame] = ""  # a call that raises is not followed by a check for signals
        elif event == "opcode":
            is_point = previous.get(frame, "").startswith(_INTERRUPTIBLE)
            previous[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        count += is_point
        if is_point and count == number:
            previous.clear()
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        previous.clear()
    return count >= number


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def assert_threads_end(expected: int) -> None:
    gc.collect()
    end = time.monotonic() + HANG_LIMIT_S
    while num_threads() > expected:
        assert time.monotonic() < end, f"{num_threads()} threads instead of {expected}"
        time.sleep(0.001)


@pytest.fixture
def loaded(target_dir: Path) -> Iterator[LoadedModel]:
    """A loaded target. At the end, all threads of engines on it must have ended."""
    with LLM(target_dir, max_num_seqs=1) as llm:
        llm.generate("a", GREEDY)  # starts the threads that tqdm and torch keep
    before = num_threads()
    yield load_checkpoint(target_dir)
    assert_threads_end(before)


def build(loaded: LoadedModel) -> LLM:
    return LLM.from_loaded(
        loaded, max_num_seqs=1, max_model_len=64, kv_cache_bytes=1 << 20, num_threads=1
    )


def test_a_ctrl_c_while_an_llm_starts_leaves_no_engine(loaded: LoadedModel) -> None:
    before = num_threads()
    traced = (
        "LLM.from_loaded",
        "RunningEngine._start",
        "Dispatcher.__init__",
        "register",
        "delayed_exit",
        "capture_progress",
        "_GeneratorContextManager.__exit__",
    )
    number = 0
    while True:
        number += 1
        was_interrupted = interrupted_at(number, lambda: build(loaded), traced)
        # Without the garbage collector, which would find an engine only at some later time.
        deadline = time.monotonic() + 2
        while num_threads() > before and time.monotonic() < deadline:
            time.sleep(0.0005)
        assert num_threads() == before, f"interrupted at point {number}"
        if not was_interrupted:
            break
    assert number > 25


def test_a_ctrl_c_while_a_request_is_queued_leaves_a_working_llm(loaded: LoadedModel) -> None:
    before = num_threads()
    traced = ("Session.add_requests", "Dispatcher.start_polling", "RequestStream.__init__")
    number = 0
    while True:
        number += 1
        with build(loaded) as llm:
            was_interrupted = interrupted_at(
                number, lambda llm=llm: llm.generate("a", GREEDY), traced
            )
            outputs = started(lambda llm=llm: llm.generate("b", GREEDY)).result(HANG_LIMIT_S)
            assert len(outputs[0].outputs[0].token_ids) == 8
        assert_threads_end(before)
        if not was_interrupted:
            break
    assert number > 10


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "deleted"])
def test_a_ctrl_c_while_an_llm_is_freed_leaves_no_thread(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    monkeypatch.setattr("paceline.dispatcher._IDLE_S", 0.05)
    before = num_threads()
    traced = (
        "LLM.__del__",
        "LLM.close",
        "Dispatcher.close",
        "Dispatcher._close",
        "Dispatcher._end_sessions",
    )
    number = 0
    while True:
        number += 1
        llm = build(loaded)
        llm.generate("a", GREEDY)  # starts the polling thread
        engines = [llm]
        del llm
        # Python ignores exceptions in a destructor, after it has called the hook.
        was_interrupted = interrupted_at(
            number, engines[0].close if is_closed else engines.clear, traced
        )
        engines.clear()
        assert_threads_end(before)
        if not was_interrupted:
            break
    assert number > 6


def test_an_idle_llm_has_no_polling_thread(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.dispatcher._IDLE_S", 0.001)
    with build(loaded) as llm:
        expected = llm.generate("a", GREEDY)[0].outputs
        # Requests come before, while and after the thread ends.
        for i in range(200):
            time.sleep((i % 8) * 0.0004)
            outputs = started(lambda: llm.generate("a", GREEDY)).result(HANG_LIMIT_S)
            assert outputs[0].outputs == expected
        end = time.monotonic() + HANG_LIMIT_S
        while llm._dispatcher.is_polling:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_a_ctrl_c_keeps_no_engine_in_its_traceback(loaded: LoadedModel) -> None:
    before = num_threads()
    with pytest.raises(KeyboardInterrupt) as caught, pytest.MonkeyPatch.context() as patch:

        def interrupt(*arguments: Any) -> None:
            assert num_threads() > before
            raise KeyboardInterrupt

        patch.setattr("paceline.running_engine.Dispatcher", interrupt)
        build(loaded)
    assert num_threads() == before
    assert any(frame.name == "_start" for frame in caught.traceback)
