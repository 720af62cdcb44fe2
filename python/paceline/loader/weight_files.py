# SPDX-License-Identifier: Apache-2.0
"""The weight files of a checkpoint: one safetensors file, or shards with their index."""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from paceline import _core
from paceline._core import ModelFileError, ModelNotFoundError

from .files import exists, open_regular
from .messages import name_some, quote, shorten, show
from .row_part import RowPart
from .section import read_json_object
from .tensor_source import TensorSource

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

# The limit of the library.
_MAX_HEADER_BYTES: Final = 100_000_000
# Bytes of a tensor read at a time.
_CHUNK_BYTES: Final = 16 << 20
# The limit of file systems.
_MAX_NAME_BYTES: Final = 255


@dataclass(frozen=True)
class FileStamp:
    """What tells whether a file is still the one that was opened.

    Attributes:
        path: The file.
        size: In bytes.
        mtime_ns: When its contents changed last, which a program can set.
        ctime_ns: When it changed last in any way, which no program can set.
        inode: Its number in the file system.
    """

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Returns the stamp of a file as it is now; OSError if it is not there."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class Shard:
    """One safetensors file, mapped and validated: a `TensorSource`.

    Attributes:
        path: The file.
        file: The mapping.
        stamp: The file when it was mapped.
    """

    path: Path
    file: _core.SafetensorsFile
    stamp: FileStamp

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Maps and validates a file.

        Raises:
            ModelNotFoundError: There is no such file.
            ModelFileError: It is damaged.
        """
        file = _core.SafetensorsFile(os.fspath(path))
        return cls(path, file, FileStamp.of(path))

    @cached_property
    def _raw(self) -> RawShard:
        return RawShard(self.path)

    def info(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """See `TensorSource.info`."""
        return self.file.info(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `TensorSource.chunks`; errors also as for `RawShard`."""
        return self._raw.chunks(name, self.info(name)[2])

    def is_same(self, name: str, other: TensorSource, other_name: str) -> bool:
        """See `TensorSource.is_same`."""
        return other is self and other_name == name

    def put(self, builder: _core.ModelBuilder, weight: str, name: str) -> None:
        """See `TensorSource.put`."""
        builder.put_tensor(weight, self.file, name)

    def put_part(self, builder: _core.ModelBuilder, weight: str, name: str, part: RowPart) -> None:
        """See `TensorSource.put_part`."""
        builder.put_rows(weight, self.file, name, part.groups, part.first, part.count)


@dataclass(frozen=True)
class WeightFiles:
    """All weight files of a checkpoint.

    Attributes:
        directory: The folder of the files.
        owners: The file of every tensor, by the tensor's name.
        has_index: They are shards with an index.
    """

    directory: Path
    owners: Mapping[str, Shard]
    has_index: bool

    @property
    def where(self) -> str:
        """The file that names all tensors, for messages."""
        return str(self.directory / (INDEX_NAME if self.has_index else WEIGHTS_NAME))


class RawShard:
    """The bytes of the tensors in a safetensors file that `_core.SafetensorsFile` has accepted.

    The file is read, not mapped, so a file that has become shorter gives an error, not a signal.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file and reads the offset of each tensor.

        Raises:
            ModelFileError: It cannot be read, or has changed since it was accepted.
        """
        self._path = path
        self._fd = open_regular(path, "weights")
        weakref.finalize(self, os.close, self._fd)
        (header_bytes,) = struct.unpack("<Q", self._read(0, 8))
        if header_bytes > _MAX_HEADER_BYTES:
            raise self._changed()
        try:
            header = json.loads(self._read(8, header_bytes))
            self._offsets = {
                name: tuple(8 + header_bytes + offset for offset in entry["data_offsets"])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ModelFileError):
                raise
            raise self._changed() from None

    def chunks(self, name: str, nbytes: int) -> Iterator[bytes]:
        """The bytes of one tensor, row-major and little-endian, at most 16 MiB at a time.

        Args:
            name: The tensor's name in the file.
            nbytes: How many bytes it has.

        Raises:
            ModelFileError: The file has changed since it was accepted.
        """
        begin, end = self._offsets.get(name, (0, -1))
        if end - begin != nbytes:
            raise self._changed()
        for offset in range(begin, end, _CHUNK_BYTES):
            yield self._read(offset, min(_CHUNK_BYTES, end - offset))

    def _read(self, offset: int, count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self._fd, count, offset)
            except OSError as error:
                raise ModelFileError(
                    f"{self._path}: cannot read weights: {error.strerror}"
                ) from None
            if not part:
                raise self._changed()
            parts.append(part)
            offset += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _changed(self) -> ModelFileError:
        return ModelFileError(f"{self._path}: the file changed while it was read")


