# SPDX-License-Identifier: Apache-2.0
"""Measures what receipts cost: the CPU time of making them, beside that of generating the tokens.

    PYTHONPATH=python python docs/scripts/bench_receipts.py

Requests with receipts and without run by turns on one engine: the demo with its draft model, or a
model of `--model` with plain decoding. The
share is that of the CPU time of all threads in `Receipts.form` and `ReceiptForm.fill`, which the
thread that calls them measures itself, so other load of the machine does not count. The tokens per
second of both count all of it; on a GPU the thread that makes receipts also hands out the tokens.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.receipts.maker import ReceiptForm, Receipts

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a folder with a model (default: the demo)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=32, help="requests of a turn, all at once")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an output")
    parser.add_argument("--turns", type=int, default=7, help="turns with receipts, and without")
    arguments = parser.parse_args()
    demo = find_demo("draft_model")
    clock = Clock()
    plain = SamplingParams(temperature=0.8, max_tokens=arguments.tokens, ignore_eos=True)
    prompts = [f"{PROMPT}        # {i}\n" for i in range(arguments.requests)]
    # CPU seconds of the process, those of receipts, and seconds.
    turns: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    with LLM(
        arguments.model or demo.target,
        speculative_config=None if arguments.model else demo.speculative_config(),
        device=arguments.device,
        max_num_seqs=arguments.requests,
        show_progress=False,
    ) as llm:
        llm.generate(prompts[0], replace(plain, receipt=True))  # computes the digests
        llm.generate(prompts, replace(plain, seed=0))  # warms up
        Receipts.form = clock.timed(Receipts.form)  # type: ignore[method-assign]
        ReceiptForm.fill = clock.timed(ReceiptForm.fill)  # type: ignore[method-assign]
        for turn in range(2 * arguments.turns):
            has_receipts = turn % 2 == 1
            clock.seconds = 0.0
            start, cpu_start = time.perf_counter(), time.process_time()
            llm.generate(prompts, replace(plain, receipt=has_receipts, seed=turn))
            cpu = time.process_time() - cpu_start
            turns[has_receipts].append((cpu, clock.seconds, time.perf_counter() - start))
    assert all(made == 0 for _, made, _ in turns[False])
    total, made, _ = (sum(column) for column in zip(*turns[True], strict=True))
    num_requests = arguments.turns * arguments.requests
    print(
        f"{num_requests} requests of {arguments.tokens} tokens with receipts, and as many without"
    )
    print(f"a receipt takes {1e6 * made / num_requests:.0f} us, ", end="")
    print(f"{1e6 * made / num_requests / arguments.tokens:.2f} us a token")
    print(f"which is {100 * made / total:.2f} % of the CPU time of the requests")
    for has_receipts, label in ((False, "without receipts"), (True, "with receipts")):
        cpu_s = statistics.median(cpu for cpu, _, _ in turns[has_receipts])
        wall_s = statistics.median(seconds for _, _, seconds in turns[has_receipts])
        rate = arguments.requests * arguments.tokens / wall_s
        print(f"{label}: {cpu_s:.3f} CPU seconds, {rate:.0f} tokens/s (medians of a turn)")


if __name__ == "__main__":
    main()
