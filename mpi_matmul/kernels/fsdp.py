"""Fully sharded data parallel (fsdp): the column shards of b travel once round the ring, block by block.

| matrix | global | placement | on one rank |
| ------ | ------ | --------- | ----------- |
| a      | (m, k) | rows      | (m/p, k)    |
| b      | (k, n) | columns   | (k, n/p)    |
| c      | (m, n) | rows      | (m/p, n)    |

Mesh: p x 1 x 1. A block is some rows of k of one rank's shard; c += a[:, rows] @ b[rows] as the blocks of
these rows arrive, each passed on while it is multiplied. Messages per rank: (p - 1) a block. Bytes: all ranks
together (p - 1) * k * n * itemsize. Memory per rank: A/p + B/p + C/p + a few blocks (see
`mpi_matmul.blocks`).

An all-gather of the parameters that is consumed as it arrives. Sources: Rajbhandari et al., ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models, SC 2020 (stage 3, parameter partitioning); Zhao et
al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, PVLDB 16(12), 2023, pages 3848-3860.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from itertools import product
from typing import Any

import numpy as np

from mpi_matmul import blocks
from mpi_matmul.accumulate import can_be_cut, multiply_into
from mpi_matmul.comm.collectives import gather
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint, failing_stops_all
from mpi_matmul.comm.ring import Places, ring_all_gather
from mpi_matmul.layout import Array, block_range, length
from mpi_matmul.mesh import Mesh
from mpi_matmul.operands import Problem
from mpi_matmul.work import Formulas, Outline, Work


def fsdp(work: Work, a_shard: Array, b_shard: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m/p, n) from ``a_shard`` (m/p, k) and every rank's ``b_shard`` (k, n/p)."""
    mailbox, n = work.along("m"), c_shard.shape[1]
    cut = blocks.Cut(a_shard.shape[1], n, b_shard.itemsize, mailbox.world_size, can_be_cut(c_shard.dtype))
    groups = blocks.together(work.problem.m, cut, mailbox.rank)
    panel = np.empty(cut.largest_panel(groups), b_shard.dtype)
    own = (b_shard[cut.part(mailbox.rank, step)] for step in cut.steps)
    places = Places(blocks.WINDOW + 1, cut.largest_block, b_shard.dtype, cut.shape)
    ring = ring_all_gather(mailbox, own, len(cut.steps), blocks.WINDOW, places)
    for step, owners in product(cut.steps, groups):
        columns = cut.columns(owners, step)
        if len(owners) == 1:
            b_block = next(ring)
        else:
            b_block = panel[: length(step.rows), : length(columns)]
            lay_side_by_side(ring, owners, cut, step, b_block)
        work.multiply_into(a_shard[:, step.rows], b_block, c_shard[:, columns], step.rows.start > 0)
    next(ring, None)  # ends when the last block has been passed on


def lay_side_by_side(
    ring: Iterator[Array], owners: list[int], cut: blocks.Cut, step: blocks.Step, panel: Array
) -> None:
    """The next blocks from the ring, which are those of neighbours, each into its columns of ``panel``."""
    first = cut.columns(owners, step).start
    for owner in owners:
        columns = cut.columns([owner], step)
        panel[:, columns.start - first : columns.stop - first] = next(ring)


def sent_bytes(problem: Problem, mesh: Mesh, rank: int) -> int:
    """What ``rank`` passes on: every shard of b but the one that its neighbour ahead began with."""
    i, _, j = mesh.coordinates(rank)
    n = length(slice(*block_range(problem.n, mesh.n, j)))
    ahead = length(slice(*block_range(n, mesh.m, (i + 1) % mesh.m)))
    return problem.k * (n - ahead) * np.dtype(problem.b_dtype).itemsize if mesh.m > 1 else 0


def sent_messages(problem: Problem, mesh: Mesh, rank: int) -> int:
    """One for each block of the shards that it passes on."""
    return (mesh.m - 1) * _cut(problem, mesh, rank).number_of_steps


def extra_bytes(problem: Problem, mesh: Mesh, rank: int) -> int:
    """Memory besides the shards: blocks on their way."""
    return _cut(problem, mesh, rank).bytes_in_flight()


def most_bytes(problem: Problem, mesh: Mesh) -> int:
    """Of the rank that sends most: the shard that it does not pass on is a last one."""
    return sent_bytes(problem, mesh, mesh.rank_at((max(mesh.m - 2, 0), 0, 0)))


def most_messages(problem: Problem, mesh: Mesh) -> int:
    """Of the rank that sends most: its columns of b are as many as those of the first, or of the last."""
    return max(sent_messages(problem, mesh, mesh.rank_at((0, 0, j))) for j in (0, mesh.n - 1))


def outline(problem: Problem, mesh: Mesh) -> Outline:
    """Of the first rank: a piece is a step of one rank, or of several that are multiplied together."""
    cut = _cut(problem, mesh, mesh.rank_at((0, 0, 0)))
    steps, groups = cut.number_of_steps, -(-mesh.m // blocks.at_once(problem.m, cut))
    return Outline((mesh.m - 1) * steps, steps * groups, steps // cut.tiles)


FORMULAS = Formulas(sent_bytes, sent_messages, extra_bytes, most_bytes, most_messages, outline)


def _cut(problem: Problem, mesh: Mesh, rank: int) -> blocks.Cut:
    n = length(slice(*block_range(problem.n, mesh.n, mesh.coordinate("n", rank))))
    itemsize = np.dtype(problem.b_dtype).itemsize
    return blocks.Cut(problem.k, n, itemsize, mesh.m, can_be_cut(np.dtype(problem.dtype)))


def fsdp_compute_fn(
    comm: PointToPoint, rank: int, a_chunk: Array, b_chunk: Array, result: MutableSequence[Any]
) -> None:
    """The FSDP program of one device.

    ``a_chunk`` (m/p, k): its rows of a; ``b_chunk`` (k, n/p): its columns of b; both in rank order (any
    split). Device 0 puts the product (m, n) into ``result[0]``. ``comm`` needs no more than
    ``num_devices``, ``send`` and ``recv``. Raises what numpy.matmul raises.
    """
    with failing_stops_all(comm, rank):
        np.matmul(a_chunk[:0], b_chunk[:, :0])  # operands that do not fit raise here
        mailbox = mailbox_of(comm, rank)
        c_blocks = multiply_ring(mailbox, a_chunk, b_chunk)
        c_shards = gather(mailbox, np.concatenate(c_blocks, axis=1), root=0)
        if c_shards is not None:
            result[0] = np.concatenate(c_shards)


def multiply_ring(mailbox: Mailbox, a_shard: Array, b_shard: Array) -> list[Any]:
    """``a_shard`` @ every rank's b_shard, in rank order, where nobody knows how wide the others' are."""
    c_blocks: list[Any] = [None] * mailbox.world_size
    dtype = np.result_type(a_shard, b_shard)
    rows = blocks.row_blocks(a_shard.shape[1], blocks.MOST_BLOCKS if can_be_cut(dtype) else 1)
    ring = ring_all_gather(mailbox, (b_shard[part] for part in rows), len(rows), blocks.WINDOW)
    for b_block, (part, owner) in zip(
        ring, product(rows, blocks.ring_order(mailbox.world_size, mailbox.rank)), strict=True
    ):
        c_blocks[owner] = multiply_into(a_shard[:, part], b_block, c_blocks[owner], add=part.start > 0)
    return c_blocks
