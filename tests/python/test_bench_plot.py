# SPDX-License-Identifier: Apache-2.0
"""`paceline bench latency --plot` and `paceline bench plot`, and the bar of a bench."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from paceline import cli
from paceline.bench import plot

pytestmark = pytest.mark.usefixtures("quick_machine")

QUICK = [
    "--demo", "--concurrency", "1,3", "--input-len", "9", "--output-len", "16", "--rounds", "1",
]  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def save(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


def lines_of(figure: Figure, axes: int) -> dict[str, tuple[list[float], list[float]]]:
    """The points of each line, by its label."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[axes].get_lines()
    }


def test_the_plot_shows_the_rows(
    tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    report_path, image = tmp_path / "bench.json", tmp_path / "bench.png"
    argv = ["bench", "latency", *QUICK, "--json", str(report_path), "--plot", str(image)]
    assert cli.main(argv) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    report = json.loads(report_path.read_text())
    rows = report["rows"]
    for axes, key in ((0, "iteration_ms"), (1, "output_tokens_per_s")):
        lines = lines_of(figure, axes)
        for name in ("plain", "k=4"):
            own = [row for row in rows if row["configuration"] == name]
            assert lines[name] == ([1, 3], [row[key] for row in own])
    floors = lines_of(figure, 0)
    plain = [row for row in rows if row["configuration"] == "plain"]
    assert floors["floor of plain"] == ([1, 3], [row["floor_ms"] for row in plain])
    # Tokens of all sequences, if each iteration took its least time.
    limits = lines_of(figure, 1)["limit of plain"][1]
    assert limits == [
        pytest.approx(row["workload"]["concurrency"] / row["floor_ms"] * 1e3) for row in plain
    ]
    for axes in figure.axes:
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel() and axes.get_legend()
    title = figure.get_suptitle()
    for part in (report["target"], report["draft"], report["machine"], report["date"], "bench.png"):
        assert part in title.replace("\n", " ")
    capsys.readouterr()
    # From the stored report comes the same figure.
    again = tmp_path / "again.svg"
    assert cli.main(["bench", "plot", str(report_path), "--out", str(again)]) == 0
    assert capsys.readouterr().out == f"wrote {again}\n"
    assert "</svg>" in again.read_text()
    assert [lines_of(drawn[1], axes) for axes in (0, 1)] == [
        lines_of(figure, axes) for axes in (0, 1)
    ]


def test_a_report_without_floors_or_times(tmp_path: Path, drawn: list[Figure]) -> None:
    # Of --host-only, and of runs in which the sequences never decode together. The keys that
    # reports have since they can be drawn are missing.
    row = {
        "configuration": "plain $x$", "workload": {"concurrency": 2}, "iteration_ms": 1.5,
        "output_tokens_per_s": 7.0, "tokens_per_iteration": 1.0, "floor_ms": None,
        "num_draft_tokens": 0,
    }  # fmt: skip
    rows = [row, row | {"workload": {"concurrency": 4}, "iteration_ms": 0.0}]
    plot.draw_report({"target": "t", "device": "cpu", "rows": rows}, str(tmp_path / "a.png"))
    assert lines_of(drawn[0], 0) == {"plain $x$": ([2], [1.5])}
    assert drawn[0].get_suptitle() == "t, cpu"


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("paceline.bench.latency_command.load")  # nothing is measured
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for argv in (
        ["bench", "latency", "--demo", "--plot", str(tmp_path / "a.png")],
        ["bench", "plot", "no/such", "--out", str(tmp_path / "a.png")],
    ):
        assert cli.main(argv) == cli.EXIT_USAGE
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.endswith("is not installed: pip install 'paceline[bench]'\n")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            ["latency", "--plot", "a.gif"],
            2,
            "--plot is 'a.gif'; allowed: a file that ends",
        ),
        (["latency", "--plot", "no/such/a.png"], 2, "--plot is 'no/such/a.png', but there is no"),
        (["plot", "no/such", "--out", "a.png"], 3, "no/such: No such file"),
        (["plot", "REPORT", "--out", "a.txt"], 2, "--out is 'a.txt'"),
    ],
)
def test_refusals(
    argv: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("paceline.bench.latency_command.load")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *argv]) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": []}', "[" * 99999])
def test_a_file_that_is_no_report(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "REPORT"
    report.write_text(content)
    assert cli.main(["bench", "plot", str(report), "--out", str(tmp_path / "a.png")]) == 2
    assert "is not a report with rows" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [report]


def test_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    argv = ["bench", "latency", *QUICK]
    assert cli.main(argv) == 0
    captured = capsys.readouterr()
    # Two cells of two configurations, each with a warm-up and a round.
    assert "8/8" in captured.err and "Measuring k=4 at 3 sequences: 100%" in captured.err
    assert "measuring" not in captured.err  # the line of a log
    assert cli.main([*argv, "-q"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert cli.main(argv) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "measuring k=4 at 3 sequences ..."
