# SPDX-License-Identifier: Apache-2.0
"""The report of `paceline bench pairs`: a table, and JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.bench.measurement import Measurement
from paceline.bench.pairs.known import ImposedLength, Pair
from paceline.bench.report import TABLES, GrowingTable, columns, legends, parts
from paceline.bench.serving import draft_metrics, serving_metrics
from paceline.speculative_config import SpeculativeConfig

# Figures of a measurement that a row has under their own names.
_KEPT: Final = (
    "floor_ms", "floor_share", "additive_floor_ms", "additive_floor_share", "idle_share",
    "target_experts", "draft_experts",
)  # fmt: skip


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
    return GrowingTable(columns(*parts("pairs", device)), name_width)


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
    texts = [text for name, text in TABLES["pairs"]["acceptances"].items() if name in seen]
    return "\n".join([*legends(*parts("pairs", device)), *texts])
