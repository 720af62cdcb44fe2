# SPDX-License-Identifier: Apache-2.0
"""Measures engines that choose k beside plain decoding and beside fixed k, by turns.

    bench_adaptive.py --pair draft_model [--pair ngram ...] --device cpu --num-threads 2
    bench_adaptive.py --pair qwen3-8b+qwen3-8b-eagle3 --device cuda --fixed 1,2,3 --lengths 1.1,2.34

A pair is a demo, whose acceptance is its own, or two configurations with random weights, for which
--lengths imposes acceptance lengths at the largest k. All engines of a pair live at the same time
and take turns, since a machine's speed changes. The first round is cold: the engines that choose
know nothing yet. Every figure of a round is kept in the JSON; the table has medians of the ratios
to plain decoding and to the best fixed k of the same round, cold round apart.

"whole" is all output tokens over the time from the first request to the last token. "decode" is the
column of `bench latency`, from first tokens on. "steady" counts only while all requests decode.
With imposed lengths the fixed k are not measured at each length: their tokens are scaled, since the
time of an iteration does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import _core
from paceline.bench.latency import make_executor
from paceline.bench.models import BenchModel, load, load_draft
from paceline.bench.runs import Requests, Run, run_once
from paceline.bench.workload import Workload
from paceline.demo import demo_names, find_demo
from paceline.speculative_config import SpeculativeConfig

PROMPTS = Path(__file__).parents[1] / "support/demo_prompts.json"


def tokens_of(rate: float, k: int) -> float:
    """Tokens of a window with k drafts, each of which is accepted with a probability."""
    return sum(rate**i for i in range(k + 1))


def rate_of(length: float, k: int) -> float:
    """The probability with which `tokens_of` gives a length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(middle, k) < length else (low, middle)
    return high


@dataclass
class Engine:
    """One engine.

    Attributes:
        name: In the table.
        executor: The engine.
        k: The largest number of drafts; 0 = plain.
        length: The acceptance length that is imposed; None = the pair's own, or it does not matter.
        is_adaptive: Whether it chooses k.
        sampling: Of its requests.
        rounds: By number of sequences, the figures of each round.
    """

    name: str
    executor: _core.Executor
    k: int = 0
    length: float | None = None
    is_adaptive: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    rounds: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


def steady_tokens_per_s(run: Run) -> float:
    """Tokens per second between the last first token and the first end. Where requests follow each
    other, those of each between its first and its last token.
    """
    if any(request.sent_s > run.requests[0].sent_s for request in run.requests):
        spans = [request.token_times_s[-1] - request.token_times_s[0] for request in run.requests]
        return sum(sum(request.num_tokens[1:]) for request in run.requests) / sum(spans)
    begin = max(request.token_times_s[0] for request in run.requests)
    end = min(request.token_times_s[-2] for request in run.requests)
    if end <= begin:  # some request had ended before the last one began
        return math.nan
    counts = [
        count
        for request in run.requests
        for at, count in zip(request.token_times_s, request.num_tokens, strict=True)
        if begin < at <= end
    ]
    return sum(counts) / (end - begin)


def figures(run: Run, concurrency: int) -> dict[str, Any]:
    """What is kept of a run."""
    num_tokens = sum(request.num_output_tokens for request in run.requests)
    times = run.times
    decoding = [
        us + idle
        for us, idle, n, chunks in zip(
            times["us"], times["idle_us"], times["num_decoding"], times["num_prefill"], strict=True
        )
        if n == concurrency and chunks == 0
    ]
    found: dict[str, Any] = {
        "whole": num_tokens / run.duration_s,
        "decode": run.tokens_per_s,
        "steady": steady_tokens_per_s(run),
        "iteration_us": statistics.median(decoding) if decoding else 0.0,
        "mean_iteration_us": statistics.fmean(decoding) if decoding else 0.0,
        "tokens_per_iteration": run.tokens_per_iteration,
        "host_us": run.stats["host_us"] / max(run.stats["num_iterations"], 1),
        "iterations": {
            of["num_drafts"]: of["num_iterations"]
            for of in run.stats["drafts"]
            if of["num_iterations"]
        },
        "us": {of["num_drafts"]: of["us"] for of in run.stats["drafts"] if of["num_iterations"]},
        "prompt_us": sum(
            us for us, chunks in zip(times["us"], times["num_prefill"], strict=True) if chunks
        ),
        "idle_us": sum(times["idle_us"]),
        "duration_us": run.duration_s * 1e6,
        "tokens": num_tokens,
    }
    if run.stats["is_adaptive"]:
        found["acceptance"] = [round(p, 3) for p in run.stats["expected_acceptance"]]
        found["costs"] = [
            (of["num_seqs"], of["num_drafts"], of["num_samples"], round(of["us"]))
            for of in run.stats["costs"]
        ]
    return found


