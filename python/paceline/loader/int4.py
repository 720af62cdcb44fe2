# SPDX-License-Identifier: Apache-2.0
"""Matrices of int4 as checkpoints store them, and how they become those of a model.

A layout names the tensors of a matrix and the order of their bits:

    gptq, gptq_v2    qweight [K / 8, N] packed along K, qzeros [G, N / 8], scales [G, N], g_idx [K]
    awq              qweight [K, N / 8] packed along N, qzeros [G, N / 8], scales [G, N]
    pack-quantized   weight_packed [N, K / 8], weight_zero_point [N / 8, G], weight_scale [N, G]

Words have 32 bits and eight codes, and G is the number of groups of columns. A model has codes as
bytes of two, [N, K / 2], whose columns are those of the first group, then of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paceline._core import ModelFileError

from .conversion import Sibling, StoredTensor
from .messages import quote

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .conversion import Elements

GPTQ: Final = "gptq"
GPTQ_V2: Final = "gptq_v2"
AWQ: Final = "awq"
PACKED: Final = "pack-quantized"

WORD_DTYPE: Final = "I32"
SCALE_DTYPES: Final = ("F16", "BF16")
CODES_PER_WORD: Final = 8
# Columns that share a scale are a multiple of it.
GROUP_STEP: Final = 32
_ZERO: Final = 8
# Where AWQ keeps column j of the eight of a word.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Int4Names:
    """The names of the tensors of a matrix, after that of its module."""

    codes: str
    scales: str
    zeros: str
    groups: str


NAMES: Final = {
    GPTQ: Int4Names("qweight", "scales", "qzeros", "g_idx"),
    GPTQ_V2: Int4Names("qweight", "scales", "qzeros", "g_idx"),
    AWQ: Int4Names("qweight", "scales", "qzeros", "g_idx"),
    PACKED: Int4Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
SHAPE_NAME: Final = "weight_shape"


@dataclass(frozen=True)
class Int4Tensor:
    """How one tensor of an int4 matrix is made of those of a checkpoint: a `Conversion`.

    Attributes:
        part: "codes", "scales", "zeros" or "order".
        layout: One of the layouts above.
        rows: Of the matrix.
        columns: Of the matrix.
        group: The columns of a group.
        has_zeros: Groups have zero points of their own.
        has_order: Columns are not in the order of the inputs.
        siblings: Further tensors that are read.
        key: The file and the key of the configuration that the layout follows from.
    """

    part: str
    layout: str
    rows: int
    columns: int
    group: int
    has_zeros: bool
    has_order: bool
    siblings: tuple[Sibling, ...]
    key: str

    @property
    def num_groups(self) -> int:
        """Returns how many groups a row has."""
        return self.columns // self.group

    def dtype(self, stored: str) -> str:
        """See `Conversion.dtype`."""
        return {"codes": "U8", "scales": stored, "zeros": "U8", "order": "I32"}[self.part]

    def array(self, main: StoredTensor, siblings: Mapping[str, StoredTensor]) -> Elements:
        """See `Conversion.array`.

        Raises:
            ModelFileError: Values of the tensors contradict each other or the configuration.
            NotImplementedError: Matrices that are one in memory have two orders of inputs.
        """
        if self.part == "order":
            return self._order(main, list(siblings.values()))
        if self.part == "scales":
            return main.scales() if self.layout == PACKED else main.scales().T
        if self.part == "zeros":
            return self._zeros(main)
        return self._codes(main, siblings)

    def _codes(
        self, main: StoredTensor, siblings: Mapping[str, StoredTensor]
    ) -> npt.NDArray[np.uint8]:
        import numpy as np

        names = NAMES[self.layout]
        by_name = {one.rpartition(".")[2]: stored for one, stored in siblings.items()}
        if SHAPE_NAME in by_name:
            self._check_shape(by_name[SHAPE_NAME])
        if names.zeros in by_name:
            self._check_symmetric(by_name[names.zeros])
        groups = by_name.get(names.groups)
        words = main.words()
        packed: npt.NDArray[np.uint8]
        if self.layout == AWQ:
            packed = _pack(_awq_columns(words).T)
        else:
            rows = words if self.layout == PACKED else words.T
            packed = np.ascontiguousarray(rows).view(np.uint8)
        if groups is None:
            return packed
        if not self.has_order:
            self._check_no_order(groups)
            return packed
        order = self._order_of(groups)
        codes = np.empty((self.rows, self.columns), np.uint8)
        codes[:, 0::2] = packed & 15
        codes[:, 1::2] = packed >> 4
        return _pack(codes[:, order])

    def _zeros(self, main: StoredTensor) -> npt.NDArray[np.uint8]:
        """[rows, num_groups]."""
        import numpy as np

        words = main.words()
        if self.layout == AWQ:
            return np.ascontiguousarray(_awq_columns(words).T)
        if self.layout == GPTQ:
            # Of the whole word, as the writer subtracted: a zero point of 0 borrowed from the next.
            words = words + np.uint32(0x11111111)
        if self.layout == PACKED:
            words = words.T
        zeros = np.empty((self.num_groups, words.shape[1], CODES_PER_WORD), np.uint8)
        for i in range(CODES_PER_WORD):
            zeros[:, :, i] = (words >> np.uint32(4 * i)) & np.uint32(15)
        return np.ascontiguousarray(zeros.reshape(self.num_groups, -1)[:, : self.rows].T)

    def _check_shape(self, stored: StoredTensor) -> None:
        seen = [int(size) for size in stored.integers()]
        if seen != [self.rows, self.columns]:
            raise ModelFileError(
                f"{stored.where} is {seen}; expected [{self.rows}, {self.columns}], the shape that "
                "the configuration gives the matrix"
            )

    def _check_symmetric(self, stored: StoredTensor) -> None:
        """Refuses zero points other than 8, which GPTQ's first layout stores as 7, or as 8."""
        import numpy as np

        allowed = (0x77777777, 0x88888888) if self.layout == GPTQ else (0x88888888,)
        wrong = np.setdiff1d(stored.words(), np.array(allowed, np.uint32))
        if len(wrong) > 0:
            key = "symmetric" if self.layout == PACKED else "sym"
            raise ModelFileError(
                f"{stored.where} has the word 0x{int(wrong[0]):08X}, but the configuration says "
                f"that groups are symmetric; expected words 0x{allowed[0]:08X}, or "
                f'"{key}": false'
            )

    def _check_no_order(self, stored: StoredTensor) -> None:
        import numpy as np

        groups = stored.integers()
        wrong = np.flatnonzero(groups != np.arange(self.columns) // self.group)
        if len(wrong) > 0:
            column = int(wrong[0])
            raise ModelFileError(
                f"{stored.where} puts column {column} into group {int(groups[column])}, but "
                f"{self.key} says that columns are in the order of their groups; expected group "
                f"{column // self.group}, or a configuration that names an activation order"
            )

    def _order_of(self, stored: StoredTensor) -> npt.NDArray[np.int32]:
        """The inputs of the columns, sorted by group and then by number."""
        import numpy as np

        groups = stored.integers()
        if groups.min() < 0 or groups.max() >= self.num_groups:
            seen = groups.min() if groups.min() < 0 else groups.max()
            raise ModelFileError(
                f"{stored.where} names group {int(seen)}; expected groups 0 to "
                f"{self.num_groups - 1} ({self.columns} columns in groups of {self.group}, as "
                f"{self.key} says)"
            )
        counts = np.bincount(groups, minlength=self.num_groups)
        wrong = np.flatnonzero(counts != self.group)
        if len(wrong) > 0:
            group = int(wrong[0])
            raise ModelFileError(
                f"{stored.where} puts {int(counts[group])} columns into group {group}; expected "
                f"{self.group} in each group, as {self.key} says"
            )
        return np.argsort(groups, kind="stable").astype(np.int32)

    def _order(self, main: StoredTensor, others: Sequence[StoredTensor]) -> npt.NDArray[np.int32]:
        import numpy as np

        order = self._order_of(main)
        for other in others:
            if not np.array_equal(order, self._order_of(other)):
                raise NotImplementedError(
                    f"{other.where} orders the inputs unlike {quote(main.name)}, with which it is "
                    "one matrix in memory; supported: one order for both, as a quantiser gives "
                    "them that sees the same inputs; or quantise without an activation order"
                )
        return order


def _awq_columns(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """The codes of words that AWQ packed along their second axis."""
    import numpy as np

    codes = np.empty((*words.shape, CODES_PER_WORD), np.uint8)
    for column, place in enumerate(_AWQ_PLACES):
        codes[:, :, column] = (words >> np.uint32(4 * place)) & np.uint32(15)
    return codes.reshape(words.shape[0], -1)


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes of two codes, the lower column in the low four bits."""
    import numpy as np

    return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4)))
