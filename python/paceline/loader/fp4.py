# SPDX-License-Identifier: Apache-2.0
"""Matrices of e2m1, floats of four bits, as checkpoints store them.

    mxfp4-pack-quantized    weight_packed [N, K / 2], weight_scale [N, K / 32], powers of two

A byte has two elements, the lower column in the low four bits, as in memory.
"""

from __future__ import annotations

from typing import Final

from paceline._core import ModelFileError

from .family import TensorSpec
from .formats import FP4_STEP, MXFP4_COLUMNS, MXFP4_DTYPE, Dim, MatrixFormat, over

MXFP4_PACKED: Final = "mxfp4-pack-quantized"

_BYTES: Final = (MXFP4_DTYPE,)


def fp4_specs(
    name: str, source: str, rows: Dim, columns: Dim, format: MatrixFormat
) -> list[TensorSpec]:
    """The elements of a matrix and its scales.

    Args:
        name: The canonical name of the matrix.
        source: The path of its module in the checkpoint.
        rows: Its rows.
        columns: Its columns.
        format: Its format.

    Raises:
        ModelFileError: Its sizes do not fit the format.
    """
    size, keys = columns
    if size % FP4_STEP != 0:
        raise ModelFileError(
            f"{format.key} is {format.layout}, but {source} has {size} columns ({keys}); expected "
            f"a multiple of {FP4_STEP}, or a checkpoint that leaves this module out"
        )
    elements, scales = f"{source}.weight_packed", f"{source}.weight_scale"
    return mxfp4_specs(name, elements, scales, rows, columns, _BYTES, _BYTES)


def mxfp4_specs(
    name: str,
    elements: str,
    scales: str,
    rows: Dim,
    columns: Dim,
    element_dtypes: tuple[str, ...],
    scale_dtypes: tuple[str, ...],
) -> list[TensorSpec]:
    """The elements of a matrix in mxfp4, two in a byte, and its scales.

    Args:
        name: The canonical name of the matrix.
        elements: The name of the tensor of elements in the checkpoint.
        scales: That of the scales.
        rows: Its rows.
        columns: Its columns, a multiple of 32.
        element_dtypes: What elements may be stored as.
        scale_dtypes: What scales may be stored as.
    """

    def spec(suffix: str, source: str, divisor: int, dtypes: tuple[str, ...]) -> TensorSpec:
        shape = (rows[0], columns[0] // divisor)
        return TensorSpec(
            f"{name}.{suffix}", source, shape, f"{rows[1]}, {over(columns, divisor)}", dtypes
        )

    return [
        spec("weight", elements, 2, element_dtypes),
        spec("scales", scales, MXFP4_COLUMNS, scale_dtypes),
    ]
