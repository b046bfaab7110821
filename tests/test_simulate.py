"""The device programs and the simulator: any communicator of two methods, any split, numpy's result."""

import threading

import numpy as np
import pytest
import worlds
from test_kernels import OPERANDS, assert_same, check_product, counting_up

from mpi_matmul import Communicator, compute_fn, dp_mat_mul, fsdp_compute_fn, fsdp_mat_mul
from mpi_matmul.comm.threads import DeviceFailed
from mpi_matmul.kernels import KERNELS
from mpi_matmul.mesh import Mesh

DEVICE_PROGRAMS = {"dp": compute_fn, "fsdp": fsdp_compute_fn}
SIMULATED = {"dp": dp_mat_mul, "fsdp": fsdp_mat_mul}
pytestmark = pytest.mark.parametrize("strategy", SIMULATED)


@pytest.mark.parametrize("num_devices", range(1, 9))
@pytest.mark.parametrize("seed", range(3))
def test_the_device_programs_on_somebody_elses_communicator(strategy, num_devices, seed):
    """With random delays and orders, three products in a row, no pause between them."""
    program = DEVICE_PROGRAMS[strategy]
    on = KERNELS[strategy].on(Mesh(num_devices, 1, 1))
    operands = [(counting_up(7 + i, 5), counting_up(5, 6)) for i in range(3)]
    results = [[None] for _ in operands]

    def device(comm, rank):
        for (a, b), result in zip(operands, results, strict=True):
            a_chunk = a[on.a.slices(a.shape, rank)]
            b_chunk = b[on.b.slices(b.shape, rank)]
            program(comm, rank, a_chunk, b_chunk, result)

    worlds.bare(num_devices, seed).run(device)
    for (a, b), result in zip(operands, results, strict=True):
        assert_same(result[0], a @ b)


def test_the_device_programs_take_any_split(strategy):
    """Not only the split of numpy.array_split: the last device has what is left over."""
    program = DEVICE_PROGRAMS[strategy]
    a, b, result = counting_up(7, 4), counting_up(4, 8), {}

    def device(comm, rank):
        a_chunk = [a[:1], a[1:1], a[1:]][rank]
        b_chunk = b if strategy == "dp" else [b[:, :2], b[:, 2:3], b[:, 3:]][rank]
        program(comm, rank, a_chunk, b_chunk, result)

    worlds.threads(3).run(device)
    assert_same(result[0], a @ b)


def test_a_device_that_fails_in_a_thread_of_ones_own_wakes_the_others(strategy):
    comm, outcome = Communicator(3), {}

    def device(rank):
        try:
            columns = 9 if rank == 1 else 4
            DEVICE_PROGRAMS[strategy](comm, rank, np.ones((2, columns)), np.ones((4, 2)), [None])
        except Exception as error:
            outcome[rank] = error

    threads = [threading.Thread(target=device, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(outcome[1], ValueError)
    assert isinstance(outcome[0], DeviceFailed)
    assert "device 1 failed" in str(outcome[0])
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("shape", "num_devices"),
    [
        ((8, 6, 4), 2),
        ((16, 8, 12), 4),
        ((4, 3, 5), 1),
        ((4, 3, 5), 2),
        ((4, 3, 5), 3),
        ((8, 8, 8), 4),
        ((5, 7, 3), 8),
    ],
)
def test_worked_examples_on_threads(strategy, shape, num_devices):
    m, k, n = shape
    a, b = counting_up(m, k), counting_up(k, n)
    assert_same(SIMULATED[strategy](a, b, num_devices), a @ b)
    check_product(worlds.threads(num_devices), strategy, a, b)


@pytest.mark.parametrize("case", OPERANDS)
def test_the_simulator_gives_numpys_result(strategy, case):
    a, b = OPERANDS[case]
    c = SIMULATED[strategy](a, b, 3)
    assert type(c) is type(np.matmul(a, b))
    assert_same(c, np.matmul(a, b))
