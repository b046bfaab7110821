"""The one table of kernels: name -> where a, b and c lie, what it costs, and the function that multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpi_matmul.kernels.data_parallel as data_parallel
import mpi_matmul.kernels.fsdp as fsdp
from mpi_matmul.layout import COLUMNS, REPLICATED, ROWS, Placement


@dataclass(frozen=True)
class Kernel:
    """``multiply(mailbox, a_shard, b_shard, c_shard)`` fills this rank's ``c_shard``.

    A kernel that ``streams`` computes c row by row of a and sends nothing itself. It takes a
    `mpi_matmul.stream.Stream` besides: rows of a may still arrive, and rows of c leave, while it runs.
    ``sent_bytes(m, k, n, itemsize, world_size, rank)`` is what that rank sends inside the product,
    ``extra_bytes(m, k, n, itemsize, world_size)`` the most memory that it needs besides its shards; itemsize
    is b's.
    """

    name: str
    a: Placement
    b: Placement
    c: Placement
    streams: bool
    multiply: Callable[..., None]
    sent_bytes: Callable[[int, int, int, int, int, int], int]
    extra_bytes: Callable[[int, int, int, int, int], int]


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "dp",
            a=ROWS,
            b=REPLICATED,
            c=ROWS,
            streams=True,
            multiply=data_parallel.data_parallel,
            sent_bytes=data_parallel.sent_bytes,
            extra_bytes=data_parallel.extra_bytes,
        ),
        Kernel(
            "fsdp",
            a=ROWS,
            b=COLUMNS,
            c=ROWS,
            streams=False,
            multiply=fsdp.fsdp,
            sent_bytes=fsdp.sent_bytes,
            extra_bytes=fsdp.extra_bytes,
        ),
    )
}


def kernel_named(name: str) -> Kernel:
    """The kernel of that name; ValueError that lists the names when there is none."""
    if name not in KERNELS:
        raise ValueError(f"strategy is {name!r}, expected one of {', '.join(KERNELS)}")
    return KERNELS[name]
