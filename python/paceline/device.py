# SPDX-License-Identifier: Apache-2.0
"""Chooses the device of models and prepares CUDA before its first use."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline.config import DEVICES, check_device
from paceline.progress import progress_bar

CUBLASLT_VARIABLE: Final = "PACELINE_CUBLASLT"
CUBLASLT_NAME: Final = "libcublasLt.so.13"

# The folder of the library inside the common folder of NVIDIA's Python packages.
_CUBLASLT_FOLDER: Final = "cu13/lib"


def resolve_device(device: str = "auto") -> str:
    """Chooses the device that models are loaded to, and prepares CUDA if it is "cuda".

    Args:
        device: "cpu", "cuda", or "auto" for "cuda" if a GPU is usable and "cpu" otherwise.

    Returns:
        "cpu" or "cuda".

    Raises:
        ValueError: The device is none of the three.
        NotImplementedError: The device is an index such as "cuda:1", which is not supported.
    """
    check_device(device)
    if device == "auto":
        device = _auto_device()
    if device == "cuda":
        path = find_cublaslt()
        if path is not None:
            _core.set_cublaslt_path(path)
    return device


def chosen_gpus(
    device: str, tensor_parallel_size: int, devices: Sequence[int] | None
) -> tuple[int, ...]:
    """Chooses the GPU of each rank.

    Args:
        device: What `resolve_device` returned.
        tensor_parallel_size: The number of ranks.
        devices: The option `devices`.

    Returns:
        The GPUs in the order of the ranks. Empty: the models are loaded to `device` as it is.

    Raises:
        ValueError: `devices` is given for another device, or does not have one GPU for each rank.
        NotImplementedError: There are fewer GPUs.
    """
    if device != "cuda":
        if devices is not None:
            raise ValueError(
                f"devices is {list(devices)}, but the device is {device!r}; allowed: only with "
                "device 'cuda', otherwise leave it out"
            )
        return ()
    if devices is None:
        if tensor_parallel_size == 1:
            return ()
        devices = range(tensor_parallel_size)
    elif len(devices) != tensor_parallel_size:
        raise ValueError(
            f"devices is {list(devices)}, but tensor_parallel_size is {tensor_parallel_size}; "
            "allowed: one GPU for each rank"
        )
    num_gpus = _core.cuda_status()["num_gpus"]
    if max(devices) >= num_gpus:
        raise NotImplementedError(
            f"tensor_parallel_size is {tensor_parallel_size}, on the GPUs {list(devices)}, but the "
            f"process sees {num_gpus}, from 0; allowed: as many ranks as there are GPUs "
            "(CUDA_VISIBLE_DEVICES chooses them)"
        )
    return tuple(devices)


def _auto_device() -> str:
    return "cuda" if _core.cuda_status()["is_usable"] else "cpu"


def usable_devices() -> list[str]:
    """Returns the values of `device` that work on this machine."""
    is_usable = _core.cuda_status()["is_usable"]
    return [name for name in DEVICES if name != "cuda" or is_usable]


def find_cublaslt() -> str | None:
    """Looks for cuBLASLt in Python packages. The C++ library searches the system's own folders.

    Returns:
        The file or folder in the environment variable PACELINE_CUBLASLT if it is set; otherwise the
        folder of NVIDIA's Python package that has `libcublasLt.so.13`; otherwise None.
    """
    given = os.environ.get(CUBLASLT_VARIABLE)
    if given:
        return given
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location) / _CUBLASLT_FOLDER
        if (folder / CUBLASLT_NAME).is_file():
            return str(folder)
    return None


@contextlib.contextmanager
def capture_progress(*, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Provides a progress bar for `_core.Executor`, which appears with the first captured graph.

    Args:
        is_shown: Whether to show the bar if standard error is a terminal.

    Yields:
        The executor's `progress` argument.
    """
    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = progress_bar(total, "Capturing graphs", "graph", is_shown=is_shown)
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()
