# SPDX-License-Identifier: Apache-2.0
"""The formats of matrices with scales, and the tensors that they are stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

# Stored dtypes of matrices without scales, and of all vectors.
PLAIN_DTYPES: Final = ("BF16", "F16", "F32")
# Stored dtypes of scales of fp8.
SCALE_DTYPES: Final = ("F32", "BF16")
# Stored dtypes of elements.
FP8_DTYPE: Final = "F8_E4M3"
MXFP4_DTYPE: Final = "U8"

FP8_BLOCK: Final = 128
MXFP4_COLUMNS: Final = 32
NVFP4_COLUMNS: Final = 16
# Columns of e2m1 matrices are a multiple of it.
FP4_STEP: Final = 32

# A size of a tensor, and the keys of the configuration that it follows from.
Dim = tuple[int, str]


@dataclass(frozen=True)
class MatrixFormat:
    """The format of a matrix with scales.

    Attributes:
        name: "fp8", "mxfp4", "nvfp4" or "int4".
        scales: "fp8" only: what has a scale of its own: "tensor", "row" or "block".
        suffix: "fp8" only: the name of the scales in the checkpoint, beside "weight".
        is_exact: "fp8" only: every scale is a power of two.
        layout: How checkpoints store "int4", see `int4.py`, and "mxfp4" and "nvfp4" of Linears, see
            `fp4.py`.
        group: "int4" only: the columns that share a scale; 0: those of a row.
        has_zeros: "int4" only: groups have zero points.
        has_order: "int4" only: the columns of a group are not adjacent inputs.
        key: With a layout: the file and the key of the configuration that says so.
    """

    name: str
    scales: str = ""
    suffix: str = ""
    is_exact: bool = False
    layout: str = ""
    group: int = 0
    has_zeros: bool = False
    has_order: bool = False
    key: str = ""

    @property
    def entry(self) -> dict[str, Any]:
        """The format in a canonical description."""
        if self.name in ("mxfp4", "nvfp4"):
            return {"format": self.name}
        if self.name == "int4":
            return {
                "format": "int4",
                "group": self.group or "row",
                **({"has_zeros": True} if self.has_zeros else {}),
                **({"has_order": True} if self.has_order else {}),
            }
        scales = [FP8_BLOCK, FP8_BLOCK] if self.scales == "block" else self.scales
        return {
            "format": "fp8",
            "scales": scales,
            **({"exact_scales": True} if self.is_exact else {}),
        }

    def scale_dims(self, rows: Dim, columns: Dim) -> Sequence[Dim]:
        """The shape of the scales of an fp8 matrix."""
        if self.scales == "tensor":
            return ((1, "1"),)
        if self.scales == "row":
            return (rows, (1, "1"))
        return tuple(_num_blocks(dim) for dim in (rows, columns))


def over(dim: Dim, divisor: int) -> str:
    """A size in terms of keys, divided, for messages."""
    keys = dim[1]
    return f"({keys}) / {divisor}" if " " in keys else f"{keys} / {divisor}"


def _num_blocks(dim: Dim) -> Dim:
    return -(-dim[0] // FP8_BLOCK), f"{over(dim, FP8_BLOCK)} rounded up"


@dataclass(frozen=True)
class LayerFormats:
    """The formats of a layer's Linears; None: no scales.

    Attributes:
        qkv: Of q, k and v.
        o: Of o.
        gate_up: Of gate and up.
        down: Of down.
    """

    qkv: MatrixFormat | None = None
    o: MatrixFormat | None = None
    gate_up: MatrixFormat | None = None
    down: MatrixFormat | None = None

    def of(self, name: str) -> MatrixFormat | None:
        """The format of one matrix by its canonical name in the layer, such as "attn.q"."""
        return {
            "attn.o": self.o,
            "mlp.gate": self.gate_up,
            "mlp.up": self.gate_up,
            "mlp.down": self.down,
        }.get(name, self.qkv)

    def entries(self, *names: str) -> dict[str, Any]:
        """Those of some Linears that have scales, by name, in a canonical description."""
        found = {name: getattr(self, name) for name in names}
        return {name: format.entry for name, format in found.items() if format is not None}


NO_FORMATS: Final = LayerFormats()
