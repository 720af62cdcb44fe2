# SPDX-License-Identifier: Apache-2.0
"""Runs `paceline bench latency`."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.arrivals import Arrivals, arrival_lines, measure_arrivals
from paceline.bench.drafting import speculations
from paceline.bench.floor import Speed, with_floor
from paceline.bench.latency import can_trace, measure
from paceline.bench.latency_options import (
    LatencyOptions,
    check_hub_options,
    check_num_layers,
    parse_latency_options,
    target_source,
)
from paceline.bench.latency_report import (
    Setup,
    first_token_lines,
    length_lines,
    report,
    sequences,
    setup_lines,
    speedup_lines,
    trace_table,
    with_cells,
)
from paceline.bench.lengths import at_lengths
from paceline.bench.measurement import Measurement
from paceline.bench.models import BenchModel, load, load_draft
from paceline.bench.plot import draw_report
from paceline.bench.report import GrowingTable, Output, columns, legends, write_json
from paceline.bench.workload import Workload
from paceline.console import check_output, tell
from paceline.device import chosen_gpus, resolve_device
from paceline.progress import progress_bar
from paceline.speculative_config import SpeculativeConfig


def run_latency(args: argparse.Namespace) -> int:
    """Measures, prints the rows and returns the exit code."""
    started: float = getattr(args, "started", time.monotonic())
    options = parse_latency_options(args)
    check_output()
    setup = _set_up(args, started)
    _check_lengths(max(options.input_lens), args.output_len, setup)
    cells = list(itertools.product(options.input_lens, options.concurrency, _variants(setup)))
    runs_per_cell = (
        options.arrivals.num_runs(args.rounds)
        if options.arrivals is not None
        else len(options.samplings) * (args.rounds + 1)
    )
    num_runs = len(cells) * runs_per_cell
    with progress_bar(num_runs, "Measuring", "run", is_shown=not args.quiet) as bar:
        bench = _Bench(args, options, setup, Speed(setup.device, args.num_threads), bar)
        for n, c, variant in cells:
            cell = _Cell(*variant, c, n, runs_per_cell)
            what = cell.words(has_input_len=len(options.input_lens) > 1)
            if bar.disable and not args.quiet:
                tell(f"measuring {what} ...")
            bar.set_description(f"Measuring {what}")
            # A reason is kept without its exception, whose traceback keeps an engine alive.
            reason = None
            try:
                bench.measure(cell)
            except MemoryError as error:
                if len(cells) == 1:
                    raise
                reason = str(error)
            if reason is not None:
                bench.leave_out(cell, what, reason)
    bench.finish()
    return 0


@dataclass(frozen=True)
class _Cell:
    """The measurements of one engine.

    Attributes:
        variant: "plain", or k and the driver.
        drafter: The drafter, or None.
        speculation: None = plain decoding.
        concurrency: Sequences at the same time.
        input_len: Prompt tokens of each.
        num_runs: Steps of the bar.
    """

    variant: str
    drafter: BenchModel | None
    speculation: SpeculativeConfig | None
    concurrency: int
    input_len: int
    num_runs: int

    def words(self, *, has_input_len: bool) -> str:
        """For messages."""
        words = f"{self.variant} at {sequences(self.concurrency)}"
        return words + (f", {self.input_len} prompt tokens" if has_input_len else "")


@dataclass
class _Bench:
    """The command while it runs: what was measured, and what is printed and written of it."""

    args: argparse.Namespace
    options: LatencyOptions
    setup: Setup
    speed: Speed
    bar: Any
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    rows: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[tuple[str, Measurement]] = field(default_factory=list)
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[dict[str, Any]] = field(default_factory=list)
    startup: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Makes the output and the table, whose first column has room for all names."""
        self.output = Output(self.args.json, self.bar)
        names = [
            self._name(variant, n, sampling)
            for variant, _, _ in _variants(self.setup)
            for n in self.options.input_lens
            for sampling in self.options.samplings
        ]
        shown = columns(*self.setup.parts)
        self.table = GrowingTable(shown, max(map(len, [*names, shown[0].name])))

    @property
    def _num_gpus(self) -> int:
        """GPUs that share the target; the floor of ranks on the CPU is that of the machine."""
        return self.args.tensor_parallel_size if self.setup.device == "cuda" else 1

    def measure(self, cell: _Cell) -> None:
        """Measures a cell, then prints and writes what there is by then.

        Raises:
            MemoryError: It does not fit.
        """
        workloads = [
            Workload(cell.concurrency, cell.input_len, self.args.output_len, sampling)
            for sampling in self.options.samplings
        ]
        engine: dict[str, Any] = {
            "num_threads": self.args.num_threads,
            "tensor_parallel_size": self.args.tensor_parallel_size,
            "rounds": self.args.rounds,
            "use_null_device": self.args.host_only,
            "show_progress": not self.args.quiet,
            "after_run": self.bar.update,
        }
        if self.options.arrivals is not None:
            self._measure_arrivals(cell, workloads[0], self.options.arrivals, engine)
        else:
            self._measure_iterations(cell, workloads, engine)
        self._write()

    def _measure_iterations(
        self, cell: _Cell, workloads: list[Workload], engine: dict[str, Any]
    ) -> None:
        results = measure(
            self.setup.target, cell.drafter, cell.speculation, workloads,
            seconds_before=self.setup.seconds_before, is_traced=self.args.trace is not None,
            **engine,
        )  # fmt: skip
        self.speed.forget()
        if not self.args.host_only:  # without ops there is no limit to compare with
            results = [
                with_floor(
                    result, self.setup.target, cell.drafter, self.speed, num_gpus=self._num_gpus
                )
                for result in results
            ]
        if self.startup is None:
            self._keep_startup(results[0].engine_start_s, results[0].first_token_s)
            head = setup_lines(self.setup, self.speed.memory, self.startup or {})
            self.output.show([*head, *self.table.heading()])
        for result in results:
            name = self._name(cell.variant, cell.input_len, dict(result.workload.sampling))
            lengths = at_lengths(result, self.options.lengths)
            self.measurements.append((name, result))
            self.rows.append({"configuration": name, **result.as_dict(), "at_lengths": lengths})
            self.output.show([self.table.row(with_cells(self.rows[-1]))])

    def _measure_arrivals(
        self, cell: _Cell, workload: Workload, arrivals: Arrivals, engine: dict[str, Any]
    ) -> None:
        found = measure_arrivals(
            self.setup.target, cell.drafter, cell.speculation, workload, arrivals, **engine
        )
        if self.startup is None:
            self._keep_startup(found.engine_start_s, found.first_token_s)
        name = self._name(cell.variant, cell.input_len, {})
        self.arrivals += [{"configuration": name, **row} for row in found.rows]

    def leave_out(self, cell: _Cell, what: str, reason: str) -> None:
        """Notes a cell that does not fit into memory."""
        self.bar.update(cell.num_runs)
        self.not_measured.append(
            {
                "configuration": cell.variant,
                "concurrency": cell.concurrency,
                "input_len": cell.input_len,
                "reason": reason,
            }
        )
        with self.bar.external_write_mode(sys.stderr):
            tell(f"not measured: {what}: {reason}")
        if self.rows or self.arrivals:
            self._write()

    def finish(self) -> None:
        """Prints what follows the rows.

        Raises:
            MemoryError: No cell fitted into memory.
        """
        if not self.rows and not self.arrivals:
            raise MemoryError(
                f"no cell could be measured; the last one: {self.not_measured[-1]['reason']}"
            )
        measured = self._report()
        self.output.close(measured, self._closing_lines(measured))
        if self.args.plot is not None:
            draw_report(measured, self.args.plot)

    def _closing_lines(self, measured: dict[str, Any]) -> list[str]:
        if self.options.arrivals is not None:
            return arrival_lines(self.arrivals, self.setup.device)
        lines = legends(*self.setup.parts)
        lines += [*speedup_lines(measured), *length_lines(measured)]
        return lines + (first_token_lines(measured) if len(self.options.input_lens) > 1 else [])

    def _name(self, variant: str, input_len: int, sampling: dict[str, Any]) -> str:
        """The name of a row: what differs between rows of as many sequences."""
        facts = {"input_len": input_len} if len(self.options.input_lens) > 1 else {}
        facts |= sampling if len(self.options.samplings) > 1 else {}
        return variant + "".join(f" {key}={value:g}" for key, value in facts.items())

    def _keep_startup(self, engine_start_s: float, first_token_s: float) -> None:
        before = self.setup.seconds_before
        self.startup = {
            "model_build_s": self.setup.model_build_s,
            "engine_start_s": engine_start_s,
            "start_to_first_token_s": before + engine_start_s + first_token_s,
        }

    def _report(self) -> dict[str, Any]:
        command = getattr(self.args, "command_line", "paceline bench latency")
        found = report(self.run_id, command, self.setup, self.speed.memory, self.rows)
        return found | {
            "startup": self.startup,
            "arrivals": self.arrivals,
            "not_measured": self.not_measured,
        }

    def _write(self) -> None:
        self.output.write(self._report())
        if self.args.trace is not None:
            write_json(self.args.trace, trace_table(self.run_id, self.setup, self.measurements))


