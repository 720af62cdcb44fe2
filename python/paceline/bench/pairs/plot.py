# SPDX-License-Identifier: Apache-2.0
"""Draws a report of `paceline bench pairs`; needs matplotlib, the extra [bench]."""

from __future__ import annotations

from typing import Any, Final

from paceline.bench.plot import prepare_axes, save

# The key of a row, the title and the unit of each part of the figure.
_PARTS: Final = (
    ("output_throughput", "output of all requests", "tokens per second"),
    ("median_itl_ms", "inter-token latency", "ms (median)"),
    ("floor_share", "share of the floor", "least time of an iteration / its time"),
)
# By temperature.
_STYLES: Final = ("-", "--", ":", "-.")


def draw(report: dict[str, Any], path: str) -> None:
    """Draws throughput, inter-token latency and share of the floor against concurrency.

    Args:
        report: The report, with at least one row.
        path: The file to write.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.figure import Figure  # has the Agg backend, and opens no window

    figure = Figure(figsize=(15, 5.6), layout="constrained")
    rows = report["rows"]
    pairs = list(dict.fromkeys(str(row["pair"]) for row in rows))
    temperatures = list(dict.fromkeys(float(row["temperature"]) for row in rows))
    concurrency = sorted({row["max_concurrency"] for row in rows})
    lines = {}
    for axes, (key, title, unit) in zip(figure.subplots(1, 3), _PARTS, strict=True):
        for index, pair in enumerate(pairs):
            for rank, temperature in enumerate(temperatures):
                own = [
                    row
                    for row in rows
                    if (row["pair"], row["temperature"]) == (pair, temperature) and row[key]
                ]
                own.sort(key=lambda row: row["max_concurrency"])
                if not own:
                    continue
                label = f"{pair}, T={temperature:g}"
                if own[0]["has_dummy_weights"]:
                    label += ", imposed length"
                [lines[label]] = axes.plot(
                    [row["max_concurrency"] for row in own],
                    [row[key] for row in own],
                    color=f"C{index % 10}",
                    label=label,
                    linestyle=_STYLES[rank % len(_STYLES)],
                    marker="o",
                    markersize=4,
                )
        prepare_axes(axes, concurrency, title, unit, has_legend=False)
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=4, fontsize=8)
    save(figure, report, path)
