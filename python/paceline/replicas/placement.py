# SPDX-License-Identifier: Apache-2.0
"""Which GPU, or how many cores, each replica on this machine has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline import _core

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def place(
    num_replicas: int, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Divides this machine among replicas.

    Args:
        num_replicas: How many.
        arguments: Those of `LLM` for all of them.
        environment: That of this process.

    Returns:
        For each replica the arguments of its `LLM` and its own environment variables. With GPUs
        each has one for each of its ranks. Otherwise the cores are divided, unless `num_threads` is
        given.

    Raises:
        ValueError: There are fewer GPUs, or `devices` is given.
    """
    gpus = _gpus(environment) if _core.build_info()["has_cuda"] else []
    if arguments.get("device", "auto") != "cpu" and gpus:
        num_ranks = arguments.get("tensor_parallel_size", 1)
        if num_replicas * num_ranks > len(gpus):
            each = "" if num_ranks == 1 else f" for replicas of {num_ranks} GPUs"
            raise ValueError(
                f"--replicas is {num_replicas}; allowed: 1 to {len(gpus) // num_ranks}{each}, "
                f"since this machine has {len(gpus)} GPUs (in {_VISIBLE}, if that is set), "
                "or --device cpu"
            )
        if arguments.get("devices") is not None:
            raise ValueError(
                f"--devices is {arguments['devices']} and --replicas is {num_replicas}; allowed: "
                f"with replicas leave it out, since each has GPUs of its own ({_VISIBLE} chooses "
                "those of all)"
            )
        environments = [
            {_VISIBLE: ",".join(gpus[first : first + num_ranks])}
            for first in range(0, num_replicas * num_ranks, num_ranks)
        ]
    else:
        environments = [{} for _ in range(num_replicas)]
        if arguments.get("num_threads") is None:
            num_cores = len(os.sched_getaffinity(0))
            arguments = {**arguments, "num_threads": max(1, num_cores // num_replicas)}
    first = dict(arguments)
    # One progress bar says enough.
    return [first] + [first | {"show_progress": False}] * (num_replicas - 1), environments


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that this process may use.

    Without a call of CUDA, which would take memory of one of them for this process.
    """
    if _VISIBLE in environment:
        return [name.strip() for name in environment[_VISIBLE].split(",") if name.strip()]
    devices = Path("/dev").glob("nvidia[0-9]*")
    count = sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices)
    return [str(index) for index in range(count)]
