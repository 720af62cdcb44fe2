# SPDX-License-Identifier: Apache-2.0
"""Opening the models of a folder that `paceline convert` wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from paceline._core import ModelFileError, ModelNotFoundError
from paceline.speculative_fields import check_found_method

from .binding import BoundTensor
from .checkpoint import OpenedModel
from .drafter_checkpoint import DRAFT_MODEL
from .families import check_dtype
from .family import Family, TensorSpec
from .files import exists
from .folder import CheckpointFolder
from .messages import quote
from .tensor_source import read_tensor
from .weight_files import Shard

if TYPE_CHECKING:
    import numpy.typing as npt

# Tensors of token ids, by their stored dtype.
_INTEGERS: Final = {"I32": "<i4", "I64": "<i8"}


def describe_converted(
    folder: CheckpointFolder, dtype: str, *, is_drafter: bool = False, method: str | None = None
) -> OpenedModel:
    """The target of a folder; or what drafts: its drafter, or the target if it has none.

    Its tensors are not looked at.

    Args:
        folder: The folder.
        dtype: "float32", "bfloat16" or "auto"; a folder has one dtype.
        is_drafter: The part that drafts is asked for.
        method: The method that the user named, or None.

    Raises:
        ValueError: `dtype` is not the folder's, or it drafts with another method.
        Exception: As for `read_converted`.
    """
    check_dtype(dtype)
    converted = folder.converted
    part = converted.target
    if is_drafter:
        part = converted.draft or part
        found = part.config.get("drafter", {}).get("kind", DRAFT_MODEL)
        check_found_method(method, found, f"{folder.path} holds a drafter")
    if dtype not in ("auto", part.dtype):
        raise ValueError(
            f"dtype is {dtype!r}, but {folder.path} was converted for {part.dtype!r} "
            f"({part.role}); allowed: 'auto' or {part.dtype!r}, or convert it again with --dtype"
        )
    return OpenedModel(
        path=folder.path,
        top=None,
        family=Family(str(part.config["name"]), part.architecture, part.config, (), ()),
        weight_dtype=part.dtype,
        eos_token_ids=converted.stop_token_ids,
        bos_token_id=converted.bos_token_id,
        generation=folder.generation,
        converted_file=folder.path / part.weights,
    )


def open_converted(
    folder: CheckpointFolder, dtype: str, *, is_drafter: bool = False, method: str | None = None
) -> OpenedModel:
    """The same with its tensors, of which only token ids are read.

    The library checks names and shapes when the model is filled, as it does when it reads the
    folder.

    Raises:
        ModelNotFoundError: The weight file is missing.
        ModelFileError: A file is damaged.
        Exception: As for `describe_converted`.
    """
    described = describe_converted(folder, dtype, is_drafter=is_drafter, method=method)
    path = described.converted_file
    assert path is not None
    if not exists(path):
        raise ModelNotFoundError(f"{path}: no such file, but paceline.json names it")
    shard = Shard.open(path)
    tensors = []
    ids = {}
    for name in shard.file.names():
        stored, shape, nbytes = shard.info(name)
        if stored in _INTEGERS:
            ids[name] = _read_ids(shard, name)
        else:
            spec = TensorSpec(name, name, tuple(shape), "")
            tensors.append(BoundTensor(spec, shard, name, stored, nbytes))
    return replace(described, tensors=tuple(tensors), ids=ids)


def _read_ids(shard: Shard, name: str) -> npt.NDArray[Any]:
    import numpy as np

    stored, shape, _ = shard.info(name)
    values = np.frombuffer(read_tensor(shard, name), _INTEGERS[stored])
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ModelFileError(f"{shard.path}: tensor {quote(name)} has ids beyond 32 bits")
    return values.astype(np.int32).reshape(shape)
