"""Matrix products on sharded operands: one kernel, on threads or on every rank of mpirun."""

from mpi_matmul.comm.threads import Communicator
from mpi_matmul.kernels.data_parallel import compute_fn
from mpi_matmul.kernels.fsdp import fsdp_compute_fn
from mpi_matmul.multiply import matmul
from mpi_matmul.simulate import dp_mat_mul, fsdp_mat_mul

__all__ = [
    "Communicator",
    "compute_fn",
    "dp_mat_mul",
    "fsdp_compute_fn",
    "fsdp_mat_mul",
    "matmul",
]
