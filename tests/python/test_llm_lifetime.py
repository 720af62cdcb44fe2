# SPDX-License-Identifier: Apache-2.0
"""LLM: use from several threads, closing, lifetimes, and engines that fail."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import (
    LLM,
    DeviceError,
    RequestError,
    SamplingParams,
    _core,
)
from paceline.dispatcher import Dispatcher
from paceline.loader import load_checkpoint
from paceline.stream import Request, RequestStream

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=1.0, max_tokens=1500, seed=0)


# ---- threads -----------------------------------------------------------------------------------


def test_several_threads_generate(llm: LLM) -> None:
    jobs = [(f"prompt {i}", SamplingParams(max_tokens=20 + i, seed=i)) for i in range(24)]
    expected = [llm.generate(prompt, params)[0].outputs for prompt, params in jobs]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda job: llm.generate(*job)[0].outputs, jobs))
    assert results == expected


@pytest.mark.serial
def test_waiting_releases_the_gil(llm: LLM, target_dir: Path) -> None:
    model = load_checkpoint(target_dir).model
    options = {"max_model_len": 64, "kv_cache_bytes": 8 << 20}
    executor = _core.Executor(model, None, options)
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        polls = [pool.submit(executor.poll, 1000) for _ in range(4)]
        count = 0
        while not all(poll.done() for poll in polls):
            count += 1
            time.sleep(0.001)
    assert time.monotonic() - start < 3  # the four waits of one second overlap
    assert count > 50  # Python ran during the waits
    executor.close()


def test_close_waits_for_running_calls(target_dir: Path) -> None:
    model = load_checkpoint(target_dir).model
    executor = _core.Executor(model, None, {"max_model_len": 64, "kv_cache_bytes": 8 << 20})
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        poll = pool.submit(executor.poll, 300)
        time.sleep(0.05)
        executor.close()
        assert time.monotonic() - started >= 0.3  # not before the poll ended
        assert poll.result() == []
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.poll()
    assert "closed" in repr(executor)


def test_close_ends_running_requests(target_dir: Path) -> None:
    llm = LLM(target_dir)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, ["a"] * 64, LONG)
        while not llm._dispatcher.sessions and not future.done():
            time.sleep(0.001)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            future.result()
    llm.close()
    assert "closed" in repr(llm)
    for call in (lambda: llm.generate("a"), lambda: llm.logits("a"), llm.memory_report):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()


# ---- lifetimes ---------------------------------------------------------------------------------


def test_arrays_outlive_the_objects_they_come_from(target_dir: Path) -> None:
    loaded = load_checkpoint(target_dir)
    arena = loaded.model.arena()
    assert arena.readonly
    digest = hash(bytes(arena))
    executor = _core.Executor(loaded.model, None, {"max_model_len": 64, "kv_cache_bytes": 8 << 20})
    num_bytes = loaded.model.weight_bytes
    del loaded
    gc.collect()
    assert len(arena) == num_bytes and hash(bytes(arena)) == digest
    executor.add_request([1, 2, 3], score_prompt=True)
    (event,) = [e for e in _poll_all(executor) if e.finish_reason]
    logits = event.logits
    assert logits is not None and logits.shape == (3, executor.vocab_size)
    assert not logits.flags.writeable
    copy = logits.copy()
    executor.close()
    del executor, event
    gc.collect()
    assert np.array_equal(copy, logits)


def _poll_all(executor: _core.Executor) -> Iterator[_core.RequestEvent]:
    while True:
        for event in executor.poll(timeout_ms=1000):
            yield event
            if event.finish_reason is not None:
                return


def test_an_llm_is_freed_without_close(target_dir: Path) -> None:
    llm = LLM(target_dir)
    dispatcher = llm._dispatcher
    llm.generate("a", GREEDY)
    del llm
    gc.collect()
    assert dispatcher.is_closed
    assert not dispatcher.is_polling


# ---- a failing engine --------------------------------------------------------------------------


class _Event:
    """Has the attributes of `_core.RequestEvent`."""

    sample = num_drafted = num_accepted = 0
    arrival_us, first_token_us, finish_us = 1000, 0, 2000
    num_cached_tokens = 7
    logits = None

    def __init__(self, id: int, token_ids: list[int], finish_reason: str | None, error: str = ""):
        self.id, self.token_ids = id, token_ids
        self.finish_reason, self.error = finish_reason, error
        self.counters: dict[str, Any] = {"drafted_per_position": []}


class _FakeExecutor:
    """Fails every second request, or raises `failure`."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.next_id = 0
        self.events: list[_Event] = []
        self.num_cancelled = 0

    def add_requests(self, requests: list[_core.Request], ids: list[int]) -> bool:
        for _ in requests:
            self.next_id += 1
            is_good = self.next_id % 2
            reason, error = ("length", "") if is_good else ("error", "broke")
            self.events.append(_Event(self.next_id, [1], reason, error))
            ids.append(self.next_id)
        return True

    def poll(self, timeout_ms: int) -> list[_Event]:
        if self.failure is not None and self.next_id:
            raise self.failure
        events, self.events = self.events, []
        return events

    def cancel(self, id: int, sample: int | None) -> bool:
        self.num_cancelled += 1
        return True

    def close(self) -> None:
        pass


