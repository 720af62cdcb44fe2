# SPDX-License-Identifier: Apache-2.0
"""The tables behind the rows of `paceline bench latency`, made of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

# Behind a figure, by its source.
_MARKS: Final = {"computed": "", "imposed": "*"}


def sequences(count: int) -> str:
    """Counts sequences in words."""
    return f"{count} sequence{'' if count == 1 else 's'}"


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of columns as wide as needed, the first one flush left and the others flush right."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def gpu_cells(gpu: Mapping[str, Any] | None) -> list[str]:
    """The cells of a clock, marked where the driver lowered it, and of a power; "-" if unknown."""
    clock, power = (None, None) if gpu is None else (gpu["sm_clock_mhz"], gpu["power_w"])
    mark = "!" if gpu is not None and gpu["is_throttled"] else ""
    return [
        "-" if clock is None else f"{clock:.0f}{mark}",
        "-" if power is None else f"{power:.0f}",
    ]


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
    lengths = sorted({entry["acceptance_length"] for row in rows for entry in row["at_lengths"]})
    if not rows:
        return []
    cells = []
    for row in rows:
        at = {entry["acceptance_length"]: entry for entry in row["at_lengths"]}
        cells.append(
            [
                row["configuration"],
                row["workload"]["concurrency"],
                *(
                    f"{at[length]['tokens_per_s']:.1f}{_MARKS[at[length]['source']]}"
                    if length in at
                    else "-"
                    for length in lengths
                ),
            ]
        )
    head = ["tokens/s at acceptance length", "sequences", *(f"{length:g}" for length in lengths)]
    explained = "while all sequences decode, computed from the time of the measured iterations"
    if any(entry["source"] == "imposed" for row in rows for entry in row["at_lengths"]):
        explained += "; * = the length that was imposed"
    return ["", *table(head, cells), explained]


def first_token_lines(report: Mapping[str, Any]) -> list[str]:
    """Times to the first token by the length of the prompts."""
    cells = []
    for row in report["rows"]:
        work, floor_ms, all_ms = row["workload"], row["prompt_floor_ms"], row["prompts_ms"]
        num_tokens = work["concurrency"] * work["input_len"]
        cells.append(
            [
                row["configuration"],
                work["concurrency"],
                f"{work['input_len']:,}",
                f"{row['time_to_first_token_ms']:,.1f}",
                f"{all_ms:,.1f}",
                f"{num_tokens / all_ms * 1e3:,.0f}" if all_ms > 0 else "-",
                f"{floor_ms:,.1f}" if floor_ms is not None else "-",
                f"{floor_ms / all_ms:.0%}" if floor_ms is not None and all_ms > 0 else "-",
            ]
        )
    head = [
        "time to the first token", "sequences", "prompt tokens", "mean ms", "all ms",
        "prompt tokens/s", "floor ms", "floor share",
    ]  # fmt: skip
    return ["", *table(head, cells), "all: until the last request has its first token"]
