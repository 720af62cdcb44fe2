# SPDX-License-Identifier: Apache-2.0
"""The report of `paceline bench latency`: its tables, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import _core
from paceline.bench.floor import CUDA_BF16_FLOPS
from paceline.bench.measurement import Measurement
from paceline.bench.models import BenchModel
from paceline.bench.report import Column, columns, machine_name, parts, report_facts, table
from paceline.speculative_config import SpeculativeConfig

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """The models and configurations to measure.

    Attributes:
        target: The target.
        draft: The drafter, or None.
        speculations: One per driver; empty = plain decoding alone.
        device: "cpu" or "cuda".
        model_build_s: Seconds for loading the models.
        seconds_before: Seconds from the start of the command until the models were loaded.
    """

    target: BenchModel
    draft: BenchModel | None
    speculations: list[SpeculativeConfig]
    device: str
    model_build_s: float
    seconds_before: float

    @property
    def has_mixture(self) -> bool:
        """Returns whether the target or the drafter is a mixture of experts."""
        models = (self.target,) if self.draft is None else (self.target, self.draft)
        return any(model.costs.num_experts > 0 for model in models)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the table, in tables.toml."""
        return (*parts("latency", self.device), *(("experts",) if self.has_mixture else ()))

    def facts(self) -> dict[str, Any]:
        """What a report says of the models."""
        target, draft = self.target, self.draft
        speculation = self.speculations[0] if self.speculations else None
        dtype = target.model.weight_dtype
        is_gpu = self.device == "cuda"
        return {
            "device_name": _core.cuda_status()["name"] if is_gpu else None,
            "target": target.name,
            "target_matrix_bytes": target.costs.all_bytes,
            "draft": draft and draft.name,
            "draft_matrix_bytes": draft and draft.costs.all_bytes,
            "weight_dtype": dtype,
            "accept_method": speculation and speculation.rejection_sample_method,
            "synthetic_acceptance_length": speculation and speculation.synthetic_acceptance_length,
            "peak_tflops": CUDA_BF16_FLOPS / 1e12 if is_gpu and dtype == "bfloat16" else None,
        }


def report(
    run_id: str, command: str, setup: Setup, read_bandwidth: float, rows: Sequence[Row]
) -> dict[str, Any]:
    """Returns the report as plain JSON types; docs/bench.md describes the keys.

    Args:
        run_id: Identifies the run.
        command: The command line.
        setup: What was measured.
        read_bandwidth: Bytes per second from memory.
        rows: The rows, as plain JSON types.
    """
    facts = report_facts("latency", command, setup.device, read_bandwidth) | setup.facts()
    return facts | {"run_id": run_id, "rows": list(rows), "speedup": list(_speedups(rows))}


