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
) -> _core.ModelBuilder:
    """Allocates the weights of a model (`docs/tensor-parallel.md`).

    Args:
        config: The canonical description of `docs/model-format.md`.
        weight_dtype: The dtype of matrices: "float32" or "bfloat16".
        device: "cpu" or "cuda".
        gpus: The GPU of each rank, which gets its part of a target, or a whole drafter; empty: the
            weights are on `device` as a whole.
        is_drafter: It is a drafter.

    Returns:
        The builder, which every tensor is put into.

    Raises:
        NotImplementedError: There is no such device; or ranks cannot share the target, or the GPUs
            do not work together.
        ValueError: `gpus` has a number twice, or `device` is not "cuda".
        MemoryError: There is not enough memory for the weights.
    """
    return _core.ModelBuilder(
        json.dumps(config), weight_dtype, device, gpus=gpus, is_drafter=is_drafter
    )
