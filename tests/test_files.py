"""Operands and product as files, on MPI: who reads and writes what, on hosts that share the folder or not."""

import json
import sys

import numpy as np
import pytest
from launcher import run_ranks
from test_cli import mpirun, refused, saved, simulate

from mpi_matmul import costs
from mpi_matmul.kernels import KERNELS
from mpi_matmul.mesh import Mesh
from mpi_matmul.operands import Problem

# The program, with what PREPARE does to some ranks first; afterwards each rank says what it saw.
SCRIPT = """
import json, sys
import numpy as np
from mpi4py import MPI
import mpi_matmul.deliver as deliver, mpi_matmul.multiply as multiply, mpi_matmul.sources as sources
from mpi_matmul import memory
from mpi_matmul.cli import main
from mpi_matmul.storage import FileError, MatrixPart, NpyFile
rank, seen = MPI.COMM_WORLD.rank, {"read": 0, "written": 0}

def counted(method, key):
    def wrapped(self, rows, columns, block):
        seen[key] += block.nbytes
        return method(self, rows, columns, block)
    return wrapped

NpyFile.read, MatrixPart.write = counted(NpyFile.read, "read"), counted(MatrixPart.write, "written")
{prepare}
status = main(sys.argv[1:])
seen["peak"] = memory.peak()
everything = MPI.COMM_WORLD.gather(seen)
if rank == 0:
    print("SEEN", json.dumps(everything))
sys.exit(status)
"""

HOSTS = {
    "a shared folder": ("", {0, 1, 2}, {0, 1, 2}),
    "rank 1 cannot open the operands": (
        "if rank == 1: multiply.open_recipe = lambda recipe: None",
        {0, 2},
        {0, 1, 2},
    ),
    "other files of these names on ranks 1 and 2": (
        "if rank: NpyFile.fingerprint = lambda self: ['another']",
        {0},
        {0, 1, 2},
    ),
    "rank 2 cannot write": (
        """
def refuse(name, *_): raise FileError(name, "not here")
if rank == 2: deliver.open_part = refuse""",
        {0, 1, 2},
        {0, 1},
    ),
    "nothing is shared": (
        """
def refuse(name, *_): raise FileError(name, "not here")
if rank: deliver.open_part, multiply.open_recipe = refuse, lambda recipe: None""",
        {0},
        {0},
    ),
}


def run_program(tmp_path, prepare, *arguments, num_ranks=3):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.replace("{prepare}", prepare))
    job = run_ranks(num_ranks, [sys.executable, str(script), *map(str, arguments)])
    seen = [line for line in job.stdout.splitlines() if line.startswith("SEEN")]
    return job, json.loads(seen[0].removeprefix("SEEN")) if seen else None


@pytest.mark.parametrize("strategy", KERNELS)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("check", ["exact", "probe"])
def test_each_rank_reads_and_writes_its_own_part_or_rank_0_does(tmp_path, strategy, hosts, check):
    prepare, readers, writers = HOSTS[hosts]
    rng = np.random.default_rng(8)
    a, b = rng.integers(-9, 9, (61, 40)).astype("f8"), rng.integers(-9, 9, (40, 50)).astype(">i4")
    a_path = saved(tmp_path, "A.npy", np.asfortranarray(a))
    b_path, c_path = saved(tmp_path, "B.npy", b), tmp_path / "C.npy"
    before = a_path.read_bytes(), b_path.read_bytes()
    job, seen = run_program(
        tmp_path, prepare, a_path, b_path, "-o", c_path, "--strategy", strategy, "--check", check
    )
    assert job.returncode == 0, job.stderr
    np.testing.assert_array_equal(np.load(c_path), a @ b)
    assert np.load(c_path).dtype == np.float64
    assert (a_path.read_bytes(), b_path.read_bytes()) == before
    assert {rank for rank, of_rank in enumerate(seen) if of_rank["read"]} == readers
    assert {rank for rank, of_rank in enumerate(seen) if of_rank["written"]} == writers
    assert sum(of_rank["written"] for of_rank in seen) == 61 * 50 * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.npy", "B.npy", "C.npy", "program.py"]


