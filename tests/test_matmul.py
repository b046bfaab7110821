"""matmul: the product on the ranks of an MPI communicator, called from a user's own program."""

import sys
import time

import numpy as np
import pytest
from launcher import run_ranks

from mpi_matmul import matmul
from mpi_matmul.kernels import KERNELS

on_every_strategy = pytest.mark.parametrize("strategy", KERNELS)


@pytest.mark.mpi
@on_every_strategy
def test_whole_operands_on_the_root_alone(mpi_comm, strategy):
    rng = np.random.default_rng(1)
    for root in {0, mpi_comm.size - 1}:
        a, b = rng.standard_normal((7, 5)), rng.standard_normal((5, 6))
        is_root = mpi_comm.rank == root
        c = matmul(a if is_root else None, b if is_root else None, mpi_comm, strategy, root=root)
        if is_root:
            np.testing.assert_allclose(c, a @ b, rtol=1e-13)
        else:
            assert c is None


@pytest.mark.mpi
@on_every_strategy
def test_two_products_in_a_row_with_printing_between(mpi_comm, strategy):
    a = np.arange(12.0).reshape(4, 3) if mpi_comm.rank == 0 else None
    c = matmul(a, None if a is None else a.T, mpi_comm, strategy)
    if mpi_comm.rank == 0:
        print(c)
    d = matmul(c, c, mpi_comm, strategy)
    if mpi_comm.rank == 0:
        assert (d == (a @ a.T) @ (a @ a.T)).all()


@pytest.mark.mpi
@on_every_strategy
def test_a_matrix_by_itself_stays_as_it_is(mpi_comm, strategy):
    a = np.random.default_rng(2).standard_normal((9, 9))
    before = a.tobytes()
    for b in (a, a.T):
        c = matmul(a, b, mpi_comm, strategy)
        if mpi_comm.rank == 0:
            np.testing.assert_allclose(c, a @ b, rtol=1e-12)
            assert not np.shares_memory(a, c)
            c[...] = 0
    assert a.tobytes() == before
    assert a.flags.writeable


@pytest.mark.mpi
def test_vectors_and_numbers_of_numpys_kind(mpi_comm):
    v = np.arange(5)
    for a, b in ((v, v), (v, np.ones((5, 2), int)), (np.ones((3, 5), int), v)):
        c = matmul(a, b, mpi_comm)
        if mpi_comm.rank == 0:
            assert type(c) is type(np.matmul(a, b))
            np.testing.assert_array_equal(c, np.matmul(a, b))


@pytest.mark.mpi
@on_every_strategy
def test_paths_of_files(mpi_comm, strategy, mpi_tmp_path):
    a = np.arange(6, dtype=">f8").reshape(2, 3)
    path = str(mpi_tmp_path / "A.npy")
    if mpi_comm.rank == 0:
        np.save(path, a)
    mpi_comm.Barrier()
    c = matmul(path, a.T, mpi_comm, strategy)
    if mpi_comm.rank == 0:
        assert c.tolist() == [[5, 14], [14, 50]]