def median_ratio(ratios: list[float]) -> str:
    """The median, with the lowest and the highest."""
    ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"


class Pair:
    """A pair of models and its engines."""

    def __init__(self, name: str, args: argparse.Namespace, deadline: float):
        self.name = name
        self._args = args
        self._deadline = deadline
        self._concurrency = [int(c) for c in args.concurrency.split(",")]
        lens = [int(length) for length in args.output_len.split(",")]
        self._output_len = dict(
            zip(self._concurrency, lens if len(lens) > 1 else lens * 99, strict=False)
        )
        self._prompts: list[list[int]] = []
        begin = time.monotonic()
        if name in demo_names():
            self._load_demo()
        else:
            self._load_dummies()
        print(f"{name}: started in {time.monotonic() - begin:.1f} s", flush=True)

    def _load_demo(self) -> None:
        from tokenizers import Tokenizer

        demo = find_demo(self.name)
        target = load(str(demo.target), dummy=False, device=self._args.device, show_progress=False)
        draft = None
        if demo.draft is not None:
            draft = load_draft(
                str(demo.draft), target, method=demo.name, dummy=False,
                device=self._args.device, show_progress=False,
            )  # fmt: skip
        tokenizer = Tokenizer.from_file(str(demo.target / "tokenizer.json"))
        texts = [entry["text"] for entry in json.loads(PROMPTS.read_text())]
        self._prompts = [tokenizer.encode(text).ids[: self._args.input_len] for text in texts]
        k = demo.num_speculative_tokens
        fixed = SpeculativeConfig.parse(demo.speculative_config(k) | {"x": {"adaptive": False}})
        self._start(target, draft, [("plain", None), (f"k={k}", fixed)])
        self._start(target, draft, [("adaptive", replace(fixed, adaptive=True))])

    def _load_dummies(self) -> None:
        names = self.name.split("+")
        target = load(names[0], dummy=True, device=self._args.device, show_progress=False)
        draft = load_draft(
            names[1], target, method=None, dummy=True, device=self._args.device,
            show_progress=False,
        )  # fmt: skip
        lengths = [float(length) for length in self._args.lengths.split(",")]
        fixed = [int(k) for k in self._args.fixed.split(",")]
        most = max(fixed)
        variants: list[tuple[str, SpeculativeConfig | None]] = [("plain", None)]

        def drafting(k: int, length: float, *, is_adaptive: bool) -> SpeculativeConfig:
            return SpeculativeConfig(
                model=names[1], num_speculative_tokens=k, rejection_sample_method="synthetic",
                synthetic_acceptance_length=length, adaptive=is_adaptive,
            )  # fmt: skip

        for k in fixed:
            imposed = tokens_of(rate_of(max(lengths), most), k)
            variants.append((f"k={k}", drafting(k, imposed, is_adaptive=False)))
        for length in lengths:
            one = drafting(most, length, is_adaptive=True)
            variants.append((f"adaptive {length:g}", one))
        self._start(target, draft, variants)

    def _start(
        self,
        target: BenchModel,
        draft: BenchModel | None,
        variants: list[tuple[str, SpeculativeConfig | None]],
    ) -> None:
        most = max(self._output_len.values())
        workload = Workload(max(self._concurrency), self._args.input_len, most)
        self._vocab = target.config["vocab_size"]
        if not hasattr(self, "engines"):
            self.engines: list[Engine] = []
        for name, speculation in variants:
            begin = time.monotonic()
            executor = make_executor(
                target, None if speculation is None else draft, speculation, workload,
                num_threads=self._args.num_threads,
            )  # fmt: skip
            engine = Engine(name, executor)
            graph_mib = executor.memory_report()["graph_bytes"] / 2**20
            seconds = time.monotonic() - begin
            print(f"{self.name} {name}: {seconds:.2f} s, graphs {graph_mib:.0f} MiB", flush=True)
            if speculation is not None:
                engine.k = speculation.k
                engine.length = speculation.synthetic_acceptance_length
                engine.is_adaptive = bool(speculation.adaptive)
            self.engines.append(engine)
        if self._args.forced and variants[-1][1] is not None and variants[-1][1].adaptive:
            last = self.engines[-1]
            off = replace(last, name="k'=0 forced", sampling={"num_speculative_tokens": 0})
            off.rounds = {}
            self.engines.append(off)

    def run(self, turn: int) -> bool:
        """Runs one round; False: the time is over."""
        for c in self._concurrency:
            order = (
                self.engines[turn % len(self.engines) :] + self.engines[: turn % len(self.engines)]
            )
            for engine in order:
                if time.monotonic() > self._deadline:
                    return False
                is_fixed = engine.k > 0 and not engine.is_adaptive
                if is_fixed and turn % self._args.fixed_every > 0:
                    engine.rounds[c].append(engine.rounds[c][-1])
                    continue
                count = c * (self._args.repeat if c == 1 else 1)
                workload = Workload(c, self._args.input_len, self._output_len[c], engine.sampling)
                prompts = random.Random(turn).sample(self._prompts, len(self._prompts))
                run = run_once(
                    engine.executor, workload, self._vocab, seed=turn,
                    requests=Requests(count=count, prompts=prompts),
                )  # fmt: skip
                engine.rounds.setdefault(c, []).append(figures(run, c))
        return True

    def _speed(self, engine: Engine, c: int, turn: int, figure: str, length: float | None) -> float:
        one = engine.rounds[c][turn]
        speed = float(one[figure])
        if engine.length is not None and length is not None and not engine.is_adaptive:
            most = max(other.k for other in self.engines)
            speed *= tokens_of(rate_of(length, most), engine.k) / engine.length
        return speed

    def print_table(self, figure: str) -> None:
        """Prints the ratios of one figure."""
        fixed = [e for e in self.engines if e.k > 0 and not e.is_adaptive]
        for c in self._concurrency:
            for engine in self.engines:
                num = min(len(e.rounds.get(c, [])) for e in self.engines)
                plain = self.engines[0]
                if num == 0 or engine is plain:
                    continue
                to_plain, to_best = [], []
                for turn in range(num):
                    own = self._speed(engine, c, turn, figure, engine.length)
                    of_plain = self._speed(plain, c, turn, figure, None)
                    best = max(self._speed(e, c, turn, figure, engine.length) for e in fixed)
                    to_plain.append(own / of_plain)
                    to_best.append(own / max(best, of_plain))
                warm = slice(1, None) if num > 1 else slice(0, None)
                counts = engine.rounds[c][num - 1]["iterations"]
                own_us, plain_us = (
                    # A run may be too short for an iteration in which all sequences decode.
                    f"{us:.0f} us" if us > 0 else "- us"
                    for us in (
                        statistics.median(one["iteration_us"] for one in e.rounds[c])
                        for e in (engine, plain)
                    )
                )
                print(
                    f"{self.name:24} {figure:7} c={c:<4}{engine.name:14} "
                    f"to plain {median_ratio(to_plain[warm])}, to the better "
                    f"{median_ratio(to_best[warm])}, cold {to_best[0]:.3f}, "
                    f"{own_us} (plain {plain_us}), "
                    f"iterations {counts}, {num} rounds",
                    flush=True,
                )

    def as_dict(self) -> dict[str, Any]:
        """All figures."""
        return {engine.name: engine.rounds for engine in self.engines}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", action="append", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument(
        "--output-len", default="256", help="one for each concurrency, or one for all"
    )
    parser.add_argument("--fixed-every", type=int, default=1, help="rounds with a fixed k")
    parser.add_argument(
        "--no-forced", dest="forced", action="store_false", help="leave out k' = 0 forced"
    )
    parser.add_argument("--repeat", type=int, default=4, help="requests of a run with c = 1")
    parser.add_argument("--lengths", default="2.2")
    parser.add_argument("--fixed", default="4")
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    pairs = [Pair(name, args, deadline) for name in args.pair]
    turn = 0
    while all([pair.run(turn) for pair in pairs]):
        turn += 1
    if args.json is not None:
        args.json.write_text(json.dumps({pair.name: pair.as_dict() for pair in pairs}))
    for pair in pairs:
        for figure in ("whole", "decode", "steady"):
            pair.print_table(figure)


if __name__ == "__main__":
    main()
