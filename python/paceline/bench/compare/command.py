# SPDX-License-Identifier: Apache-2.0
"""Runs `paceline bench compare`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Final

from paceline.bench.compare.ratios import CANNOT_BE_JUDGED, Ratio, paired_ratios, unpaired
from paceline.bench.compare.reading import FACTS, Report, read_any_report
from paceline.bench.options import check_can_write
from paceline.bench.report import write_json
from paceline.bench.tables import table
from paceline.checks import check_path, quoted, shorten
from paceline.console import EXIT_OK, check_output, emit

_LEGEND: Final = """\
B/A: the median ratio over the rounds, then the lowest and the highest. 95 % interval: where the
mean ratio lies, by the spread of the turns, or of the rounds if there is one turn. better, worse:
the interval does not contain 1. within noise: it does."""
_ONE_ROUND: Final = """\
cannot be judged: with one round, nothing tells noise from a change; measure more with --rounds, or
give the reports of further turns."""
_ONE_TURN: Final = """\
one turn: the interval does not know what differs between two runs of one program; give the reports
of three turns or more."""


def add_compare_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `compare` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "compare",
        help="the ratios of two reports, or of reports by turns, with their spread",
        description=(
            "Prints the ratio B / A of each figure of each row that two reports share. Further "
            "reports are those of further turns, measured A B A B ..., so that a machine that gets "
            "warmer or slower meanwhile does so for both. Reports of different commands or "
            "machines are refused."
        ),
    )
    parser.add_argument("a", metavar="A.json", help="a report of `latency`, `pairs` or `serve`")
    parser.add_argument("b", metavar="B.json", help="one of the same bench, to compare with it")
    parser.add_argument(
        "more",
        metavar="MORE.json",
        nargs="*",
        default=[],  # without a default, argparse names it where B.json is missing
        help="reports of further turns: A, B, A, B, ...",
    )
    parser.add_argument(
        "--allow-different",
        metavar="LIST",
        help=f"compare although these differ: {', '.join(FACTS)} (default: none)",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the ratios as a JSON object; without FILE, print only this object (default: "
        "none)",
    )
    return parser


def run_compare(args: argparse.Namespace) -> int:
    """Compares, prints the ratios and returns the exit code."""
    check_output()
    allowed = _parse_allowed(args.allow_different)
    paths = [args.a, args.b, *args.more]
    for path in paths:
        check_path("REPORT", path, "a file with a report")
    if args.json is not None and args.json != "-":
        check_can_write("--json", args.json)
    if len(paths) % 2:
        raise ValueError(
            f"there are {len(paths)} reports; allowed: an even number, A and B by turns"
        )
    reports = [read_any_report(path) for path in paths]
    differing = _check(reports, allowed)
    turns = list(zip(reports[::2], reports[1::2], strict=True))
    ratios = paired_ratios(turns)
    if not ratios:
        raise ValueError(
            f"no row is in all reports; {shorten(reports[0].path, 200)} has "
            f"{shorten('; '.join(reports[0].rows), 200)}, {shorten(reports[1].path, 200)} has "
            f"{shorten('; '.join(reports[1].rows), 200)}"
        )
    compared = {
        "bench": "compare",
        "of": reports[0].kind,
        "a": [a.path for a, _ in turns],
        "b": [b.path for _, b in turns],
        "different": differing,
        "unpaired": unpaired(turns),
        "rows": [ratio.as_dict() for ratio in ratios],
    }
    if args.json == "-":
        emit(json.dumps(compared))
        return EXIT_OK
    for line in _lines(turns, ratios, compared):
        emit(line)
    if args.json is not None:
        write_json(args.json, compared)
    return EXIT_OK


def _parse_allowed(text: str | None) -> list[str]:
    names = [] if text is None else text.split(",")
    for name in names:
        if name not in FACTS:
            raise ValueError(
                f"--allow-different is {shorten(text)}; allowed: a list of {quoted(FACTS)}"
            )
    return names


def _check(reports: Sequence[Report], allowed: Sequence[str]) -> dict[str, list[str]]:
    """Refuses reports that do not compare; returns the facts that differ although allowed.

    A fact that a report does not state, such as the machine of a server, is not compared.
    """
    first = reports[0]
    for report in reports[1:]:
        if report.kind != first.kind:
            raise ValueError(
                f"{shorten(first.path, 200)} is a report of `bench {first.kind}` and "
                f"{shorten(report.path, 200)} one of `bench {report.kind}`; allowed: reports of "
                "one bench"
            )
    differing = {}
    for name in FACTS:
        stated = {report.path: report.facts[name] for report in reports}
        values = list(dict.fromkeys(value for value in stated.values() if value is not None))
        if len(values) < 2:
            continue
        if name not in allowed:
            owners = [
                next(path for path, value in stated.items() if value == wanted)
                for wanted in values[:2]
            ]
            raise ValueError(
                f"the reports have different {name}s: {shorten(owners[0], 200)} has "
                f"{shorten(values[0], 300)}, {shorten(owners[1], 200)} has "
                f"{shorten(values[1], 300)}; measure both in the same way, or add "
                f"--allow-different {','.join([*allowed, name])}"
            )
        differing[name] = values
    return differing


def _lines(
    turns: Sequence[tuple[Report, Report]], ratios: Sequence[Ratio], compared: dict[str, Any]
) -> list[str]:
    lines = []
    for letter, reports in zip("AB", zip(*turns, strict=True), strict=True):
        listed = ", ".join(f"{report.path} ({report.date})" for report in reports)
        lines.append(f"{letter}: {listed}")
    lines += [
        f"different {name}s: {' | '.join(values)}" for name, values in compared["different"].items()
    ]
    cells = []
    last = None
    for ratio in ratios:
        spread = (
            "" if len(ratio.ratios) == 1 else f"{min(ratio.ratios):.3f} to {max(ratio.ratios):.3f}"
        )
        interval = ratio.interval
        shown = "" if interval is None else "{:.3f} to {:.3f}".format(*interval)
        cells.append(
            [
                "" if ratio.row == last else ratio.row, ratio.figure, f"{ratio.a:,.3f}",
                f"{ratio.b:,.3f}", f"{ratio.median:.3f}", spread, len(ratio.ratios), shown,
                ratio.verdict,
            ]
        )  # fmt: skip
        last = ratio.row
    head = (
        "row", "figure", "A", "B", "B/A", "lowest to highest", "rounds", "95 % interval", "B is",
    )  # fmt: skip
    lines += ["", *table(head, cells), _LEGEND]
    if any(ratio.verdict == CANNOT_BE_JUDGED for ratio in ratios):
        lines.append(_ONE_ROUND)
    if len(turns) == 1 and any(ratio.interval for ratio in ratios):
        lines.append(_ONE_TURN)
    for path, names in compared["unpaired"].items():
        lines.append(f"only in {path}: {'; '.join(names)}")
    return lines
