# SPDX-License-Identifier: Apache-2.0
"""`paceline convert --allow-pickle`: reads pickles, weights only.

They are the tensors of an EAGLE draft head, and a block drafter's own embedding for mask tokens,
which takes the place of a row of the target's. z-lab's folders may have it as a pickle.
`paceline convert` gives such a drafter embeddings of its own: a copy of the target's with that row.

This is the only file that imports torch. Its weights-only reader builds tensors and refuses a
pickle that asks for anything else.
"""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline._core import ModelFileError

from .binding import BoundTensor
from .block_facts import tensor_prefix
from .block_kinds import block_kind_of_config, block_section, read_mask_token
from .drafter_checkpoint import DRAFT_MODEL, detect_method
from .drafters import Target, made_for_another
from .files import open_regular, read_file
from .folder import CONFIG_NAME, PICKLE_NAME, TOKENIZER_NAME, CheckpointFolder
from .safetensors_writer import NewTensor, float_bytes, write_safetensors
from .section import MAX_CONFIG_BYTES
from .state_dict import MemoryTensors
from .tensor_source import WeightMap
from .weight_files import WEIGHTS_NAME, open_weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

# The dtypes that the loader reads; `d2t` and `t2d` are integers.
_DTYPES: Final = (
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
    "torch.int64",
    "torch.int32",
    "torch.bool",
)


def read_pickle(source: CheckpointFolder) -> CheckpointFolder:
    """Reads the weights of a draft head from a pickle.

    Args:
        source: A folder with `config.json` and `pytorch_model.bin`.

    Returns:
        The same folder with the tensors of the pickle, which are mapped, not copied.

    Raises:
        ModelNotFoundError: A file is missing.
        ModelFileError: The pickle holds anything but tensors, or is damaged.
        NotImplementedError: It is no draft head, or torch is not installed.
    """
    pickle = source.path / PICKLE_NAME
    found = CheckpointFolder(source.path, MemoryTensors(_read_tensors(pickle), str(pickle)))
    if detect_method(found) == DRAFT_MODEL:
        raise NotImplementedError(
            f"{pickle}: not an EAGLE draft head (it has no tensor 'fc.weight'); "
            "--allow-pickle reads only those. Save other models as model.safetensors"
        )
    return found


def convert_pickle(source: CheckpointFolder, out: Path) -> None:
    """Writes the draft head in a folder with `model.safetensors` instead of the pickle.

    Args:
        source: A folder with `config.json` and `pytorch_model.bin`.
        out: An empty folder for the result, which has the same tensors.

    Raises:
        ModelNotFoundError: A file is missing.
        ModelFileError: The pickle holds anything but tensors, or is damaged.
        NotImplementedError: It is no EAGLE draft head, or torch is not installed.
        OSError: `out` cannot be written.
    """
    settings = read_file(
        source.path / CONFIG_NAME, "the drafter's configuration", max_bytes=MAX_CONFIG_BYTES
    )
    copies = {CONFIG_NAME: settings}
    if source.tokenizer_contents is not None:
        copies[TOKENIZER_NAME] = source.tokenizer_contents
    new: list[NewTensor] = []
    for name, tensors in read_pickle(source).weights.owners.items():
        dtype, shape, _ = tensors.info(name)
        new.append(NewTensor(name, dtype, shape, functools.partial(tensors.chunks, name)))
    write_safetensors(out / WEIGHTS_NAME, new, {"format": "pt", "from": PICKLE_NAME})
    for name, contents in copies.items():
        (out / name).write_bytes(contents)


def read_mask_embedding(path: Path) -> tuple[int, npt.NDArray[np.float32]]:
    """Reads a block drafter's own embedding for mask tokens.

    Args:
        path: The file `mask_embedding.pt`.

    Returns:
        The token id, and the embedding [hidden size].

    Raises:
        ModelFileError: The file holds anything else, or is damaged.
        NotImplementedError: torch is not installed.
    """
    import numpy as np

    values = _load(path)
    import torch

    keys = ("mask_token_id", "embedding")
    if not isinstance(values, Mapping) or set(values) != set(keys):
        seen = f"keys {sorted(map(str, values))}" if isinstance(values, Mapping) else f"{values!r}"
        raise ModelFileError(
            f"{path}: holds {type(values).__name__}, {seen:.80}; expected a dict with the keys "
            f"{keys[0]!r} and {keys[1]!r}"
        )
    token, embedding = (values[key] for key in keys)
    if isinstance(token, torch.Tensor) and token.numel() == 1 and not token.is_floating_point():
        token = token.item()
    if isinstance(token, bool) or not isinstance(token, int):
        raise ModelFileError(f"{path}: {keys[0]!r} is {token!r:.80}; expected a token id")
    is_floating = isinstance(embedding, torch.Tensor) and embedding.is_floating_point()
    if not is_floating or embedding.squeeze().ndim != 1 or embedding.numel() > path.stat().st_size:
        shape = list(embedding.shape) if isinstance(embedding, torch.Tensor) else embedding
        raise ModelFileError(
            f"{path}: {keys[1]!r} is {type(embedding).__name__} {shape!r:.80}; expected a tensor "
            "of floating-point numbers with one dimension"
        )
    flat = embedding.detach().float().reshape(-1).contiguous()
    return token, np.asarray(flat.numpy(), np.float32)