def _set_up(args: argparse.Namespace, started: float) -> Setup:
    """Checks all arguments, then loads the models."""
    source, is_dummy = target_source(args)
    check_hub_options(args)
    check_num_layers(args)
    config, chosen = speculations(args)
    device = resolve_device("cpu" if args.demo and args.device == "auto" else args.device)
    gpus = chosen_gpus(device, args.tensor_parallel_size, None)
    if args.trace is not None and not can_trace(device):
        raise NotImplementedError(
            f"--trace times kernels, but the device is {device!r}; "
            "leave it out, or use --device cuda"
        )
    begin = time.monotonic()
    target = load(
        source, dummy=is_dummy, dtype=args.dtype, device=device, gpus=gpus,
        show_progress=not args.quiet, revision=args.revision, cache_dir=args.cache_dir,
        num_layers=args.num_layers,
    )  # fmt: skip
    draft = None
    if config is not None and config.has_model:
        is_draft_dummy = is_dummy or args.draft_config is not None
        # An MTP layer is in the target's files.
        draft_source, revision, kept = config.model, config.revision, None
        if draft_source is None:
            draft_source, revision, kept = source, args.revision, args.num_layers
        draft = load_draft(
            draft_source, target, method=config.method, draft_feedback=config.draft_feedback,
            draft_tensor_parallel_size=config.draft_tensor_parallel_size,
            dummy=is_draft_dummy, dtype=args.dtype, device=device, gpus=gpus,
            show_progress=not args.quiet, revision=revision, cache_dir=args.cache_dir,
            num_layers=kept,
        )  # fmt: skip
    end = time.monotonic()
    return Setup(target, draft, chosen, device, end - begin, end - started)


def _check_lengths(input_len: int, output_len: int, setup: Setup) -> None:
    """Checks before anything is measured that the models support the longest requests."""
    num_tokens = input_len + output_len
    for model in (setup.target, setup.draft):
        if model is None or "drafter" in model.config:  # a draft head supports what its target does
            continue
        longest = model.loaded.max_position
        if num_tokens > longest:
            raise ValueError(
                f"input_len is {input_len} and output_len {output_len}, so requests have "
                f"{num_tokens} tokens, but {model.name} supports {longest}; use a smaller "
                "--input-len or --output-len"
            )


def _variants(setup: Setup) -> Iterator[tuple[str, BenchModel | None, SpeculativeConfig | None]]:
    """The configurations of every cell: plain decoding, then every k and driver."""
    yield "plain", None, None
    drivers = {speculation.draft_driver for speculation in setup.speculations}
    for speculation in setup.speculations:
        name = f"k={speculation.k}"
        if len(drivers) > 1 or speculation.draft_driver != "unrolled":
            name += f" {speculation.draft_driver}"
        if speculation.adaptive:
            name = f"adaptive to {name}"
        yield name, setup.draft, speculation
