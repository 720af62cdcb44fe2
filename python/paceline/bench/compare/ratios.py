# SPDX-License-Identifier: Apache-2.0
"""Ratios of two variants that were measured by turns, with what their spread says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.bench.compare.reading import CLOCK, MORE_IS_BETTER, Report

#: The verdicts of which a table explains more.
WITHIN_NOISE: Final = "within noise"
CANNOT_BE_JUDGED: Final = "cannot be judged"

# Two-sided 95 % quantiles of Student's t, for 1, 2, ... degrees of freedom. Beyond the last one, it
# holds too, and makes an interval slightly wider.
_STUDENT_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """One figure of one row.

    Attributes:
        row: The name of the row.
        figure: The key of the figure.
        a: Median of variant A.
        b: Median of variant B.
        ratios: B over A, of each round.
        turns: The median ratio of each turn.
    """

    row: str
    figure: str
    a: float
    b: float
    ratios: tuple[float, ...]
    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean ratio (geometric), by Student's t; None with one
        round.

        Several turns count as one ratio each, since the rounds of a process resemble each other
        more than those of two processes.
        """
        repeats = self.turns if len(self.turns) > 1 else self.ratios
        if len(repeats) == 1:
            return None
        logs = [math.log(ratio) for ratio in repeats]
        quantile = _STUDENT_95[min(len(logs) - 1, len(_STUDENT_95)) - 1]
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        middle = statistics.fmean(logs)
        return math.exp(middle - half), math.exp(middle + half)

    @property
    def verdict(self) -> str:
        """Returns what the interval says of B: "better" or "worse" if it does not contain 1, else
        WITHIN_NOISE; CANNOT_BE_JUDGED without an interval, and "" for the clock.
        """
        if self.figure == CLOCK:
            return ""
        interval = self.interval
        if interval is None:
            return CANNOT_BE_JUDGED
        low, high = interval
        if low <= 1 <= high:
            return WITHIN_NOISE
        return "better" if (low > 1) == (self.figure in MORE_IS_BETTER) else "worse"

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
            "interval": self.interval,
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
            by_turn = [_ratios(a, b) for a, b in values]
            of_a = [value for a, _ in values for value in a]
            of_b = [value for _, b in values for value in b]
            found.append(
                Ratio(
                    name,
                    figure,
                    statistics.median(of_a),
                    statistics.median(of_b),
                    ratios=tuple(ratio for turn in by_turn for ratio in turn),
                    turns=tuple(statistics.median(turn) for turn in by_turn),
                )
            )
    return found


def _ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The ratios of one turn."""
    if len(a) == len(b):
        return [later / earlier for earlier, later in zip(a, b, strict=True)]
    return [statistics.median(b) / statistics.median(a)]


def unpaired(turns: Sequence[tuple[Report, Report]]) -> dict[str, list[str]]:
    """Rows that some report lacks, by the report that has them."""
    reports = [report for turn in turns for report in turn]
    common = set.intersection(*(set(report.rows) for report in reports))
    return {
        report.path: [name for name in report.rows if name not in common]
        for report in reports
        if set(report.rows) - common
    }
