# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(
    total: int,
    what: str,
    unit: str,
    *,
    is_shown: bool,
    needs_terminal: bool = True,
    is_scaled: bool = False,
) -> Any:
    """Makes a progress bar with an ETA.

    Args:
        total: The number of steps.
        what: What is being done, before the bar.
        unit: What a step is.
        is_shown: Whether to show it. A process without standard error shows none.
        needs_terminal: Show it only where standard error is a terminal.
        is_scaled: Write numbers of steps as 1.2k, 3.4M.

    Returns:
        A `tqdm`, which is a context manager.
    """
    from tqdm import tqdm

    if sys.stderr is None:  # under pythonw, or closed by a daemon; tqdm would write to it
        is_shown = False
    hides = True if not is_shown else None if needs_terminal else False
    return tqdm(total=total, desc=what, unit=unit, unit_scale=is_scaled, disable=hides)
