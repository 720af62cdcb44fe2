# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model go: to a device, or to GPUs of which each is a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline import _core


def new_builder(
    config: Mapping[str, Any],
    weight_dtype: str,
    *,
    device: str,
    gpus: Sequence[int],
    is_drafter: bool,
    draft_tensor_parallel_size: int | None = None,
) -> _core.ModelBuilder:
    """Allocates the weights of a model (`docs/tensor-parallel.md`).

    Args:
        config: The canonical description of `docs/model-format.md`.
        weight_dtype: The dtype of matrices: "float32" or "bfloat16".
        device: "cpu" or "cuda".
        gpus: The GPU of each rank, which gets its part of a target; empty: the weights are on
            `device` as a whole.
        is_drafter: It is a drafter, of which a GPU gets a part or all.
        draft_tensor_parallel_size: `SpeculativeConfig.draft_tensor_parallel_size`: with 1 each GPU
            gets the whole drafter; None: bytes decide.

    Returns:
        The builder, which every tensor is put into.

    Raises:
        NotImplementedError: There is no such device; or ranks cannot share the target, or not the
            drafter as asked for, or the GPUs do not work together.
        ValueError: `gpus` has a number twice, `device` is not "cuda", or
            `draft_tensor_parallel_size` is neither 1 nor the number of GPUs.
        MemoryError: There is not enough memory for the weights.
    """
    return _core.ModelBuilder(
        json.dumps(config),
        weight_dtype,
        device,
        gpus=gpus,
        is_drafter=is_drafter,
        draft_tensor_parallel_size=draft_tensor_parallel_size or 0,
    )
