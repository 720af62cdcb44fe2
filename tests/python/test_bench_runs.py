# SPDX-License-Identifier: Apache-2.0
"""How a bench sends its requests, and what it records of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import tiny_models
from paceline import _core
from paceline.bench import latency, models, runs
from paceline.bench.runs import Requests
from paceline.bench.workload import Workload


class Script:
    """An engine that delivers given events: per poll, (request, tokens, whether it ends)."""

    def __init__(self, polls: Sequence[Sequence[tuple[int, int, bool]]]) -> None:
        self._polls = iter(polls)
        self._ids = itertools.count()
        self.sent: list[list[int]] = []

    def reset_stats(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}

    iteration_times = stats

    def add_requests(self, requests: Sequence[_core.Request], ids: list[int]) -> bool:
        ids += [next(self._ids) for _ in requests]
        self.sent.append(list(ids))
        return True

    def poll(self, timeout_ms: int) -> list[Any]:
        class Event:
            def __init__(self, number: int, count: int, is_last: bool) -> None:
                self.id, self.token_ids, self.error = number, [7] * count, ""
                self.finish_reason = "length" if is_last else None
                self.arrival_us, self.first_token_us, self.finish_us = 1000, 3000, 11000

        return [Event(*event) for event in next(self._polls)]


def test_the_next_request_starts_when_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(runs.time, "monotonic", lambda: float(next(clock)))
    engine = Script(
        [
            [(0, 1, False), (1, 1, False)],
            [(0, 3, False), (1, 2, True)],
            [(0, 2, True), (2, 1, False)],
            [(2, 5, True)],
        ]
    )
    work = Workload(2, 4, 6)
    run = runs.run_once(engine, work, 128, seed=1, requests=Requests(count=3))  # type: ignore[arg-type]
    assert [ids for ids in engine.sent if ids] == [[0, 1], [2]]
    # The clock ticks at the begin, when requests are sent, and after each poll.
    one, zero, two = run.requests
    assert (one.sent_s, one.token_times_s, one.num_tokens, one.ended_s) == (1, [2, 4], [1, 2], 4)
    assert (zero.sent_s, zero.num_tokens, zero.num_output_tokens) == (1, [1, 3, 2], 6)
    assert two.sent_s > one.ended_s and two.num_prompt_tokens == 4
    assert run.duration_s == two.ended_s
    assert run.first_token_ms == 2
    assert run.tokens_per_iteration == (2 + 3 + 2 + 5) / 4
    # Two sequences emit (2 + 5 + 5) / 3 tokens after their first one in 8 ms.
    assert run.tokens_per_s == pytest.approx(2 * 4 / 8e-3)


def test_prompts_take_turns_and_end_at_stop_tokens() -> None:
    model = models.load(str(tiny_models.make(tiny_models.TinySpec("gemma3", seed=3))), dummy=False)
    work = Workload(2, 5, 12)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    [free] = latency.measure(
        model, None, None, [work], rounds=1, requests=Requests(count=5, prompts=prompts)
    )
    [run] = free.runs
    assert sorted(request.num_prompt_tokens for request in run.requests) == [3, 3, 3, 7, 7]
    assert {request.num_output_tokens for request in run.requests} == {12}
    assert run.stats["num_emitted_tokens"] == 60
    assert max(request.sent_s for request in run.requests) > run.requests[0].ended_s
    executor = latency.make_executor(model, None, None, work)
    try:
        executor.add_request(prompts[0], temperature=0.0, max_tokens=12)
        events: list[_core.RequestEvent] = []
        while not any(event.finish_reason for event in events):
            events += executor.poll(1000)
    finally:
        executor.close()
    token_ids = [token for event in events for token in event.token_ids]
    requests = Requests(prompts=prompts[:1], stop_token_ids=token_ids[3:4])
    [stopped] = latency.measure(model, None, None, [work], rounds=1, requests=requests)
    num_tokens = [request.num_output_tokens for request in stopped.runs[0].requests]
    assert num_tokens == [token_ids.index(token_ids[3]) + 1] * 2