BAD = {
    "shapes": (np.ones((2, 3)), np.ones((2, 3)), {}, ValueError, r"\(2, 3\) and b \(2, 3\)"),
    "a number": (np.ones(()), np.ones(3), {}, ValueError, r"\(\) and b \(3,\)"),
    "vectors": (np.ones(1), np.ones(3), {}, ValueError, r"\(1,\) and b \(3,\)"),
    "text": (np.array([["x"]]), np.ones((1, 1)), {}, TypeError, "<U1"),
    "objects": (np.array([[None]]), np.ones((1, 1)), {}, TypeError, "object"),
    "nothing on the root": (None, None, {}, TypeError, "object"),
    "missing file": ("no_such_file.npy", np.ones((1, 1)), {}, ValueError, "no_such_file.npy"),
    "strategy": (np.ones((1, 1)), np.ones((1, 1)), {"strategy": "magic"}, ValueError, "magic.*dp, fsdp"),
    "root": (np.ones((1, 1)), np.ones((1, 1)), {"root": 99}, ValueError, "root is 99"),
    "communicator": (np.ones((1, 1)), np.ones((1, 1)), {"comm": "world"}, TypeError, "world"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", BAD)
def test_bad_operands_raise_the_same_on_every_rank(mpi_comm, case):
    a, b, options, kind, message = BAD[case]
    mine = (a, b) if mpi_comm.rank == 0 else (None, None)
    with pytest.raises(kind, match=message) as caught:
        matmul(*mine, **{"comm": mpi_comm, **options})
    assert len(set(mpi_comm.allgather(str(caught.value)))) == 1
    assert matmul([[2]], [[3]], mpi_comm) == (6 if mpi_comm.rank == 0 else None)  # and life goes on


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    ("mine", "others"), [({"strategy": "dp"}, {}), ({"root": 1}, {"root": 0}), ({"strategy": "magic"}, {})]
)
def test_arguments_that_differ_between_ranks_are_an_error_on_all(mpi_comm, mine, others):
    with pytest.raises(ValueError, match=r"on rank 0 and .* on rank 2") as caught:
        matmul([[1]], [[1]], mpi_comm, **(mine if mpi_comm.rank == 2 else others))
    assert len(set(mpi_comm.allgather(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=3)
def test_a_part_of_the_world(mpi_comm):
    half = mpi_comm.Split(mpi_comm.rank % 2, -mpi_comm.rank)
    a = np.full((4, 4), mpi_comm.rank)
    c = matmul(a, a, half)
    if half.rank == 0:
        assert (c == 4 * mpi_comm.rank**2).all()
    half.Free()


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp_column"])
def test_a_product_of_more_than_two_gib_and_two_to_the_31_elements(tmp_path, strategy):
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "from mpi4py import MPI\n"
        "from mpi_matmul import matmul\n"
        "a, b = np.arange(50_000).astype('u1')[:, None], np.arange(43_001).astype('u1')[None, :]\n"
        "mine = (a, b) if MPI.COMM_WORLD.rank == 0 else (None, None)\n"
        f"c = matmul(*mine, strategy={strategy!r})\n"
        "if c is not None:\n"
        "    assert c.size > 2**31 and c.dtype == np.uint8\n"
        "    assert all((c[i] == a[i] * b[0]).all() for i in range(0, 50_000, 499))\n"
        "    assert c[-1, -1] == a[-1, 0] * b[0, -1]\n"
    )
    job = run_ranks(3, [sys.executable, str(script)], timeout=110)
    assert job.returncode == 0, job.stderr


# ---- whole programs of a user ----

SCRIPT = """
import numpy as np, sys
from mpi4py import MPI
from mpi_matmul import matmul
rank = MPI.COMM_WORLD.rank
a = np.arange(12.0).reshape(4, 3) if rank == 0 else None
c = matmul(a, None if a is None else a.T)
{between}
d = matmul(c, c, strategy="dp")
if rank == 0:
    print("second product", d.shape, flush=True)
"""


def run_script(tmp_path, between, num_ranks=3):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{between}", between))
    return run_ranks(num_ranks, [sys.executable, str(script)], timeout=30)


def test_a_program_of_a_user(tmp_path):
    job = run_script(tmp_path, "if rank == 0: print('first', flush=True)")
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["first", "second product (4, 4)"]


@pytest.mark.parametrize(
    "between", ["if rank == 2: raise KeyError('struck')", "if rank == 0: import nothing_there"]
)
def test_an_exception_between_two_products_ends_the_job(tmp_path, between):
    start = time.monotonic()
    job = run_script(tmp_path, between)
    assert time.monotonic() - start < 15
    assert job.returncode != 0
    assert job.stderr.count("Traceback") == 1
    assert "second product" not in job.stdout


def test_a_communicator_of_ours_is_enough_to_end_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "from mpi_matmul import compute_fn\n"
        "from mpi_matmul.comm.mpi import MPICommunicator\n"
        "comm, x, result = MPICommunicator(), np.ones((3, 3)), [None]\n"
        "if comm.rank == 1: raise KeyError('struck')\n"
        "compute_fn(comm, comm.rank, x, x, result)\n"
    )
    job = run_ranks(3, [sys.executable, str(script)], timeout=30)
    assert job.returncode != 0
    assert job.stderr.count("KeyError: 'struck'") == 1


@pytest.mark.parametrize("stream", ["sys.stdout = None", "sys.stdout.close()", "sys.stderr = None"])
def test_a_program_that_has_closed_its_streams_ends_too(tmp_path, stream):
    job = run_script(tmp_path, f"{stream}\nif rank == 1: raise KeyError('struck')")
    assert job.returncode != 0


@pytest.mark.parametrize("before", ["from mpi4py import MPI", "import mpi_matmul.comm.mpi"])
def test_a_user_who_leaves_the_start_of_mpi_to_us(tmp_path, before):
    script = tmp_path / "script.py"
    script.write_text(
        f"import mpi4py; mpi4py.rc.initialize = False\n{before}\n"
        "from mpi_matmul import matmul\nc = matmul([[2]], [[3]])\nif c is not None: print(c)\n"
    )
    job = run_ranks(2, [sys.executable, str(script)], timeout=30)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["[[6]]"]


def test_a_product_after_mpi_has_ended_is_an_error(tmp_path):
    job = run_script(tmp_path, "MPI.Finalize()\ntry: matmul(c, c)\nexcept RuntimeError as error: sys.exit(0)")
    assert job.returncode == 0, job.stderr


def test_many_sends_on_the_way_end_with_the_program(tmp_path):
    """More than MPI keeps by itself, to a receiver that is late."""
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "from mpi_matmul.comm.mpi import MPI, MPICommunicator\n"
        "with MPICommunicator() as comm:\n"
        "    if comm.rank == 0:\n"
        "        for number in range(300): comm.send(0, 1, np.full(8200, number))\n"
        "    MPI.COMM_WORLD.barrier()\n"
        "    if comm.rank == 1:\n"
        "        assert [int(comm.recv(1)[1][-1]) for _ in range(300)] == list(range(300))\n"
    )
    job = run_ranks(2, [sys.executable, str(script)], timeout=30)
    assert job.returncode == 0, job.stderr


