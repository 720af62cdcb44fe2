# SPDX-License-Identifier: Apache-2.0
"""Token ids among the weights of a draft head: its vocabulary, and the order of its clusters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from paceline._core import ModelFileError

from .gemma4_assistant import CENTROIDS, TOKEN_ORDERING
from .tensor_source import TensorSource, read_tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_INTEGERS: Final = {"I64": "<i8", "I32": "<i4"}


def _read_ids(shard: TensorSource, name: str, count: int, meaning: str) -> npt.NDArray[np.int64]:
    """Reads a list of integers."""
    import numpy as np

    dtype, shape, _ = shard.info(name)
    where = f"{shard.path}: tensor {name!r}"
    if dtype not in _INTEGERS:
        raise ModelFileError(f"{where} is stored as {dtype}; expected {' or '.join(_INTEGERS)}")
    if tuple(shape) != (count,):
        raise ModelFileError(f"{where} has shape {list(shape)}; expected [{count}], {meaning}")
    return _read_array(shard, name, _INTEGERS[dtype]).astype(np.int64)


def read_ordering(owners: Mapping[str, TensorSource], vocab_size: int) -> npt.NDArray[np.int32]:
    """Reads the token ids of an assistant's clusters, cluster by cluster: each id once."""
    import numpy as np

    name = TOKEN_ORDERING
    if name not in owners:
        raise ModelFileError(
            f"{owners[CENTROIDS].path}: tensor {CENTROIDS!r} is in the weights, but {name!r} is "
            "not; expected both or none of the two"
        )
    where = f"{owners[name].path}: tensor {name!r}"
    ids = _read_ids(owners[name], name, vocab_size, "a token id of the target at each index")
    is_bad = (ids < 0) | (ids >= vocab_size)
    if is_bad.any():
        index = int(is_bad.argmax())
        raise ModelFileError(
            f"{where}[{index}] is {int(ids[index])}; expected ids from 0 to {vocab_size - 1}"
        )
    counts = np.bincount(ids, minlength=vocab_size)
    if counts.max() > 1:
        token = int(counts.argmax())
        first, second = (int(index) for index in np.flatnonzero(ids == token)[:2])
        raise ModelFileError(
            f"{where} has token id {token} at indices {first} and {second}; expected every id once"
        )
    return ids.astype(np.int32)


def read_map(
    owners: Mapping[str, TensorSource], prefix: str, num_rows: int, vocab_size: int
) -> npt.NDArray[np.int32]:
    """Reads `d2t`, whose offsets are added to the row, as token ids of the target; checks `t2d`."""
    import numpy as np

    name = f"{prefix}d2t" if f"{prefix}d2t" in owners else "d2t"
    where = f"{owners[name].path}: tensor {name!r}"
    offsets = _read_ids(owners[name], name, num_rows, "a value for each row of 'lm_head.weight'")
    rows = np.arange(num_rows, dtype=np.int64)
    # An offset near the end of int64 would wrap around, perhaps into the allowed range.
    is_bad = (offsets < -rows) | (offsets >= vocab_size - rows)
    ids = rows + np.where(is_bad, 0, offsets)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise ModelFileError(
            f"{where}[{row}] is {int(offsets[row])}, which is row {row} as token id "
            f"{row + int(offsets[row])}; expected ids from 0 to {vocab_size - 1}, as offsets "
            "from the row"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) != num_rows:
        token = int(unique[(counts > 1).argmax()])
        first, second = (int(row) for row in np.flatnonzero(ids == token)[:2])
        raise ModelFileError(
            f"{where} gives rows {first} and {second} the same token id {token}; expected a "
            "different one for each row"
        )
    _check_mask(owners, prefix, unique, vocab_size)
    return ids.astype(np.int32)


def _check_mask(
    owners: Mapping[str, TensorSource], prefix: str, ids: npt.NDArray[np.int64], vocab_size: int
) -> None:
    """Checks that `t2d`, where a file has it, marks the token ids that `d2t` maps to."""
    import numpy as np

    name = f"{prefix}t2d" if f"{prefix}t2d" in owners else "t2d"
    if name not in owners:
        return
    shard = owners[name]
    dtype, shape, _ = shard.info(name)
    where = f"{shard.path}: tensor {name!r}"
    if dtype not in ("BOOL", "U8") or tuple(shape) != (vocab_size,):
        raise ModelFileError(
            f"{where} is {dtype} of shape {list(shape)}; expected BOOL of shape [{vocab_size}], a "
            "mark for each id of the target"
        )
    marked = np.flatnonzero(_read_array(shard, name, "u1"))
    if not np.array_equal(marked, ids):
        raise ModelFileError(
            f"{where} marks {len(marked)} ids, but 'd2t' reaches {len(ids)}"
            f"{'' if len(marked) != len(ids) else ' others'}; expected the same ids"
        )


def _read_array(shard: TensorSource, name: str, dtype: str) -> npt.NDArray[Any]:
    import numpy as np

    return np.frombuffer(read_tensor(shard, name), np.dtype(dtype))
