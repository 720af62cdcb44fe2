# SPDX-License-Identifier: Apache-2.0
"""Draws the reports of `latency`, `pairs` and `serve`; needs matplotlib, the extra [bench]."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.bench.report import TABLES
from paceline.checks import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES: Final = (".png", ".svg", ".pdf")
PLOT_NEEDS: Final = (
    f"the ending is {', '.join(_SUFFIXES)}; needs matplotlib: pip install 'paceline[bench]'"
)
# Title, unit, and by the name of each line its key.
Panel = Sequence[Any]
# The parts of tables.toml by the bench.
_FIGURES: Final = TABLES["figures"]
# Of lines that share a colour.
_STYLES: Final = ("-", "--", ":", "-.")


@dataclass
class Series:
    """The rows of a report that a line connects.

    Attributes:
        name: Its name, for "{}" in the names of a panel.
        color: The number of its colour.
        style: Its line style, as of matplotlib.
        rows: By position on the x axis: the figures.
    """

    name: str
    color: int
    style: str = "-"
    rows: dict[float, Mapping[str, Any]] = field(default_factory=dict)


def check_can_plot(option: str, path: str) -> None:
    """Checks what can be checked before anything is measured.

    Raises:
        ValueError: matplotlib is not installed, or the file has another ending.
    """
    if Path(path).suffix not in _SUFFIXES:
        raise ValueError(
            f"{option} is {shorten(path, 200)}; allowed: a file that ends with "
            f"{', '.join(_SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} needs matplotlib, which is not installed: pip install 'paceline[bench]'"
        )


def read_report(path: str) -> dict[str, Any]:
    """Reads what `paceline bench latency --json FILE` or `paceline bench pairs` with it wrote.

    Raises:
        ValueError: It is no such file.
        OSError: It cannot be read.
    """
    try:
        report = json.loads(Path(path).read_bytes())
        rows = report["rows"]
        keys = _FIGURES[_kind(report)]["row_keys"]
        is_report = bool(rows) and all(
            all(key in row for key in keys) and _concurrency(row) >= 1 for row in rows
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        is_report = False
    if not is_report:
        raise ValueError(
            f"{shorten(path, 200)} is not a report with rows; allowed: a file that `paceline bench "
            "latency --json FILE`, without --request-rate, or `paceline bench pairs --json FILE` "
            "wrote"
        )
    result: dict[str, Any] = report
    return result


def draw_report(report: Mapping[str, Any], path: str) -> None:
    """Draws a report of `latency` or `pairs` against concurrency.

    Args:
        report: The report, with at least one row.
        path: The file to write.

    Raises:
        OSError: It cannot be written.
    """
    kind = _kind(report)
    series = (_pair_series if kind == "pairs" else _latency_series)(report["rows"])
    ticks = {float(c): str(c) for c in sorted(map(_concurrency, report["rows"]))}
    title, has_one_legend = title_of(report), kind == "pairs"
    draw(_FIGURES[kind]["panels"], series, ticks, title, path, has_one_legend=has_one_legend)


def draw_results(results: Sequence[Mapping[str, Any]], command: str, path: str) -> None:
    """Draws throughput, TTFT and ITL of `serve` against load; else as `draw_report`."""
    ticks = {float(place): _load(result) for place, result in enumerate(results)}
    series = Series("", 0, rows=dict(zip(ticks, results, strict=True)))
    facts = {"target": results[0]["model_id"], "date": results[0]["date"], "command": command}
    panels = _FIGURES["serve"]["panels"]
    draw(panels, [series], ticks, title_of(facts), path, x_label="load", is_log=False)


def draw(
    panels: Sequence[Panel],
    series: Sequence[Series],
    ticks: Mapping[float, str],
    title: str,
    path: str,
    *,
    x_label: str = "sequences at the same time",
    is_log: bool = True,
    has_one_legend: bool = False,
) -> None:
    """Draws panels side by side, each with the lines of all series.

    Args:
        panels: The panels.
        series: Their lines.
        ticks: The labels of the x axis, by position.
        title: The title of the figure.
        path: The file to write.
        x_label: The name of the x axis.
        is_log: Whether both axes are logarithmic, on which figures that are zero are not drawn.
        has_one_legend: Whether one legend for all panels replaces that of each panel.
    """
    from matplotlib.figure import Figure  # has the Agg backend, and opens no window

    figure = Figure(figsize=(5.5 * len(panels), 5.6), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (heading, unit, keys) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for one in series:
            for rank, (label, key) in enumerate(keys.items()):
                points = [
                    (x, row[key])
                    for x, row in sorted(one.rows.items())
                    if row[key] or (row[key] is not None and not is_log)
                ]
                if points:
                    [handles[label.format(one.name)]] = axes.plot(
                        *zip(*points, strict=True),
                        label=label.format(one.name),
                        color=f"C{one.color % 10}",
                        linestyle="--" if rank else one.style,
                        linewidth=1 if rank else 2,
                        marker="" if rank and len(points) > 1 else "o",
                        markersize=4,
                    )
        _scale(axes, is_log=is_log)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        if not has_one_legend and list(keys) != [heading]:
            axes.legend(fontsize=8)
    if has_one_legend:
        lines = list(handles.values())
        figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=9, parse_math=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def title_of(report: Mapping[str, Any]) -> str:
    """Model, machine, date and command; older reports lack some of them."""
    models = " + ".join(str(report[key]) for key in ("target", "draft") if report.get(key))
    machine = report.get("machine") or report.get("device_name") or report.get("device")
    facts = [models, report.get("weight_dtype"), machine, report.get("date")]
    lines = [", ".join(str(fact) for fact in facts if fact)]
    lines += textwrap.wrap(str(report.get("command") or ""), 150)
    return "\n".join(lines)


def _scale(axes: Axes, *, is_log: bool) -> None:
    from matplotlib.ticker import LogLocator

    if not is_log:
        axes.set_ylim(bottom=0)
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _kind(report: Mapping[str, Any]) -> str:
    return "pairs" if report.get("bench") == "pairs" else "latency"


def _concurrency(row: Mapping[str, Any]) -> int:
    number: int = row["max_concurrency"] if "pair" in row else row["workload"]["concurrency"]
    return number


def _latency_series(rows: Sequence[Mapping[str, Any]]) -> list[Series]:
    """A series for each configuration, of the rows whose sequences decoded together."""
    found: dict[str, Series] = {}
    for row in rows:
        name = str(row["configuration"])
        series = found.setdefault(name, Series(name, len(found)))
        concurrency, floor_ms = _concurrency(row), row["floor_ms"]
        if row["iteration_ms"] > 0:
            # If every iteration took its least time.
            limit = concurrency * row["tokens_per_iteration"] / floor_ms * 1e3 if floor_ms else None
            series.rows[concurrency] = {**row, "limit_tokens_per_s": limit}
    return list(found.values())


def _pair_series(rows: Sequence[Mapping[str, Any]]) -> list[Series]:
    """A series for each pair and temperature: a pair has a colour, a temperature a line style."""
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    found: dict[str, Series] = {}
    for row in rows:
        name = f"{row['pair']}, T={row['temperature']:g}"
        if row["has_dummy_weights"]:
            name += ", imposed length"
        style = _STYLES[temperatures.index(row["temperature"]) % len(_STYLES)]
        series = found.setdefault(name, Series(name, pairs.index(row["pair"]), style))
        series.rows[_concurrency(row)] = row
    return list(found.values())


def _load(result: Mapping[str, Any]) -> str:
    """The name of a load of `serve`."""
    parts = []
    if result["request_rate"] != "inf":
        parts.append(f"{result['request_rate']:g}/s")
    if result["max_concurrency"] is not None:
        parts.append(f"c={result['max_concurrency']}")
    return "\n".join(parts) or "all at once"