def test_nothing_of_a_program_goes_on_after_its_job_was_ended(tmp_path):
    """Whatever catches the error: MPI's Abort may return."""
    kernel = "lambda *shards: 1 / 0 if rank == 1 else None"
    between = (
        "import mpi_matmul.kernels as kernels, dataclasses, pathlib\n"
        f"kernels.KERNELS['dp'] = dataclasses.replace(kernels.KERNELS['dp'], multiply={kernel})\n"
        "try: matmul(a, a, strategy='dp') if rank else matmul(c, c, strategy='dp')\n"
        f"except ZeroDivisionError: pathlib.Path({str(tmp_path / 'went_on')!r}).touch()\n"
    )
    job = run_script(tmp_path, between)
    assert job.returncode != 0
    assert job.stderr.count("ZeroDivisionError") == 1
    assert not (tmp_path / "went_on").exists()


def test_the_users_own_hook_still_shows_what_nobody_catches(tmp_path):
    between = "sys.excepthook = lambda kind, error, trace: print('mine:', error, file=sys.stderr)"
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\n{between}\n" + SCRIPT.replace("{between}", "if rank == 1: raise KeyError(7)")
    )
    job = run_ranks(3, [sys.executable, str(script)], timeout=30)
    assert job.returncode != 0
    assert "rank 1 of 3 failed" in job.stderr
    assert job.stderr.count("mine: 7") == 1
    assert "Traceback" not in job.stderr


def test_a_caught_error_does_not_end_the_job(tmp_path):
    between = (
        "try: matmul(np.ones((2, 3)), np.ones((2, 3)))\nexcept ValueError as error: print(error, flush=True)"
    )
    job = run_script(tmp_path, between)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("do not fit") == 3
