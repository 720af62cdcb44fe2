# SPDX-License-Identifier: Apache-2.0
"""A block drafter's own embedding for mask tokens, which takes the place of a row of the target's.

z-lab's folders may have it as a pickle. `paceline convert` gives such a drafter embeddings of its
own: a copy of the target's with that row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._core import ModelFileError

from .binding import BoundTensor
from .block_facts import tensor_prefix
from .block_kinds import block_kind_of_config, block_section, read_mask_token
from .drafters import Target, made_for_another
from .folder import CheckpointFolder
from .pickles import read_mask_embedding
from .safetensors_writer import NewTensor, float_bytes, write_safetensors
from .tensor_source import WeightMap
from .weight_files import WEIGHTS_NAME, open_weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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
