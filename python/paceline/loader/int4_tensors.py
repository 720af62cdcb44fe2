# SPDX-License-Identifier: Apache-2.0
"""The tensors of int4 matrices: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline._core import ModelFileError

from .conversion import Sibling
from .family import TensorSpec
from .formats import Dim, MatrixFormat, over
from .int4 import (
    AWQ,
    CODES_PER_WORD,
    NAMES,
    PACKED,
    SCALE_DTYPES,
    SHAPE_NAME,
    WORD_DTYPE,
    Int4Tensor,
)

_WORDS: Final = (WORD_DTYPE,)


def int4_specs(
    name: str, source: str, rows: Dim, columns: Dim, format: MatrixFormat
) -> list[TensorSpec]:
    """The codes of a matrix, its scales and its zero points.

    Args:
        name: The canonical name of the matrix.
        source: The path of its module in the checkpoint.
        rows: Its rows.
        columns: Its columns.
        format: Its format.

    Raises:
        ModelFileError: Its sizes do not fit the format.
    """
    group = _checked_group(source, rows, columns, format)
    names = NAMES[format.layout]
    groups = (columns[0] // group, over(columns, group))
    is_packed = format.layout == PACKED
    codes = {
        PACKED: (rows, _words(columns)),
        AWQ: (columns, _words(rows)),
    }.get(format.layout, (_words(columns), rows))
    zeros = (_words(rows), groups) if is_packed else (groups, _words(rows))
    scales = (rows, groups) if is_packed else (groups, rows)

    siblings: list[Sibling] = []
    if is_packed:
        shape_dims = ((2, "2"),)
        siblings.append(_sibling(f"{source}.{SHAPE_NAME}", shape_dims, ("I64", "I32")))
    if format.layout != AWQ:
        # Without an order it may be there, and says so.
        of_columns = f"{source}.{names.groups}"
        siblings.append(_sibling(of_columns, (columns,), _WORDS, is_required=format.has_order))
        if not format.has_zeros:
            siblings.append(_sibling(f"{source}.{names.zeros}", zeros, _WORDS))

    def spec(
        part: str,
        suffix: str,
        stored: str,
        ours: Sequence[Dim],
        theirs: Sequence[Dim],
        dtypes: tuple[str, ...],
        its_siblings: Sequence[Sibling] = (),
    ) -> TensorSpec:
        return TensorSpec(
            f"{name}.{suffix}",
            f"{source}.{stored}",
            tuple(size for size, _ in ours),
            ", ".join(keys for _, keys in theirs),
            dtypes,
            stored_shapes=(tuple(size for size, _ in theirs),),
            conversion=Int4Tensor(
                part,
                format.layout,
                rows[0],
                columns[0],
                group,
                format.has_zeros,
                format.has_order,
                tuple(its_siblings),
                format.key,
            ),
        )

    bytes_of_row = (columns[0] // 2, over(columns, 2))
    ours = (rows, groups)
    specs = [
        spec("codes", "weight", names.codes, (rows, bytes_of_row), codes, _WORDS, siblings),
        spec("scales", "scales", names.scales, ours, scales, SCALE_DTYPES),
    ]
    if format.has_zeros:
        specs.append(spec("zeros", "zeros", names.zeros, ours, zeros, _WORDS))
    return specs


def order_specs(
    name: str, modules: Sequence[str], columns: Dim, format: MatrixFormat | None
) -> list[TensorSpec]:
    """The order of the inputs of a matrix, if it has one.

    Args:
        name: The canonical name of the matrix.
        modules: The paths in the checkpoint of the modules that it consists of.
        columns: Its columns.
        format: Its format.
    """
    if format is None or not format.has_order:
        return []
    suffix = NAMES[format.layout].groups
    first, *others = (f"{module}.{suffix}" for module in modules)
    siblings = tuple(_sibling(other, (columns,), _WORDS, is_required=True) for other in others)
    int4 = Int4Tensor(
        "order",
        format.layout,
        0,
        columns[0],
        format.group or columns[0],
        format.has_zeros,
        format.has_order,
        siblings,
        format.key,
    )
    shape, keys = (columns[0],), columns[1]
    return [TensorSpec(f"{name}.order", first, shape, keys, _WORDS, conversion=int4)]


def _checked_group(source: str, rows: Dim, columns: Dim, format: MatrixFormat) -> int:
    """The columns of a group of a matrix."""
    group = format.group or columns[0]
    if columns[0] % group != 0:
        raise ModelFileError(
            f"{format.key} is {group}; expected a divisor of the {columns[0]} columns "
            f"({columns[1]}) of {source}, or a quantised checkpoint that leaves it out"
        )
    if format.layout != PACKED and rows[0] % CODES_PER_WORD != 0:
        raise ModelFileError(
            f"{format.key}: {source} has {rows[0]} rows ({rows[1]}); expected a multiple of "
            f"{CODES_PER_WORD}, which zero points are packed by"
        )
    return group


def _words(dim: Dim) -> Dim:
    size, _ = dim
    rounded = " rounded up" if size % CODES_PER_WORD else ""
    return -(-size // CODES_PER_WORD), over(dim, CODES_PER_WORD) + rounded


def _sibling(
    source: str, dims: Sequence[Dim], dtypes: tuple[str, ...], *, is_required: bool = False
) -> Sibling:
    shape = tuple(size for size, _ in dims)
    return Sibling(source, (shape,), ", ".join(keys for _, keys in dims), dtypes, is_required)
