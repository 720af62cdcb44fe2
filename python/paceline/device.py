# SPDX-License-Identifier: Apache-2.0
"""Which device models lie and run on, and what CUDA needs before it is first used."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline.config import DEVICES, check_device

CUBLASLT_VARIABLE: Final = "PACELINE_CUBLASLT"
CUBLASLT_NAME: Final = "libcublasLt.so.13"

# Where NVIDIA's packages for Python put the library, below their common folder.
_CUBLASLT_FOLDER: Final = "cu13/lib"


def resolve_device(device: str = "auto") -> str:
    """Chooses where models lie and run, and makes CUDA ready if that is it.

    Args:
        device: "auto" = "cuda" where there is a usable GPU, else "cpu"; or one of those two.

    Returns:
        "cpu" or "cuda".

    Raises:
        ValueError: None of the three.
        NotImplementedError: "cuda" where it cannot be used; says why.
    """
    check_device(device)
    if device == "auto":
        device = _auto_device()
    if device == "cuda":
        path = find_cublaslt()
        if path is not None:
            _core.set_cublaslt_path(path)
    return device


def _auto_device() -> str:
    return "cuda" if _core.cuda_status()["is_usable"] else "cpu"


def usable_devices() -> list[str]:
    """The values of `device` that work here: "auto", "cpu" and maybe "cuda"."""
    is_usable = _core.cuda_status()["is_usable"]
    return [name for name in DEVICES if name != "cuda" or is_usable]


def find_cublaslt() -> str | None:
    """Looks for cuBLASLt beside Python; the library itself looks in the system's usual places.

    Returns:
        What the environment variable PACELINE_CUBLASLT says, a file or a folder; else the folder
        of NVIDIA's package for Python that has `libcublasLt.so.13`; else None.
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
    """A progress bar for `_core.Executor`, there from the first captured program on.

    Args:
        is_shown: Whether to show it where standard error is a terminal.

    Yields:
        What the executor takes as `progress`.
    """
    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            from tqdm import tqdm

            bar = tqdm(
                total=total,
                desc="Capturing graphs",
                unit="graph",
                disable=None if is_shown else True,
            )
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()
