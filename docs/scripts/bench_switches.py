# SPDX-License-Identifier: Apache-2.0
"""Measures what a change of the drafter costs the requests that run.

    PYTHONPATH=python python docs/scripts/bench_switches.py --device cuda

Requests of the demo run all the time while its drafters take turns. For each change the engine says
for how long it rested between two iterations, which is to be less than an iteration takes. The
longest pause of a stream has more: its tokens so far are computed again for the new drafter, beside
those of the other requests, while the caller loads and captures.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline import LLM, SamplingParams, _core
from paceline.demo import find_demo

PROMPT = "def read_lines(path):\n    with open(path) as f:\n"


class Load:
    """Requests that run in a thread, one stream after another, and the pauses of their chunks."""

    def __init__(self, llm: LLM, num_requests: int, num_tokens: int) -> None:
        self._llm = llm
        self._prompts = [f"{PROMPT}        # {i}\n" for i in range(num_requests)]
        self._params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self.began = threading.Event()
        self.times: list[list[float]] = []  # of the chunks of each stream

    def _run(self) -> None:
        while not self._is_over:
            times: list[list[float]] = [[] for _ in self._prompts]
            for chunk in self._llm.stream(self._prompts, self._params):
                times[chunk.index].append(time.perf_counter())
                self.began.set()
            self.times += times

    def __enter__(self) -> Load:
        self._thread.start()
        self.began.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def longest_pause(self) -> float:
        """The longest time between two chunks of a stream, in seconds."""
        return max(
            after - before for times in self.times for before, after in itertools.pairwise(times)
        )


def main() -> None:
    """Prints how long the engine rested, how long iterations took, and the pauses of streams."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=16, help="requests that run at once")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an output")
    parser.add_argument("--switches", type=int, default=40, help="changes of the drafter")
    arguments = parser.parse_args()
    demos = {name: find_demo(name) for name in ("eagle3", "draft_model", "ngram")}
    turns: dict[str, dict[str, Any] | None] = {
        **{name: demo.speculative_config() for name, demo in demos.items()},
        "plain": None,
    }
    with LLM(
        demos["eagle3"].target, device=arguments.device, max_num_seqs=arguments.requests,
        max_model_len=arguments.tokens + 64, show_progress=False,
    ) as llm:  # fmt: skip
        with Load(llm, arguments.requests, arguments.tokens) as undisturbed:
            pass  # one batch
        llm._executor.reset_stats()
        rests_us: list[tuple[str, float]] = []
        with Load(llm, arguments.requests, arguments.tokens) as load:
            for name in itertools.islice(itertools.cycle(turns), arguments.switches):
                with recorded_rests() as rests:
                    llm.set_drafter(turns[name], show_progress=False)
                rests_us += [(name, rest) for rest in rests]
        times_us = llm._executor.iteration_times()["us"]
    assert len(rests_us) == arguments.switches
    rests = [rest for _, rest in rests_us]
    slowest, longest = max(rests_us, key=lambda pair: pair[1])
    print(f"{arguments.switches} changes while {arguments.requests} requests ran")
    print(f"an iteration takes {statistics.median(times_us):.0f} us (median of {len(times_us)})")
    print(f"the engine rested for {statistics.median(rests):.0f} us (median), ", end="")
    print(f"{longest:.0f} us at most (a change to {slowest})")
    print(f"longest pause of a stream: {1e3 * undisturbed.longest_pause():.1f} ms ", end="")
    print(f"without changes, {1e3 * load.longest_pause():.1f} ms with them")


@contextlib.contextmanager
def recorded_rests() -> Iterator[list[float]]:
    """Collects for how many microseconds engines rest when their drafters change."""
    rests: list[float] = []
    set_drafter = _core.Executor.set_drafter

    def recording(self: _core.Executor, *arguments: Any) -> float:
        rests.append(set_drafter(self, *arguments))
        return rests[-1]

    _core.Executor.set_drafter = recording  # type: ignore[method-assign]
    try:
        yield rests
    finally:
        _core.Executor.set_drafter = set_drafter  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
