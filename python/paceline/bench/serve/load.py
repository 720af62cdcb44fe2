# SPDX-License-Identifier: Apache-2.0
"""Puts load on a server: requests arrive at random, with a limit on those that are open."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.bench.serve.client import Answer, Client
from paceline.bench.serve.datasets import Question

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Load:
    """How requests arrive.

    Attributes:
        request_rate: Requests a second; infinity = all at once.
        burstiness: 1 = a Poisson process; less = in bursts; more = evenly.
        max_concurrency: Requests that are open at a time; None = any number.
    """

    request_rate: float
    burstiness: float
    max_concurrency: int | None


async def run_load(
    client: Client,
    questions: Sequence[Question],
    load: Load,
    rng: np.random.Generator,
    after_each: Callable[[], object],
) -> tuple[list[Answer], float]:
    """Asks all questions.

    Args:
        client: Asks the server.
        questions: What to ask.
        load: How requests arrive.
        rng: Chooses the times between arrivals.
        after_each: Called when a request has ended.

    Returns:
        The answers in the order of the questions, and the seconds that all took.
    """
    limit = (
        contextlib.nullcontext()
        if load.max_concurrency is None
        else asyncio.Semaphore(load.max_concurrency)
    )

    async def ask(question: Question) -> Answer:
        async with limit:
            answer = await client.ask(question)
        after_each()
        return answer

    started = time.perf_counter()
    at = 0.0
    tasks = []
    for question in questions:
        if not math.isinf(load.request_rate):
            delay = started + at - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            at += rng.gamma(load.burstiness, 1.0 / (load.request_rate * load.burstiness))
        tasks.append(asyncio.create_task(ask(question)))
    answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - started
