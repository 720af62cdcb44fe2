# SPDX-License-Identifier: Apache-2.0
"""`paceline bench`: `latency`, `pairs` and `serve` measure, `plot` draws reports."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from paceline.bench.floor import Speed, with_floor
from paceline.bench.latency import Measurement, can_trace, measure
from paceline.bench.models import BenchModel, load, load_draft
from paceline.bench.options import (
    add_latency_parser,
    check_can_write,
    check_hub_options,
    check_num_layers,
    parse_concurrency,
    parse_samplings,
    speculations,
    target_source,
)
from paceline.bench.pairs.command import run_pairs
from paceline.bench.pairs.options import add_pairs_parser
from paceline.bench.pairs.plot import draw as draw_pairs
from paceline.bench.plot import PLOT_NEEDS, check_can_plot, draw, is_pairs_report, read_report
from paceline.bench.report import (
    COLUMNS,
    EXPERTS_LEGEND,
    LEGEND,
    Setup,
    print_head,
    print_row,
    report,
    trace_table,
    write_json,
)
from paceline.bench.serve.command import run_serve
from paceline.bench.serve.options import add_serve_parser
from paceline.bench.workload import Speculation, Workload
from paceline.checks import check_int, check_path
from paceline.console import check_output, emit, progress_bar, tell
from paceline.device import resolve_device


def add_parser(commands: Any) -> None:
    """Adds `bench` to the command line's subparsers."""
    bench = commands.add_parser(
        "bench",
        help="measure this machine or a server, or draw what was measured",
        description="Measures this machine or a server, or draws what was measured.",
    )
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    add_latency_parser(kinds).set_defaults(run=run_latency)
    add_pairs_parser(kinds).set_defaults(run=run_pairs)
    add_serve_parser(kinds).set_defaults(run=run_serve)
    plot = kinds.add_parser(
        "plot",
        help="draw a report of `latency --json FILE` or `pairs --json FILE`",
        description="Draws what `latency --plot` or `pairs --plot` draws, from a report that "
        "--json FILE wrote.",
    )
    plot.add_argument("report", metavar="REPORT", help="the JSON file of the report")
    plot.add_argument(
        "--out", metavar="FILE", required=True, help=f"the file to write; {PLOT_NEEDS}"
    )
    plot.set_defaults(run=run_plot)


def run_plot(args: argparse.Namespace) -> int:
    """Draws a report and returns the exit code."""
    check_output()
    check_path("REPORT", args.report, "a file with a report")
    check_can_write("--out", args.out)
    check_can_plot("--out", args.out)
    stored = read_report(args.report)
    (draw_pairs if is_pairs_report(stored) else draw)(stored, args.out)
    emit(f"wrote {args.out}")
    return 0


