# SPDX-License-Identifier: Apache-2.0
"""The weight files of a checkpoint: one safetensors file, or shards with their index."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline import _core
from paceline._core import ModelFileError, ModelNotFoundError

from .section import read_json_object

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

# How many names a message lists.
_MAX_NAMED: Final = 5


@dataclass(frozen=True)
class Shard:
    """One safetensors file, mapped and validated.

    Attributes:
        path: Where it lies.
        file: The mapping.
    """

    path: Path
    file: _core.SafetensorsFile


class RawShard:
    """The bytes of the tensors in a safetensors file.

    Only for files that `_core.SafetensorsFile` has accepted: offsets are not checked again. A view
    that is still in use when the context ends keeps the mapping alive.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file.

        Raises:
            OSError: It cannot be opened or mapped.
        """
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (header_bytes,) = struct.unpack_from("<Q", self._map)
        header = json.loads(self._map[8 : 8 + header_bytes])
        self._offsets: dict[str, tuple[int, int]] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                self._offsets[name] = (8 + header_bytes + begin, 8 + header_bytes + end)

    def __enter__(self) -> RawShard:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()

    def view(self, name: str) -> memoryview:
        """The bytes of one tensor, row-major and little-endian; a view into the mapping."""
        begin, end = self._offsets[name]
        return memoryview(self._map)[begin:end]


def open_shards(directory: Path) -> tuple[list[Shard], dict[str, str]]:
    """Opens the weight files; also returns the index's file by tensor, empty without an index."""
    single = directory / WEIGHTS_NAME
    if single.exists():
        return [_open_shard(single)], {}
    index = directory / INDEX_NAME
    if not index.exists():
        others = sorted(
            entry.name for entry in directory.iterdir() if entry.suffix in (".bin", ".pth", ".gguf")
        )
        hint = f"; {others[0]} is there, but only safetensors are read" if others else ""
        raise ModelNotFoundError(
            f"{directory}: neither {WEIGHTS_NAME} nor {INDEX_NAME} is there{hint}"
        )
    listing = _read_index(index)
    shards: list[Shard] = []
    owners: dict[str, Path] = {}
    for shard_name in sorted(set(listing.values())):
        path = directory / shard_name
        if not path.exists():
            raise ModelNotFoundError(
                f"{path}: no such file, but {INDEX_NAME} says that it holds "
                f"{name_some(name for name, shard in listing.items() if shard == shard_name)}"
            )
        shard = _open_shard(path)
        for name in shard.file.names():
            if name in owners:
                raise ModelFileError(
                    f"{path}: tensor {name!r} also lies in {owners[name].name}; expected every "
                    "tensor in one shard"
                )
            owners[name] = path
        shards.append(shard)
    for name, shard_name in listing.items():
        owner = owners.get(name)
        if owner is None or owner.name != shard_name:
            where = "no shard holds it" if owner is None else f"it lies in {owner.name}"
            raise ModelFileError(
                f"{directory / shard_name}: tensor {name!r} is missing, but {INDEX_NAME} says that "
                f"it lies here; {where}"
            )
    return shards, listing


def _open_shard(path: Path) -> Shard:
    return Shard(path, _core.SafetensorsFile(os.fspath(path)))


def _read_index(index: Path) -> dict[str, str]:
    values = read_json_object(index, "the list of weight files")
    listing = values.get("weight_map")
    if not isinstance(listing, dict) or not listing:
        seen = "missing" if listing is None else f"{type(listing).__name__} {listing!r:.60}"
        raise ModelFileError(
            f'{index}: key "weight_map" is {seen}; expected an object with the file of every tensor'
        )
    for name, shard_name in listing.items():
        if not isinstance(shard_name, str) or not _is_plain_name(shard_name):
            raise ModelFileError(
                f'{index}: key "weight_map.{name}" is {shard_name!r:.80}; expected the plain name '
                "of a .safetensors file in the same folder"
            )
    return {str(name): str(shard_name) for name, shard_name in listing.items()}


def _is_plain_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and not any(mark in name for mark in "/\\:")
        and not name.startswith(".")
    )


def name_some(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(map(repr, listed[:_MAX_NAMED]))
    more = len(listed) - _MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text
