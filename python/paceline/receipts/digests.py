# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of JSON values, and of the weights of a model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline.loader.weight_files import FileStamp

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

# Of the digest of weights: it is one of files, or one of the values in memory.
FILES: Final = "files:"
MEMORY: Final = "memory:"

_MAX_THREADS: Final = 8


def canonical(value: Any) -> bytes:
    """Writes a JSON value in its only form: ASCII, keys in order, no spaces, 1 for 1.0.

    Raises:
        ValueError: A number is infinite or NaN.
    """
    return json.dumps(
        _with_integers(value), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def _with_integers(value: Any) -> Any:
    """A value with integers for whole numbers, as other languages write them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_integers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        # Token ids, of which there may be a million.
        return value if set(map(type, value)) <= {int} else [_with_integers(one) for one in value]
    return value


def digest(value: Any) -> str:
    """Returns the SHA-256 of the canonical form of a JSON value, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


# ---- weights -----------------------------------------------------------------------------------


def weights_digest(target: LoadedModel, *, of_memory: bool | None = None) -> str:
    """Computes the digest of a model's weights.

    Args:
        target: The model.
        of_memory: Take the values in memory instead of the files that they came from. None = where
            there are no such files.

    Returns:
        "files:" or "memory:" and a digest in hexadecimal.

    Raises:
        ModelFileError: A file cannot be read, or has changed since it was loaded.
        NotImplementedError: The values are needed and are not in the memory of this process.
    """
    files = target.weights.files
    if of_memory is None:
        of_memory = not files
    if not of_memory and files:
        return FILES + digest(sorted(file_digests(files)))
    arena = getattr(target.model, "arena", None)
    if arena is None or target.model.device != "cpu":
        where = "in other processes" if arena is None else f"on {target.model.device!r}"
        raise NotImplementedError(
            f"a receipt of {target.path} needs the digest of its weights, which did not come from "
            f"files and are {where}; allowed: weights in files, such as those that "
            "save_pretrained writes, or device 'cpu' in this process"
        )
    return MEMORY + hashlib.sha256(arena()).hexdigest()


def file_digests(files: Sequence[FileStamp]) -> list[str]:
    """Returns the SHA-256 of each file, from the cache or computed in several threads.

    Raises:
        ModelFileError: A file cannot be read, or is not the one that was loaded.
    """
    num_threads = min(len(files), _MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(num_threads, 1), thread_name_prefix="paceline-digests") as pool:
        return list(pool.map(_file_digest, files))


def _file_digest(stamp: FileStamp) -> str:
    return _core.file_digest(
        os.fsencode(stamp.path),
        size=stamp.size,
        mtime_ns=stamp.mtime_ns,
        ctime_ns=stamp.ctime_ns,
        inode=stamp.inode,
    )