FAILURES = {
    "a full disk on rank 2": "if rank == 2: MatrixPart.write = full",
    "a full disk on rank 0": "if rank == 0: MatrixPart.write = full",
    "a full disk on rank 0, which writes for others": (
        "if rank == 0: MatrixPart.write = full\n"
        "else: deliver.open_part = lambda name, *_: full(None, None, None, None)"
    ),
    "a disk that fails in the end": "if rank == 1: MatrixPart.sync = lambda self: full(self, 0, 0, 0)",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_part_that_cannot_be_written_leaves_all_as_it_was(tmp_path, failure):
    a = saved(tmp_path, "A.npy", np.ones((30, 30)))
    old = saved(tmp_path, "C.npy", np.zeros(3)).read_bytes()
    prepare = "def full(self, *_): raise FileError('C.npy', 'no space left on device')\n" + FAILURES[failure]
    job, _ = run_program(tmp_path, prepare, a, a, "-o", tmp_path / "C.npy", "--json", tmp_path / "R.json")
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpi_matmul:")]
    assert job.returncode == 2, job.stderr
    assert len(lines) == 1
    assert "C.npy: no space left on device" in lines[0]
    assert "Traceback" not in job.stderr
    assert (tmp_path / "C.npy").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.npy", "C.npy", "program.py"]


def test_vectors_have_the_result_shape_of_numpy(tmp_path):
    v = np.arange(7.0)
    cases = {(): (v, v), (3,): (v, np.ones((7, 3))), (5,): (np.ones((5, 7)), v)}
    for shape, (a, b) in cases.items():
        paths = [saved(tmp_path, "A.npy", a), saved(tmp_path, "B.npy", b), "-o", tmp_path / "C.npy"]
        job = mpirun(3, *paths)
        assert job.returncode == 0, job.stderr
        assert np.load(tmp_path / "C.npy").shape == shape
        np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), a @ b)


def test_no_rank_holds_a_whole_matrix(tmp_path):
    """Neither reading, multiplying, probing nor writing: at no time more than shards, blocks and 64 MB."""
    size, p = 4000, 4
    rng = np.random.default_rng(1)
    a = saved(tmp_path, "A.npy", rng.standard_normal((size, size), np.float32))
    b = saved(tmp_path, "B.npy", rng.standard_normal((size, size), np.float32))
    report, c = tmp_path / "R.json", tmp_path / "C.npy"
    job = mpirun(p, a, b, "-o", c, "--check", "probe", "--json", report)
    assert job.returncode == 0, job.stderr
    run = json.loads(report.read_text())["runs"][0]
    assert run["check"]["kind"] == "probe"
    shards = 3 * size * size * 4 // p
    for baseline, peak in zip(run["baseline_memory_bytes"], run["peak_memory_bytes"], strict=True):
        assert shards < peak - baseline < shards + 64_000_000, (baseline, peak, shards)
    c = np.load(c, mmap_mode="r")
    np.testing.assert_allclose(c[::997], np.load(a)[::997] @ np.load(b), rtol=0, atol=1e-2)


def test_a_large_operand_shows_up_whole_on_no_rank_but_the_first(tmp_path):
    a = saved(tmp_path, "A.npy", np.ones((8000, 8000)))
    b = saved(tmp_path, "B.npy", np.ones((8000, 256)))
    job, seen = run_program(
        tmp_path, "", a, b, "-o", tmp_path / "C.npy", "--strategy", "fsdp", "--check", "probe", num_ranks=4
    )
    assert job.returncode == 0, job.stderr
    whole = 8000 * 8000 * 8
    for of_rank in seen:
        assert of_rank["peak"] < whole // 4 + 3 * 8000 * 256 * 8 + 150_000_000


SKEWED = {
    "other dtypes, dp": ((4000, 9000, 8), "i1", "f8", "dp"),
    "other dtypes, fsdp": ((4000, 9000, 8), "i1", "f8", "fsdp"),
    "a long k": ((4, 1_000_000, 4), "f8", "f8", "fsdp"),
    "long columns": ((1_000_000, 4, 4), "f8", "f8", "fsdp"),
    "a long row of c": ((4, 4, 1_000_000), "f8", "f8", "fsdp"),
}


@pytest.mark.parametrize("case", SKEWED)
def test_neither_conversion_nor_probe_takes_more_than_panels(tmp_path, case):
    (m, k, n), a_dtype, b_dtype, strategy = SKEWED[case]
    a, b = np.ones((m, k), a_dtype), np.ones((k, n), b_dtype)
    report = tmp_path / "R.json"
    paths = saved(tmp_path, "A.npy", a), saved(tmp_path, "B.npy", b)
    job = mpirun(2, *paths, "--strategy", strategy, "--check", "probe", "--json", report)
    assert job.returncode == 0, job.stderr
    run = json.loads(report.read_text())["runs"][0]
    shards = (a.nbytes + m * n * 8) // 2 + b.nbytes // (1 if strategy == "dp" else 2)
    for baseline, peak in zip(run["baseline_memory_bytes"], run["peak_memory_bytes"], strict=True):
        assert peak - baseline < shards + 64_000_000


