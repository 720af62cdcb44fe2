# SPDX-License-Identifier: Apache-2.0
"""Measures what receipts cost: the CPU time of making them, beside that of generating the tokens.

    PYTHONPATH=python python docs/scripts/bench_receipts.py

Requests with receipts and without run by turns on one engine, the demo with its draft model. The
share is that of the CPU time of all threads in `Receipts.form` and `ReceiptForm.fill`, which the
thread that calls them measures itself, so other load of the machine does not count.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.receipts.maker import ReceiptForm, Receipts

NUM_REQUESTS = 32
NUM_TOKENS = 256
NUM_TURNS = 7
PROMPT = "def read_lines(path):\n    with open(path) as f:\n"


class Clock:
    """Sums the CPU time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added."""

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.thread_time() - start

        return call


def main() -> None:
    """Prints the time of receipts for each request and token, and its share."""
    demo = find_demo("draft_model")
    clock = Clock()
    plain = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=True)
    prompts = [f"{PROMPT}        # {i}\n" for i in range(NUM_REQUESTS)]
    turns: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with LLM(
        demo.target, speculative_config=demo.speculative_config(), device="cpu", show_progress=False
    ) as llm:
        llm.generate(prompts[0], replace(plain, receipt=True))  # computes the digests
        Receipts.form = clock.timed(Receipts.form)  # type: ignore[method-assign]
        ReceiptForm.fill = clock.timed(ReceiptForm.fill)  # type: ignore[method-assign]
        for turn in range(2 * NUM_TURNS):
            has_receipts = turn % 2 == 1
            clock.seconds = 0.0
            start = time.process_time()
            llm.generate(prompts, replace(plain, receipt=has_receipts, seed=turn))
            turns[has_receipts].append((time.process_time() - start, clock.seconds))
    assert all(seconds == 0 for _, seconds in turns[False])
    total, made = (sum(column) for column in zip(*turns[True], strict=True))
    num_requests = NUM_TURNS * NUM_REQUESTS
    print(f"{num_requests} requests of {NUM_TOKENS} tokens with receipts, and as many without")
    print(f"a receipt takes {1e6 * made / num_requests:.0f} us, ", end="")
    print(f"{1e6 * made / num_requests / NUM_TOKENS:.2f} us a token")
    print(f"which is {100 * made / total:.2f} % of the CPU time of the requests")
    off = sorted(seconds for seconds, _ in turns[False])[NUM_TURNS // 2]
    on = sorted(seconds for seconds, _ in turns[True])[NUM_TURNS // 2]
    print(f"median CPU seconds of a turn: {off:.3f} without receipts, {on:.3f} with")


if __name__ == "__main__":
    main()
