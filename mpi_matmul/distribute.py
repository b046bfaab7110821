"""The two doors: whole arrays on one rank <-> shards on every rank, along a placement."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from mpi_matmul.comm.collectives import broadcast
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer, is_plain, snapshot
from mpi_matmul.layout import Array, Placement, Shape


def scatter(mailbox: Mailbox, matrix: Array | None, shape: Shape, placement: Placement, root: int) -> Array:
    """This rank's shard of ``matrix``, which is whole on ``root`` and None elsewhere.

    The shard is C-contiguous and in native byte order. On ``root`` it may share memory with ``matrix``
    (then it is read-only).
    """
    if placement.axis is None:
        return broadcast(mailbox, None if matrix is None else _own(matrix), root)
    if matrix is None:
        return mailbox.recv(root)
    previous: Transfer | None = None
    for rank in range(mailbox.world_size):
        if rank != root:
            transfer = mailbox.start_send(rank, matrix[placement.slices(shape, mailbox.world_size, rank)])
            if previous is not None:  # one is packed while one is sent: never a second copy of the whole
                previous.wait()
            previous = transfer
    own = _own(matrix[placement.slices(shape, mailbox.world_size, root)])
    if previous is not None:
        previous.wait()
    return own


def _own(part: Array) -> Array:
    """``part`` as a shard: without a copy where it already looks like one."""
    if is_plain(part) and not _is_mapped(part):
        view = part.view()
        view.flags.writeable = False
        return view
    return snapshot(part)


def _is_mapped(array: Any) -> bool:
    """Whether the array lies in a file: a kernel would wait for the disk again and again."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def empty_result(
    shape: Shape, dtype: np.dtype[Any], placement: Placement, mailbox: Mailbox, root: int
) -> tuple[Array | None, Array]:
    """``(c, c_shard)``, unfilled. On ``root`` the shard is a view of the whole c; elsewhere c is None."""
    if mailbox.rank == root:
        c = np.empty(shape, dtype)
        return c, c[placement.slices(shape, mailbox.world_size, root)]
    return None, np.empty(placement.shard_shape(shape, mailbox.world_size, mailbox.rank), dtype)


def collect(mailbox: Mailbox, c: Array | None, c_shard: Array, placement: Placement, root: int) -> None:
    """Fill ``c`` on ``root`` from every rank's ``c_shard``, each received straight into its place."""
    if c is None:
        mailbox.start_send(root, c_shard).wait()
        return
    arrivals = [
        mailbox.start_recv(rank, part)
        for rank, part in enumerate(placement.split(c, mailbox.world_size))
        if rank != root
    ]
    for arrival in arrivals:
        arrival.wait()
