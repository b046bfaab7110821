"""Who owns what: block ranges and placements. Integers and slices, no messages.

>>> [block_range(10, 4, index) for index in range(4)]
[(0, 3), (3, 6), (6, 8), (8, 10)]
>>> ROWS.on(Mesh(4, 1, 1)).slices((10, 6), rank=2)
(slice(6, 8, None), slice(0, 6, None))
>>> Placement("blocks", rows=("m",), columns=("n",)).on(Mesh(2, 1, 3)).shard_shape((10, 7), rank=0)
(5, 3)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from mpi_matmul.mesh import AXES, Coordinates, Mesh

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


def block_length(length: int, parts: int, index: int) -> int:
    """How many items block ``index`` has."""
    size, larger = divmod(length, parts)
    return size + (index < larger)


def length(part: slice) -> int:
    """How many items a slice with a start and a stop takes."""
    size: int = part.stop - part.start
    return size


@dataclass(frozen=True)
class Placement:
    """How one matrix is laid over a mesh of ranks.

    ``rows`` and ``columns`` name the axes of the mesh over which rows and columns are split, the first one
    first. Ranks that differ only along another axis own the same part, each a copy of its own.
    """

    name: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def on(self, mesh: Mesh) -> Distribution:
        """The matrix on the ranks of ``mesh``."""
        return Distribution(self, mesh)


ROWS = Placement("rows", rows=("m",))
COLUMNS = Placement("columns", columns=("m",))
REPLICATED = Placement("replicated")


@dataclass(frozen=True)
class Distribution:
    """Which part of a matrix each rank owns."""

    placement: Placement
    mesh: Mesh

    def slices(self, shape: Shape, rank: int) -> tuple[slice, slice]:
        """The rows and columns of a global matrix of ``shape`` that ``rank`` owns."""
        here = self.mesh.coordinates(rank)
        return (
            self._part(shape[0], self.placement.rows, here),
            self._part(shape[1], self.placement.columns, here),
        )

    def shard_shape(self, shape: Shape, rank: int) -> Shape:
        """The shape of that part."""
        rows, columns = self.slices(shape, rank)
        return length(rows), length(columns)

    def split(self, matrix: Array) -> Iterator[Array]:
        """Views of the parts of ``matrix``, in rank order."""
        for rank in range(self.mesh.size):
            yield matrix[self.slices((matrix.shape[0], matrix.shape[1]), rank)]

    def first_owner(self, rank: int) -> int:
        """Of the ranks that own the same part as ``rank``, the one that stands first."""
        axes = self.placement.rows + self.placement.columns
        here = self.mesh.coordinates(rank)
        i, k, j = (place if axis in axes else 0 for axis, place in zip(AXES, here, strict=True))
        return self.mesh.rank_at((i, k, j))

    @property
    def copies(self) -> int:
        """How many ranks own the same part."""
        axes = self.placement.rows + self.placement.columns
        return math.prod(self.mesh.along(axis) for axis in AXES if axis not in axes)

    def _part(self, size: int, axes: tuple[str, ...], here: Coordinates) -> slice:
        start, stop = 0, size
        for axis in axes:
            index = AXES.index(axis)
            first, last = block_range(stop - start, self.mesh.shape[index], here[index])
            start, stop = start + first, start + last
        return slice(start, stop)