def run_latency(args: argparse.Namespace) -> int:
    """Measures, prints the rows and returns the exit code."""
    started: float = getattr(args, "started", time.monotonic())
    concurrency = parse_concurrency(args.concurrency)
    for option in ("input_len", "output_len", "rounds"):
        check_int(option, getattr(args, option), 1)
    samplings = parse_samplings(args)
    for option, path in (("--json", args.json), ("--plot", args.plot), ("--trace", args.trace)):
        if path is not None and (option, path) != ("--json", "-"):
            check_can_write(option, path)
    if args.plot is not None:
        check_can_plot("--plot", args.plot)
    check_output()
    for option, path in (
        ("--model", args.model),
        ("--config", args.config),
        ("--draft-config", args.draft_config),
    ):
        if path is not None:
            check_path(option, path)
    is_json_alone = args.json == "-"
    command = getattr(args, "command_line", "paceline bench latency")
    setup = _set_up(args, started)
    speed = Speed(setup.device, args.num_threads)
    run_id = uuid.uuid4().hex[:12]
    rows: list[tuple[str, Measurement]] = []
    variants = list(_variants(setup))
    names = {
        (variant, i): _row_name(variant, sampling if len(samplings) > 1 else {})
        for variant, _, _ in variants
        for i, sampling in enumerate(samplings)
    }
    name_width = max(len(name) for name in (*names.values(), COLUMNS[0][0]))
    cells = list(itertools.product(concurrency, variants))
    num_runs = len(cells) * len(samplings) * (args.rounds + 1)
    with progress_bar(num_runs, "Measuring", "run", is_shown=not args.quiet) as bar:
        for c, (variant, drafter, speculation) in cells:
            workloads = [Workload(c, args.input_len, args.output_len, s) for s in samplings]
            what = f"{variant} at {_sequences(c)}"
            if bar.disable and not args.quiet:
                tell(f"measuring {what} ...")
            bar.set_description(f"Measuring {what}")
            results = measure(
                setup.target, drafter, speculation, workloads, num_threads=args.num_threads,
                rounds=args.rounds, use_null_device=args.host_only,
                seconds_before=setup.seconds_before, is_traced=args.trace is not None,
                show_progress=not args.quiet, after_run=bar.update,
            )  # fmt: skip
            is_first = not rows
            speed.forget()
            if not args.host_only:  # without ops there is no limit to compare with
                # Prompt lookup drafts nothing where it finds nothing.
                may_stop_early = speculation is not None and (
                    speculation.draft_stop_threshold > 0 or speculation.ngram_max > 0
                )
                results = [
                    with_floor(result, setup.target, drafter, speed, may_stop_early=may_stop_early)
                    for result in results
                ]
            new_rows = [(names[variant, i], result) for i, result in enumerate(results)]
            rows += new_rows
            if not is_json_alone:
                with bar.external_write_mode(sys.stdout):
                    if is_first:
                        print_head(setup, speed.memory, results[0], name_width)
                    for name, row in new_rows:
                        print_row(setup, name, row, name_width)
            measured = report(run_id, command, setup, speed.memory, rows)
            if args.json is not None and not is_json_alone:
                write_json(args.json, measured)
            if args.trace is not None:
                write_json(args.trace, trace_table(run_id, setup, rows))
    if is_json_alone:
        emit(json.dumps(measured))
    else:
        emit(LEGEND)
        if setup.has_mixture:
            emit(EXPERTS_LEGEND)
        for speedup in measured["speedup"]:
            emit(
                f"{speedup['configuration']} / plain tokens per second at "
                f"{_sequences(speedup['concurrency'])}: {speedup['ratio']:.2f}"
            )
    if args.plot is not None:
        draw(measured, args.plot)
    return 0


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"


def _row_name(variant: str, sampling: dict[str, Any]) -> str:
    return variant + "".join(f" {key}={value:g}" for key, value in sampling.items())


def _set_up(args: argparse.Namespace, started: float) -> Setup:
    """Checks all arguments, then loads the models."""
    source, is_dummy = target_source(args)
    check_hub_options(args)
    check_num_layers(args)
    config, chosen = speculations(args)
    device = resolve_device("cpu" if args.demo and args.device == "auto" else args.device)
    if args.trace is not None and not can_trace(device):
        raise NotImplementedError(
            f"--trace times kernels, but the device is {device!r}; "
            "leave it out, or use --device cuda"
        )
    begin = time.monotonic()
    target = load(
        source, dummy=is_dummy, dtype=args.dtype, device=device, show_progress=not args.quiet,
        revision=args.revision, cache_dir=args.cache_dir, num_layers=args.num_layers,
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
            dummy=is_draft_dummy, dtype=args.dtype, device=device, show_progress=not args.quiet,
            revision=revision, cache_dir=args.cache_dir, num_layers=kept,
        )  # fmt: skip
    end = time.monotonic()
    return Setup(target, draft, chosen, device, end - begin, end - started)


def _variants(setup: Setup) -> Iterator[tuple[str, BenchModel | None, Speculation | None]]:
    """The configurations at every concurrency: plain decoding, then every driver."""
    yield "plain", None, None
    for speculation in setup.speculations:
        name = f"k={speculation.num_speculative_tokens}"
        if len(setup.speculations) > 1 or speculation.draft_driver != "unrolled":
            name += f" {speculation.draft_driver}"
        yield name, setup.draft, speculation
