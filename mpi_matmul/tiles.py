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
from itertools import pairwise

import numpy as np

from mpi_matmul import blocks
from mpi_matmul.accumulate import can_be_cut, sum_dtype
from mpi_matmul.layout import block_range, length
from mpi_matmul.mesh import Coordinates, Mesh
from mpi_matmul.operands import Problem
from mpi_matmul.work import Formulas


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
        self.a_itemsize, self.b_itemsize = (np.dtype(d).itemsize for d in (problem.a_dtype, problem.b_dtype))
        self.sum_itemsize = sum_dtype(np.dtype(problem.dtype)).itemsize
        self.c_stays = mesh.k == 1 and can_be_cut(np.dtype(problem.dtype))
        self.shares = [self._share(owner) for owner in range(mesh.k)]
        self.parts = self._parts()

    @property
    def tile_rows(self) -> int:
        """The most rows of a tile of a, and of a part of c that travels."""
        return max((length(rows) for share in self.shares for rows in share), default=0)

    @property
    def part_length(self) -> int:
        """The largest part of ``inner``."""
        return max((length(part.inner) for part in self.parts), default=0)

    def a_part(self, part: Part) -> slice:
        """The columns of its owner's shard of a that ``part`` is."""
        return _within(part.inner, block_range(self.inner, self.mesh.n, part.a_owner)[0])

    def b_part(self, part: Part) -> slice:
        """The rows of its owner's shard of b that ``part`` is."""
        return _within(part.inner, block_range(self.inner, self.mesh.m, part.b_owner)[0])

    def _share(self, owner: int) -> list[slice]:
        """The rows of c of one owner, in the tiles in which they are made: one if nothing of them travels."""
        start, stop = block_range(self.rows, self.mesh.k, owner)
        number = -(-(stop - start) // self._rows_of_a_tile())
        return [_within(slice(*block_range(stop - start, number, i)), -start) for i in range(number)]

    def _rows_of_a_tile(self) -> int:
        """At most; all rows, if nothing of them travels."""
        if not self.c_stays:
            row_bytes = max(1, self._most_columns * self.sum_itemsize)
            return max(blocks.LEAST_SUM_ROWS, blocks.SUM_BYTES // row_bytes)
        return blocks.GOOD_ROWS if self.mesh.n > 1 else max(1, self._most_rows)

    def _parts(self) -> list[Part]:
        cuts = {block_range(self.inner, self.mesh.n, j)[0] for j in range(self.mesh.n)}
        cuts |= {block_range(self.inner, self.mesh.m, i)[0] for i in range(self.mesh.m)}
        edges = [*(sorted(cut for cut in cuts if cut < self.inner) or [0]), self.inner]
        found = []
        for start, stop in pairwise(edges):
            a_owner, b_owner = (_owner_of(start, self.inner, ranks) for ranks in (self.mesh.n, self.mesh.m))
            for inner in self._blocks(stop - start):
                found.append(Part(_within(inner, -start), a_owner, b_owner))
        return _taking_turns(found, by_a=self.mesh.n >= self.mesh.m)

    def _blocks(self, size: int) -> list[slice]:
        """A range of ``inner`` of one owner, cut into blocks."""
        tile_rows = min(self._most_rows, self._rows_of_a_tile())
        line = max(
            tile_rows * self.a_itemsize if self.mesh.n > 1 else 0,
            self._most_columns * self.b_itemsize if self.mesh.m > 1 else 0,
        )
        owners = max(self.mesh.m, self.mesh.n)
        least = min(-(-blocks.BLOCKS // owners), 2 * size * line // blocks.BLOCK_BYTES)
        return blocks.row_blocks(size, max(-(-size * line // blocks.BLOCK_BYTES), least))


def brick(problem: Problem, mesh: Mesh, here: Coordinates) -> tuple[int, int, int]:
    """How many rows, items of k, and columns the rank ``here`` multiplies."""
    sizes = zip((problem.m, problem.k, problem.n), mesh.shape, here, strict=True)
    rows, inner, columns = (stop - start for start, stop in (block_range(*one) for one in sizes))
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


# ---- what it costs ----


def sent_bytes(problem: Problem, mesh: Mesh, rank: int) -> int:
    """Bytes that ``rank`` sends inside the product.

    Of its part of a all but what the next rank along n owns, of b all but what the next one along m owns, of
    the sums of c all but its own.
    """
    tiles, (i, l, j) = _sizes(problem, mesh, rank), mesh.coordinates(rank)  # noqa: E741
    rows, inner, columns, a_itemsize, b_itemsize, sum_itemsize = tiles
    of_a = rows * (inner - _share_of(inner, mesh.n, j + 1)) * a_itemsize if mesh.n > 1 else 0
    of_b = columns * (inner - _share_of(inner, mesh.m, i + 1)) * b_itemsize if mesh.m > 1 else 0
    of_c = columns * (rows - _share_of(rows, mesh.k, l)) * sum_itemsize
    return of_a + of_b + of_c


def sent_messages(problem: Problem, mesh: Mesh, rank: int) -> int:
    """Messages that ``rank`` sends inside the product."""
    here = mesh.coordinates(rank)
    tiles, (i, l, j) = Tiles(problem, mesh, here), here  # noqa: E741
    row_tiles = sum(map(len, tiles.shares))
    of_a = row_tiles * sum(part.a_owner != (j + 1) % mesh.n for part in tiles.parts)
    of_b = sum(part.b_owner != (i + 1) % mesh.m for part in tiles.parts)
    of_c = sum(len(share) for owner, share in enumerate(tiles.shares) if owner != l)
    return (of_a if mesh.n > 1 else 0) + (of_b if mesh.m > 1 else 0) + of_c


def extra_bytes(problem: Problem, mesh: Mesh, rank: int) -> int:
    """The most memory that ``rank`` needs besides its shards."""
    tiles = Tiles(problem, mesh, mesh.coordinates(rank))
    in_turn = blocks.WINDOW + 2
    total = 0
    if mesh.n > 1:
        total += in_turn * tiles.tile_rows * tiles.part_length * tiles.a_itemsize + 2 * blocks.BLOCK_BYTES
    if mesh.m > 1:
        panels = in_turn * tiles.part_length if tiles.c_stays else tiles.inner - tiles.inner // mesh.m
        total += panels * tiles.columns * tiles.b_itemsize
    if not tiles.c_stays:
        number = 2 * blocks.SUM_WINDOW + 2 if mesh.k > 1 else 1
        total += number * tiles.tile_rows * tiles.columns * tiles.sum_itemsize
    return total


def _sizes(problem: Problem, mesh: Mesh, rank: int) -> tuple[int, int, int, int, int, int]:
    itemsizes = (np.dtype(dtype).itemsize for dtype in (problem.a_dtype, problem.b_dtype))
    a_itemsize, b_itemsize = itemsizes
    sizes = brick(problem, mesh, mesh.coordinates(rank))
    return (*sizes, a_itemsize, b_itemsize, sum_dtype(np.dtype(problem.dtype)).itemsize)


def _share_of(size: int, parts: int, place: int) -> int:
    start, stop = block_range(size, parts, place % parts)
    return stop - start


FORMULAS = Formulas(sent_bytes, sent_messages, extra_bytes)
