# SPDX-License-Identifier: Apache-2.0
"""The programs that measure what receipts and changes of the drafter cost."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from markdown_pages import ROOT
from time_limits import HANG_LIMIT_S


def printed(script: str, *options: str) -> list[float]:
    """The numbers that a program of docs/scripts prints; not those in names, such as eagle3."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/scripts" / script), *options],
        capture_output=True, text=True, timeout=HANG_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", done.stdout)]


def test_the_cost_of_receipts() -> None:
    numbers = printed("bench_receipts.py", "--requests", "2", "--tokens", "8", "--turns", "1")
    num_requests, num_tokens, receipt_us, token_us, *_ = numbers
    assert (num_requests, num_tokens) == (2, 8)
    assert receipt_us > 0
    assert token_us * 8 == pytest.approx(receipt_us, abs=0.6)  # both are rounded


def test_the_cost_of_changes_of_the_drafter() -> None:
    options = ("--requests", "2", "--tokens", "48", "--switches", "4")
    numbers = printed("bench_switches.py", *options)
    num_changes, num_requests, iteration_us, num_iterations, rest_us, longest_us, *pauses = numbers
    assert (num_changes, num_requests) == (4, 2)
    assert num_iterations > 0 and 0 < rest_us <= longest_us
    assert rest_us < iteration_us
    assert len(pauses) == 2 and min(pauses) > 0
