# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model that are made of stored ones of another form."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .formats import FP8_DTYPE
from .messages import quote
from .tensor_source import TensorSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    # Those that are made; of bfloat16 there are the bits.
    Elements = (
        npt.NDArray[np.float16]
        | npt.NDArray[np.float32]
        | npt.NDArray[np.int32]
        | npt.NDArray[np.uint16]
        | npt.NDArray[np.uint8]
    )


@dataclass(frozen=True)
class Sibling:
    """Another stored tensor that a tensor of a model is made of, or checked with.

    Attributes:
        source: Its name in the checkpoint, after the prefix.
        shapes: The shapes that it may have.
        shape_keys: The shape in terms of keys, for messages.
        dtypes: The dtypes that it may be stored in.
        is_required: The checkpoint must have it.
    """

    source: str
    shapes: tuple[tuple[int, ...], ...]
    shape_keys: str
    dtypes: tuple[str, ...]
    is_required: bool


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, with what reads it."""

    shard: TensorSource
    name: str

    @property
    def where(self) -> str:
        """Returns its file and its name, for messages."""
        return f"{self.shard.path}: tensor {quote(self.name)}"

    @property
    def dtype(self) -> str:
        """Returns its dtype."""
        return self.shard.info(self.name)[0]

    def integers(self) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
        """The elements of a tensor of integers."""
        import numpy as np

        data, shape = self._read()
        if self.dtype == "I64":
            return np.frombuffer(data, np.int64).reshape(shape)
        return np.frombuffer(data, np.int32).reshape(shape)

    def words(self) -> npt.NDArray[np.uint32]:
        """The elements of a tensor of packed codes or zero points."""
        import numpy as np

        data, shape = self._read()
        return np.frombuffer(data, np.uint32).reshape(shape)

    def scales(self) -> npt.NDArray[np.float16] | npt.NDArray[np.uint16]:
        """The elements of a tensor of scales; of bfloat16 their bits."""
        import numpy as np

        data, shape = self._read()
        if self.dtype == "BF16":
            return np.frombuffer(data, np.uint16).reshape(shape)
        return np.frombuffer(data, np.float16).reshape(shape)

    def floats(self) -> npt.NDArray[np.float32]:
        """The elements of a tensor in e4m3 or in float32."""
        import numpy as np

        data, shape = self._read()
        if self.dtype == FP8_DTYPE:
            return _e4m3_values()[np.frombuffer(data, np.uint8)].reshape(shape)
        return np.frombuffer(data, np.float32).reshape(shape)

    def _read(self) -> tuple[bytes, tuple[int, ...]]:
        return b"".join(self.shard.chunks(self.name)), self.shard.info(self.name)[1]


class Conversion(Protocol):
    """How a tensor of a model is made of a stored one and of its siblings."""

    @property
    def siblings(self) -> tuple[Sibling, ...]:
        """Returns the further tensors that are read."""

    def dtype(self, stored: str) -> str:
        """The dtype of the tensor of the model, from that of the stored one."""

    def array(self, main: StoredTensor, siblings: Mapping[str, StoredTensor]) -> Elements:
        """The elements of the tensor of the model; those of bfloat16 as uint16.

        Args:
            main: The stored tensor.
            siblings: The others that the checkpoint has, by `Sibling.source`.

        Raises:
            ModelFileError: Values of the tensors contradict each other or the configuration.
            NotImplementedError: The values are not supported.
        """


@functools.cache
def _e4m3_values() -> npt.NDArray[np.float32]:
    """The value of every byte of float8 e4m3."""
    import numpy as np

    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0)
    )
    values = np.where(bits < 128, magnitude, -magnitude).astype(np.float32)
    values[bits & 127 == 127] = np.nan
    return values
