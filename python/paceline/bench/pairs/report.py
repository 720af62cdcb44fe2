# SPDX-License-Identifier: Apache-2.0
"""The report of `paceline bench pairs`: a table, and JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.bench.measurement import Measurement
from paceline.bench.pairs.known import ImposedLength, Pair
from paceline.bench.report import GPU_COLUMNS, GPU_LEGEND, Column, GrowingTable
from paceline.bench.serving import draft_metrics, serving_metrics
from paceline.speculative_config import SpeculativeConfig

# The first column is as wide as its longest entry.
_COLUMNS: Final = (
    Column("pair", "{pair}", "", 13),
    Column("T", "{temperature:g}", "", 4),
    Column("c", "{max_concurrency}", "", 4),
    Column("output", "{output_throughput:.1f}", "tok/s", 8),
    Column("requests", "{request_throughput:.3f}", "per s", 8),
    Column("total", "{total_token_throughput:.1f}", "tok/s", 8),
    Column("TTFT ms", "{mean_ttft_ms:.1f}", "mean", 8),
    Column("", "{median_ttft_ms:.1f}", "median", 8),
    Column("", "{p99_ttft_ms:.1f}", "P99", 8),
    Column("TPOT ms", "{mean_tpot_ms:.2f}", "mean", 8),
    Column("", "{median_tpot_ms:.2f}", "median", 7),
    Column("", "{p99_tpot_ms:.2f}", "P99", 7),
    Column("ITL ms", "{mean_itl_ms:.2f}", "mean", 7),
    Column("", "{median_itl_ms:.2f}", "median", 7),
    Column("", "{p99_itl_ms:.2f}", "P99", 7),
    Column("E2E ms", "{mean_e2el_ms:.1f}", "mean", 9),
    Column("accept", "{spec_decode_acceptance_rate:.1f}%", "rate", 7),
    Column("accept", "{spec_decode_acceptance_length:.2f}", "length", 6),
    Column("imposed", "{imposed_cell}", "length", 14),
    Column("iteration", "{iteration_ms:.3f}", "ms", 9),
    Column("floor", "{floor_share:.0%}", "share", 6),
    Column("additive", "{additive_floor_share:.0%}", "share", 8),
)

LEGEND: Final = """\
T: temperature. c: requests at the same time. output, total tok/s: output tokens, and prompt and
output tokens, of all requests per second, prompts included. TTFT: from sending a request to its
first token. TPOT: time per later token of a request. ITL: time between the iterations that bring
tokens. E2E: from sending to the end. accept rate: accepted drafts over verified drafts. accept
length: tokens of a request in an iteration. iteration: median over those in which all requests
decode. floor share: the least time for the reads and operations of an iteration, over its time.
additive share: the same if no two operations of an iteration overlap."""
# Figures of a measurement that a row has under their own names.
_KEPT: Final = (
    "floor_ms", "floor_share", "additive_floor_ms", "additive_floor_share", "idle_share",
    "target_experts", "draft_experts",
)  # fmt: skip
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
        acceptance = "measured"
        if imposed is not None:
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
            **serving_metrics(run.requests, run.duration_s),
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
            **{key: getattr(row, key) for key in _KEPT},
            "gpu": None if row.gpu is None else row.gpu.as_dict(),
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

    def cells(self) -> list[str]:
        """The cells of its line in the table, with the reason in the place of figures."""
        temperature = "-" if self.temperature is None else f"{self.temperature:g}"
        concurrency = "-" if self.concurrency is None else str(self.concurrency)
        return [self.pair, temperature, concurrency, f"not measured: {self.reason}"]

    def as_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {
            "pair": self.pair,
            "temperature": self.temperature,
            "max_concurrency": self.concurrency,
            "reason": self.reason,
        }


def table_of(device: str, name_width: int) -> GrowingTable:
    """The table of a device, whose names have a width."""
    gpu = GPU_COLUMNS if device == "cuda" else ()
    return GrowingTable((*_COLUMNS, *gpu), name_width)


def with_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what its columns show beside its own figures."""
    length, acceptance = row["imposed_acceptance_length"], row["acceptance"]
    imposed = f"none, {acceptance}" if length is None else f"{length:.2f} {acceptance}"
    return {**row, "imposed_cell": imposed}


def legend(device: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the columns are, and the acceptances that these rows have."""
    seen = {row["acceptance"] for row in rows}
    gpu = [GPU_LEGEND] if device == "cuda" else []
    return "\n".join([LEGEND, *gpu, *(text for name, text in _ACCEPTANCES.items() if name in seen)])
