"""Fully sharded data parallel (fsdp): the column shards of b travel once round the ring of ranks.

| matrix | global | placement | on one rank |
| ------ | ------ | --------- | ----------- |
| a      | (m, k) | rows      | (m/p, k)    |
| b      | (k, n) | columns   | (k, n/p)    |
| c      | (m, n) | rows      | (m/p, n)    |

Messages per rank: p - 1. Bytes: all ranks together (p - 1) * k * n * itemsize. Memory per rank:
A/p + B/p + C/p + two blocks of b in flight. No rank ever has the whole b.

An all-gather of the parameters that is consumed as it arrives. Sources: Rajbhandari et al., ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models, SC 2020 (stage 3, parameter partitioning); Zhao et
al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, PVLDB 16(12), 2023, pages 3848-3860.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

import numpy as np

from mpi_matmul.comm.collectives import gather
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint, failing_stops_all
from mpi_matmul.layout import COLUMNS, Array


def fsdp(mailbox: Mailbox, a_shard: Array, b_shard: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m/p, n) from ``a_shard`` (m/p, k) and every rank's ``b_shard`` (k, n/p)."""
    multiply_ring(mailbox, a_shard, b_shard, list(COLUMNS.split(c_shard, mailbox.world_size)))


def multiply_ring(mailbox: Mailbox, a_shard: Array, b_shard: Array, c_blocks: list[Any]) -> None:
    """Set ``c_blocks[owner]`` to ``a_shard`` @ the b_shard of ``owner``, for every owner.

    An entry is the array to fill, or None to have one made. At step s a rank multiplies the block that
    started s places behind it on the ring; meanwhile it passes that block on and receives the next.
    """
    rank, world_size = mailbox.rank, mailbox.world_size
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    b_block = b_shard
    for step in range(world_size):
        owner = (rank - step) % world_size
        last = step == world_size - 1
        if not last:
            sending = mailbox.start_send(ahead, b_block)
            arriving = mailbox.start_recv(behind)
        c_blocks[owner] = np.matmul(a_shard, b_block, out=c_blocks[owner])
        if not last:
            sending.wait()
            b_block = arriving.wait()


def fsdp_compute_fn(
    comm: PointToPoint, rank: int, a_chunk: Array, b_chunk: Array, result: MutableSequence[Any]
) -> None:
    """The FSDP program of one device.

    ``a_chunk`` (m/p, k): its rows of a; ``b_chunk`` (k, n/p): its columns of b; both in rank order (any
    split). Device 0 puts the product (m, n) into ``result[0]``. ``comm`` needs no more than
    ``num_devices``, ``send`` and ``recv``. Raises what numpy.matmul raises.
    """
    with failing_stops_all(comm, rank):
        mailbox = mailbox_of(comm, rank)
        c_blocks: list[Any] = [None] * mailbox.world_size
        multiply_ring(mailbox, a_chunk, b_chunk, c_blocks)
        c_shards = gather(mailbox, np.concatenate(c_blocks, axis=1), root=0)
        if c_shards is not None:
            result[0] = np.concatenate(c_shards)
