# SPDX-License-Identifier: Apache-2.0
"""`paceline bench`: `latency`, `pairs` and `serve` measure, `compare` and `plot` read reports."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from paceline.bench.compare.command import run_compare
from paceline.bench.latency_command import run_latency
from paceline.bench.options import texts
from paceline.bench.pairs.command import run_pairs
from paceline.bench.plot import draw_report, read_report
from paceline.bench.serve.command import run_serve
from paceline.bench.values import check_outputs
from paceline.checks import check_path
from paceline.commands.flags import add_command
from paceline.console import check_output, emit, print_usage_help


def add_parser(commands: Any) -> None:
    """Adds `bench` to the command line's subparsers."""
    bench = commands.add_parser(
        "bench",
        help="measure this machine or a server, compare or draw what was measured",
        description="Measures this machine or a server, compares what was measured, or draws it.",
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND")
    bench.set_defaults(run=functools.partial(print_usage_help, bench))
    commands = (
        ("latency", run_latency),
        ("pairs", run_pairs),
        ("serve", run_serve),
        ("compare", run_compare),
        ("plot", run_plot),
    )
    values = texts()
    for name, run in commands:
        add_command(kinds, f"bench {name}", run, **values)


def run_plot(args: argparse.Namespace) -> int:
    """Draws a report and returns the exit code."""
    check_output()
    check_path("REPORT", args.report, "a file with a report")
    check_outputs(args)
    draw_report(read_report(args.report), args.out)
    emit(f"wrote {args.out}")
    return 0
