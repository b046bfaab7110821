"""The one table of kernels: name -> where a, b and c lie, and the function that multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.kernels.data_parallel import data_parallel
from mpi_matmul.kernels.fsdp import fsdp
from mpi_matmul.layout import COLUMNS, REPLICATED, ROWS, Array, Placement


@dataclass(frozen=True)
class Kernel:
    """``multiply(mailbox, a_shard, b_shard, c_shard)`` fills this rank's ``c_shard``."""

    name: str
    a: Placement
    b: Placement
    c: Placement
    multiply: Callable[[Mailbox, Array, Array, Array], None]


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("dp", a=ROWS, b=REPLICATED, c=ROWS, multiply=data_parallel),
        Kernel("fsdp", a=ROWS, b=COLUMNS, c=ROWS, multiply=fsdp),
    )
}


def kernel_named(name: str) -> Kernel:
    """The kernel of that name; ValueError that lists the names when there is none."""
    if name not in KERNELS:
        raise ValueError(f"strategy is {name!r}, expected one of {', '.join(KERNELS)}")
    return KERNELS[name]
