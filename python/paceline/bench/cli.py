# SPDX-License-Identifier: Apache-2.0
"""`paceline bench`: `latency`, `pairs` and `serve` measure, `compare` and `plot` read reports."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from paceline.bench.arrivals import DEFAULT_NUM_PROMPTS
from paceline.bench.compare.command import run_compare
from paceline.bench.compare.reading import FACTS
from paceline.bench.latency_command import run_latency
from paceline.bench.latency_options import SAMPLING_KEYS
from paceline.bench.lengths import DEFAULT_LENGTHS
from paceline.bench.models import config_names
from paceline.bench.pairs.command import run_pairs
from paceline.bench.pairs.known import ASSUMED_LENGTH, NUM_SPECULATIVE_TOKENS, PAIRS
from paceline.bench.pairs.options import PAIR_METHODS
from paceline.bench.plot import PLOT_NEEDS, draw_report, read_report
from paceline.bench.serve.client import CHATS, COMPLETIONS
from paceline.bench.serve.command import run_serve
from paceline.bench.serve.datasets import DATASETS
from paceline.bench.serving import GOODPUT_NAMES
from paceline.bench.values import check_outputs
from paceline.checks import check_path
from paceline.commands.flags import add_command
from paceline.console import check_output, emit, print_usage_help
from paceline.speculative_fields import DRAFT_DRIVERS, REJECTION_SAMPLE_METHODS


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
    values = _texts()
    for name, run in commands:
        add_command(kinds, f"bench {name}", run, **values)


def _texts() -> dict[str, object]:
    """The values of the names in the texts of flags.toml that only benches have."""
    return {
        # Acceptance methods that measure acceptance.
        "ACCEPT_METHODS": [m for m in REJECTION_SAMPLE_METHODS if m != "synthetic"],
        "ASSUMED_LENGTH": str(ASSUMED_LENGTH),
        "CHATS": CHATS,
        "COMPLETIONS": COMPLETIONS,
        "CONFIG_NAMES": config_names(),
        "DATASETS": DATASETS,
        "DEFAULT_LENGTHS": DEFAULT_LENGTHS,
        "DEFAULT_NUM_PROMPTS": DEFAULT_NUM_PROMPTS,
        "DRAFT_DRIVERS": DRAFT_DRIVERS,
        "ENDPOINTS": (COMPLETIONS, CHATS),
        "FACTS": FACTS,
        "GOODPUT_NAMES": GOODPUT_NAMES,
        "PAIRS": PAIRS,
        "PAIRS_K": NUM_SPECULATIVE_TOKENS,
        "PAIR_METHODS": PAIR_METHODS,
        "PLOT_NEEDS": PLOT_NEEDS,
        "SAMPLING_KEYS": SAMPLING_KEYS,
    }


def run_plot(args: argparse.Namespace) -> int:
    """Draws a report and returns the exit code."""
    check_output()
    check_path("REPORT", args.report, "a file with a report")
    check_outputs(args)
    draw_report(read_report(args.report), args.out)
    emit(f"wrote {args.out}")
    return 0
