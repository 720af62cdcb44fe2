# SPDX-License-Identifier: Apache-2.0
"""The report of `paceline bench latency`: a table, and JSON."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline.bench.floor import CUDA_BF16_FLOPS
from paceline.bench.lengths import at_lengths
from paceline.bench.measurement import Measurement
from paceline.bench.models import BenchModel
from paceline.bench.tables import gpu_cells
from paceline.bench.workload import Speculation
from paceline.console import emit

# Two lines of heading and the width of each column; the first one is as wide as its longest entry.
COLUMNS: Final = (
    ("configuration", "", 13), ("sequences", "", 9), ("iteration", "ms", 9), ("p99", "ms", 8),
    ("tokens", "per iter.", 9), ("tokens", "per s", 9), ("1st token", "ms", 9), ("reads", "GB", 8),
    ("math", "GFLOP", 8), ("reads", "GB/s", 7), ("floor", "share", 6), ("additive", "share", 8),
    ("idle", "share", 6), ("host", "us", 8), ("start", "s", 7),
)  # fmt: skip
# Follow on a GPU.
_GPU: Final = (("clock", "MHz", 5), ("power", "W", 5))
# Follows with a mixture of experts.
_EXPERTS: Final = ("experts", "per layer", 11)

LEGEND: Final = """\
sequences: requests at the same time. iteration, p99: median and 99th percentile of the iterations
in which all requests decode. tokens per iter.: of one sequence, the acceptance length. tokens per
s: all sequences. 1st token: mean time from queueing. reads, math: bytes and operations of an
iteration. floor share: the least time for them, over the time of the iteration; 100 % is the limit
of the machine. additive share: the same if no two operations of an iteration overlap. idle: of the
device, before an iteration. host: its work for an iteration. start: of the engine."""
GPU_LEGEND: Final = """\
clock, power: of the GPU while it ran: the median clock of its multiprocessors, with ! where the
driver lowered it for power or heat, and the mean power."""
EXPERTS_LEGEND: Final = """\
experts: mean number of experts of a mixture layer that had rows and were read; the target's, then
the drafter's after a slash. reads and floor share follow from them."""


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
    speculations: list[Speculation]
    device: str
    model_build_s: float
    seconds_before: float

    @property
    def has_mixture(self) -> bool:
        """Returns whether the target or the drafter is a mixture of experts."""
        models = (self.target,) if self.draft is None else (self.target, self.draft)
        return any(model.costs.num_experts > 0 for model in models)


def report(
    run_id: str,
    command: str,
    setup: Setup,
    read_bandwidth: float,
    rows: list[tuple[str, Measurement]],
    lengths: Sequence[float] = (),
) -> dict[str, Any]:
    """Returns the report as plain JSON types; docs/bench.md describes the keys.

    Args:
        run_id: Identifies the run.
        command: The command line.
        setup: What was measured.
        read_bandwidth: Bytes per second from memory.
        rows: The name of each row, and the row.
        lengths: Acceptance lengths at which each row has tokens per second.
    """
    target, draft = setup.target, setup.draft
    speculation = setup.speculations[0] if setup.speculations else None
    status = _core.cuda_status()
    return {
        "bench": "latency",
        "run_id": run_id,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": command,
        "machine": machine_name(setup.device),
        "version": _core.version(),
        "build": _core.build_info(),
        "device": setup.device,
        "device_name": status["name"] if setup.device == "cuda" else None,
        "target": target.name,
        "target_matrix_bytes": target.costs.all_bytes,
        "draft": None if draft is None else draft.name,
        "draft_matrix_bytes": None if draft is None else draft.costs.all_bytes,
        "weight_dtype": target.model.weight_dtype,
        "accept_method": None if speculation is None else speculation.accept_method,
        "synthetic_acceptance_length": None
        if speculation is None
        else speculation.synthetic_acceptance_length or None,
        "read_bandwidth_gb_per_s": read_bandwidth / 1e9,
        "peak_tflops": CUDA_BF16_FLOPS / 1e12
        if setup.device == "cuda" and target.model.weight_dtype == "bfloat16"
        else None,
        "rows": [
            {"configuration": name, **row.as_dict(), "at_lengths": at_lengths(row, lengths)}
            for name, row in rows
        ],
        "speedup": speedups(rows),
    }


def machine_name(device: str) -> str:
    """The GPU, or the processor and its number of cores that this process may use."""
    if device == "cuda":
        return str(_core.cuda_status()["name"])
    name = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    num_cores = _core.build_info()["num_cores"]
    return f"{name}, {num_cores} core{'' if num_cores == 1 else 's'}"