def test_a_file_that_becomes_shorter_while_it_is_used_is_said_in_one_line(tmp_path):
    a, b = saved(tmp_path, "A.npy", np.ones((400, 300))), saved(tmp_path, "B.npy", np.ones((300, 2)))
    prepare = (
        "import os\n"
        "def shorter(*arguments, check=multiply.choose_check):\n"
        f"    if rank == 0: os.truncate({str(a)!r}, 5000)\n"
        "    MPI.COMM_WORLD.Barrier()\n"
        "    return check(*arguments)\n"
        "multiply.choose_check = shorter"
    )
    job, _ = run_program(tmp_path, prepare, a, b, "-o", tmp_path / "C.npy")
    assert job.returncode == 2, job.stderr
    assert "Traceback" not in job.stderr
    assert f"{a}: cut short" in job.stderr
    assert not (tmp_path / "C.npy").exists()


# ---- memory that there is not ----


def test_max_memory_refuses_with_the_amounts(tmp_path):
    a = saved(tmp_path, "A.npy", np.ones((2000, 2000)))
    job = mpirun(3, a, a, "-o", tmp_path / "C.npy", "--max-memory", "100MB")
    assert refused(job, "fsdp needs", "more than --max-memory 100 MB", "on rank")
    assert not (tmp_path / "C.npy").exists()
    assert mpirun(3, a, a, "-o", tmp_path / "C.npy", "--max-memory", "400 MiB").returncode == 0


def test_without_memory_for_an_exact_check_auto_probes(tmp_path):
    a, report = saved(tmp_path, "A.npy", np.ones((2000, 2000))), tmp_path / "R.json"
    for limit, kind in (("1GB", "exact"), ("200MB", "probe")):
        job = mpirun(4, a, a, "--strategy", "fsdp", "--max-memory", limit, "--json", report)
        assert job.returncode == 0, job.stderr
        run = json.loads(report.read_text())["runs"][0]
        assert run["check"]["kind"] == kind
        assert max(run["peak_memory_bytes"]) < float(limit[:-2]) * {"G": 1e9, "M": 1e6}[limit[-2]]
    assert refused(mpirun(4, a, a, "--check", "exact", "--max-memory", "200MB"), "fsdp needs")


@pytest.mark.parametrize("amount", ["", "many", "-1", "1.5.2GB", "8XB", "GB"])
def test_an_amount_of_memory_is_a_number_with_a_unit(amount):
    assert refused(simulate(1, "--max-memory", amount), "--max-memory", "is not a size such as")


def test_what_a_run_needs_is_enough(tmp_path):
    """Just above the amount that is named the run is let in, and its ranks keep to it."""
    arguments = ["--shape", 3000, 3000, 3000, "--dtype", "float32", "--strategy", "fsdp", "--check", "probe"]
    job = mpirun(3, *arguments, "--max-memory", "1MB")
    needed = float(job.stderr.split("fsdp needs ")[1].split(" MB")[0])
    report = tmp_path / "R.json"
    job = mpirun(3, *arguments, "--max-memory", f"{needed + 3}MB", "--json", report)
    assert job.returncode == 0, job.stderr
    assert max(json.loads(report.read_text())["runs"][0]["peak_memory_bytes"]) < (needed + 3) * 1e6


def fsdp_on(num_ranks):
    return KERNELS["fsdp"].on(Mesh(num_ranks, 1, 1))


def test_a_host_that_has_less_is_named():
    problem = Problem(1000, 1000, 1000, "float64", "float64", "float64", (1000, 1000))
    places = [
        costs.Place("h1", 10**7, 10**9),
        costs.Place("h2", 10**7, 3 * 10**7),
        costs.Place("h1", 10**7, None),
    ]
    with pytest.raises(
        ValueError, match=r"^fsdp needs .* of memory on h2, .* more than there is \(30.0 MB\)"
    ):
        costs.refuse_beyond(None, fsdp_on(3), problem, "none", places)
    costs.refuse_beyond(None, fsdp_on(2), problem, "none", [places[0], places[2]])
    with pytest.raises(ValueError, match="on h1"):
        costs.refuse_beyond(None, fsdp_on(1), problem, "exact", [costs.Place("h1", 0, 3 * 10**7)])
