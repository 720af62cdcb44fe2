# SPDX-License-Identifier: Apache-2.0
"""Reads reports of benches and draws those of `latency`; needs matplotlib, the extra [bench]."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES: Final = (".png", ".svg", ".pdf")
PLOT_NEEDS: Final = (
    f"the ending is {', '.join(_SUFFIXES)}; needs matplotlib: pip install 'paceline[bench]'"
)
# What a report of `latency` and one of `pairs` need for a figure.
_ROW_KEYS: Final = (
    "configuration", "workload", "iteration_ms", "output_tokens_per_s", "tokens_per_iteration",
    "floor_ms", "num_draft_tokens",
)  # fmt: skip
_PAIR_KEYS: Final = (
    "pair", "temperature", "max_concurrency", "output_throughput", "median_itl_ms", "floor_share",
)  # fmt: skip


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
        is_of_pairs = is_pairs_report(report)
        is_report = bool(rows) and all(
            all(key in row for key in (_PAIR_KEYS if is_of_pairs else _ROW_KEYS))
            and (row["max_concurrency"] if is_of_pairs else row["workload"]["concurrency"]) >= 1
            for row in rows
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


def is_pairs_report(report: dict[str, Any]) -> bool:
    """Returns whether a report is one of `paceline bench pairs`."""
    return report.get("bench") == "pairs"


def draw(report: dict[str, Any], path: str) -> None:
    """Draws time and throughput against concurrency.

    Args:
        report: The report.
        path: The file to write.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.figure import Figure  # has the Agg backend, and opens no window

    figure = Figure(figsize=(11, 5.6), layout="constrained")
    time_axes, rate_axes = figure.subplots(1, 2)
    rows = report["rows"]
    names = list(dict.fromkeys(str(row["configuration"]) for row in rows))
    for index, name in enumerate(names):
        color = f"C{index % 10}"
        own = [row for row in rows if row["configuration"] == name and row["iteration_ms"] > 0]
        own.sort(key=lambda row: row["workload"]["concurrency"])
        _line(time_axes, own, _time, color, name)
        _line(rate_axes, own, _rate, color, name)
        with_floor = [row for row in own if row["floor_ms"]]
        _line(time_axes, with_floor, _floor_time, color, f"floor of {name}", is_floor=True)
        _line(rate_axes, with_floor, _floor_rate, color, f"limit of {name}", is_floor=True)
    concurrency = sorted({row["workload"]["concurrency"] for row in rows})
    prepare_axes(time_axes, concurrency, "time of an iteration", "ms (median)")
    prepare_axes(rate_axes, concurrency, "output of all sequences", "tokens per second")
    save(figure, report, path)


def save(figure: Figure, report: dict[str, Any], path: str) -> None:
    """Writes a figure with the title of its report.

    Raises:
        OSError: It cannot be written.
    """
    figure.suptitle(title_of(report), fontsize=9, parse_math=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def title_of(report: dict[str, Any]) -> str:
    """Model, machine, date and command; older reports lack some of them."""
    models = " + ".join(str(report[key]) for key in ("target", "draft") if report.get(key))
    machine = report.get("machine") or report.get("device_name") or report.get("device")
    facts = [models, report.get("weight_dtype"), machine, report.get("date")]
    lines = [", ".join(str(fact) for fact in facts if fact)]
    lines += textwrap.wrap(str(report.get("command") or ""), 150)
    return "\n".join(lines)


def _time(row: dict[str, Any]) -> float:
    return float(row["iteration_ms"])


def _rate(row: dict[str, Any]) -> float:
    return float(row["output_tokens_per_s"])


def _floor_time(row: dict[str, Any]) -> float:
    return float(row["floor_ms"])


def _floor_rate(row: dict[str, Any]) -> float:
    """Tokens per second if every iteration took its least time."""
    tokens = row["workload"]["concurrency"] * row["tokens_per_iteration"]
    return float(tokens / row["floor_ms"] * 1e3)


def _line(
    axes: Axes,
    rows: list[dict[str, Any]],
    value: Any,
    color: str,
    label: str,
    *,
    is_floor: bool = False,
) -> None:
    if not rows:
        return
    axes.plot(
        [row["workload"]["concurrency"] for row in rows],
        [value(row) for row in rows],
        color=color,
        label=label,
        linestyle="--" if is_floor else "-",
        linewidth=1 if is_floor else 2,
        marker="" if is_floor and len(rows) > 1 else "o",
        markersize=4,
    )


def prepare_axes(
    axes: Axes, concurrency: list[int], title: str, unit: str, *, has_legend: bool = True
) -> None:
    """Scales and labels axes over concurrency, whose lines are drawn.

    Args:
        axes: The axes.
        concurrency: The ticks.
        title: What is shown.
        unit: Its unit.
        has_legend: Whether the axes get a legend.
    """
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(concurrency, [str(number) for number in concurrency])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("sequences at the same time")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if has_legend:
        axes.legend(fontsize=8)
