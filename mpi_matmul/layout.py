"""Who owns what: block ranges and placements. Integers and slices, no messages.

>>> [block_range(10, 4, index) for index in range(4)]
[(0, 3), (3, 6), (6, 8), (8, 10)]
>>> ROWS.slices((10, 6), 4, 2)
(slice(6, 8, None), slice(0, 6, None))
>>> COLUMNS.shard_shape((10, 6), 4, 2)
(10, 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, int]


def block_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of block ``index`` when ``length`` items are split over ``parts`` owners.

    The first ``length % parts`` blocks get one item more (the rule of ``numpy.array_split``); a block
    may be empty.

    >>> block_range(2, 4, 3)
    (2, 2)
    """
    size, larger = divmod(length, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def length(part: slice) -> int:
    """How many items a slice with a start and a stop takes."""
    size: int = part.stop - part.start
    return size


@dataclass(frozen=True)
class Placement:
    """How one matrix is laid over the ranks: split along ``axis`` (0 rows, 1 columns), or whole on each."""

    name: str
    axis: int | None

    def slices(self, shape: Shape, world_size: int, rank: int) -> tuple[slice, slice]:
        """The part of a global matrix of ``shape`` that ``rank`` owns."""
        rows, columns = slice(0, shape[0]), slice(0, shape[1])
        if self.axis == 0:
            rows = slice(*block_range(shape[0], world_size, rank))
        elif self.axis == 1:
            columns = slice(*block_range(shape[1], world_size, rank))
        return rows, columns

    def shard_shape(self, shape: Shape, world_size: int, rank: int) -> Shape:
        """The shape of that part."""
        rows, columns = self.slices(shape, world_size, rank)
        return rows.stop - rows.start, columns.stop - columns.start

    def split(self, matrix: Array, world_size: int) -> Iterator[Array]:
        """Views of the parts of ``matrix``, in rank order."""
        for rank in range(world_size):
            yield matrix[self.slices((matrix.shape[0], matrix.shape[1]), world_size, rank)]


ROWS = Placement("rows", 0)
COLUMNS = Placement("columns", 1)
REPLICATED = Placement("replicated", None)
