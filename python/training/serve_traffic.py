# SPDX-License-Identifier: Apache-2.0
"""Serves example traffic with Paceline and captures it, for a training from served traffic.

The prompts are windows of the training files, so the held-out files stay unseen. The requests run
in the `LLM` of this program; `paceline serve --capture` writes the same shards for requests that
arrive over HTTP.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from corpus import token_stream
from options import DEMO, corpus_from, options_for, plan_from
from texts import Windows
from tokenizers import Tokenizer

from paceline import LLM, RequestOutput, SamplingParams

# Requests that are queued together. Between two such groups the program looks at the clock.
_QUEUED: Final = 4096


@dataclass(frozen=True)
class Plan:
    """All numbers of the traffic; each is a command-line option."""

    seed: int = 0
    requests: int = 81920  # as many continuations as train_eagle3.py generates by itself
    shortest_prompt: int = 32  # tokens of the training files in a prompt
    longest_prompt: int = 320
    new_tokens: int = 96  # greatest number of tokens of an output
    concurrency: int = 256  # requests that run at the same time


@dataclass
class Totals:
    """What was served.

    Attributes:
        requests: Requests that have ended.
        tokens: Tokens of their outputs.
        steps: Iterations with drafts.
        accepted: Drafts that these accepted.
    """

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    accepted: int = 0

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Counts outputs."""
        for output in outputs:
            drafts = output.metrics.speculative_decoding or {}
            self.requests += 1
            self.tokens += len(output.outputs[0].token_ids)
            self.steps += drafts.get("num_spec_steps", 0)
            self.accepted += drafts.get("num_accepted_draft_tokens", 0)

    def summary(self, seconds: float) -> str:
        """Describes what was served in `seconds`."""
        text = f"{self.requests} requests with {self.tokens} tokens of output in {seconds:.0f} s"
        text += f", {self.tokens / seconds:.0f} tokens/s"
        if self.steps:
            text += f", acceptance length {1 + self.accepted / self.steps:.3f}"
        return text


def draw_prompts(windows: Windows, plan: Plan, count: int) -> list[list[int]]:
    """Draws prompts of all lengths that the plan allows."""
    choices = (plan.shortest_prompt, plan.longest_prompt + 1)
    lengths = torch.randint(*choices, (count,), generator=windows.random).tolist()
    return [windows.sample(1, length)[0].tolist() for length in lengths]


def serve(
    llm: LLM,
    windows: Windows,
    plan: Plan,
    temperatures: Sequence[float],
    until: float | None = None,
) -> Totals:
    """Serves the requests of the plan; the temperatures take turns.

    Args:
        llm: Serves them.
        windows: The training files.
        plan: The numbers of the traffic.
        temperatures: Each request takes the next one, and after the last the first again.
        until: No group of requests begins after this moment, by `time.monotonic`.

    Returns:
        What was served.
    """
    totals = Totals()
    turns = itertools.cycle(temperatures)
    while totals.requests < plan.requests and (until is None or time.monotonic() < until):
        count = min(_QUEUED, plan.requests - totals.requests)
        params = [
            SamplingParams(temperature=next(turns), max_tokens=plan.new_tokens)
            for _ in range(count)
        ]
        totals.add(llm.generate(draw_prompts(windows, plan, count), params, use_tqdm=False))
    return totals


def _options() -> argparse.Namespace:
    parser = options_for(__doc__, Plan)
    parser.add_argument("--target", type=Path, default=DEMO / "gemma3_code")
    parser.add_argument(
        "--capture", type=Path, required=True, help="the folder that the shards are written to"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="T",
        help="sampling temperatures, which the requests take in turn (default: 0)",
    )
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="how to draft, as for `paceline serve` (default: plain decoding)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no requests later than this, whatever their number; they are queued by 4096",
    )
    return parser.parse_args()


def main() -> None:
    """Serves the traffic; exits with 1 if the capture does not have all of it."""
    arguments = _options()
    plan = plan_from(arguments, Plan)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    stream = token_stream(tokenizer, corpus_from(arguments).train)
    windows = Windows(stream, torch.device("cpu"), plan.seed)
    with LLM(
        arguments.target,
        speculative_config=arguments.speculative_config,
        device=arguments.device,
        max_model_len=plan.longest_prompt + plan.new_tokens,
        max_num_seqs=plan.concurrency,
        seed=plan.seed,
    ) as llm:
        capture = llm.start_capture(arguments.capture)
        began = time.monotonic()
        until = None if arguments.minutes is None else began + 60 * arguments.minutes
        totals = serve(llm, windows, plan, arguments.temperature, until)
        print(totals.summary(time.monotonic() - began), flush=True)
        capture.close()
        stats = capture.stats()
    print(f"the capture has {stats['num_requests']} of them in {stats['num_bytes']} bytes")
    if stats["num_requests"] < totals.requests:
        sys.exit(f"the capture in {arguments.capture} ended early: {stats['state']}")


if __name__ == "__main__":
    main()
