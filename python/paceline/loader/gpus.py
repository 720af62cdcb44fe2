# SPDX-License-Identifier: Apache-2.0
"""Copies loaded models to several GPUs, of which each is a rank (docs/tensor-parallel.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline import _core

from .loaded_model import LoadedModel


def split_pair(
    target: LoadedModel, draft: LoadedModel | None, gpus: Sequence[int]
) -> tuple[LoadedModel, LoadedModel | None]:
    """Copies models from the CPU to GPUs: to each its part of the target, and the whole drafter.

    Args:
        target: The target, loaded to "cpu".
        draft: The drafter, or None.
        gpus: The GPU of each rank.

    Returns:
        The models on the GPUs.

    Raises:
        NotImplementedError: Ranks cannot share the target, or the GPUs do not work together.
        MemoryError: There is not enough memory on a GPU.
    """
    split = replace(target, model=_core.split_model(target.model, gpus, is_drafter=False))
    if draft is None:
        return split, None
    if draft is target and len(gpus) == 1:
        return split, split
    return split, replace(draft, model=_core.split_model(draft.model, gpus, is_drafter=True))
