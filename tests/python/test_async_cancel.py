# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: ending a request early frees its blocks, by abort or in any way that a task ends."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from async_tasks import GREEDY, LONG, LONGEST, idle, last, run, until_queued
from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.loader import TokenizerInfo
from time_limits import HANG_LIMIT_S


async def _cancel_task(allm: AsyncLLM) -> None:
    task = asyncio.create_task(last(allm.generate("a", LONGEST)))
    await until_queued(allm.llm, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _break(allm: AsyncLLM) -> None:
    async for _ in allm.generate("a", LONG):
        break


async def _close_iterator(allm: AsyncLLM) -> None:
    outputs = allm.stream("a", LONG)
    await anext(outputs)
    await outputs.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    await outputs.aclose()


async def _close_from_another_task(allm: AsyncLLM) -> None:
    outputs = allm.generate("a", SamplingParams(max_tokens=1))
    await anext(outputs)
    outputs = allm.generate("a", LONG, "other")
    task = asyncio.create_task(anext(outputs))
    while outputs._feed is None or outputs._feed._waiter is None:
        if task.done():
            break
        await asyncio.sleep(0)
    await outputs.aclose()
    await asyncio.wait([task])


async def _fail_in_the_loop(allm: AsyncLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in allm.stream("a", LONG):
            _ = 1 / 0


async def _cancel_while_preparing(allm: AsyncLLM) -> None:
    """Of those tasks, the workers prepare the requests of the first two."""
    encode = TokenizerInfo.encode
    has_started = threading.Event()
    may_go_on = threading.Event()

    def slow_encode(self: TokenizerInfo, text: str, **options: Any) -> list[int]:
        has_started.set()
        may_go_on.wait(HANG_LIMIT_S)
        return encode(self, text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenizerInfo, "encode", slow_encode)
        tasks = [asyncio.create_task(last(allm.generate("a", LONG))) for _ in range(9)]
        while not has_started.is_set():
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        may_go_on.set()
        # When both workers can meet, they have left those requests behind.
        meeting = threading.Barrier(2)
        loop = asyncio.get_running_loop()
        workers = allm._session.workers
        await asyncio.gather(*(loop.run_in_executor(workers, meeting.wait) for _ in range(2)))


async def _time_out(allm: AsyncLLM) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(last(allm.generate("a", LONG)), 0.02)


@pytest.mark.parametrize(
    "end",
    [
        _cancel_task,
        _break,
        _close_iterator,
        _close_from_another_task,
        _fail_in_the_loop,
        _cancel_while_preparing,
        _time_out,
    ],
)
def test_ending_early_frees_the_blocks(
    allm: AsyncLLM, llm: LLM, end: Callable[[AsyncLLM], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> tuple[int, int]:
        await end(allm)
        before = llm._executor.stats()["num_iterations"]
        stats = await idle(llm)
        return before, stats["num_iterations"]

    before, after = run(main())
    # The iteration that ran, and one whose inputs were staged at the same time.
    assert after <= before + 2


@pytest.mark.parametrize("has_pending_call", [False, True])
def test_closing_the_loop_cancels(allm: AsyncLLM, llm: LLM, has_pending_call: bool) -> None:
    """Also if an event came after the loop stopped, whose call the closing loop drops."""
    loop = asyncio.new_event_loop()
    outputs = allm.generate("a", dataclasses.replace(LONG, ignore_eos=True, n=8))
    before = llm._executor.stats()["num_cancelled"]
    loop.run_until_complete(anext(outputs))
    assert outputs._feed is not None
    while has_pending_call and not outputs._feed.bell._is_scheduled:
        time.sleep(0.001)
    loop.close()  # the next event finds it closed
    assert run(idle(llm))["num_cancelled"] == before + 8
    del outputs


def test_abort_ends_with_the_output_so_far(allm: AsyncLLM, llm: LLM) -> None:
    async def main() -> tuple[RequestOutput, RequestOutput, list[RequestOutput]]:
        running = allm.generate("a", LONG, "mine")
        seen = await anext(running)
        await allm.abort("mine")
        await allm.abort("mine")
        await allm.abort("unknown")
        outputs = [output async for output in running]
        # One that has not been queued yet.
        early = asyncio.create_task(last(allm.generate("a", LONG, "early")))
        while "early" not in allm._session._by_name:
            await asyncio.sleep(0)
        await allm.abort("early")
        result = seen, await early, outputs
        await idle(llm)
        return result

    seen, early, outputs = run(main())
    (completion,) = outputs[-1].outputs
    assert outputs[-1].finished and outputs[-1].error is None
    assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 1500
    assert completion.token_ids[: len(seen.outputs[0].token_ids)] == seen.outputs[0].token_ids
    assert early.outputs[0].finish_reason == "abort" and early.metrics.total_time_ms >= 0


def test_a_request_id_is_taken_while_its_request_runs(allm: AsyncLLM) -> None:
    async def main() -> None:
        first = allm.generate("a", LONG, "x")
        await anext(first)
        with pytest.raises(ValueError, match="request_id is 'x', which a running request has"):
            await anext(allm.generate("b", GREEDY, "x"))
        await allm.abort("x")
        await last(first)
        assert (await last(allm.generate("b", GREEDY, "x"))).request_id == "x"
        # Names that callers choose may look like those that the engine gives.
        number = int((await last(allm.generate("b", GREEDY))).request_id)
        named = allm.generate("a", LONG, str(number + 2))
        await anext(named)
        unnamed = allm.generate("a", LONG)  # its number is number + 2
        output = await anext(unnamed)
        assert output.request_id == unnamed.request_id == f"{number + 2}'"
        await asyncio.gather(named.aclose(), unnamed.aclose())

    run(main())
    for name in ("", 3):
        with pytest.raises(ValueError, match="request_id is"):
            allm.generate("a", GREEDY, name)  # type: ignore[arg-type]
