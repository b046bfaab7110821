"""How the brick of one rank is cut into the tiles that travel on a mesh of ranks: integers alone.

The brick of a rank is ``rows`` (of a and c) x ``inner`` (of k) x ``columns`` (of b and c). On a mesh that
splits them m, k and n ways

* the rank's part of a (rows x inner) is owned by its line along n, each a range of ``inner``,
* its part of b (inner x columns) by its line along m, each a range of ``inner`` too,
* its part of c (rows x columns) by its line along k, each a range of ``rows``.

So ``inner`` is cut wherever either owner changes, and further, into parts whose tile of a and panel of b are
about BLOCK_BYTES, but of about LEAST_ROWS rows of b at least: with each part all of c is read and written
once more. Parts of different owners take turns, so that all of them send from the beginning.

>>> problem = Problem(400, 600, 300, "float64", "float64", "float64", (400, 300))
>>> tiles = Tiles(problem, Mesh(2, 1, 3), (0, 0, 0))
>>> [(part.inner.start, part.inner.stop, part.a_owner, part.b_owner) for part in tiles.parts]
[(0, 200, 0, 0), (200, 300, 1, 0), (400, 600, 2, 1), (300, 400, 1, 1)]
>>> Tiles(problem, Mesh(1, 2, 2), (0, 0, 0)).shares
[[slice(0, 200, None)], [slice(200, 400, None)]]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from mpi_matmul import blocks
from mpi_matmul.accumulate import can_be_cut, sum_dtype
from mpi_matmul.layout import block_length, block_range, length
from mpi_matmul.mesh import Coordinates, Mesh
from mpi_matmul.operands import Problem


@dataclass(frozen=True)
class Part:
    """A range of the brick's ``inner``, and who owns it: places on the lines along n (of a) and m (of b)."""

    inner: slice
    a_owner: int
    b_owner: int


