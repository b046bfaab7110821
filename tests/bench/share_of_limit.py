"""How near a kernel comes to its limit: the time in which the same ranks multiply without messages.

    mpirun -n 2 python tests/bench/share_of_limit.py [SIZE ...]

For each SIZE (default 1024 4096), m = k = n = SIZE in float64: the product is checked first, then kernel and
limit are timed in turn, REPEATS times; printed are medians, and the share limit / kernel (1 is perfect).
"""

import sys
import time

import numpy as np
from mpi4py import MPI

from mpi_matmul.comm.collectives import barrier
from mpi_matmul.comm.mailbox import mailbox_of
from mpi_matmul.kernels import KERNELS
from mpi_matmul.launch import on_mpi

REPEATS = 5


def shards(mailbox, kernel, size):
    """This rank's shards of the same random a and b on every rank, and the whole b."""
    a, b = np.random.default_rng(0).standard_normal((2, size, size))
    shape, world_size, rank = (size, size), mailbox.world_size, mailbox.rank
    a_shard = a[kernel.a.slices(shape, world_size, rank)].copy()
    b_shard = b[kernel.b.slices(shape, world_size, rank)].copy()
    return a_shard, b_shard, b, np.empty(kernel.c.shard_shape(shape, world_size, rank))


def timed(mailbox, work):
    """Seconds until the last rank has finished ``work``, which all begin together."""
    barrier(mailbox)
    start = time.perf_counter()
    work()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)


def measure(mailbox, kernel, size):
    """Median seconds of the kernel and of its limit."""
    a_shard, b_shard, b, c_shard = shards(mailbox, kernel, size)
    expected = a_shard @ b
    kernel.multiply(mailbox, a_shard, b_shard, c_shard)
    np.testing.assert_allclose(c_shard, expected, rtol=0, atol=1e-9 * size)
    seconds = [
        (
            timed(mailbox, lambda: kernel.multiply(mailbox, a_shard, b_shard, c_shard)),
            timed(mailbox, lambda: np.matmul(a_shard, b, out=expected)),
        )
        for _ in range(REPEATS)
    ]
    return np.median(seconds, axis=0)


def program(comm, rank):
    for size in [int(argument) for argument in sys.argv[1:]] or [1024, 4096]:
        for kernel in KERNELS.values():
            taken, limit = measure(mailbox_of(comm, rank), kernel, size)
            if rank == 0:
                seconds = f"{taken:8.4f} s, limit {limit:8.4f} s"
                print(f"{size:6d}  {kernel.name:5s} {seconds}, share {limit / taken:.2f}", flush=True)


if __name__ == "__main__":
    on_mpi(program)
