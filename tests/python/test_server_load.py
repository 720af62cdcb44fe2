# SPDX-License-Identifier: Apache-2.0
"""Load on the server: many requests, of which some are cancelled, and many open streams."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from paceline import SamplingParams
from paceline.async_feeds import Feed
from paceline.server.exchange import Exchange
from paceline.server.generation import Generation
from running_server import RunningServer, open_demo

COMPLETIONS = "/v1/completions"
CONCURRENCY = 64
IS_LONG = os.environ.get("PACELINE_TEST_LEVEL") == "3"
NUM_REQUESTS = 10_000 if IS_LONG else 400
NUM_STREAMS = 500 if IS_LONG else 100
SHARE_CANCELLED = 0.3
NUM_KINDS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with (
        open_demo(max_num_seqs=32, max_model_len=256) as llm,
        RunningServer(llm, max_queue=1000) as server,
    ):
        yield server


def kinds() -> list[dict[str, Any]]:
    """Requests of mixed lengths, each with a seed of its own."""
    rng = random.Random(1)
    return [
        {
            "prompt": f"def f{i}(" + "x, " * rng.randrange(20),
            "max_tokens": rng.randrange(1, 24),
            "temperature": rng.choice([0, 1]),
            "seed": i,
        }
        for i in range(NUM_KINDS)
    ]


async def text_of(response: aiohttp.ClientResponse, num_lines: int | None = None) -> str:
    """The text of a stream; its beginning if only some lines are wanted."""
    text = ""
    async for line in response.content:
        if num_lines is not None:
            num_lines -= 1
            if num_lines < 0:
                return text
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
    return text


def test_none_is_lost_and_none_comes_twice(server: RunningServer) -> None:
    """What is cancelled leaves nothing behind; all others get their own text."""
    bodies = kinds()
    expected = [
        server.llm.generate(
            body["prompt"],
            SamplingParams(**{key: body[key] for key in ("max_tokens", "temperature", "seed")}),
            use_tqdm=False,
        )[0].outputs[0].text
        for body in bodies
    ]  # fmt: skip
    rng = random.Random(2)
    plans = [(rng.randrange(NUM_KINDS), rng.random(), rng.random()) for _ in range(NUM_REQUESTS)]
    sizes: list[int] = []
    num_whole = 0

    async def ask(session: aiohttp.ClientSession, kind: int, cancels: float, way: float) -> None:
        nonlocal num_whole
        body = bodies[kind] | {"stream": way < 0.7}
        async with session.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
            if cancels < SHARE_CANCELLED:
                await text_of(response, num_lines=1 if body["stream"] else 0)
                response.close()  # closes the connection, before or after the end
                return
            if body["stream"]:
                text = await text_of(response)
            else:
                text = (await response.json())["choices"][0]["text"]
        assert text == expected[kind]
        num_whole += 1

    async def main() -> None:
        limit = asyncio.Semaphore(CONCURRENCY)

        async def limited(index: int) -> None:
            async with limit:
                await ask(session, *plans[index])
            if index % max(1, NUM_REQUESTS // 10) == 0:
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

        connector = aiohttp.TCPConnector(limit=0)
        base = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession(base, connector=connector) as session:
            await asyncio.gather(*(limited(i) for i in range(NUM_REQUESTS)))

    asyncio.run(main())
    assert num_whole == sum(cancels >= SHARE_CANCELLED for _, cancels, _ in plans)
    server.wait_until_idle()
    assert not server.allm._session._by_name and not server.allm._session._by_engine_id
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) in (Feed, Generation, Exchange)]
    assert left == []
    if IS_LONG:  # the second half takes no more memory than 1 % for 1,000 requests
        growth = sizes[-1] / sizes[len(sizes) // 2] - 1
        assert growth < 0.01 * NUM_REQUESTS / 2 / 1000, sizes


@pytest.mark.serial
def test_slow_readers_delay_no_one(server: RunningServer) -> None:
    """Many open streams, of which some are never read: the event loop stays awake."""
    body = {"prompt": "def f", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = "".join(event["choices"][0]["text"] for event in server.events(COMPLETIONS, body))
    stalls: list[float] = []

    async def watch() -> None:
        """Runs in the server's loop: how late a sleep ends."""
        while True:
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(0.005)
            stalls.append(asyncio.get_running_loop().time() - before - 0.005)

    async def main() -> list[str]:
        connector = aiohttp.TCPConnector(limit=0)
        base = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession(base, connector=connector) as session:

            async def ask(index: int) -> str:
                async with session.post(COMPLETIONS, json=body | {"stream": True}) as response:
                    assert response.status == 200
                    if index % 20 == 0:
                        await asyncio.sleep(1.0)  # reads nothing meanwhile
                    return await text_of(response)

            return await asyncio.gather(*(ask(i) for i in range(NUM_STREAMS)))

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    try:
        texts = asyncio.run(main())
    finally:
        watching.cancel()
    assert texts == [alone] * NUM_STREAMS
    server.wait_until_idle()
    stalls.sort()
    print(f"{len(stalls)} sleeps, p99 of the stall {stalls[len(stalls) * 99 // 100] * 1e3:.1f} ms")
    # The clients run in the same process, and share its lock with the server; in CI, other tests
    # run beside them.
    assert stalls[len(stalls) * 99 // 100] < (0.05 if IS_LONG else 0.25)
