# SPDX-License-Identifier: Apache-2.0
"""Draws results of `paceline bench serve`; needs matplotlib, the extra [bench]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from paceline.bench.plot import save

# The keys of a result, the title and the unit of each part of the figure.
_PARTS: Final = (
    (("output_throughput",), "output", "tokens per second"),
    (("median_ttft_ms", "p99_ttft_ms"), "time to first token", "ms"),
    (("median_itl_ms", "p99_itl_ms"), "inter-token latency", "ms"),
)


def draw(results: Sequence[dict[str, Any]], command: str, path: str) -> None:
    """Draws throughput, TTFT and ITL against load.

    Args:
        results: At least one.
        command: The command that made them.
        path: The file to write.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.figure import Figure  # has the Agg backend, and opens no window

    figure = Figure(figsize=(15, 5), layout="constrained")
    names = [_load(result) for result in results]
    places = range(len(results))
    for axes, (keys, title, unit) in zip(figure.subplots(1, 3), _PARTS, strict=True):
        for key in keys:
            label = key.split("_")[0] if len(keys) > 1 else title
            axes.plot(places, [result[key] for result in results], marker="o", label=label)
        axes.set_xticks(places, names)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("load")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        if len(keys) > 1:
            axes.legend(fontsize=8)
    first = results[0]
    save(figure, {"target": first["model_id"], "date": first["date"], "command": command}, path)


def _load(result: dict[str, Any]) -> str:
    parts = []
    if result["request_rate"] != "inf":
        parts.append(f"{result['request_rate']:g}/s")
    if result["max_concurrency"] is not None:
        parts.append(f"c={result['max_concurrency']}")
    return "\n".join(parts) or "all at once"