def _load(path: Path) -> Any:
    """Returns what a pickle holds, read weights only."""
    try:
        import torch
    except ModuleNotFoundError:
        raise NotImplementedError(
            "--allow-pickle reads the file with torch, which is not installed; pip install torch"
        ) from None
    os.close(open_regular(path, "weights"))
    # torch.save has written zip files since 2020; older formats are not supported.
    if not zipfile.is_zipfile(path):
        raise ModelFileError(f"{path}: not a zip file; expected one that torch.save wrote")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFileError(
            f"{path}: cannot be read weights-only ({type(error).__name__}): {lines[0]:.300}"
        ) from error


def _read_tensors(path: Path) -> Mapping[str, torch.Tensor]:
    tensors = _load(path)
    import torch

    if not isinstance(tensors, Mapping) or not tensors:
        raise ModelFileError(
            f"{path}: holds {type(tensors).__name__} {tensors!r:.60}; expected a dict of tensors"
        )
    size = path.stat().st_size
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelFileError(
                f"{path}: entry {name!r:.80} is {type(tensor).__name__}; expected tensors by name"
            )
        if str(tensor.dtype) not in _DTYPES or tensor.layout is not torch.strided:
            raise ModelFileError(
                f"{path}: tensor {name!r:.80} is {tensor.dtype}, {tensor.layout}; expected a "
                f"dense one of {', '.join(_DTYPES)}"
            )
        # A stride of 0 can turn a few bytes into a huge tensor.
        if tensor.numel() * tensor.element_size() > size:
            raise ModelFileError(
                f"{path}: tensor {name!r:.80} has shape {list(tensor.shape)}, which is more than "
                f"the file's {size} bytes"
            )
    return tensors


# ---- the row of mask tokens ----------------------------------------------------------------------


def add_mask_row(
    source: CheckpointFolder, pickle: Path, target: Target, out: Path
) -> CheckpointFolder:
    """Gives a block drafter embeddings of its own.

    Args:
        source: The drafter's folder.
        pickle: The file with the embedding of mask tokens.
        target: The target, with its tensors.
        out: An empty folder for the embeddings, which must stay while they are read.

    Returns:
        The folder `source` with its tensors and the embeddings.

    Raises:
        ModelNotFoundError: A file is missing.
        ModelFileError: The file holds anything else, or contradicts the configuration.
        NotImplementedError: The drafter is no block drafter, or has embeddings of its own;
            or torch is not installed.
        ValueError: It was made for another target.
        OSError: `out` cannot be written.
    """
    top = source.config
    if block_kind_of_config(top) is None:
        raise NotImplementedError(
            f"{pickle}: only drafters for 'dflash', 'dflash2' and 'dspark' have mask tokens, and "
            f"{top.source} describes another model; expected no such file"
        )
    owners = source.weights.owners
    name = f"{tensor_prefix(owners)}embed_tokens.weight"
    if name in owners:
        raise NotImplementedError(
            f"{pickle}: {owners[name].path} has {name!r}, in which mask tokens have a row already; "
            "supported: one of the two"
        )
    mask_token = read_mask_token(top, block_section(top), target.vocab_size)
    token, row = read_mask_embedding(pickle)
    if token != mask_token:
        raise ModelFileError(
            f"{pickle}: 'mask_token_id' is {token}, but {top.source} says {mask_token}; expected "
            "the same"
        )
    table = target.tables["embed.weight"]
    rows, hidden = table.spec.shape
    if len(row) != hidden:
        raise ValueError(
            f"{made_for_another(top)} the embedding in {pickle} has {len(row)} elements, but those "
            f"of {target.path} have {hidden}"
        )
    chunks = functools.partial(_with_row, table, token, row)
    new = NewTensor(name, table.dtype, (rows, hidden), chunks)
    write_safetensors(out / WEIGHTS_NAME, [new], {"format": "pt", "from": pickle.name})
    weights = WeightMap(source.weights.where, {**owners, **open_weights(out).owners})
    return CheckpointFolder(source.path, weights)


def _with_row(table: BoundTensor, index: int, row: npt.NDArray[np.float32]) -> Iterator[bytes]:
    """The bytes of a table in which one row is replaced."""
    new = float_bytes(row, table.dtype)
    first = index * len(new)
    begin = 0
    for part in table.shard.chunks(table.source):
        end = begin + len(part)
        low, high = max(first, begin), min(first + len(new), end)
        if low < high:
            part = part[: low - begin] + new[low - first : high - first] + part[high - begin :]
        yield part
        begin = end
