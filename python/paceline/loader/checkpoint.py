# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint on disk: its files, which tensor lies where, and loading them.

The C++ library maps and validates safetensors files; Python only reads names and shapes and hands
over which tensor is which. Neither torch nor the safetensors package is involved.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline._core import ModelFileError, ModelNotFoundError

from .decoder import LM_HEADS, Family, TensorSpec
from .families import ARCHITECTURES, check_dtype, translate
from .hf_config import HfConfig, Section, read_hf_config, read_json_object
from .kinds import kind_of_config

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
STORED_DTYPES: Final = ("BF16", "F16", "F32")

# Where a drafter belongs.
_CURE: Final = ": name it in speculative_config['model'], or after --draft of `paceline convert`"
# How many names a message lists.
_MAX_NAMED: Final = 5
# Bytes compared at a time.
_CHUNK_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Shard:
    """One safetensors file, mapped and validated.

    Attributes:
        path: Where it lies.
        file: The mapping.
    """

    path: Path
    file: _core.SafetensorsFile


@dataclass(frozen=True)
class BoundTensor:
    """A tensor that the model needs and where the checkpoint keeps it.

    Attributes:
        spec: What is needed.
        shard: The file it lies in.
        source: Its full name there.
        dtype: As stored: "BF16", "F16" or "F32".
        nbytes: Bytes as stored.
    """

    spec: TensorSpec
    shard: Shard
    source: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were checked; no weights were read yet.

    Attributes:
        path: The folder.
        hf: Its configuration.
        family: The decoder, translated.
        weight_dtype: What matrices become: "float32" or "bfloat16".
        tensors: Every tensor the model needs, in the order in which it is filled.
        notes: What a user may want to know about the choices made, one sentence each.
    """

    path: Path
    hf: HfConfig
    family: Family
    weight_dtype: str
    tensors: tuple[BoundTensor, ...]
    notes: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The canonical description, for `weight_dtype`."""
        return self.family.config_for(self.weight_dtype)

    @property
    def stored_dtypes(self) -> dict[str, int]:
        """How many matrices are stored in each dtype."""
        return dict(Counter(tensor.dtype for tensor in self.tensors if tensor.spec.is_matrix))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, of those that the vocabulary has."""
        vocab_size = self.family.config["vocab_size"]
        return tuple(token for token in self.hf.eos_token_ids if token < vocab_size)


def open_checkpoint(path: str | os.PathLike[str], dtype: str = "auto") -> Checkpoint:
    """Opens the checkpoint in a folder and checks that it has all that its configuration asks for.

    Args:
        path: The folder: `config.json` and `model.safetensors`, or shards with
            `model.safetensors.index.json`.
        dtype: "float32", "bfloat16", or "auto": bfloat16 when every matrix is stored as BF16, else
            float32.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
    """
    check_dtype(dtype)
    directory = open_directory(path)
    hf = _read_config(directory)
    family = translate(hf)
    shards, listing = _open_shards(directory)
    tensors = _bind(family, shards, listing, hf.source)
    weight_dtype, notes = _choose_dtype(dtype, tensors)
    checkpoint = Checkpoint(directory, hf, family, weight_dtype, tensors, tuple(notes))
    dropped = sorted(set(hf.eos_token_ids) - set(checkpoint.eos_token_ids))
    if dropped:
        note = (
            f"end-of-sequence ids {dropped} of {directory} are outside of its vocabulary "
            f"({family.config['vocab_size']} ids) and are left out"
        )
        checkpoint = Checkpoint(directory, hf, family, weight_dtype, tensors, (*notes, note))
    return checkpoint


def open_directory(path: str | os.PathLike[str]) -> Path:
    """Checks that a path can be the folder of a checkpoint.

    Args:
        path: The folder.

    Returns:
        The folder.

    Raises:
        ModelNotFoundError: There is no such folder.
        ModelFileError: It is none, or one that `paceline convert` wrote.
    """
    directory = Path(path)
    _check_directory(directory)
    return directory


def load_weights(
    checkpoint: Checkpoint, *, device: str = "cpu", progress: bool = True
) -> _core.Model:
    """Fills a model with the checkpoint's tensors, each copied and converted once.

    Args:
        checkpoint: What `open_checkpoint` returned.
        device: "cpu" or "cuda": where the weights will lie.
        progress: Show a progress bar where standard error is a terminal.

    Raises:
        ModelFileError: The library refuses the description or a tensor.
        NotImplementedError: There is no such device.
        MemoryError: There is no room for the weights.
    """
    from tqdm import tqdm

    builder = _core.ModelBuilder(json.dumps(checkpoint.config), checkpoint.weight_dtype, device)
    with tqdm(
        total=checkpoint.nbytes,
        desc=f"Loading {checkpoint.path.name or checkpoint.path}",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for tensor in checkpoint.tensors:
            builder.put_tensor(tensor.spec.name, tensor.shard.file, tensor.source)
            bar.update(tensor.nbytes)
    return builder.finish()


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


def _read_config(directory: Path) -> HfConfig:
    """The configuration of a target; that of a drafter is refused with a hint."""
    try:
        return read_hf_config(directory, ARCHITECTURES)
    except NotImplementedError as error:
        path = directory / "config.json"
        top = Section(read_json_object(path, "the model's configuration"), str(path))
        kind = kind_of_config(top)
        if kind is None:
            raise
        raise NotImplementedError(
            f"{error}; it is a drafter ({kind}) and no target{_CURE}"
        ) from None


def _check_directory(directory: Path) -> None:
    if directory.is_dir():
        if (directory / "paceline.json").is_file() and not (directory / "config.json").exists():
            raise ModelFileError(
                f"{directory}: a folder written by `paceline convert` (it has paceline.json); "
                "expected a Hugging Face checkpoint with config.json"
            )
        return
    if directory.exists():
        raise ModelFileError(f"{directory}: not a folder; expected the folder of a checkpoint")
    raise ModelNotFoundError(
        f"{directory}: no such folder; expected the local folder of a checkpoint with config.json "
        f"and {WEIGHTS_NAME} (nothing is downloaded)"
    )


def _open_shards(directory: Path) -> tuple[list[Shard], dict[str, str]]:
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
                f"{_name_some(name for name, shard in listing.items() if shard == shard_name)}"
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


def _bind(
    family: Family, shards: list[Shard], listing: Mapping[str, str], config_source: str
) -> tuple[BoundTensor, ...]:
    """Finds every tensor that the model needs, and refuses those that nobody asked for."""
    owners = {name: shard for shard in shards for name in shard.file.names()}
    prefix = next((p for p in family.prefixes if f"{p}embed_tokens.weight" in owners), None)
    if prefix is None:
        prefix = family.prefixes[0]
    lm_head = next((name for name in family.lm_head_names if name in owners), None)

    bound: list[BoundTensor] = []
    missing: list[str] = []
    for spec in family.tensors:
        source = prefix + spec.source
        if spec.name == "lm_head.weight":
            source = lm_head or family.lm_head_names[0]
        shard = owners.get(source)
        if shard is None:
            missing.append(source)
            continue
        dtype, shape, nbytes = shard.file.info(source)
        if dtype not in STORED_DTYPES:
            raise NotImplementedError(
                f"{shard.path}: tensor {source!r} is stored as {dtype}, which Paceline does not "
                f"support; supported: {', '.join(STORED_DTYPES)}"
            )
        if tuple(shape) != spec.shape:
            raise ModelFileError(
                f"{shard.path}: tensor {source!r} has shape {list(shape)}; expected "
                f"{list(spec.shape)} ({spec.shape_keys} of {config_source})"
            )
        bound.append(BoundTensor(spec, shard, source, dtype, nbytes))
    if missing:
        _raise_missing(missing, family, shards, owners)
    _check_unexpected(family, prefix, bound, owners, listing, config_source)
    return tuple(bound)


def _raise_missing(
    missing: list[str], family: Family, shards: list[Shard], owners: Mapping[str, Shard]
) -> None:
    where = str(shards[0].path) if len(shards) == 1 else str(shards[0].path.parent / INDEX_NAME)
    count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
    hint = ""
    if "fc.weight" in owners:
        hint = f"; with 'fc.weight' it is an EAGLE drafter and no target{_CURE}"
    elif missing == [family.lm_head_names[0]] and family.tied_table is None:
        hint = '; a model that shares it with the embeddings says "tie_word_embeddings": true'
    elif missing[0].endswith("embed_tokens.weight") and len(missing) > 1:
        prefixes = ", ".join(map(repr, family.prefixes))
        hint = f"; the file has {_name_some(owners)}; allowed prefixes: {prefixes}"
    raise ModelFileError(
        f"{where}: {count} missing: {_name_some(missing)}, which {family.architecture} needs{hint}"
    )


def _check_unexpected(
    family: Family,
    prefix: str,
    bound: Iterable[BoundTensor],
    owners: Mapping[str, Shard],
    listing: Mapping[str, str],
    config_source: str,
) -> None:
    used = {tensor.source: tensor for tensor in bound}
    unexpected: list[str] = []
    for name, shard in owners.items():
        if name in used or name.endswith("rotary_emb.inv_freq"):
            continue
        if name.startswith(family.ignored_prefixes or ("\0",)):
            continue
        if name.startswith(prefix) and name.removeprefix(prefix) in family.ignored_sources:
            continue
        if family.tied_table is not None and name in LM_HEADS:
            table = next(t for t in used.values() if t.spec.name == family.tied_table)
            _check_tied_copy(name, shard, table, config_source)
            continue
        unexpected.append(name)
    if not unexpected:
        return
    shard = owners[unexpected[0]]
    where = str(shard.path.parent / INDEX_NAME) if listing else str(shard.path)
    count = "1 tensor is" if len(unexpected) == 1 else f"{len(unexpected)} tensors are"
    raise ModelFileError(
        f"{where}: {count} not part of {family.architecture} as {config_source} describes it: "
        f"{_name_some(unexpected)}"
    )


def _check_tied_copy(name: str, shard: Shard, table: BoundTensor, config_source: str) -> None:
    """A tied lm_head may be in the file, as a copy of the embeddings."""
    import numpy as np

    dtype, shape, nbytes = shard.file.info(name)
    same = (dtype, tuple(shape), nbytes) == (
        table.dtype,
        table.spec.shape,
        table.nbytes,
    )
    if same:
        with RawShard(shard.path) as left, RawShard(table.shard.path) as right:
            ours, theirs = left.view(name), right.view(table.source)
            for begin in range(0, nbytes, _CHUNK_BYTES):
                part = slice(begin, begin + _CHUNK_BYTES)
                if not np.array_equal(
                    np.frombuffer(ours[part], np.uint8), np.frombuffer(theirs[part], np.uint8)
                ):
                    same = False
                    break
            ours.release()
            theirs.release()
    if not same:
        raise ModelFileError(
            f"{shard.path}: tensor {name!r} differs from {table.source!r}, but key "
            f'"tie_word_embeddings" of {config_source} is true; expected no such tensor, a copy, '
            "or false"
        )


def _choose_dtype(dtype: str, tensors: Iterable[BoundTensor]) -> tuple[str, list[str]]:
    """The weight dtype, and what there is to say about it."""
    matrices = [tensor for tensor in tensors if tensor.spec.is_matrix]
    stored = {tensor.dtype for tensor in matrices}
    names = " and ".join(sorted(stored))
    if dtype == "auto":
        if stored == {"BF16"}:
            return "bfloat16", []
        if stored == {"F32"}:
            return "float32", []
        return "float32", [f"weights stored as {names} are loaded as float32, which is lossless"]
    if dtype == "float32" or stored == {"BF16"}:
        return dtype, []
    narrow = next((tensor for tensor in matrices if tensor.dtype == "F16"), None)
    if narrow is not None:
        # The library refuses it: two 16-bit formats, and the way from one to the other loses bits
        # without saving any.
        raise ValueError(
            f"dtype is 'bfloat16', but tensor {narrow.source!r} of {narrow.shard.path} is stored "
            "as F16, which would lose 3 bits of each value; allowed: 'auto' or 'float32'"
        )
    return dtype, [f"weights stored as {names} are rounded to bfloat16, as asked"]


def _name_some(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(map(repr, listed[:_MAX_NAMED]))
    more = len(listed) - _MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text
