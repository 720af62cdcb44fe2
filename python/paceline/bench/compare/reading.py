# SPDX-License-Identifier: Apache-2.0
"""Reads the reports of all benches as rows of figures, a value for each round."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.checks import shorten

Figures = dict[str, list[float]]

#: Facts that two reports must share, unless --allow-different names them.
FACTS: Final = ("command", "machine")

# Of each bench: the figures that are compared.
_LATENCY: Final = ("iteration_ms", "output_tokens_per_s", "time_to_first_token_ms")
_REQUESTS: Final = (
    "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms",
)  # fmt: skip
_PAIRS: Final = (*_REQUESTS, "iteration_ms")
#: Figures of which more is better; of all others but the clock, less is.
MORE_IS_BETTER: Final = ("output_tokens_per_s", "output_throughput")
#: The clock explains other figures, and is neither better nor worse.
CLOCK: Final = "sm_clock_mhz"
# A sampling parameter that a row's name leaves out.
_GREEDY: Final = ("temperature", 0)
# Options of a command that name where its output goes; with a value, or without.
_OUTPUT_OPTIONS: Final = ("--json", "--plot", "--trace", "--label")
_OUTPUT_SWITCHES: Final = ("--quiet", "-q", "--save-detailed")


@dataclass
class Report:
    """A report of any bench.

    Attributes:
        path: Its file.
        kind: "latency", "pairs" or "serve".
        facts: Those of FACTS, the command without the options of output; None if it does not say.
        date: When it was measured.
        rows: By the name of a row: a value of each round for each figure.
    """

    path: str
    kind: str
    facts: dict[str, str | None]
    date: str
    rows: dict[str, Figures] = field(default_factory=dict)

    def add(self, name: str, figures: Figures) -> None:
        """Adds a row; one that the report has already gets further rounds."""
        row = self.rows.setdefault(name, {})
        for key, values in figures.items():
            row.setdefault(key, []).extend(values)


def read_any_report(path: str) -> Report:
    """Reads what --json of `bench latency`, `pairs` or `serve` wrote.

    Raises:
        ValueError: It is no such file.
        OSError: It cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        values = json.loads(content)
        report = _read(path, values)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        report = None
    if report is None or not report.rows:
        raise ValueError(
            f"{shorten(path, 200)} has no row of a bench; allowed: a file that `paceline bench "
            "latency`, `pairs` or `serve` wrote with --json FILE"
        )
    return report


def _read(path: str, values: Any) -> Report:
    if isinstance(values, list) or "endpoint_type" in values:
        results = values if isinstance(values, list) else [values]
        report = _report(path, "serve", results[0])
        for result in results:
            report.add(_serve_name(result), _figures(result, _REQUESTS))
        return report
    if values.get("bench") == "pairs":
        report = _report(path, "pairs", values)
        for row in values["rows"]:
            name = f"{row['pair']}, T={row['temperature']:g}, c={row['max_concurrency']}"
            report.add(name, _figures(row, _PAIRS))
        return report
    report = _report(path, "latency", values)
    for row in values["rows"]:
        report.add(_latency_name(row), _figures(row, _LATENCY))
    for row in values.get("arrivals", ()):
        share = row["capacity_share"]
        rate = f"{row['request_rate']:g}/s" if share is None else f"{share:.0%} of the capacity"
        report.add(f"{_latency_name(row)}, {rate}", _figures(row, _REQUESTS))
    return report


def _report(path: str, kind: str, values: Mapping[str, Any]) -> Report:
    command = values.get("command")
    machine = values.get("machine") or values.get("device_name")
    facts = {
        "command": None if command is None else _without_output(str(command)),
        "machine": None if machine is None else str(machine),
    }
    return Report(path, kind, facts, str(values.get("date", "")))


def _without_output(command: str) -> str:
    """A command without the options that only say where its output goes."""
    words = iter(shlex.split(command))
    kept = []
    for word in words:
        option = word.partition("=")[0]
        if word in _OUTPUT_SWITCHES:
            continue
        if option not in _OUTPUT_OPTIONS:
            kept.append(word)
        elif option == word:
            value = next(words, "")
            if value.startswith("--"):  # `--json` may stand alone
                words = _before(value, words)
    return shlex.join(kept)


def _before(first: str, rest: Any) -> Any:
    yield first
    yield from rest


def _latency_name(row: Mapping[str, Any]) -> str:
    work = row["workload"]
    # Rows of one command with several lengths have the length in their name, too.
    name = re.sub(r" input_len=\d+", "", row["configuration"])
    parts = [name, f"c={work['concurrency']}", f"{work['input_len']}+{work['output_len']} tokens"]
    sampling = {key: value for key, value in work["sampling"].items() if (key, value) != _GREEDY}
    parts += [f"{key}={value:g}" for key, value in sampling.items() if f"{key}=" not in name]
    return ", ".join(parts)


def _serve_name(row: Mapping[str, Any]) -> str:
    rate = row["request_rate"]
    parts = [str(row["model_id"]), f"{row['num_prompts']} requests"]
    parts.append("all at once" if rate == "inf" else f"{rate:g}/s")
    if row["max_concurrency"] is not None:
        parts.append(f"c={row['max_concurrency']}")
    return ", ".join(parts)


def _figures(row: Mapping[str, Any], keys: tuple[str, ...]) -> Figures:
    """The figures of a row that exist and are above zero."""
    rounds = row.get("rounds") or [row]
    figures = {key: [float(values[key]) for values in rounds if values.get(key)] for key in keys}
    clock = (row.get("gpu") or {}).get(CLOCK)
    if clock:
        figures[CLOCK] = [float(clock)]
    return {key: values for key, values in figures.items() if values}
