# SPDX-License-Identifier: Apache-2.0
"""Copies loaded models to several GPUs, of which each is a rank (docs/tensor-parallel.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline import _core

from .loaded_model import LoadedModel


def split_pair(
    target: LoadedModel,
    draft: LoadedModel | None,
    gpus: Sequence[int],
    draft_tensor_parallel_size: int | None = None,
) -> tuple[LoadedModel, LoadedModel | None]:
    """Copies models from the CPU to GPUs: to each its part of the target, and of the drafter.

    Args:
        target: The target, loaded to "cpu".
        draft: The drafter, or None.
        gpus: The GPU of each rank.
        draft_tensor_parallel_size: `SpeculativeConfig.draft_tensor_parallel_size`: with 1 each GPU
            gets the whole drafter, and with None it may get a part or all.

    Returns:
        The models on the GPUs.

    Raises:
        NotImplementedError: Ranks cannot share the target, or not the drafter as asked for, or the
            GPUs do not work together.
        ValueError: `draft_tensor_parallel_size` is neither 1 nor the number of GPUs.
        MemoryError: There is not enough memory on a GPU.
    """
    split = replace(target, model=_core.split_model(target.model, gpus, is_drafter=False))
    if draft is None:
        return split, None
    if draft is target and len(gpus) == 1:
        return split, split
    size = draft_tensor_parallel_size or 0
    model = _core.split_model(draft.model, gpus, is_drafter=True, draft_tensor_parallel_size=size)
    return split, replace(draft, model=model)