def speedups(rows: list[tuple[str, Measurement]]) -> list[dict[str, Any]]:
    """Ratios of speculative to plain tokens per second."""

    def key(row: Measurement) -> str:
        return json.dumps(asdict(row.workload))

    plain = {key(row): row.output_tokens_per_s for _, row in rows if row.num_draft_tokens == 0}
    return [
        {
            "configuration": name,
            "concurrency": row.workload.concurrency,
            "input_len": row.workload.input_len,
            "ratio": row.output_tokens_per_s / plain[key(row)],
        }
        for name, row in rows
        if row.num_draft_tokens > 0 and plain[key(row)] > 0
    ]


def trace_table(run_id: str, setup: Setup, rows: list[tuple[str, Measurement]]) -> dict[str, Any]:
    """The time of each kernel of one iteration, the longest first."""
    return {
        "run_id": run_id,
        "target": setup.target.name,
        "draft": None if setup.draft is None else setup.draft.name,
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


def write_json(path: str, value: Any) -> None:
    """Writes a file; an OSError names it."""
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:  # of a full disk, without the name of the file
        raise OSError(error.errno, error.strerror, path) from None


def print_head(setup: Setup, read_bandwidth: float, first: Measurement, name_width: int) -> None:
    """Prints what is measured, and the heading of the table."""
    target, draft = setup.target, setup.draft
    emit(f"target {target.name}: {target.costs.all_bytes / 1e6:.1f} MB of matrices")
    if draft is not None and setup.speculations:
        speculation = setup.speculations[0]
        length = speculation.synthetic_acceptance_length
        judged = speculation.accept_method + (f" length {length}" if length else "")
        emit(f"draft  {draft.name}: {draft.costs.all_bytes / 1e6:.1f} MB of matrices, {judged}")
    if target.loaded.is_dummy:
        emit("dummy weights: the times are those of models of these shapes; no token has a meaning")
    emit(f"read bandwidth of {machine_name(setup.device)}: {read_bandwidth / 1e9:.1f} GB/s")
    emit(
        f"start to first token: {first.start_to_first_token_s:.2f} s, of it models "
        f"{setup.model_build_s:.2f} s, engine {first.engine_start_s:.2f} s"
    )
    columns = _columns(setup)
    print_cells([name for name, _, _ in columns], columns, name_width)
    print_cells([unit for _, unit, _ in columns], columns, name_width)


def _columns(setup: Setup) -> tuple[tuple[str, str, int], ...]:
    gpu = _GPU if setup.device == "cuda" else ()
    return (*COLUMNS, *gpu, *((_EXPERTS,) if setup.has_mixture else ()))


def _experts_cell(row: Measurement) -> str:
    target, draft = (
        "-" if experts is None else f"{experts:.1f}"
        for experts in (row.target_experts, row.draft_experts)
    )
    return target if row.draft_experts is None else f"{target} / {draft}"


def print_row(setup: Setup, name: str, row: Measurement, name_width: int) -> None:
    """Prints a row. Without a floor nothing was read, and so there is no speed of reading."""
    has_floor = row.floor_share is not None
    share = f"{row.floor_share:.0%}" if has_floor else "-"
    additive = f"{row.additive_floor_share:.0%}" if has_floor else "-"
    speed = f"{row.gb_per_s:.1f}" if has_floor else "-"
    cells: list[object] = [
        name, row.workload.concurrency, f"{row.iteration_ms:.3f}", f"{row.iteration_p99_ms:.3f}",
        f"{row.tokens_per_iteration:.2f}", f"{row.output_tokens_per_s:.1f}",
        f"{row.time_to_first_token_ms:.1f}", f"{row.iteration_bytes / 1e9:.3f}",
        f"{row.flops / 1e9:.1f}", speed, share, additive, f"{row.idle_share:.1%}",
        f"{row.host_us:.1f}", f"{row.engine_start_s:.2f}",
    ]  # fmt: skip
    if setup.device == "cuda":
        cells += gpu_cells(None if row.gpu is None else row.gpu.as_dict())
    if setup.has_mixture:
        cells.append(_experts_cell(row))
    print_cells(cells, _columns(setup), name_width)


def print_cells(
    cells: Sequence[object], columns: Sequence[tuple[str, str, int]], name_width: int
) -> None:
    """Prints a line of a table; a column is two lines of heading and a width."""
    first, *others = zip(cells, columns, strict=True)
    line = [f"{first[0]:<{name_width}}", *(f"{cell:>{width}}" for cell, (_, _, width) in others)]
    emit(" ".join(line), flush=True)
