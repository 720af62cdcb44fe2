# SPDX-License-Identifier: Apache-2.0
"""Grammars that take long to compile, and what the process that tries them does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline import LLM
from paceline.running_llm import internals

_PAGE_BYTES = 4096


def slow_schema(index: int) -> dict[str, Any]:
    """One of many schemas whose compilation takes far more CPU time than is allowed."""
    numbers = range(99_991 - 200 * index, 99_991 - 200 * (index + 1), -2)
    return {"anyOf": [{"type": "integer", "multipleOf": number} for number in numbers]}


def trial_pid(llm: LLM) -> int:
    """The process that has tried a grammar before."""
    process = internals(llm).requests.grammars._trials._process
    assert process is not None
    return process.pid


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def resident_bytes(pid: int | str = "self") -> int:
    """The memory of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def wait_for_children(llm: LLM, count: int, timeout_s: float = 20) -> None:
    """Waits until so many grammars are being tried."""
    deadline = time.monotonic() + timeout_s
    while len(children(trial_pid(llm))) != count:
        assert time.monotonic() < deadline, children(trial_pid(llm))
        time.sleep(0.005)
