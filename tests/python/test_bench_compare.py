# SPDX-License-Identifier: Apache-2.0
"""`paceline bench compare`: which reports compare, and what their ratios say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import cli
from paceline.bench.compare.ratios import Ratio
from paceline.bench.serve.command import _command_of


def latency_report(times_ms: list[float], **changes: Any) -> dict[str, Any]:
    """A report of one row, with an iteration time for each round; throughput follows from it."""
    rounds = [
        {"iteration_ms": ms, "output_tokens_per_s": 1000 / ms, "time_to_first_token_ms": 10.0,
         "prompts_ms": 10.0}
        for ms in times_ms
    ]  # fmt: skip
    row = {
        "configuration": "k=3",
        "workload": {"concurrency": 4, "input_len": 9, "output_len": 16,
                     "sampling": {"temperature": 0}},
        "gpu": {"sm_clock_mhz": 1980}, "rounds": rounds, **rounds[0],
    }  # fmt: skip
    report = {
        "bench": "latency", "date": "2026-11-23", "command": "paceline bench latency --demo",
        "machine": "a machine", "rows": [row],
    }  # fmt: skip
    return report | changes


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes reports a.json, b.json, ... and returns their names."""
    monkeypatch.chdir(tmp_path)

    def write(*reports: Any) -> list[str]:
        names = [f"{letter}.json" for letter, _ in zip("abcdef", reports, strict=False)]
        for name, report in zip(names, reports, strict=True):
            Path(name).write_text(json.dumps(report))
        return names

    return write


def compare(*argv: str) -> int:
    return cli.main(["bench", "compare", *argv])


