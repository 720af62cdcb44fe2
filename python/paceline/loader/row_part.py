# SPDX-License-Identifier: Apache-2.0
"""Rows of a stored tensor that are a tensor of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RowPart:
    """Some rows of a tensor: the same ones of each of several equal groups of its rows.

    Attributes:
        groups: How many groups there are.
        each: The rows of a group.
        first: The first row of each group that belongs to the part.
        count: How many rows of each group do.
    """

    groups: int
    each: int
    first: int
    count: int

    @property
    def rows(self) -> int:
        """The rows of the part."""
        return self.groups * self.count

    @property
    def stored_rows(self) -> int:
        """The rows of the tensor."""
        return self.groups * self.each

    def over(self, size: int) -> RowPart:
        """The same of a tensor that has one row for each `size` rows of this one's.

        With several groups, `size` divides all numbers of the part; else where the part begins.
        """
        return RowPart(
            self.groups, -(-self.each // size), self.first // size, -(-self.count // size)
        )

    def cut(self, chunks: Iterable[bytes], nbytes: int) -> Iterator[bytes]:
        """The bytes of the part.

        Args:
            chunks: The bytes of the tensor, piece by piece.
            nbytes: How many there are.
        """
        row = nbytes // self.stored_rows
        group, low, high = self.each * row, self.first * row, (self.first + self.count) * row
        at = 0
        for chunk in chunks:
            end = at + len(chunk)
            for begin in range(at // group * group, end, group):
                first, last = max(at, begin + low), min(end, begin + high)
                if first < last:
                    yield chunk[first - at : last - at]
            at = end
