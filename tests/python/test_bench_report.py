# SPDX-License-Identifier: Apache-2.0
"""What all benches share: tables of columns and rows, the file of --json, and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from paceline.bench import plot
from paceline.bench.report import Column, GrowingTable, Output, table

COLUMNS = (
    Column("name", "{name}"),
    Column("time", "{work[ms]:.1f}", "ms", 6),
    Column("share", "{share:.0%}", "", 5),
)
ROWS = [
    {"name": "a", "work": {"ms": 1234.56}, "share": 0.5},
    {"name": "long", "work": {"ms": 2}, "share": None},
]


def test_a_complete_table_is_as_wide_as_needed() -> None:
    assert table(COLUMNS, ROWS) == [
        "name    time  share",
        "a     1234.6    50%",
        "long     2.0      -",
    ]


def test_a_growing_table_has_fixed_widths() -> None:
    growing = GrowingTable(COLUMNS, 4)
    assert growing.heading() == ["name   time share", "         ms      "]
    assert [growing.row(row) for row in ROWS] == ["a    1234.6   50%", "long    2.0     -"]
    # A reason may take the place of figures.
    assert growing.line(["a", "not measured: no room"]) == "a    not measured: no room"


def test_the_json_is_printed_alone_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, printed in ((None, "row\nend\n"), ("-", '{"a": 1}\n')):
        output = Output(path)
        output.show(["row"])
        output.write({"a": 0})
        output.close({"a": 1}, ["end"])
        assert capsys.readouterr().out == printed
    Output(str(tmp_path / "a.json")).write({"a": 0})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 0}
    with pytest.raises(OSError, match=r"no/a\.json"):
        Output("no/a.json").write({})


def test_a_zero_is_drawn_on_linear_axes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    rows: list[dict[str, Any]] = [
        {"pair": "p", "temperature": 0, "max_concurrency": c, "output_throughput": 9.0,
         "median_itl_ms": itl, "floor_share": 0.5, "has_dummy_weights": False}
        for c, itl in ((1, 0.0), (4, 2.0))
    ]  # fmt: skip
    plot.draw_report({"bench": "pairs", "rows": rows}, "a.png")
    keys = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    loads = [
        {"model_id": "m", "date": "d", "request_rate": rate, "max_concurrency": c}
        | dict.fromkeys(keys, figure)
        for rate, c, figure in (("inf", None, 0.0), (2.5, 4, 3.0))
    ]
    plot.draw_results(loads, "paceline bench serve", "b.png")
    of_pairs, of_serve = ([list(axes.get_lines()) for axes in f.axes] for f in figures)
    assert [list(lines[0].get_xdata()) for lines in of_pairs] == [[1, 4], [4], [1, 4]]
    assert [[list(line.get_ydata()) for line in lines] for lines in of_serve] == [
        [[0, 3]] * count for count in (1, 2, 2)
    ]
    ticks = [label.get_text() for label in figures[1].axes[0].get_xticklabels()]
    assert ticks == ["all at once", "2.5/s\nc=4"]
    # A panel whose only line has the panel's name needs no legend.
    assert [axes.get_legend() is None for axes in figures[1].axes] == [True, False, False]
