"""Data parallel (dp): nothing travels inside the product; every rank has the whole b.

| matrix | global | placement  | on one rank |
| ------ | ------ | ---------- | ----------- |
| a      | (m, k) | rows       | (m/p, k)    |
| b      | (k, n) | replicated | (k, n)      |
| c      | (m, n) | rows       | (m/p, n)    |

Mesh: p x 1 x 1. Messages and bytes per rank: none. Memory per rank: A/p + B + C/p.

b stands for the parameters of a model and a for a batch: data parallel training multiplies each rank's
part of the batch by its own copy of the parameters. Source: Li et al., PyTorch Distributed: Experiences on
Accelerating Data Parallel Training, PVLDB 13(12), 2020, pages 3005-3018.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

import numpy as np

from mpi_matmul.comm.collectives import gather
from mpi_matmul.comm.mailbox import mailbox_of
from mpi_matmul.comm.protocol import PointToPoint, failing_stops_all
from mpi_matmul.layout import Array
from mpi_matmul.work import Work


def data_parallel(work: Work, a_shard: Array, b: Array, c_shard: Array) -> None:
    """Fill ``c_shard`` (m/p, n) with ``a_shard`` (m/p, k) @ ``b`` (k, n), a panel of rows as it arrives."""
    for rows in work.stream.panels(a_shard.shape[0]):
        work.multiply_into(a_shard[rows], b, c_shard[rows], False)
        work.stream.finished(rows.stop)


def compute_fn(comm: PointToPoint, rank: int, a_chunk: Array, b: Array, result: MutableSequence[Any]) -> None:
    """The data-parallel program of one device.

    ``a_chunk`` (m/p, k): the rows of a that device ``rank`` owns, in rank order (any split of the rows);
    ``b`` (k, n): whole. Device 0 puts the product (m, n) into ``result[0]``. ``comm`` needs no more than
    ``num_devices``, ``send`` and ``recv``. Raises what numpy.matmul raises.
    """
    with failing_stops_all(comm, rank):
        c_shards = gather(mailbox_of(comm, rank), np.matmul(a_chunk, b), root=0)
        if c_shards is not None:
            result[0] = np.concatenate(c_shards)
