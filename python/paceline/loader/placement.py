# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model go: to a device, or to GPUs of which each is a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import _core


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model go (`docs/tensor-parallel.md`).

    Attributes:
        device: "cpu" or "cuda".
        gpus: The GPU of each rank, which gets its part of a target; empty: the weights are on
            `device` as a whole.
        is_drafter: It is a drafter, of which a GPU gets a part or all.
        draft_tensor_parallel_size: `SpeculativeConfig.draft_tensor_parallel_size`: with 1 each GPU
            gets the whole drafter; None: bytes decide.
    """

    device: str
    gpus: Sequence[int] = ()
    is_drafter: bool = False
    draft_tensor_parallel_size: int | None = None

    def new_builder(self, config: Mapping[str, Any], weight_dtype: str) -> _core.ModelBuilder:
        """Allocates the weights of a model.

        Args:
            config: The canonical description of `docs/model-format.md`.
            weight_dtype: The dtype of matrices: "float32" or "bfloat16".

        Returns:
            The builder, which every tensor is put into.

        Raises:
            NotImplementedError: There is no such device; or ranks cannot share the target, or not
                the drafter as asked for, or the GPUs do not work together.
            ValueError: `gpus` has a number twice, `device` is not "cuda", or
                `draft_tensor_parallel_size` is neither 1 nor the number of GPUs.
            MemoryError: There is not enough memory for the weights.
        """
        return _core.ModelBuilder(
            json.dumps(config),
            weight_dtype,
            self.device,
            gpus=self.gpus,
            is_drafter=self.is_drafter,
            draft_tensor_parallel_size=self.draft_tensor_parallel_size or 0,
        )


def drafter_placement(
    device: str, gpus: Sequence[int], draft_tensor_parallel_size: int | None
) -> Placement:
    """Where the weights of a drafter go; the arguments are the attributes of `Placement`."""
    return Placement(device, gpus, True, draft_tensor_parallel_size)
