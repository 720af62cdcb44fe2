# SPDX-License-Identifier: Apache-2.0
"""The report of `paceline bench pairs`: a table, and JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline import _core
from paceline.bench.measurement import Measurement
from paceline.bench.pairs.known import ImposedLength, Pair
from paceline.bench.report import GPU_LEGEND, machine_name, print_cells
from paceline.bench.serving import draft_metrics, serving_metrics
from paceline.bench.tables import gpu_cells
from paceline.console import emit
from paceline.speculative_config import SpeculativeConfig

# Two lines of heading, the width, and what a row shows; the first column is as wide as its longest
# entry.
_COLUMNS: Final = (
    ("pair", "", 13, "{pair}"),
    ("T", "", 4, "{temperature:g}"),
    ("c", "", 4, "{max_concurrency}"),
    ("output", "tok/s", 8, "{output_throughput:.1f}"),
    ("requests", "per s", 8, "{request_throughput:.3f}"),
    ("total", "tok/s", 8, "{total_token_throughput:.1f}"),
    ("TTFT ms", "mean", 8, "{mean_ttft_ms:.1f}"),
    ("", "median", 8, "{median_ttft_ms:.1f}"),
    ("", "P99", 8, "{p99_ttft_ms:.1f}"),
    ("TPOT ms", "mean", 8, "{mean_tpot_ms:.2f}"),
    ("", "median", 7, "{median_tpot_ms:.2f}"),
    ("", "P99", 7, "{p99_tpot_ms:.2f}"),
    ("ITL ms", "mean", 7, "{mean_itl_ms:.2f}"),
    ("", "median", 7, "{median_itl_ms:.2f}"),
    ("", "P99", 7, "{p99_itl_ms:.2f}"),
    ("E2E ms", "mean", 9, "{mean_e2el_ms:.1f}"),
    ("accept", "rate", 7, "{spec_decode_acceptance_rate:.1f}%"),
    ("accept", "length", 6, "{spec_decode_acceptance_length:.2f}"),
    ("imposed", "length", 14, "{imposed_cell}"),
    ("iteration", "ms", 9, "{iteration_ms:.3f}"),
    ("floor", "share", 6, "{floor_share:.0%}"),
    ("additive", "share", 8, "{additive_floor_share:.0%}"),
)

# Follow on a GPU.
_GPU_COLUMNS: Final = (("clock", "MHz", 5), ("power", "W", 5))

LEGEND: Final = """\
T: temperature. c: requests at the same time. output, total tok/s: output tokens, and prompt and
output tokens, of all requests per second, prompts included. TTFT: from sending a request to its
first token. TPOT: time per later token of a request. ITL: time between the iterations that bring
tokens. E2E: from sending to the end. accept rate: accepted drafts over verified drafts. accept
length: tokens of a request in an iteration. iteration: median over those in which all requests
decode. floor share: the least time for the reads and operations of an iteration, over its time.
additive share: the same if no two operations of an iteration overlap."""
# What the acceptance of a row is, and the sentence of the legend.
_ACCEPTANCES: Final = {
    "measured": "none, measured: checkpoints, whose acceptance on the prompts was measured.",
    "published": "published: dummy weights, with an imposed acceptance length that was published "
    "for vLLM.",
    "assumed": "assumed: dummy weights, with an imposed acceptance length for which nothing was "
    "published.",
}


@dataclass(frozen=True)
class PairRow:
    """A measured row.

    Attributes:
        pair: The pair.
        speculation: Its drafting.
        imposed: The imposed acceptance length; None = acceptance was measured.
        measurement: The figures, with a floor.
    """

    pair: Pair
    speculation: SpeculativeConfig
    imposed: ImposedLength | None
    measurement: Measurement

    def as_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types: the keys of vLLM's result files, then our own."""
        row, imposed = self.measurement, self.imposed
        (run,) = row.runs
        temperature, c = row.workload.sampling["temperature"], row.workload.concurrency
        if imposed is None:
            acceptance = "measured"
        else:
            acceptance = "published" if imposed.is_published else "assumed"
        return {
            "date": time.strftime("%Y%m%d-%H%M%S", time.gmtime()),
            "endpoint_type": "paceline",
            "backend": "paceline",
            "label": f"{self.pair.name} T={temperature:g} c={c}",
            "model_id": self.pair.target,
            "tokenizer_id": None if self.pair.is_dummy else self.pair.target,
            "num_prompts": len(run.requests),
            "request_rate": "inf",
            "burstiness": 1.0,
            "max_concurrency": c,
            **serving_metrics(run),
            **draft_metrics(run.stats),
            "pair": self.pair.name,
            "drafter_id": self.pair.drafter,
            "has_dummy_weights": self.pair.is_dummy,
            "acceptance": acceptance,
            "imposed_acceptance_length": None if imposed is None else imposed.tokens,
            "imposed_acceptance_source": None if imposed is None else imposed.source,
            "speculative_method": self.speculation.method,
            "num_speculative_tokens": self.speculation.num_speculative_tokens,
            "rejection_sample_method": self.speculation.rejection_sample_method,
            "temperature": temperature,
            "iteration_ms": row.iteration_ms or None,  # 0 if requests never decoded together
            "floor_ms": row.floor_ms,
            "floor_share": row.floor_share,
            "additive_floor_ms": row.additive_floor_ms,
            "additive_floor_share": row.additive_floor_share,
            "idle_share": row.idle_share,
            "gpu": None if row.gpu is None else row.gpu.as_dict(),
            "target_experts": row.target_experts,
            "draft_experts": row.draft_experts,
        }