def requests_for(num: int) -> list[Request]:
    return [
        Request(
            i,
            None,
            [1],
            SamplingParams(),
            sampling={},
            detokenizer=None,
        )
        for i in range(num)
    ]


def test_a_failed_request_does_not_affect_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(_FakeExecutor())  # type: ignore[arg-type]
    monkeypatch.setattr(llm, "_dispatcher", dispatcher)
    monkeypatch.setattr(llm, "speculative_config", None)
    with pytest.raises(RequestError, match="prompt 1: broke") as error:
        llm.generate(["a", "b", "c"])
    assert [output.error for output in error.value.outputs] == [None, "broke", None]
    assert all(output.num_cached_tokens == 7 for output in error.value.outputs)
    assert [output.outputs[0].finish_reason for output in error.value.outputs] == [
        "length",
        "error",
        "length",
    ]
    dispatcher.close()


def test_a_failed_engine_raises_its_cause_every_time() -> None:
    dispatcher = Dispatcher(_FakeExecutor(MemoryError("gone")))  # type: ignore[arg-type]
    stream = RequestStream(dispatcher, requests_for(2), owner=None)
    with pytest.raises(MemoryError, match="gone"):
        next(stream)
    with pytest.raises(MemoryError, match="gone"):
        dispatcher.open().add_requests([_core.Request([1])])
    dispatcher.close()


def test_every_consumer_of_a_stream_gets_the_error() -> None:
    executor = _FakeExecutor()
    dispatcher = Dispatcher(executor)  # type: ignore[arg-type]
    may_fail = threading.Event()

    def poll(timeout_ms: int) -> list[_Event]:
        may_fail.wait(60)
        raise MemoryError("gone")

    executor.poll = poll  # type: ignore[method-assign]
    stream = RequestStream(dispatcher, requests_for(2), owner=None)
    with ThreadPoolExecutor(4) as pool:
        consumers = [pool.submit(next, stream) for _ in range(4)]
        may_fail.set()
        assert [str(consumer.exception(60)) for consumer in consumers] == ["gone"] * 4
    with pytest.raises(MemoryError, match="gone"):
        next(stream)
    dispatcher.close()


def test_a_ctrl_c_while_requests_are_queued_cancels_them() -> None:
    executor = _FakeExecutor()
    dispatcher = Dispatcher(executor)  # type: ignore[arg-type]
    add_requests = executor.add_requests

    def interrupt(requests: list[_core.Request], ids: list[int]) -> bool:
        add_requests(requests, ids)
        executor.events.clear()  # no request ends by itself
        raise KeyboardInterrupt  # as a signal handler does when the call returns

    executor.add_requests = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        RequestStream(dispatcher, requests_for(4), owner=None)
    assert executor.num_cancelled == 4
    assert not dispatcher.sessions
    dispatcher.close()


def test_a_refused_call_queues_nothing_and_uses_no_numbers(target_dir: Path) -> None:
    params = SamplingParams(max_tokens=16)
    with LLM(target_dir, max_model_len=1024, kv_cache_bytes=512 << 10) as llm:
        expected = [llm.generate([7, 8, 9], params)[0].outputs for _ in range(2)]
    with LLM(target_dir, max_model_len=1024, kv_cache_bytes=512 << 10) as llm:
        outputs = [llm.generate([7, 8, 9], params)[0].outputs]
        with pytest.raises(ValueError, match=r"request 1 of 2: .* raise kv_cache_bytes"):
            llm.generate([[1], [1] * 1000], params)
        stats = llm._executor.stats()
        assert stats["num_running"] == stats["num_waiting"] == 0
        outputs.append(llm.generate([7, 8, 9], params)[0].outputs)
    assert outputs == expected


def test_a_refused_thread_is_an_error_and_queues_nothing(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    with LLM(target_dir, max_num_seqs=1) as llm:
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", refuse)
            with pytest.raises(DeviceError, match=r"can't start new thread; raise the limit on"):
                llm.generate("a", GREEDY)
        assert not llm._dispatcher.sessions
        assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 24


def test_an_error_during_delivery_reaches_the_callers() -> None:
    dispatcher = Dispatcher(_FakeExecutor())  # type: ignore[arg-type]

    def fail(event: Any) -> None:
        raise LookupError("lost")

    dispatcher._deliver = fail  # type: ignore[method-assign]
    stream = RequestStream(dispatcher, requests_for(1), owner=None)
    with pytest.raises(LookupError, match="lost"):
        next(stream)
    dispatcher.close()
