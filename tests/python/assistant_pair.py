# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of Gemma 4's assistants: their target and opening an assistant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assistant_models import AssistantSpec
from paceline.loader import DrafterCheckpoint, Target, open_checkpoint, open_drafter
from tiny_models import TinySpec, make

TARGET = TinySpec("gemma4", seed=70, kv_heads=1, logit_soft_cap=30.0)
DENSE = TinySpec("gemma4", seed=71, k_eq_v=True, shared_layers=0, per_layer_size=0)
CLUSTERS = AssistantSpec(centroids=(16, 3))
ORDERING = "masked_embedding.token_ordering"
CENTROIDS = "masked_embedding.centroids.weight"


def target_of(spec: TinySpec) -> Target:
    """The facts that an assistant must fit, without loading any weights."""
    return open_checkpoint(make(spec)).as_target()


def opened(path: Path, target: TinySpec = TARGET, **arguments: Any) -> DrafterCheckpoint:
    return open_drafter(path, target_of(target), **arguments)