class Tiles:
    """The cut of the brick ``here``; the same on all ranks whose tiles of a, b or c it shares."""

    def __init__(self, problem: Problem, mesh: Mesh, here: Coordinates) -> None:
        self.mesh = mesh
        self.rows, self.inner, self.columns = brick(problem, mesh, here)
        # Ranks of a line have other rows or columns, but must cut alike: as the largest of them does.
        self._most_rows, _, self._most_columns = brick(problem, mesh, (0, 0, 0))
        traits = traits_of(problem.a_dtype, problem.b_dtype, problem.dtype)
        self.a_itemsize, self.b_itemsize, self.sum_itemsize, cut = traits
        self.c_stays = mesh.k == 1 and cut

    @cached_property
    def shares(self) -> list[list[slice]]:
        """Of each owner on the line along k the rows of c, in the tiles in which they are made."""
        return [self._share(owner) for owner in range(self.mesh.k)]

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of ``inner``, in the order in which they are multiplied."""
        return self._parts()

    @cached_property
    def groups(self) -> list[list[Part]]:
        """The parts that are multiplied at once: neighbours in that order, where they are short.

        With few rows of b BLAS is slow, and each product reads and writes all of c; laying blocks together
        costs less.
        """
        groups: list[list[Part]] = []
        size = blocks.LEAST_ROWS
        for part in self.parts:
            if 4 * size >= 3 * blocks.LEAST_ROWS:  # no block that was cut is shorter
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += length(part.inner)
        return groups

    @cached_property
    def tile_rows(self) -> int:
        """The most rows of a tile of a, and of a part of c that travels."""
        size, larger = divmod(self.rows, self.mesh.k)
        sizes = (size + 1, size) if larger else (size,)
        return max(-(-some // max(1, self.tiles_in(some))) for some in sizes)

    def tiles_in(self, rows: int) -> int:
        """The number of tiles of a share of so many rows: one if nothing of them travels."""
        return -(-rows // self._most_tile_rows)

    def blocks_in(self, size: int) -> int:
        """In how many blocks a range of ``inner`` of one owner is cut."""
        nbytes = size * self.line_bytes
        owners = max(self.mesh.m, self.mesh.n)
        least = min(-(-blocks.BLOCKS // owners), 2 * nbytes // blocks.BLOCK_BYTES)
        return blocks.number_of_blocks(size, max(-(-nbytes // blocks.BLOCK_BYTES), least))

    @cached_property
    def _most_tile_rows(self) -> int:
        if not self.c_stays:
            row_bytes = max(1, self._most_columns * self.sum_itemsize)
            return max(blocks.LEAST_SUM_ROWS, blocks.SUM_BYTES // row_bytes)
        return blocks.GOOD_ROWS if self.mesh.n > 1 else max(1, self._most_rows)

    @cached_property
    def line_bytes(self) -> int:
        """The larger of a column of a tile of a, and a row of a panel of b, if they travel."""
        return max(
            min(self._most_rows, self._most_tile_rows) * self.a_itemsize if self.mesh.n > 1 else 0,
            self._most_columns * self.b_itemsize if self.mesh.m > 1 else 0,
        )

    def a_part(self, part: Part) -> slice:
        """The columns of its owner's shard of a that ``part`` is."""
        return _within(part.inner, block_range(self.inner, self.mesh.n, part.a_owner)[0])

    def b_part(self, part: Part) -> slice:
        """The rows of its owner's shard of b that ``part`` is."""
        return _within(part.inner, block_range(self.inner, self.mesh.m, part.b_owner)[0])

    def _share(self, owner: int) -> list[slice]:
        start, stop = block_range(self.rows, self.mesh.k, owner)
        number = self.tiles_in(stop - start)
        return [_within(slice(*block_range(stop - start, number, i)), -start) for i in range(number)]

    def _parts(self) -> list[Part]:
        cuts = {block_range(self.inner, self.mesh.n, j)[0] for j in range(self.mesh.n)}
        cuts |= {block_range(self.inner, self.mesh.m, i)[0] for i in range(self.mesh.m)}
        edges = [*(sorted(cut for cut in cuts if cut < self.inner) or [0]), self.inner]
        found = []
        for start, stop in pairwise(edges):
            a_owner, b_owner = (_owner_of(start, self.inner, ranks) for ranks in (self.mesh.n, self.mesh.m))
            number = self.blocks_in(stop - start)
            for inner in (slice(*block_range(stop - start, number, i)) for i in range(number)):
                found.append(Part(_within(inner, -start), a_owner, b_owner))
        return _taking_turns(found, by_a=self.mesh.n >= self.mesh.m)


@lru_cache(16)
def traits_of(a_dtype: str, b_dtype: str, dtype: str) -> tuple[int, int, int, bool]:
    """Bytes of an item of a, of b and of a sum, and whether sums may be made in parts."""
    a, b, c = map(np.dtype, (a_dtype, b_dtype, dtype))
    return a.itemsize, b.itemsize, sum_dtype(c).itemsize, can_be_cut(c)


def brick(problem: Problem, mesh: Mesh, here: Coordinates) -> tuple[int, int, int]:
    """How many rows, items of k, and columns the rank ``here`` multiplies."""
    rows, inner, columns = map(block_length, problem.sizes, mesh.shape, here)
    return rows, inner, columns


def _owner_of(item: int, size: int, parts: int) -> int:
    """Whose range an item lies in, when ``size`` items are split over ``parts`` owners; 0, if there is
    none."""
    small, larger = divmod(size, parts)
    if not size:
        return 0
    if item < larger * (small + 1):
        return item // (small + 1)
    return larger + (item - larger * (small + 1)) // small


def _within(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)


def _taking_turns(parts: list[Part], by_a: bool) -> list[Part]:
    """The first part of every owner, then the second ones, and so on."""
    turns: dict[int, int] = {}
    order = []
    for number, part in enumerate(parts):
        owner = part.a_owner if by_a else part.b_owner
        turns[owner] = turns.get(owner, -1) + 1
        order.append((turns[owner], number))
    return [parts[number] for _, number in sorted(order)]
