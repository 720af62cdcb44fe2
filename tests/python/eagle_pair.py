# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of EAGLE draft heads: their target and opening a draft head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_models import EagleSpec
from paceline.loader import DrafterCheckpoint, Target, open_checkpoint, open_drafter
from tiny_models import TinySpec, make

# From eight layers on the default (2, L // 2, L - 3) is in ascending order.
TARGET = TinySpec("llama", seed=40, num_layers=8)
AUX = (2, 4, 5)
SPECS = {
    "eagle": EagleSpec("eagle"),
    "eagle3": EagleSpec("eagle3"),
    "speculators": EagleSpec("speculators", norm_before_residual=True),
}


def target_of(path: Path, dtype: str = "auto") -> Target:
    """The facts that a draft head must fit, without loading any weights."""
    return open_checkpoint(path, dtype).as_target()


def opened(path: Path, target: TinySpec = TARGET, **arguments: Any) -> DrafterCheckpoint:
    return open_drafter(path, target_of(make(target)), **arguments)
