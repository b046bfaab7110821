"""The whole product on simulated devices, one thread each: the same device programs, no MPI."""

from __future__ import annotations

from typing import Any

from mpi_matmul.kernels import KERNELS
from mpi_matmul.kernels.data_parallel import compute_fn
from mpi_matmul.kernels.fsdp import fsdp_compute_fn
from mpi_matmul.launch import on_threads
from mpi_matmul.layout import Array
from mpi_matmul.mesh import Mesh
from mpi_matmul.sources import pose_sources


def dp_mat_mul(a: Any, b: Any, num_devices: int) -> Array:
    """``a`` (m, k) @ ``b`` (k, n) by data parallel on ``num_devices`` threads.

    Raises ValueError (shapes, num_devices) or TypeError (dtypes); what a device raises is raised here
    with the device named.

    >>> dp_mat_mul([[1, 2], [3, 4], [5, 6]], [[1, 0], [0, 1]], num_devices=2)
    array([[1, 2],
           [3, 4],
           [5, 6]])
    """
    return _simulate("dp", compute_fn, a, b, num_devices)


def fsdp_mat_mul(a: Any, b: Any, num_devices: int) -> Array:
    """``a`` (m, k) @ ``b`` (k, n) by fully sharded data parallel on ``num_devices`` threads.

    Raises as ``dp_mat_mul`` does.
    """
    return _simulate("fsdp", fsdp_compute_fn, a, b, num_devices)


def _simulate(name: str, device_program: Any, a: Any, b: Any, num_devices: int) -> Array:
    a, b, problem = pose_sources(a, b)
    strategy = KERNELS[name].on(Mesh(max(1, num_devices), 1, 1))
    result: list[Any] = [None]

    def program(comm: Any, rank: int) -> None:
        a_chunk = a.part(*strategy.a.slices(problem.a_shape, rank))
        b_chunk = b.part(*strategy.b.slices(problem.b_shape, rank))
        device_program(comm, rank, a_chunk, b_chunk, result)

    on_threads(num_devices, program)
    product: Array = result[0].reshape(problem.result_shape)[()]
    return product
