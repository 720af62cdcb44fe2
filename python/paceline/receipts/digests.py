# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of JSON values, and of the weights of a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline._core import ModelFileError
from paceline.loader.weight_files import FileStamp

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

_logger = logging.getLogger("paceline")

# Of the digest of weights: it is one of files, or one of the values in memory.
FILES: Final = "files:"
MEMORY: Final = "memory:"

_MAX_THREADS: Final = 8
# An entry of the cache has a path of at most 4,095 bytes and five short values.
_MAX_ENTRY_BYTES: Final = 64 << 10


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
    _check_unchanged(stamp)
    entry = _entry_of(stamp)
    found = _read_entry(entry, stamp)
    if found is not None:
        return found
    _logger.info("%s: computing the SHA-256 of %.1f MB for receipts", stamp.path, stamp.size / 1e6)
    try:
        with stamp.path.open("rb") as file:
            value = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFileError(f"{stamp.path}: cannot read weights: {error.strerror}") from None
    _check_unchanged(stamp)
    _write_entry(entry, stamp, value)
    return value


def _check_unchanged(stamp: FileStamp) -> None:
    try:
        now = FileStamp.of(stamp.path)
    except OSError as error:
        raise ModelFileError(
            f"{stamp.path}: {error.strerror}, but a receipt needs the digest of the weights that "
            "were loaded from it; allowed: a file that stays where it is while its model is loaded"
        ) from None
    if now != stamp:
        raise ModelFileError(
            f"{stamp.path}: the file has changed since its weights were loaded, so a receipt would "
            "name other weights; load the model again"
        )


# ---- the cache: one small file for each file of weights ------------------------------------------


def cache_folder() -> Path:
    """The folder of the cache: `paceline/digests` in $XDG_CACHE_HOME, or else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "paceline", "digests")


def _entry_of(stamp: FileStamp) -> Path:
    name = os.fsencode(os.path.realpath(stamp.path))
    return cache_folder() / f"{hashlib.sha256(name).hexdigest()[:32]}.json"


def _facts_of(stamp: FileStamp) -> dict[str, Any]:
    return {
        "path": os.fsencode(os.path.realpath(stamp.path)).decode(errors="backslashreplace"),
        "size": stamp.size,
        "mtime_ns": stamp.mtime_ns,
        "ctime_ns": stamp.ctime_ns,
        "inode": stamp.inode,
    }


def _read_entry(entry: Path, stamp: FileStamp) -> str | None:
    """The digest in the cache; None if there is none for the file as it is now."""
    try:
        with entry.open("rb") as file:
            values = json.loads(file.read(_MAX_ENTRY_BYTES))
        value = values.pop("sha256")
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, TypeError):
        return None
    is_digest = isinstance(value, str) and len(value) == 64
    return value if is_digest and values == _facts_of(stamp) else None


def _write_entry(entry: Path, stamp: FileStamp, value: str) -> None:
    """Stores a digest; a cache that cannot be written costs time and nothing else."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=entry.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({**_facts_of(stamp), "sha256": value}, file)
            os.replace(temporary, entry)
        except BaseException:
            os.unlink(temporary)
            raise
