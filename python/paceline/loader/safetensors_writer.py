# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files, piece by piece."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ITEM_BYTES: Final = {
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class NewTensor:
    """A tensor of a new file.

    Attributes:
        name: Its name.
        dtype: Its dtype, as safetensors spells it.
        shape: Its shape.
        chunks: Makes its bytes, row-major and little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        count = _ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def write_safetensors(
    path: Path, tensors: Iterable[NewTensor], metadata: Mapping[str, str]
) -> None:
    """Writes a file.

    Args:
        path: The new file.
        tensors: The tensors; among those with elements of one size, the order is kept.
        metadata: The file's own strings.

    Raises:
        OSError: The file cannot be written.
    """
    # Wide elements first: with no gaps between tensors every one of them is aligned.
    ordered = sorted(tensors, key=lambda tensor: -_ITEM_BYTES[tensor.dtype])
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in ordered:
        offsets = [end, end + tensor.nbytes]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in ordered:
            for part in tensor.chunks():
                file.write(part)


def float_bytes(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """The bytes of numbers in a dtype.

    Args:
        values: The numbers.
        dtype: "F32", "F16" or "BF16". Numbers are rounded to nearest, ties to even; NaN stays NaN
            and keeps its sign.
    """
    import numpy as np

    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(values)] = (bits[np.isnan(values)] >> 16) | 0x40
    return rounded.astype("<u2").tobytes()