def compared(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert compare(*argv, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {row["figure"]: row["verdict"] for row in result["rows"]}


def test_rounds_are_paired(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # The machine gets slower from round to round, which no unpaired comparison would forgive.
    names = store(latency_report([2.0, 3.0, 4.0]), latency_report([1.8, 2.64, 3.68]))
    result = compared(capsys, *names)
    assert (result["bench"], result["of"]) == ("compare", "latency")
    assert (result["a"], result["b"]) == (["a.json"], ["b.json"])
    assert (result["different"], result["unpaired"]) == ({}, {})
    time, rate, first, clock = result["rows"]
    assert time["row"] == "k=3, c=4, 9+16 tokens" and time["figure"] == "iteration_ms"
    assert time["ratios"] == pytest.approx([0.9, 0.88, 0.92])
    assert (time["a"], time["b"], time["ratio"]) == (3.0, 2.64, pytest.approx(0.9))
    assert (time["lowest"], time["highest"]) == (pytest.approx(0.88), pytest.approx(0.92))
    logs = np.log(time["ratios"])
    half = 4.302653 * logs.std(ddof=1) / 3**0.5  # Student's t, two degrees of freedom
    expected = np.exp([logs.mean() - half, logs.mean() + half])
    assert time["interval"] == pytest.approx(expected, rel=1e-4)
    # Less time is better, more tokens are, and equal times say nothing.
    found = (time["verdict"], rate["verdict"], first["verdict"])
    assert found == ("better", "better", "within noise")
    assert (clock["figure"], clock["verdict"]) == ("sm_clock_mhz", "")
    assert verdicts(compared(capsys, *names[::-1]))["iteration_ms"] == "worse"
    assert compare(*names) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "A: a.json (2026-11-23)"
    line = next(line for line in printed if "iteration_ms" in line).split()
    assert line[-9:-4] == ["0.900", "0.880", "to", "0.920", "3"]
    assert line[-4:] == ["0.852", "to", "0.951", "better"]
    assert any(line.startswith("one turn: ") for line in printed)


def test_turns_and_noise(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [latency_report([ms]) for ms in (2.0, 1.9, 2.2, 2.0, 3.0, 3.1)]
    names = store(*turns)
    result = compared(capsys, *names)
    assert (result["a"], result["b"]) == (names[::2], names[1::2])
    [time] = [row for row in result["rows"] if row["figure"] == "iteration_ms"]
    assert time["ratios"] == pytest.approx([0.95, 2.0 / 2.2, 3.1 / 3.0])
    assert time["verdict"] == "within noise"
    # Two turns that agree say little: equal variants do so every other time.
    assert verdicts(compared(capsys, *names[:4]))["iteration_ms"] == "within noise"
    [time] = [r for r in compared(capsys, *names[:2])["rows"] if r["figure"] == "iteration_ms"]
    assert (time["verdict"], time["interval"]) == ("cannot be judged", None)
    assert compare(*names[:2]) == 0
    assert "with one round, nothing tells noise from a change" in capsys.readouterr().out
    # Reports with different numbers of rounds compare by their medians.
    uneven = store(latency_report([2.0, 2.0, 8.0]), latency_report([1.0]))
    [time] = [r for r in compared(capsys, *uneven)["rows"] if r["figure"] == "iteration_ms"]
    assert time["ratios"] == [0.5]


def test_rounds_that_agree_by_chance_are_within_noise(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = store(latency_report([2.0, 2.1, 2.0]), latency_report([2.02, 2.4, 2.1]))
    [time] = [r for r in compared(capsys, *names)["rows"] if r["figure"] == "iteration_ms"]
    assert min(time["ratios"]) > 1 and time["verdict"] == "within noise"
    low, high = time["interval"]
    assert low < 1 < high


def test_rounds_of_one_process_are_one_repeat(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rounds that agree in each of two turns are two ratios, not six."""
    slower, faster = [2.0, 2.0, 2.0], [1.8, 1.8, 1.8]
    names = store(*map(latency_report, (slower, faster, slower, [1.9, 1.9, 1.9])))
    [time] = [r for r in compared(capsys, *names)["rows"] if r["figure"] == "iteration_ms"]
    assert len(time["ratios"]) == 6 and time["verdict"] == "within noise"


def test_verdicts_of_equal_variants_are_seldom_wrong() -> None:
    """Of 1,000 comparisons of five turns of one program, about 50 may say otherwise."""
    random = np.random.default_rng(1)
    ratios = np.exp(random.normal(0, 0.03, (1000, 5)))
    verdicts = [
        Ratio("row", "iteration_ms", 1.0, 1.0, tuple(row), tuple(row)).verdict for row in ratios
    ]
    assert 20 <= 1000 - verdicts.count("within noise") <= 80
    shifted = [
        Ratio("row", "iteration_ms", 1.0, 1.0, tuple(row), tuple(row)).verdict
        for row in ratios * 1.2
    ]
    assert shifted.count("worse") > 990


def test_what_does_not_compare(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine = latency_report([1.0])
    elsewhere = latency_report([1.0], machine="another machine")
    other = latency_report([1.0], command="paceline bench latency --demo --rounds 2")
    for report, fact, value in (
        (elsewhere, "machine", "'another machine'"),
        (other, "command", "--rounds 2"),
    ):
        names = store(mine, report)
        assert compare(*names) == 2
        err = capsys.readouterr().err
        assert f"the reports have different {fact}s: 'a.json' has" in err and value in err
        assert f"add --allow-different {fact}" in err
        result = compared(capsys, *names, "--allow-different", fact)
        assert list(result["different"]) == [fact]
    both = latency_report([1.0], machine="another machine", command="paceline bench latency")
    assert compare(*store(mine, both), "--allow-different", "machine") == 2
    assert "add --allow-different machine,command" in capsys.readouterr().err
    # Where the output goes is no difference, and neither is what a report does not state.
    quiet = "paceline bench latency --json b.json --plot=b.png -q --demo --json"
    for report in (latency_report([1.0], command=quiet), latency_report([1.0], machine=None)):
        assert compare(*store(mine, report)) == 0
    pairs = {"bench": "pairs", "rows": [{"pair": "p", "temperature": 0, "max_concurrency": 1,
             "output_throughput": 5.0}]}  # fmt: skip
    assert compare(*store(mine, pairs)) == 2
    assert "is a report of `bench latency` and 'b.json' one of `bench pairs`" in (
        capsys.readouterr().err
    )
    row = mine["rows"][0] | {"configuration": "plain"}
    assert compare(*store(mine, mine | {"rows": [row]})) == 2
    assert (
        "no row is in all reports; 'a.json' has 'k=3, c=4, 9+16 tokens'" in capsys.readouterr().err
    )
    names = store(mine, mine | {"rows": [row, *mine["rows"]]})
    assert compared(capsys, *names)["unpaired"] == {"b.json": ["plain, c=4, 9+16 tokens"]}
    assert compare(*names) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "only in b.json: plain, c=4, 9+16 tokens"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["a.json", "a.json", "a.json"], 2, "there are 3 reports; allowed: an even number"),
        (["a.json", "none.json"], 3, "none.json: No such file"),
        (["a.json", "a.json", "--allow-different", "x"], 2, "allowed: a list of 'command', 'mac"),
        (["a.json", "a.json", "--json", "no/b.json"], 2, "--json is 'no/b.json'"),
    ],
)
def test_refusals(
    argv: list[str], code: int, message: str, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store(latency_report([1.0]))
    assert compare(*argv) == code
    assert message in capsys.readouterr().err


def test_one_report_lacks_another(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare("a.json")
    assert "the following arguments are required: B.json; see" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", "[1]", '{"rows": [{}]}', '{"rows": []}'])
def test_a_file_that_is_no_report(
    content: str, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store(latency_report([1.0]))
    Path("empty.json").write_text(content)
    assert compare("a.json", "empty.json") == 2
    assert "'empty.json' has no row of a bench; allowed: a file that" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_machine")
def test_reports_of_every_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--input-len", "9", "--output-len", "8", "--quiet", "--concurrency", "2"]
    benches = {
        "latency": ["latency", "--demo", "--rounds", "2", *short],
        "arrivals": ["latency", "--demo", "--rounds", "2", "--request-rate", "500", "--num-prompts",
                     "6", *short],
        "pairs": ["pairs", "--device", "cpu", "--temperatures", "0", *short,
                  "--config", "mine=gemma3-10m,gemma3-10m"],
    }  # fmt: skip
    for name, argv in benches.items():
        for turn in "ab":
            assert cli.main(["bench", *argv, "--json", f"{turn}.json"]) == 0
        capsys.readouterr()
        result = compared(capsys, "a.json", "b.json")
        rows = {row["row"] for row in result["rows"]}
        figures = {row["figure"] for row in result["rows"]}
        rounds = {len(row["ratios"]) for row in result["rows"]}
        if name == "latency":
            assert rows == {"plain, c=2, 9+8 tokens", "k=4, c=2, 9+8 tokens"}
            assert figures >= {"iteration_ms", "output_tokens_per_s"} and rounds == {2}
        elif name == "arrivals":
            assert rows == {f"{what}, c=2, 9+8 tokens, 500/s" for what in ("plain", "k=4")}
            assert figures >= {"output_throughput", "p99_ttft_ms"} and rounds <= {1, 2}
        else:
            assert rows == {"mine, T=0, c=2"} and rounds == {1}
            assert figures >= {"output_throughput", "p99_itl_ms", "iteration_ms"}


def test_results_of_servers(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """As `bench serve` or vLLM's writes them: one result, or a list; without the machine."""
    figures = {"output_throughput": 100.0, "median_ttft_ms": 5.0, "p99_ttft_ms": 9.0}
    result = {"endpoint_type": "openai", "model_id": "m", "num_prompts": 4, "request_rate": "inf",
              "max_concurrency": None, "date": "20261123", **figures}  # fmt: skip
    rated = result | {"request_rate": 2.5, "max_concurrency": 8, "output_throughput": 50.0}
    faster = result | {"output_throughput": 110.0, "command": "paceline bench serve"}
    found = compared(capsys, *store([result, rated], faster))
    assert found["of"] == "serve"
    assert {row["row"] for row in found["rows"]} == {"m, 4 requests, all at once"}
    assert found["rows"][0]["ratio"] == pytest.approx(1.1)
    assert found["unpaired"] == {"a.json": ["m, 4 requests, 2.5/s, c=8"]}


def test_a_stored_command_has_no_key() -> None:
    line = "paceline bench serve --api-key sk-12 --base-url http://h --label=sk-12"
    args = argparse.Namespace(command_line=line, api_key="sk-12")
    expected = "paceline bench serve --api-key ... --base-url http://h --label=..."
    assert _command_of(args) == expected
    assert _command_of(argparse.Namespace(command_line=line, api_key=None)) == line