def _speedups(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Ratios of speculative to plain tokens per second."""

    def key(row: Row) -> str:
        return json.dumps(row["workload"])

    plain = {key(row): row["output_tokens_per_s"] for row in rows if row["num_draft_tokens"] == 0}
    for row in rows:
        if row["num_draft_tokens"] > 0 and plain[key(row)] > 0:
            yield {
                "configuration": row["configuration"],
                "concurrency": row["workload"]["concurrency"],
                "input_len": row["workload"]["input_len"],
                "ratio": row["output_tokens_per_s"] / plain[key(row)],
            }


def trace_table(
    run_id: str, setup: Setup, rows: Sequence[tuple[str, Measurement]]
) -> dict[str, Any]:
    """The time of each kernel of one iteration, the longest first."""
    return {
        "run_id": run_id,
        "target": setup.target.name,
        "draft": setup.draft and setup.draft.name,
        "rows": [
            {
                "configuration": name,
                "concurrency": row.workload.concurrency,
                "iteration_us": row.iteration_ms * 1e3,
                "kernels": sorted(row.kernels or [], key=lambda kernel: -float(kernel["total_us"])),
            }
            for name, row in rows
        ],
    }


def setup_lines(setup: Setup, read_bandwidth: float, startup: Mapping[str, Any]) -> list[str]:
    """What is measured, above the table."""
    target, draft = setup.target, setup.draft
    lines = [f"target {target.name}: {target.costs.all_bytes / 1e6:.1f} MB of matrices"]
    if draft is not None and setup.speculations:
        speculation = setup.speculations[0]
        length = speculation.synthetic_acceptance_length
        judged = speculation.rejection_sample_method + (f" length {length}" if length else "")
        size = f"{draft.costs.all_bytes / 1e6:.1f} MB of matrices"
        lines.append(f"draft  {draft.name}: {size}, {judged}")
    if target.loaded.is_dummy:
        lines.append(
            "dummy weights: the times are those of models of these shapes; no token has a meaning"
        )
    return [
        *lines,
        f"read bandwidth of {machine_name(setup.device)}: {read_bandwidth / 1e9:.1f} GB/s",
        f"start to first token: {startup['start_to_first_token_s']:.2f} s, of it models "
        f"{startup['model_build_s']:.2f} s, engine {startup['engine_start_s']:.2f} s",
    ]


def with_cells(row: Row) -> dict[str, Any]:
    """A row with what its columns show beside its own figures.

    Without a floor nothing was read, and so there is no speed of reading.
    """
    experts = [row["target_experts"]]
    if row["draft_experts"] is not None:
        experts.append(row["draft_experts"])
    return {
        **row,
        "iteration_gb": row["iteration_bytes"] / 1e9,
        "gflop": row["flops"] / 1e9,
        "read_gb_per_s": None if row["floor_share"] is None else row["gb_per_s"],
        "experts": " / ".join("-" if one is None else f"{one:.1f}" for one in experts),
    }


def sequences(count: int) -> str:
    """Counts sequences in words."""
    return f"{count} sequence{'' if count == 1 else 's'}"


def speedup_lines(report: Mapping[str, Any]) -> list[str]:
    """The ratios of a report, one a line."""
    return [
        f"{speedup['configuration']} / plain tokens per second at "
        f"{sequences(speedup['concurrency'])}: {speedup['ratio']:.2f}"
        for speedup in report["speedup"]
    ]


def length_lines(report: Mapping[str, Any]) -> list[str]:
    """Tokens per second at fixed acceptance lengths; empty if no row has any."""
    rows = [row for row in report["rows"] if row["at_lengths"]]
    entries = [entry for row in rows for entry in row["at_lengths"]]
    if not entries:
        return []
    lengths = sorted({entry["acceptance_length"] for entry in entries})
    headings = [
        Column("tokens/s at acceptance length", "{configuration}"),
        Column("sequences", "{workload[concurrency]}"),
        *(Column(f"{length:g}", f"{{at {rank}}}") for rank, length in enumerate(lengths)),
    ]
    shown = []
    for row in rows:
        cells = {f"at {rank}": "-" for rank in range(len(lengths))}
        for entry in row["at_lengths"]:
            mark = "*" if entry["source"] == "imposed" else ""
            rank = lengths.index(entry["acceptance_length"])
            cells[f"at {rank}"] = f"{entry['tokens_per_s']:.1f}{mark}"
        shown.append(row | cells)
    explained = "while all sequences decode, computed from the time of the measured iterations"
    if any(entry["source"] == "imposed" for entry in entries):
        explained += "; * = the length that was imposed"
    return ["", *table(headings, shown), explained]


def first_token_lines(report: Mapping[str, Any]) -> list[str]:
    """Times to the first token by the length of the prompts."""
    shown = []
    for row in report["rows"]:
        work, floor_ms, all_ms = row["workload"], row["prompt_floor_ms"], row["prompts_ms"]
        num_tokens = work["concurrency"] * work["input_len"]
        cells = {
            "prompt_tokens_per_s": num_tokens / all_ms * 1e3 if all_ms > 0 else None,
            "prompt_floor_share": floor_ms / all_ms
            if floor_ms is not None and all_ms > 0
            else None,
        }
        shown.append(row | cells)
    explained = "all: until the last request has its first token"
    return ["", *table(columns("first_tokens"), shown), explained]
