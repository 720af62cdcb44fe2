# SPDX-License-Identifier: Apache-2.0
"""`paceline bench latency --request-rate`: requests that arrive at random on the engine itself."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_models
from paceline import _core, cli
from paceline.bench import arrivals, models, runs
from paceline.bench.runs import Requests
from paceline.bench.workload import Workload

pytestmark = pytest.mark.usefixtures("quick_machine")


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_models.make(tiny_models.TinySpec("gemma3", seed=3))


def bench(folder: Path, *extra: str) -> int:
    argv = ["--model", str(folder), "--input-len", "40", "--output-len", "16", "--quiet"]
    return cli.main(["bench", "latency", *argv, *extra])


class InstantEngine:
    """Answers a request in the poll after it; the clock goes on while a poll waits."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.new: list[int] = []
        self.num_sent = 0

    def reset_stats(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}

    iteration_times = stats

    def add_requests(self, requests: Sequence[_core.Request], ids: list[int]) -> bool:
        ids += range(self.num_sent, self.num_sent + len(requests))
        self.new += ids
        self.num_sent += len(requests)
        return True

    def poll(self, timeout_ms: int) -> list[Any]:
        self.now_s += max(timeout_ms, 0.25) / 1e3 if not self.new else 1e-4
        ended, self.new = self.new, []
        times = {"arrival_us": 0, "first_token_us": 1, "finish_us": 2}
        return [
            SimpleNamespace(id=i, token_ids=[7], finish_reason="length", error="", **times)
            for i in ended
        ]


def test_requests_arrive_as_a_poisson_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for seed in (1, 1, 2):
        engine = InstantEngine()
        monkeypatch.setattr(runs.time, "monotonic", lambda engine=engine: engine.now_s)
        requests = Requests(4000, rate=50.0)
        run = runs.run_once(engine, Workload(2, 4, 1), 128, seed=seed, requests=requests)  # type: ignore[arg-type]
        assert len(run.requests) == engine.num_sent == 4000
        sent.append(sorted(request.sent_s for request in run.requests))
    assert sent[0] == sent[1] != sent[2]
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent[0])]
    # Exponential gaps of 20 ms: mean and deviation are equal, and 1 / e of them are longer.
    assert statistics.fmean(gaps) == pytest.approx(20e-3, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(20e-3, rel=0.05)
    assert sum(gap > 20e-3 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_the_report_of_arrivals(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    drafting = json.dumps({"model": str(folder), "num_speculative_tokens": 2})
    argv = ["--speculative-config", drafting, "--concurrency", "3", "--rounds", "2"]
    argv += ["--request-rate", "200,60%,200.0", "--num-prompts", "12", "--json", str(out)]
    assert bench(folder, *argv) == 0
    report = json.loads(out.read_text())
    assert (report["bench"], report["rows"], report["not_measured"]) == ("latency", [], [])
    assert report["startup"]["engine_start_s"] > 0
    rows = report["arrivals"]
    assert [(row["configuration"], row["capacity_share"]) for row in rows] == [
        (name, share) for name in ("plain", "k=2") for share in (None, 0.6)
    ]
    for row in rows:
        assert row["num_prompts"] == 12 and row["workload"]["input_len"] == 40
        share = row["capacity_share"]
        assert row["request_rate"] == (200 if share is None else 0.6 * row["capacity"])
        assert len(row["rounds"]) == 2
        for figures in row["rounds"]:
            assert (figures["completed"], figures["total_output_tokens"]) == (12, 12 * 16)
            # Two events that one poll brings have no time between them.
            assert 0 <= figures["median_itl_ms"] <= figures["p99_itl_ms"]
            if figures["median_itl_ms"] > 0:
                ratio = figures["p99_itl_ms"] / figures["median_itl_ms"]
                assert figures["itl_p99_over_median"] == pytest.approx(ratio)
        assert row["p99_itl_ms"] == statistics.median(f["p99_itl_ms"] for f in row["rounds"])
        assert ("spec_decode_acceptance_length" in row) == (row["num_draft_tokens"] == 2)
        assert row["gpu"] is None
    # The rates of an engine share its capacity.
    assert rows[0]["capacity"] == rows[1]["capacity"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["configuration", "sequences", "prompt", "arrive/s", "done/s"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        [name, "3", "40"] for name in ("plain", "plain", "k=2", "k=2")
    ]
    assert "(60%)" in lines[2] and "p99/median: what prompts of others cost" in "\n".join(lines)


def test_the_capacity_is_what_a_full_queue_completes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.load(str(folder), dummy=False)
    asked: list[Requests | None] = []
    run_once = arrivals.run_once

    def spy(*args: Any, requests: Requests | None = None, **kwargs: Any) -> runs.Run:
        asked.append(requests)
        return run_once(*args, requests=requests, **kwargs)

    monkeypatch.setattr(arrivals, "run_once", spy)
    given = arrivals.Arrivals([(0.5, True), (300.0, False)], 10)
    found = arrivals.measure_arrivals(model, None, None, Workload(2, 9, 8), given, rounds=2)
    capacity = found.rows[0]["capacity"]
    # The warm-up, the capacity, then the rates by turns.
    assert asked[0] is None and asked[1] == Requests(10, rate=1e9)
    assert [r.rate for r in asked[2:] if r] == [0.5 * capacity, 300.0] * 2
    assert len(asked) == given.num_runs(rounds=2) == 6


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--request-rate", "0"], "--request-rate is '0'; allowed: numbers above 0, and shares"),
        (["--request-rate", "inf"], "--request-rate is 'inf'"),
        (["--request-rate", "5x%"], "--request-rate is '5x%'"),
        (["--request-rate", "5", "--num-prompts", "0"], "--num-prompts is 0"),
        (["--num-prompts", "5"], "--num-prompts is 5, but without --request-rate"),
        (["--request-rate", "5", "--plot", "a.png"], "--plot does not go with --request-rate"),
        (
            ["--request-rate", "5", "--sampling", "{}", "--sampling", "{}"],
            "--sampling is given 2 times; allowed with --request-rate: once",
        ),
    ],
)
def test_refusals(
    extra: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, *extra) == 2
    assert message in capsys.readouterr().err
