# SPDX-License-Identifier: Apache-2.0
"""What tests of `AsyncLLM` do with tasks: run them, read their outputs, wait for the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from paceline import LLM, RequestOutput, SamplingParams
from time_limits import HANG_LIMIT_S

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=1.0, max_tokens=1500, seed=0)
NUM_SAMPLES = 64
LONGEST = dataclasses.replace(LONG, ignore_eos=True, n=NUM_SAMPLES)  # takes seconds


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, HANG_LIMIT_S))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output; checks that each one continues the one before."""
    before: RequestOutput | None = None
    async for output in outputs:
        if before is not None:
            assert not before.finished and before.request_id == output.request_id
            for old, new in zip(before.outputs, output.outputs, strict=True):
                assert new.text.startswith(old.text)
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
                assert (new.logprobs or [])[: len(old.token_ids)] == (old.logprobs or [])
        before = output
    assert before is not None and before.finished
    return before


async def idle(llm: LLM) -> dict[str, Any]:
    """Waits until the engine runs nothing and checks its memory; returns its counts."""
    executor = llm._executor
    while (stats := executor.stats())["num_running"] or stats["num_waiting"]:
        await asyncio.sleep(0.001)
    assert executor.check_integrity() == ""
    assert all(group["held_blocks"] == 0 for group in llm.memory_report()["groups"])
    assert not llm._dispatcher.sessions and not llm._dispatcher.open_samples
    return stats


async def until_queued(llm: LLM, num_requests: int) -> None:
    """Waits until the engine has `num_requests` requests with the parameters LONGEST."""
    while True:
        stats = llm._executor.stats()
        if stats["num_running"] + stats["num_waiting"] == num_requests * NUM_SAMPLES:
            return
        await asyncio.sleep(0.001)
