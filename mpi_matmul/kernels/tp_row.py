"""Tensor parallel by rows (tp_row): k is split; sums of c travel round the ring, and every rank adds its
part.

| matrix | global | placement | on one rank |
| ------ | ------ | --------- | ----------- |
| a      | (m, k) | columns   | (m, k/p)    |
| b      | (k, n) | rows      | (k/p, n)    |
| c      | (m, n) | rows      | (m/p, n)    |

Mesh: 1 x p x 1. c is the sum over the ranks of a_shard @ b_shard. The rows of c that rank r is to have begin
on rank r + 1, in tiles: each rank adds its product to the tile that comes, in place, and passes it on; on r
it is complete. A reduce-scatter whose additions are made by the product itself, so that no rank ever holds
the whole of its partial c. Messages per rank: one a tile of the rows of the others. Bytes: all ranks together
(p - 1) * m * n * itemsize (float16 travels as float32, in which numpy adds it up). Memory per rank: A/p + B/p
+ C/p + a few tiles (see `mpi_matmul.tiles`).

The second half of a layer of a large model: its inputs are what tp_column has made. Sources: Shoeybi et al.,
Megatron-LM, arXiv:1909.08053, 2019, section 3 (row parallel); with a reduce-scatter in place of the
all-reduce: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
section 4.2.2.
"""

from __future__ import annotations

from mpi_matmul.layout import Array
from mpi_matmul.tiles import Tiles
from mpi_matmul.travel import sums_of_c
from mpi_matmul.work import Work


def tp_row(work: Work, a_shard: Array, b_shard: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m/p, n) from every rank's ``a_shard`` (m, k/p) @ ``b_shard`` (k/p, n)."""
    tiles = Tiles(work.problem, work.mesh, work.here)
    for rows, total, begun in sums_of_c(work, tiles, c_shard):
        work.multiply_into(a_shard[rows], b_shard, total, begun)
