"""SUMMA (summa): on a grid of ranks a travels along the rows, b along the columns, and c stays where it is.

| matrix | global | placement | on one rank (mesh r x 1 x s) |
| ------ | ------ | --------- | ---------------------------- |
| a      | (m, k) | blocks    | (m/r, k/s)                   |
| b      | (k, n) | blocks    | (k/r, n/s)                   |
| c      | (m, n) | blocks    | (m/r, n/s)                   |

k is cut into parts. For each part, the ranks that own these columns of a pass their tile along their row of
the grid, those that own these rows of b pass theirs along their column, and every rank adds tile @ panel to
its block of c, while the next ones arrive. Bytes: all ranks together (s - 1) * m * k + (r - 1) * k * n times
itemsize, which is least where the blocks of c are as square as p allows. Messages per rank: one a part and
tile (see `mpi_matmul.tiles`). Memory per rank: A/p + B/p + C/p + a few tiles.

Where a or b is the largest of the three, that one should stay: on a mesh r x s x 1 a stays, on 1 x r x s b,
and the sums of c travel (`mpi_matmul.kernels.grid3d` does it).

Sources: van de Geijn, Watts, SUMMA: Scalable Universal Matrix Multiplication Algorithm, Concurrency: Practice
and Experience 9(4), 1997, pages 255-274; the forms in which a or b stays: Schatz, van de Geijn, Poulson,
Parallel Matrix Multiplication: A Systematic Journey, SIAM J. Sci. Comput. 38(6), 2016, pages C748-C781.
"""

from __future__ import annotations

from mpi_matmul.layout import Array
from mpi_matmul.tiles import Tiles
from mpi_matmul.travel import panels_of_b, tiles_of_a, turns_by_parts
from mpi_matmul.work import Work


def summa(work: Work, a_shard: Array, b_shard: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m/r, n/s) from the ``a_shard`` (m/r, k/s) of its row, the ``b_shard`` of its
    column."""
    tiles = Tiles(work.problem, work.mesh, work.here)
    turns = turns_by_parts(tiles)
    a_tiles, b_panels = tiles_of_a(work, tiles, a_shard, turns), panels_of_b(work, tiles, b_shard, False)
    for number, b_panel in enumerate(b_panels):
        for rows in tiles.shares[0]:
            work.multiply_into(next(a_tiles), b_panel, c_shard[rows], number > 0)
    next(a_tiles, None)  # ends when the last tile has been passed on