@dataclass(frozen=True)
class Unmeasured:
    """A pair, or one row of it, that was not measured.

    Attributes:
        pair: Name of the pair.
        temperature: Of the row; None = the whole pair.
        concurrency: Of the row; None = the whole pair.
        reason: The reason.
    """

    pair: str
    temperature: float | None
    concurrency: int | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {
            "pair": self.pair,
            "temperature": self.temperature,
            "max_concurrency": self.concurrency,
            "reason": self.reason,
        }


def report(
    command: str,
    device: str,
    read_bandwidth: float,
    rows: Sequence[Mapping[str, Any]],
    unmeasured: Sequence[Unmeasured],
) -> dict[str, Any]:
    """Returns the report as plain JSON types; docs/bench.md describes the keys.

    Args:
        command: The command line.
        device: "cpu" or "cuda".
        read_bandwidth: Bytes per second from memory.
        rows: `PairRow.as_dict()` of each row.
        unmeasured: What was not measured.
    """
    return {
        "bench": "pairs",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": command,
        "machine": machine_name(device),
        "version": _core.version(),
        "build": _core.build_info(),
        "device": device,
        "read_bandwidth_gb_per_s": read_bandwidth / 1e9,
        "rows": list(rows),
        "not_measured": [entry.as_dict() for entry in unmeasured],
    }


def print_head(device: str, name_width: int) -> None:
    """Prints the machine, and the heading of the table."""
    emit(f"machine: {machine_name(device)}")
    columns = _widths(has_gpu=device == "cuda")
    for line in (0, 1):
        print_cells([column[line] for column in columns], columns, name_width)


def print_row(device: str, row: Mapping[str, Any], name_width: int) -> None:
    """Prints a row; a figure that does not exist, as acceptance without drafts, is a dash."""
    length, acceptance = row["imposed_acceptance_length"], row["acceptance"]
    imposed = f"none, {acceptance}" if length is None else f"{length:.2f} {acceptance}"
    shown_row = {**row, "imposed_cell": imposed}
    cells = [_cell(shown, shown_row) for *_, shown in _COLUMNS]
    has_gpu = device == "cuda"
    if has_gpu:
        cells += gpu_cells(row["gpu"])
    print_cells(cells, _widths(has_gpu=has_gpu), name_width)


def print_unmeasured(entry: Unmeasured, name_width: int) -> None:
    """Prints a line with the reason in the place of figures."""
    temperature = "-" if entry.temperature is None else f"{entry.temperature:g}"
    concurrency = "-" if entry.concurrency is None else entry.concurrency
    reason = f"not measured: {entry.reason}"
    columns = [*_widths()[:3], ("", "", 0)]
    print_cells([entry.pair, temperature, concurrency, reason], columns, name_width)


def legend(device: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the columns are, and the acceptances that these rows have."""
    seen = {row["acceptance"] for row in rows}
    gpu = [GPU_LEGEND] if device == "cuda" else []
    return "\n".join([LEGEND, *gpu, *(text for name, text in _ACCEPTANCES.items() if name in seen)])


def _cell(shown: str, row: Mapping[str, Any]) -> str:
    try:
        return shown.format_map(row)
    except TypeError:  # the figure is None
        return "-"


def _widths(*, has_gpu: bool = False) -> list[tuple[str, str, int]]:
    columns = [(name, unit, width) for name, unit, width, _ in _COLUMNS]
    return [*columns, *(_GPU_COLUMNS if has_gpu else ())]
