"""3-D (grid3d): each rank multiplies a brick of the m x k x n products; a, b and the sums of c travel.

| matrix | global | placement | on one rank (mesh q x r x s)          |
| ------ | ------ | --------- | ------------------------------------- |
| a      | (m, k) | blocks    | (m/q, k/(r s)): a range of a's block  |
| b      | (k, n) | blocks    | (k/(r q), n/s): a range of b's block  |
| c      | (m, n) | blocks    | (m/(q r), n/s): rows of c's block     |

The block of a (m/q, k/r) of a brick is shared by the s ranks along n: its tiles are passed along that line.
That of b (k/r, n/s) is shared by the q ranks along m: it is gathered once, and stays. The block of c (m/q,
n/s) is the sum of what the r ranks along k make: its tiles go round that line, each rank adds its product in
place, and each ends on its owner. Bytes: all ranks together (s - 1) * m * k + (q - 1) * k * n + (r - 1) * m *
n times itemsize, least where the bricks are as near to cubes as p allows. float16 sums travel as float32.
Messages: one a tile (see `mpi_matmul.tiles`). Memory per rank: A/p + B/p + C/p + (k/r, n/s) of b + a few
tiles: up to p^(1/3) times B/p, which buys fewer bytes.

Every other kernel is a special case: p x 1 x 1 is fsdp, 1 x p x 1 is tp_row, 1 x 1 x p is tp_column with an a
that is sharded too, r x 1 x s is SUMMA.

Sources: Agarwal, Balle, Gustavson, Joshi, Palkar, A three-dimensional approach to parallel matrix
multiplication, IBM J. Research and Development 39(5), 1995, pages 575-582; Solomonik, Demmel,
Communication-Optimal Parallel 2.5D Matrix Multiplication and LU Factorization Algorithms, Euro-Par 2011,
pages 90-109; Kwasniewski et al., Red-Blue Pebbling Revisited: Near Optimal Parallel Matrix-Matrix
Multiplication (COSMA), SC 2019.
"""

from __future__ import annotations

from mpi_matmul.layout import Array
from mpi_matmul.tiles import Tiles
from mpi_matmul.travel import panels_of_b, sums_of_c, tiles_of_a, turns_by_rows
from mpi_matmul.work import Work


def grid3d(work: Work, a_shard: Array, b_shard: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m/(q r), n/s), from ``a_shard`` (m/q, k/(r s)) and ``b_shard`` (k/(r q), n/s)."""
    tiles = Tiles(work.problem, work.mesh, work.here)
    a_tiles = tiles_of_a(work, tiles, a_shard, turns_by_rows(tiles, work.here[1]))
    coming = panels_of_b(work, tiles, b_shard, keep=True)
    b_panels: list[Array] = []
    for _, total, begun in sums_of_c(work, tiles, c_shard):
        for number in range(len(tiles.groups)):
            if number == len(b_panels):
                b_panels.append(next(coming))
            work.multiply_into(next(a_tiles), b_panels[number], total, begun or number > 0)
    for _ in coming:
        pass  # others may need them even where there are no rows
    next(a_tiles, None)  # ends when the last tile has been passed on
