# SPDX-License-Identifier: Apache-2.0
"""Runs `paceline bench compare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from paceline.bench.compare.ratios import CANNOT_BE_JUDGED, Ratio, paired_ratios, unpaired
from paceline.bench.compare.reading import FACTS, Report, read_any_report
from paceline.bench.report import TABLES, Output, columns, legends, table
from paceline.bench.values import check_outputs, parse_names
from paceline.checks import check_path, shorten
from paceline.console import EXIT_OK, check_output


def run_compare(args: argparse.Namespace) -> int:
    """Compares, prints the ratios and returns the exit code."""
    check_output()
    allowed: list[str] = []
    if args.allow_different is not None:
        allowed = parse_names("--allow-different", args.allow_different, FACTS)
    paths = [args.a, args.b, *args.more]
    for path in paths:
        check_path("REPORT", path, "a file with a report")
    check_outputs(args)
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
    output = Output(args.json)
    output.close(compared, _lines(turns, ratios, compared))
    output.write(compared)
    return EXIT_OK


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
    shown = []
    last = None
    for ratio in ratios:
        row = ratio.as_dict()
        row["name"] = "" if ratio.row == last else ratio.row
        row["spread"] = ""
        if len(ratio.ratios) > 1:
            row["spread"] = "{lowest:.3f} to {highest:.3f}".format_map(row)
        interval = ratio.interval
        row["shown"] = "" if interval is None else "{:.3f} to {:.3f}".format(*interval)
        shown.append({**row, "rounds": len(ratio.ratios)})
        last = ratio.row
    lines += ["", *table(columns("compare"), shown), *legends("compare")]
    if any(ratio.verdict == CANNOT_BE_JUDGED for ratio in ratios):
        lines.append(TABLES["compare"]["one_round"])
    if len(turns) == 1 and any(ratio.interval for ratio in ratios):
        lines.append(TABLES["compare"]["one_turn"])
    for path, names in compared["unpaired"].items():
        lines.append(f"only in {path}: {'; '.join(names)}")
    return lines
