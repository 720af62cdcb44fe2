# SPDX-License-Identifier: Apache-2.0
"""The report of `paceline bench pairs`: a table, and JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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


def pair_row(
    pair: Pair,
    speculation: SpeculativeConfig,
    imposed: ImposedLength | None,
    measurement: Measurement,
) -> dict[str, Any]:
    """A row as plain JSON types: the keys of vLLM's result files, then our own.

    Args:
        pair: The pair.
        speculation: Its drafting.
        imposed: The imposed acceptance length; None = acceptance was measured.
        measurement: The figures, with a floor.
    """
    (run,) = measurement.runs
    work, gpu = measurement.workload, measurement.gpu
    temperature, c = work.sampling["temperature"], work.concurrency
    return {
        "date": time.strftime("%Y%m%d-%H%M%S", time.gmtime()),
        "endpoint_type": "paceline",
        "backend": "paceline",
        "label": f"{pair.name} T={temperature:g} c={c}",
        "model_id": pair.target,
        "tokenizer_id": None if pair.is_dummy else pair.target,
        "num_prompts": len(run.requests),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": c,
        **serving_metrics(run.requests, run.duration_s),
        **draft_metrics(run.stats),
        "pair": pair.name,
        "drafter_id": pair.drafter,
        "has_dummy_weights": pair.is_dummy,
        "acceptance": "measured" if imposed is None else imposed.acceptance,
        "imposed_acceptance_length": None if imposed is None else imposed.tokens,
        "imposed_acceptance_source": None if imposed is None else imposed.source,
        "speculative_method": speculation.method,
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "rejection_sample_method": speculation.rejection_sample_method,
        "temperature": temperature,
        "iteration_ms": measurement.iteration_ms or None,  # 0 if requests never decoded together
        **{key: getattr(measurement, key) for key in _KEPT},
        "gpu": None if gpu is None else gpu.as_dict(),
    }


def table_of(device: str, name_width: int) -> GrowingTable:
    """The table of a device, whose names have a width."""
    gpu = GPU_COLUMNS if device == "cuda" else ()
    return GrowingTable((*_COLUMNS, *gpu), name_width)


def line_of(table: GrowingTable, row: Mapping[str, Any]) -> str:
    """The line of a row, or of what was not measured, with the reason in the place of figures."""
    if "reason" in row:
        temperature, c = row["temperature"], row["max_concurrency"]
        shown = "-" if temperature is None else f"{temperature:g}", "-" if c is None else str(c)
        return table.line([row["pair"], *shown, f"not measured: {row['reason']}"])
    length, acceptance = row["imposed_acceptance_length"], row["acceptance"]
    imposed = f"none, {acceptance}" if length is None else f"{length:.2f} {acceptance}"
    return table.row({**row, "imposed_cell": imposed})


def legend(device: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the columns are, and the acceptances that these rows have."""
    seen = {row["acceptance"] for row in rows}
    gpu = [GPU_LEGEND] if device == "cuda" else []
    return "\n".join([LEGEND, *gpu, *(text for name, text in _ACCEPTANCES.items() if name in seen)])
