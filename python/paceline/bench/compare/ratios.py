# SPDX-License-Identifier: Apache-2.0
"""Ratios of two variants that were measured by turns, with what their spread says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.compare.reading import CLOCK, MORE_IS_BETTER, Report


@dataclass(frozen=True)
class Ratio:
    """One figure of one row.

    Attributes:
        row: The name of the row.
        figure: The key of the figure.
        a: Median of variant A.
        b: Median of variant B.
        ratios: B over A, of each round.
    """

    row: str
    figure: str
    a: float
    b: float
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        """What the ratios say of B: "better" or "worse" if all of them agree, "noise" if not, "one
        round" if there is nothing to agree with, and "" for the clock.
        """
        if self.figure == CLOCK:
            return ""
        if len(self.ratios) == 1:
            return "one round"
        if not (all(ratio < 1 for ratio in self.ratios) or all(ratio > 1 for ratio in self.ratios)):
            return "noise"
        return "better" if (self.ratios[0] > 1) == (self.figure in MORE_IS_BETTER) else "worse"

    def as_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return {
            "row": self.row,
            "figure": self.figure,
            "a": self.a,
            "b": self.b,
            "ratio": self.median,
            "lowest": min(self.ratios),
            "highest": max(self.ratios),
            "ratios": list(self.ratios),
            "verdict": self.verdict,
        }


def paired_ratios(turns: Sequence[tuple[Report, Report]]) -> list[Ratio]:
    """Ratios of the rows that all reports have, in the order of the first.

    Rounds of two reports of one turn are paired in order. If their numbers differ, their medians
    are one pair.

    Args:
        turns: Reports of A and B, measured one after the other.
    """
    first, _ = turns[0]
    found = []
    for name in first.rows:
        if not all(name in report.rows for turn in turns for report in turn):
            continue
        for figure in first.rows[name]:
            values = [[report.rows[name].get(figure, []) for report in turn] for turn in turns]
            if not all(a and b for a, b in values):
                continue
            ratios = []
            for a, b in values:
                if len(a) == len(b):
                    ratios += [later / earlier for earlier, later in zip(a, b, strict=True)]
                else:
                    ratios.append(statistics.median(b) / statistics.median(a))
            of_a = [value for a, _ in values for value in a]
            of_b = [value for _, b in values for value in b]
            found.append(
                Ratio(name, figure, statistics.median(of_a), statistics.median(of_b), tuple(ratios))
            )
    return found


def unpaired(turns: Sequence[tuple[Report, Report]]) -> dict[str, list[str]]:
    """Rows that some report lacks, by the report that has them."""
    reports = [report for turn in turns for report in turn]
    common = set.intersection(*(set(report.rows) for report in reports))
    return {
        report.path: [name for name in report.rows if name not in common]
        for report in reports
        if set(report.rows) - common
    }
