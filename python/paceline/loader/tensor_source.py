# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a model come from: the files of a folder, or a mapping in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from paceline import _core

    from .row_part import RowPart


class TensorSource(Protocol):
    """Holds tensors by their names in Hugging Face checkpoints."""

    @property
    def path(self) -> Path:
        """The file, or the name of an argument, for messages."""

    def info(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """The dtype, as safetensors spells it, the shape and the bytes of a tensor."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, row-major and little-endian, at most 16 MiB at a time.

        Raises:
            ModelFileError: They cannot be read.
        """

    def is_same(self, name: str, other: TensorSource, other_name: str) -> bool:
        """Returns whether two tensors share their memory, so that they need not be compared."""

    def put(self, builder: _core.ModelBuilder, weight: str, name: str) -> None:
        """Fills a weight of a model with a tensor.

        Args:
            builder: The builder of the model.
            weight: The canonical name of the weight.
            name: The name of the tensor.

        Raises:
            ModelFileError: The tensor cannot be read.
        """

    def put_part(self, builder: _core.ModelBuilder, weight: str, name: str, part: RowPart) -> None:
        """Fills a weight of a model with some rows of a tensor; see `put`."""


class Weights(Protocol):
    """All tensors of a checkpoint."""

    @property
    def where(self) -> str:
        """Returns what names all tensors, for messages."""

    @property
    def owners(self) -> Mapping[str, TensorSource]:
        """The source of every tensor, by the tensor's name."""


@dataclass(frozen=True)
class WeightMap:
    """Tensors that were chosen or put together: `Weights`.

    Attributes:
        where: See `Weights.where`.
        owners: See `Weights.owners`.
    """

    where: str
    owners: Mapping[str, TensorSource]


#: Those of a model that will have dummy weights.
NO_WEIGHTS: Final = WeightMap("", {})


def read_tensor(source: TensorSource, name: str) -> bytes:
    """The bytes of a tensor in one piece; errors as for `TensorSource.chunks`."""
    return b"".join(source.chunks(name))
