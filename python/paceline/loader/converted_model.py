# SPDX-License-Identifier: Apache-2.0
"""Opening the models of a folder that `paceline convert` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline._core import ModelFileError, ModelNotFoundError
from paceline.speculative_fields import check_found_method

from .binding import BoundTensor
from .checkpoint import OpenedModel
from .converted import ConvertedPart
from .drafter_checkpoint import DRAFT_MODEL
from .families import check_dtype
from .family import Family, TensorSpec
from .files import exists
from .folder import CheckpointFolder
from .messages import quote
from .section import Section
from .tensor_source import read_tensor
from .weight_files import Shard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Tensors of token ids, by their stored dtype.
_INTEGERS: Final = {"I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, kw_only=True)
class ConvertedModel(OpenedModel):
    """The target or the drafter of such a folder; only its token ids were read yet.

    The library checks names and shapes when it is filled, as it does when it reads the folder.

    Attributes:
        weights_path: The weight file.
        source: The folder.
        token_ids: Its tensors of token ids by name.
    """

    weights_path: Path
    source: CheckpointFolder
    token_ids: dict[str, npt.NDArray[np.int32]]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        return self.source.converted.stop_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """The token id that starts a prompt, if the folder names one."""
        return self.source.converted.bos_token_id

    @property
    def generation(self) -> Section | None:
        """The object in `generation_config.json`, if there is one."""
        return self.source.generation

    @property
    def ids(self) -> dict[str, npt.NDArray[np.int32]]:
        """Its tensors of token ids by canonical name."""
        return self.token_ids

    def is_narrowed(self, tensor: BoundTensor) -> bool:
        """Never: `convert` has rounded what must be, and the library refuses the rest."""
        return False


def part_for(
    folder: CheckpointFolder, dtype: str, *, is_drafter: bool, method: str | None = None
) -> ConvertedPart:
    """Chooses the target of a folder; or what drafts: its drafter, or the target if it has none.

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
    part = folder.converted.target
    if is_drafter:
        part = folder.converted.draft or part
        found = part.config.get("drafter", {}).get("kind", DRAFT_MODEL)
        check_found_method(method, found, f"{folder.path} holds a drafter")
    if dtype not in ("auto", part.dtype):
        raise ValueError(
            f"dtype is {dtype!r}, but {folder.path} was converted for {part.dtype!r} "
            f"({part.role}); allowed: 'auto' or {part.dtype!r}, or convert it again with --dtype"
        )
    return part


def open_converted(
    folder: CheckpointFolder, dtype: str, *, is_drafter: bool = False, method: str | None = None
) -> ConvertedModel:
    """Opens the target or the drafter of a folder.

    Args:
        folder: The folder.
        dtype: As for `part_for`, like all others.
        is_drafter: The part that drafts.
        method: The method that the user named, or None.

    Raises:
        ModelNotFoundError: The weight file is missing.
        ModelFileError: A file is damaged.
        Exception: As for `part_for`.
    """
    part = part_for(folder, dtype, is_drafter=is_drafter, method=method)
    path = folder.path / part.weights
    if not exists(path):
        raise ModelNotFoundError(f"{path}: no such file, but paceline.json names it")
    shard = Shard(path, _core.SafetensorsFile(str(path)))
    tensors = []
    ids = {}
    for name in shard.file.names():
        stored, shape, nbytes = shard.info(name)
        if stored in _INTEGERS:
            ids[name] = _read_ids(shard, name)
        else:
            spec = TensorSpec(name, name, tuple(shape), "")
            tensors.append(BoundTensor(spec, shard, name, stored, nbytes))
    return ConvertedModel(
        path=folder.path,
        top=None,
        family=family_of(part),
        weight_dtype=part.dtype,
        tensors=tuple(tensors),
        notes=(),
        weights_path=path,
        source=folder,
        token_ids=ids,
    )


def family_of(part: ConvertedPart) -> Family:
    """The decoder of a part, which is translated already."""
    return Family(str(part.config["name"]), part.architecture, part.config, (), ())


def _read_ids(shard: Shard, name: str) -> npt.NDArray[Any]:
    import numpy as np

    stored, shape, _ = shard.info(name)
    values = np.frombuffer(read_tensor(shard, name), _INTEGERS[stored])
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ModelFileError(f"{shard.path}: tensor {quote(name)} has ids beyond 32 bits")
    return values.astype(np.int32).reshape(shape)