def open_weights(directory: Path) -> WeightFiles:
    """Opens the weight files in a folder.

    Returns:
        `model.safetensors`, or else the shards that the index names.

    Raises:
        ModelNotFoundError: There are none, or a shard is missing.
        ModelFileError: A file is damaged, or the shards are not those of the index.
    """
    single = directory / WEIGHTS_NAME
    if exists(single):
        shard = Shard.open(single)
        return WeightFiles(directory, dict.fromkeys(shard.file.names(), shard), has_index=False)
    index = directory / INDEX_NAME
    if not exists(index):
        raise ModelNotFoundError(
            f"{directory}: neither {WEIGHTS_NAME} nor {INDEX_NAME} is there{_cure(directory)}"
        )
    listing = _read_index(index)
    owners: dict[str, Shard] = {}
    for shard_name in sorted(set(listing.values())):
        path = directory / shard_name
        if not exists(path):
            raise ModelNotFoundError(
                f"{path}: no such file, but {INDEX_NAME} says that it holds "
                f"{name_some(name for name, shard in listing.items() if shard == shard_name)}"
            )
        shard = Shard.open(path)
        for name in shard.file.names():
            if name in owners:
                raise ModelFileError(
                    f"{path}: tensor {quote(name)} is also in {owners[name].path.name}; expected "
                    "every tensor in one shard"
                )
            owners[name] = shard
    for name, shard_name in listing.items():
        owner = owners.get(name)
        if owner is None or owner.path.name != shard_name:
            where = "no shard holds it" if owner is None else f"it is in {owner.path.name}"
            raise ModelFileError(
                f"{directory / shard_name}: tensor {quote(name)} is missing, but {INDEX_NAME} says "
                f"that it is here; {where}"
            )
    return WeightFiles(directory, owners, has_index=True)


def _cure(directory: Path) -> str:
    """What else is in a folder without weights that can be read, and what helps."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return ""  # a folder that may be searched but not listed
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        whole = f"rename it to {WEIGHTS_NAME}" if len(shards) == 1 else f"add their {INDEX_NAME}"
        return f"; there are {name_some(shards)}; {whole}"
    other = next((name for name in names if name.endswith((".bin", ".pth", ".gguf"))), None)
    if other is None:
        return ""
    return f"; {other} is there, but only safetensors are read; save the model as safetensors"


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        ModelFileError: The index is damaged, or a name is no plain name of a .safetensors file.
    """
    return sorted(set(_read_index(index).values()))


def _read_index(index: Path) -> dict[str, str]:
    values = read_json_object(index, "the list of weight files")
    listing = values.get("weight_map")
    if not isinstance(listing, dict) or not listing:
        seen = "missing" if listing is None else show(listing)
        raise ModelFileError(
            f'{index}: key "weight_map" is {seen}; expected an object with the file of every tensor'
        )
    for name, shard_name in listing.items():
        if not isinstance(shard_name, str) or not is_plain_name(shard_name):
            raise ModelFileError(
                f'{index}: key "{shorten(f"weight_map.{name}")}" is {show(shard_name)}; expected '
                "the plain name of a .safetensors file in the same folder"
            )
    return {str(name): str(shard_name) for name, shard_name in listing.items()}


def is_plain_name(name: str) -> bool:
    """Returns whether a string is the plain name of a .safetensors file, without any folder."""
    return (
        name.endswith(".safetensors")
        and len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
        and name.isprintable()
        and not any(mark in name for mark in "/\\:")
        and not name.startswith(".")
    )
