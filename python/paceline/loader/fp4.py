# SPDX-License-Identifier: Apache-2.0
"""Matrices of e2m1, floats of four bits, as checkpoints store them.

A layout names the tensors of a matrix:

    mxfp4-pack-quantized    weight_packed [N, K / 2], weight_scale [N, K / 32], powers of two
    nvfp4-pack-quantized    weight_packed, weight_scale [N, K / 16] in e4m3, weight_global_scale,
                            by which scales are divided
    modelopt                weight [N, K / 2], weight_scale [N, K / 16] in e4m3, weight_scale_2,
                            by which scales are multiplied

A byte has two elements, the lower column in the low four bits, as in memory. Scales of nvfp4 become
float32 numbers: the quotient or the product, each rounded once, as the packages compute it that
write such files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from paceline._core import ModelFileError

from .conversion import Sibling, StoredTensor
from .family import TensorSpec
from .formats import (
    FP4_STEP,
    FP8_DTYPE,
    MXFP4_COLUMNS,
    MXFP4_DTYPE,
    NVFP4_COLUMNS,
    Dim,
    MatrixFormat,
    over,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MXFP4_PACKED: Final = "mxfp4-pack-quantized"
NVFP4_PACKED: Final = "nvfp4-pack-quantized"
MODELOPT: Final = "modelopt"

_BYTES: Final = (MXFP4_DTYPE,)


@dataclass(frozen=True)
class Fp4Names:
    """The names of the tensors of a matrix, after that of its module.

    Attributes:
        elements: Two in a byte.
        scales: Of blocks.
        factor: The number that belongs to all scales; empty: there is none.
        input_scale: What products with inputs of four bits need, which is not read.
    """

    elements: str
    scales: str
    factor: str = ""
    input_scale: str = ""


NAMES: Final = {
    MXFP4_PACKED: Fp4Names("weight_packed", "weight_scale"),
    NVFP4_PACKED: Fp4Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"
    ),
    MODELOPT: Fp4Names("weight", "weight_scale", "weight_scale_2", "input_scale"),
}


@dataclass(frozen=True)
class Nvfp4Scales:
    """How the scales of a matrix in nvfp4 are made of stored ones: a `Conversion`.

    Attributes:
        siblings: The factor of all scales.
        divides: Scales are divided by the factor, not multiplied.
    """

    siblings: tuple[Sibling, ...]
    divides: bool

    def dtype(self, stored: str) -> str:
        """See `Conversion.dtype`."""
        return "F32"

    def array(
        self, main: StoredTensor, siblings: Mapping[str, StoredTensor]
    ) -> npt.NDArray[np.float32]:
        """See `Conversion.array`.

        Raises:
            ModelFileError: The factor is no number above 0.
        """
        import numpy as np

        (stored,) = siblings.values()
        factor = stored.floats().reshape(())
        if not (math.isfinite(factor) and factor > 0):
            raise ModelFileError(
                f"{stored.where} is {float(factor)}; expected a finite number above 0. The tensor "
                "is damaged: download or quantise it again"
            )
        scales = main.floats()
        with np.errstate(over="ignore", under="ignore"):  # the library refuses what comes of it
            return scales / factor if self.divides else scales * factor


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
            f"{format.key} says {format.name}, but {source} has {size} columns ({keys}); expected "
            f"a multiple of {FP4_STEP}, or a checkpoint that leaves this module out"
        )
    names = NAMES[format.layout]
    elements, scales = f"{source}.{names.elements}", f"{source}.{names.scales}"
    if format.name == "mxfp4":
        return mxfp4_specs(name, elements, scales, rows, columns, _BYTES, _BYTES)
    factor = Sibling(
        f"{source}.{names.factor}", ((1,), ()), "one number", ("F32",), is_required=True
    )
    conversion = Nvfp4Scales((factor,), divides=format.layout == NVFP4_PACKED)
    return [
        _spec(f"{name}.weight", elements, rows, columns, 2, _BYTES),
        replace(
            _spec(f"{name}.scales", scales, rows, columns, NVFP4_COLUMNS, (FP8_DTYPE,)),
            conversion=conversion,
        ),
    ]


def fp4_input_scales(tensors: Sequence[TensorSpec]) -> frozenset[str]:
    """The scales of inputs that files in nvfp4 may have, which are not used."""
    modules = [
        spec.source.rpartition(".")[0]
        for spec in tensors
        if isinstance(spec.conversion, Nvfp4Scales)
    ]
    suffixes = {names.input_scale for names in NAMES.values() if names.input_scale}
    return frozenset(f"{module}.{suffix}" for module in modules for suffix in suffixes)


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
    return [
        _spec(f"{name}.weight", elements, rows, columns, 2, element_dtypes),
        _spec(f"{name}.scales", scales, rows, columns, MXFP4_COLUMNS, scale_dtypes),
    ]


def _spec(
    name: str, source: str, rows: Dim, columns: Dim, divisor: int, dtypes: tuple[str, ...]
) -> TensorSpec:
    """A tensor with a byte for several columns of a row."""
    shape = (rows[0], columns[0] // divisor)
    return TensorSpec(name, source, shape, f"{rows[1]}, {over(columns, divisor)}", dtypes)
