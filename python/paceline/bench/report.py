# SPDX-License-Identifier: Apache-2.0
"""The reports of all benches: tables of columns and rows, and JSON."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline.console import emit


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        shown: What a row shows, as a format string with the keys of the row; "-" if a figure is
            None.
        unit: The second line of its heading, in a table with fixed widths.
        width: Its width, in such a table.
    """

    name: str
    shown: str
    unit: str = ""
    width: int = 0


#: What tables.toml says.
TABLES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
)


def columns(*names: str) -> tuple[Column, ...]:
    """The columns of these parts of a table, as tables.toml has them."""
    return tuple(Column(*cells) for name in names for cells in TABLES[name]["columns"])


def legends(*names: str) -> list[str]:
    """What explains them."""
    return [TABLES[name]["legend"] for name in names]


def parts(name: str, device: str) -> tuple[str, ...]:
    """The parts of a table on a device: it has more columns for a GPU."""
    return (name, "gpu") if device == "cuda" else (name,)


def gpu_cells(gpu: Mapping[str, Any] | None) -> dict[str, str]:
    """The cells of a GPU: a clock is marked where the driver lowered it; "-" if unknown."""
    clock, power = (None, None) if gpu is None else (gpu["sm_clock_mhz"], gpu["power_w"])
    mark = "!" if gpu is not None and gpu["is_throttled"] else ""
    return {
        "clock": "-" if clock is None else f"{clock:.0f}{mark}",
        "power": "-" if power is None else f"{power:.0f}",
    }


class GrowingTable:
    """A table whose rows are shown as they are measured, in columns of fixed widths."""

    def __init__(self, columns: Sequence[Column], name_width: int) -> None:
        """Takes the columns, and the width of the first one."""
        self._columns = columns
        self._widths = [name_width, *(column.width for column in columns[1:])]

    def heading(self) -> list[str]:
        """The two lines above the rows."""
        names = [column.name for column in self._columns]
        units = [column.unit for column in self._columns]
        return [self.line(names), self.line(units)]

    def row(self, row: Mapping[str, Any]) -> str:
        """The line of a row."""
        return self.line(_cells(self._columns, row))

    def line(self, cells: Sequence[str]) -> str:
        """A line of the first cells; a last one that is too long exceeds its column."""
        return _join(cells, self._widths, " ")


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a complete table, whose columns are as wide as needed."""
    lines = [[column.name for column in columns], *(_cells(columns, row) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [_join(cells, widths, "  ").rstrip() for cells in lines]


def _cells(columns: Sequence[Column], row: Mapping[str, Any]) -> list[str]:
    figures = {**row, **gpu_cells(row.get("gpu"))}
    return [_cell(column, figures) for column in columns]


def _cell(column: Column, figures: Mapping[str, Any]) -> str:
    try:
        return column.shown.format_map(figures)
    except TypeError:  # the figure is None
        return "-"


def _join(cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
    """A line with the first cell flush left and the others flush right."""
    first, *others = zip(cells, widths, strict=False)
    return gap.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


class Output:
    """Standard output of a bench, and the file of its --json."""

    def __init__(self, json_path: str | None, bar: Any = None) -> None:
        """Takes the value of --json, and the bar that lines are printed above."""
        self._path = json_path
        self._bar = bar

    @property
    def is_json_alone(self) -> bool:
        """Returns whether the JSON is printed instead of all else."""
        return self._path == "-"

    def show(self, lines: Iterable[str]) -> None:
        """Prints lines, unless the JSON is printed alone."""
        if self.is_json_alone:
            return
        above = self._bar.external_write_mode(sys.stdout) if self._bar else contextlib.nullcontext()
        with above:
            for line in lines:
                emit(line, flush=True)

    def write(self, report: Any) -> None:
        """Writes the file of --json, if it is given."""
        if self._path is not None and not self.is_json_alone:
            write_json(self._path, report)

    def close(self, report: Any, lines: Iterable[str] = ()) -> None:
        """Prints what follows the rows: the JSON if it is printed alone, else lines."""
        if self.is_json_alone:
            emit(json.dumps(report))
        self.show(lines)


def write_json(path: str, value: Any) -> None:
    """Writes a file; an OSError names it."""
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:  # of a full disk, without the name of the file
        raise OSError(error.errno, error.strerror, path) from None


def report_facts(bench: str, command: str, device: str, read_bandwidth: float) -> dict[str, Any]:
    """What the reports of `latency` and `pairs` have beside their rows; docs/bench.md has the keys.

    Args:
        bench: "latency" or "pairs".
        command: The command line.
        device: "cpu" or "cuda".
        read_bandwidth: Bytes per second from memory.
    """
    return {
        "bench": bench,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": command,
        "machine": machine_name(device),
        "version": _core.version(),
        "build": _core.build_info(),
        "device": device,
        "read_bandwidth_gb_per_s": read_bandwidth / 1e9,
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
