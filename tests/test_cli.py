"""The command: what it says, what it writes, how it ends. Real MPI jobs, each under a time limit."""

import json
import os
import platform
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from launcher import (
    REPOSITORY,
    eventually,
    find_mpirun,
    job_environment,
    process_table,
    run_command,
    run_ranks,
)

from mpi_matmul.versions import versions

PROGRAM = [sys.executable, "-m", "mpi_matmul"]


def mpirun(num_ranks, *arguments, **options):
    return run_ranks(num_ranks, [*PROGRAM, *map(str, arguments)], **options)


def simulate(num_ranks, *arguments, timeout=60, env=None, **options):
    command = [*PROGRAM, "--simulate", str(num_ranks), *map(str, arguments)]
    return run_command(command, timeout, job_environment(env), **options)


BACKENDS = {"mpirun": mpirun, "threads": simulate}


@pytest.fixture(params=BACKENDS)
def run(request):
    return BACKENDS[request.param]


def saved(folder, name, array):
    path = folder / name
    np.save(path, array)
    return path


@pytest.fixture
def operands(tmp_path):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((31, 20)), rng.standard_normal((20, 17))
    return saved(tmp_path, "A.npy", a), saved(tmp_path, "B.npy", b), a @ b


def refused(job, *parts):
    """Status 2, and one line of ours that says all of this."""
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpi_matmul:")]
    assert job.returncode == 2, (job.returncode, job.stdout, job.stderr)
    assert len(lines) == 1, job.stderr
    assert "Traceback" not in job.stderr
    assert job.stdout == ""
    for part in parts:
        assert str(part) in lines[0]
    return True


# ---- good runs ----


def test_the_main_job():
    job = mpirun(4, "--shape", 60, 50, 40)
    assert job.returncode == 0, job.stderr
    assert "(60 x 50) @ (50 x 40) float64 on 4 ranks" in job.stdout
    assert "dp: correct" in job.stdout
    assert "fsdp: correct" in job.stdout
    assert job.stdout.splitlines()[-1] == "done"
    assert "mpi_matmul:" not in job.stderr


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_report_for_programs(run, num_ranks, tmp_path):
    m, k, n = 50, 40, 30
    job = run(num_ranks, "--shape", m, k, n, "--dtype", "float32", "--json", tmp_path / "R.json")
    assert job.returncode == 0, job.stderr
    report = json.loads((tmp_path / "R.json").read_text())
    threads = report["backend"] == "threads"
    assert report["world_size"] == num_ranks
    assert report["shape"] == [m, k, n]
    assert report["dtype"] == "float32"
    assert report["hosts"] == [platform.node()] * num_ranks
    assert report["versions"] == [versions()] * num_ranks
    assert report["versions"][0]["numpy"] == np.__version__
    assert len(set(report["blas_threads"])) == 1
    assert (report["mpi_library"] is None) == threads
    assert [entry["strategy"] for entry in report["runs"]] == ["dp", "fsdp"]
    for entry, sent in zip(report["runs"], (0, (num_ranks - 1) * k * n * 4), strict=True):
        assert sum(entry["kernel_sent_bytes"]) == sent
        assert set(entry["seconds"]) == {"distribute", "multiply", "collect", "check"}
        assert entry["gflops"] > 0
        assert entry["check"]["kind"] == "exact"
        assert entry["check"]["passed"] is True
        assert 0 <= entry["check"]["max_error"] <= entry["check"]["error_bound"]
        for baseline, peak in zip(entry["baseline_memory_bytes"], entry["peak_memory_bytes"], strict=True):
            assert 10_000_000 < baseline < peak * 1.5


def test_the_report_on_standard_output_is_nothing_but_json(run):
    job = run(3, "--shape", 5, 6, 7, "--json", "-")
    assert json.loads(job.stdout)["world_size"] == 3
    assert "fsdp: correct" in job.stderr


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("dtype", ["float32", "float16", ">f8", "int32", "bool", "complex64", "longdouble"])
def test_files_of_any_dtype_and_order(tmp_path, strategy, dtype):
    rng = np.random.default_rng(5)
    a = np.asfortranarray(rng.integers(0, 3, (13, 9)).astype(dtype))
    b = rng.integers(0, 3, (9, 5)).astype(dtype)
    job = simulate(
        3,
        saved(tmp_path, "A.npy", a),
        saved(tmp_path, "B.npy", b),
        "-o",
        tmp_path / "C.npy",
        "--strategy",
        strategy,
    )
    assert job.returncode == 0, job.stderr
    c = np.load(tmp_path / "C.npy")
    assert c.dtype == (a @ b).dtype
    np.testing.assert_array_equal(c, a @ b)


def test_an_uneven_float32_pair_on_four_ranks(tmp_path):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3001, 2003), dtype=np.float32)
    b = rng.standard_normal((2003, 1501), dtype=np.float32)
    arguments = [
        saved(tmp_path, "A.npy", a),
        saved(tmp_path, "B.npy", b),
        "-o",
        tmp_path / "C.npy",
        "--json",
        tmp_path / "R.json",
    ]
    job = mpirun(4, *arguments)
    assert job.returncode == 0, job.stderr
    c = np.load(tmp_path / "C.npy")
    assert c.dtype == np.float32
    np.testing.assert_allclose(c, a.astype(float) @ b.astype(float), rtol=0, atol=1e-2)
    assert json.loads((tmp_path / "R.json").read_text())["runs"][0]["check"]["passed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.npy", "B.npy", "C.npy", "R.json"]


@pytest.mark.parametrize(
    "shapes",
    [((3, 0), (0, 2)), ((0, 3), (3, 2)), ((0, 0), (0, 0)), ((4,), (4, 3)), ((4,), (4,)), ((1, 1), (1, 1))],
)
def test_files_that_are_empty_or_vectors(run, tmp_path, shapes):
    a, b = (np.ones(shape, np.int32) for shape in shapes)
    job = run(3, saved(tmp_path, "A.npy", a), saved(tmp_path, "B.npy", b), "-o", tmp_path / "C.npy")
    assert job.returncode == 0, job.stderr
    c = np.load(tmp_path / "C.npy")
    assert c.shape == (a @ b).shape
    assert (c == a @ b).all()


def test_files_may_follow_the_strategies(operands):
    a, b, _ = operands
    job = simulate(2, "--strategy", "fsdp", "dp", a, b)
    assert job.returncode == 0, job.stderr
    assert "dp: correct" in job.stdout
    assert "fsdp: correct" in job.stdout


@pytest.mark.parametrize("check", ["exact", "probe", "none"])
def test_the_check_that_is_asked_for_is_made(run, operands, check, tmp_path):
    a, b, _ = operands
    job = run(3, a, b, "--check", check, "--json", tmp_path / "R.json")
    assert job.returncode == 0
    assert json.loads((tmp_path / "R.json").read_text())["runs"][0]["check"]["kind"] == check


def test_the_same_random_operands_for_every_number_of_ranks(tmp_path):
    products = []
    for num_ranks in (1, 3):
        simulate(num_ranks, "--shape", 9, 8, 7, "--dtype", "int64", "--seed", 7, "-o", tmp_path / "C.npy")
        products.append(np.load(tmp_path / "C.npy"))
    assert (products[0] == products[1]).all()
    simulate(1, "--shape", 9, 8, 7, "--dtype", "int64", "--seed", 8, "-o", tmp_path / "C.npy")
    assert (np.load(tmp_path / "C.npy") != products[0]).any()


def test_output_through_a_pipe_has_no_carriage_returns():
    job = mpirun(3, "--shape", 30, 30, 30)
    assert "\r" not in job.stdout + job.stderr


# ---- bad usage and bad input ----


def test_help_is_printed_once(run):
    job = run(4, "--help")
    assert job.returncode == 0
    assert job.stdout.count("usage:") == 1
    assert "--strategy" in job.stdout


def test_the_version():
    assert simulate(1, "--version").stdout.startswith("mpi_matmul ")


USAGE = {
    "unknown option": (["--no-such-flag"], "--no-such-flag"),
    "one operand": (["A.npy"], "expected two operands"),
    "three operands": (["A.npy", "B.npy", "C.npy"], "expected two operands"),
    "unknown strategy": (["--strategy", "magic"], "magic"),
    "files where a strategy is expected": (["--strategy", "A.npy", "B.npy"], "A.npy"),
    "unknown dtype": (["--dtype", "float63"], "float63"),
    "a dtype of objects": (["--dtype", "object"], "object"),
    "negative shape": (["--shape", "-1", "2", "3"], "--shape"),
    "shape beside files": (["A.npy", "B.npy", "--shape", "1", "2", "3"], "--shape"),
    "unknown check": (["--check", "maybe"], "maybe"),
    "a product beyond all memory": (["--shape", "4000000000", "0", "4000000000"], "no memory can hold"),
    "a shape beyond all memory": (["--shape", "3000000000", "3000000000", "1"], "memory"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage(case):
    arguments, part = USAGE[case]
    assert refused(simulate(2, *arguments), part)


@pytest.mark.parametrize("case", ["unknown option", "one operand"])
def test_bad_usage_is_said_once_on_mpi(case):
    arguments, part = USAGE[case]
    assert refused(mpirun(4, *arguments), part)


def test_a_world_of_no_ranks():
    assert refused(simulate(0), "0")


MISFITS = {
    "shapes that do not fit": (np.ones((2, 3)), np.ones((2, 3)), ("(2, 3) and", "B.npy (2, 3)")),
    "vector too short": (np.ones(1), np.ones(3), ("(1,)", "(3,)")),
    "a number": (np.ones(()), np.ones(3), ("()", "(3,)")),
    "three dimensions": (np.ones((2, 2, 2)), np.ones((2, 2)), ("(2, 2, 2)",)),
}


@pytest.mark.parametrize("case", MISFITS)
def test_operands_that_cannot_be_multiplied(run, case, tmp_path):
    a, b, parts = MISFITS[case]
    job = run(3, saved(tmp_path, "A.npy", a), saved(tmp_path, "B.npy", b), "-o", tmp_path / "C.npy")
    assert refused(job, *parts)
    assert not (tmp_path / "C.npy").exists()


def damaged(tmp_path, kind):
    path = tmp_path / "bad.npy"
    if kind == "missing":
        return path
    if kind == "objects":
        np.save(path, np.array([[{}, 1]], dtype=object), allow_pickle=True)
    elif kind == "records":
        np.save(path, np.zeros((2, 2), dtype=[("a", "f8")]))
    elif kind == "random bytes":
        path.write_bytes(np.random.default_rng(0).bytes(1024))
    elif kind == "archive":
        with path.open("wb") as stream:
            np.savez(stream, a=np.ones((2, 2)))
    elif kind == "empty file":
        path.write_bytes(b"")
    else:
        np.save(path, np.ones((100, 100)))
        path.write_bytes(path.read_bytes()[:-8])
    return path


@pytest.mark.parametrize(
    "kind", ["missing", "objects", "records", "random bytes", "archive", "empty file", "cut short"]
)
def test_files_that_are_not_what_they_say(tmp_path, kind):
    good = saved(tmp_path, "B.npy", np.ones((2, 2)))
    run = mpirun if kind in ("missing", "cut short") else simulate
    job = run(3, damaged(tmp_path, kind), good, "-o", tmp_path / "C.npy")
    assert refused(job, "bad.npy")
    assert not (tmp_path / "C.npy").exists()


@pytest.mark.parametrize("target", ["no/such/folder/C.npy", "folder", "A.npy", "/dev/null", "", "-"])
def test_outputs_that_cannot_be_written(operands, tmp_path, target):
    a, b, _ = operands
    (tmp_path / "folder").mkdir()
    before = a.read_bytes()
    job = simulate(2, a, b, "-o", target if target in ("", "-") else tmp_path / target)
    assert refused(job, target)
    assert a.read_bytes() == before


def test_a_report_that_would_overwrite_the_product_is_refused(operands, tmp_path):
    a, b, _ = operands
    assert refused(simulate(2, a, b, "-o", tmp_path / "C.npy", "--json", tmp_path / "C.npy"), "C.npy")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize("redirection", [">/dev/full", "--json - >/dev/full", "--json - >&-"])
def test_standard_output_that_is_full(operands, tmp_path, redirection):
    """Then the result is not known, and no file is changed."""
    a, b, _ = operands
    older = saved(tmp_path, "C.npy", np.ones(3)).read_bytes()
    command = ["bash", "-c", f'"$@" {redirection}', "full", *PROGRAM, "--simulate", "2", str(a), str(b)]
    job = run_command([*command, "-o", str(tmp_path / "C.npy")], 60, job_environment())
    assert job.returncode == 2
    assert job.stderr.splitlines()[-1].startswith("mpi_matmul: standard output: ")
    assert "Traceback" not in job.stderr
    assert (tmp_path / "C.npy").read_bytes() == older


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize(
    "command_line", ["--bad 2>/dev/full", "missing.npy B.npy 2>/dev/full", "--help >/dev/full"]
)
def test_a_refusal_that_nobody_can_read(command_line):
    command = ["bash", "-c", f'"$@" --simulate 2 {command_line}', "full", *PROGRAM]
    job = run_command(command, 60, job_environment())
    assert job.returncode == 2
    assert "Traceback" not in job.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize("redirection", ["2>&-", ">&-", "| head -n 1", ">&- 2>&-"])
def test_streams_that_nobody_reads(operands, tmp_path, redirection):
    a, b, product = operands
    shell = f'set -o pipefail; "$@" {redirection}'
    command = ["bash", "-c", shell, "closed", *PROGRAM, "--simulate", "2", str(a), str(b)]
    job = run_command([*command, "-o", str(tmp_path / "C.npy")], 60, job_environment())
    assert job.returncode == 0, job.stderr
    np.testing.assert_allclose(np.load(tmp_path / "C.npy"), product)


def test_names_that_the_terminal_cannot_show(operands, tmp_path):
    a, b, _ = operands
    job = simulate(2, a, b, "-o", tmp_path / "\u00fc.npy", env={"PYTHONIOENCODING": "ascii"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1].endswith("\\xfc.npy")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_disk_leaves_the_older_file(operands, tmp_path):
    """The limit on file size stands for a full disk: writing fails half way."""
    _a, _b, _ = operands
    older = saved(tmp_path, "C.npy", np.ones(3)).read_bytes()
    big = [saved(tmp_path, "big.npy", np.ones((200, 200)))] * 2
    command = ["bash", "-c", 'ulimit -f 100; trap "" XFSZ; exec "$@"', "limited", *PROGRAM, "--simulate", "2"]
    job = run_command([*command, *map(str, big), "-o", str(tmp_path / "C.npy")], 60, job_environment())
    assert job.returncode == 2
    assert "C.npy: file too large" in job.stderr
    assert "Traceback" not in job.stderr
    assert (tmp_path / "C.npy").read_bytes() == older
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.npy", "B.npy", "C.npy", "big.npy"]


@pytest.mark.parametrize(
    "facts",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "4"},
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_processes_that_each_believe_to_be_alone(facts):
    job = run_command(PROGRAM, 60, job_environment(facts))
    assert refused(job)
    # MPICH is not even started by an mpirun that is known to be Open MPI's.
    assert "4 processes, but" in job.stderr or "the MPI library that mpi4py loads is MPICH" in job.stderr
    if "OMPI_COMM_WORLD_RANK" in facts:
        silent = run_command(PROGRAM, 60, job_environment({**facts, "OMPI_COMM_WORLD_RANK": "3"}))
        assert (silent.returncode, silent.stdout) == (2, "")
        assert "mpi_matmul:" not in silent.stderr


def test_the_innermost_launcher_counts():
    """One rank of mpirun, within a Slurm step of four tasks."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert mpirun(1, "--shape", 3, 3, 3, env=step).returncode == 0


def test_simulating_under_mpirun_is_refused():
    assert refused(mpirun(3, "--simulate", 2), "--simulate")


# ---- failures ----

FAILING = """
import dataclasses, os, signal, sys
import numpy as np
import mpi_matmul.kernels as kernels
from mpi_matmul.cli import main
from mpi_matmul.comm.mailbox import MatchingMailbox

def strike(mailbox):
    {strike}

def failing(work, a_shard, b_shard, c_shard, original=kernels.KERNELS["fsdp"].multiply):
    original(work, a_shard, b_shard, c_shard)
    strike(work.mailbox)

kernels.KERNELS["fsdp"] = dataclasses.replace(kernels.KERNELS["fsdp"], multiply=failing)
sys.exit(main(sys.argv[1:]))
"""


def failing_program(tmp_path, strike):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.replace("{strike}", strike))
    return [sys.executable, str(script), "--strategy=fsdp"]


STRIKES = {
    "an exception on rank 2": "if mailbox.rank == 2: raise KeyError('struck')",
    "an exit on rank 1": "if mailbox.rank == 1: os._exit(3)",
    "a killed rank": "if mailbox.rank == 3: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("strike", STRIKES)
def test_a_rank_that_fails_ends_the_job(tmp_path, operands, strike):
    a, b, _ = operands
    start = time.monotonic()
    job = run_ranks(
        4, [*failing_program(tmp_path, STRIKES[strike]), a, b, "-o", str(tmp_path / "C.npy")], timeout=30
    )
    assert time.monotonic() - start < 20
    assert job.returncode != 0
    assert job.stderr.count("Traceback") == job.stderr.count("KeyError: 'struck'") == ("exception" in strike)
    assert ("rank 2 of 4 failed" in job.stderr) == ("exception" in strike)
    assert not (tmp_path / "C.npy").exists()


def test_a_failure_of_all_ranks_is_shown_once(tmp_path):
    job = run_ranks(
        4, [*failing_program(tmp_path, "raise KeyError('struck')"), "--strategy", "fsdp"], timeout=30
    )
    assert job.returncode != 0
    assert job.stderr.count("Traceback") == 1


def test_ranks_do_not_outlive_their_launcher(tmp_path):
    """Killed, it cannot end them."""
    wait_for_ever = (
        f"open(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close(); mailbox.recv((mailbox.rank + 1) % 3)"
    )
    program = failing_program(tmp_path, wait_for_ever)
    with subprocess.Popen([find_mpirun(), "-n", "3", *program], env=job_environment()) as launcher:
        try:
            pids = eventually(
                lambda: len(names := list(tmp_path.glob("*.pid"))) == 3 and {int(name.stem) for name in names}
            )
        finally:
            launcher.kill()
    eventually(lambda: not pids & {pid for pid, _ in process_table()})


def test_a_rank_ends_when_its_launcher_has_gone(tmp_path):
    """As it does when mpirun has lost a host: then no one else ends the rank, wherever it is."""
    job = run_ranks(
        3,
        failing_program(tmp_path, "from mpi_matmul.comm import mpi; mpi._LAUNCHER = -1; signal.pause()"),
        timeout=30,
    )
    assert job.returncode != 0
    assert re.search(r"mpi_matmul: rank [012]: the launcher has gone, this rank ends", job.stderr)


def test_a_failing_device_of_the_simulator_is_named(tmp_path):
    program = failing_program(tmp_path, "if mailbox.rank == 2: raise KeyError('struck')")
    job = run_command([*program, "--simulate", "4", "--shape", "9", "9", "9"], 30, job_environment())
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == 1
    assert "raised on device 2 of 4" in job.stderr


@pytest.mark.parametrize("check", ["exact", "probe"])
def test_a_wrong_product_is_status_1_and_is_not_written(tmp_path, operands, check):
    a, b, _ = operands
    older = saved(tmp_path, "C.npy", np.ones(3)).read_bytes()
    program = failing_program(tmp_path, "if mailbox.rank == 1: failing.c_shard[...] *= 1.01")
    script = tmp_path / "failing.py"
    script.write_text(
        script.read_text().replace(
            "    strike(work.mailbox)\n", "    failing.c_shard = c_shard\n    strike(work.mailbox)\n"
        )
    )
    job = run_ranks(
        3,
        [*program, a, b, "-o", str(tmp_path / "C.npy"), "--check", check, "--json", str(tmp_path / "R.json")],
    )
    assert job.returncode == 1, job.stderr
    assert "WRONG" in job.stdout
    assert (tmp_path / "C.npy").read_bytes() == older
    assert json.loads((tmp_path / "R.json").read_text())["runs"][0]["check"]["passed"] is False


def test_a_wrong_launcher_is_not_blamed_on_the_user(tmp_path):
    """A process that cannot load MPI says so in one line, and how to go on without."""
    job = run_command(
        PROGRAM, 60, job_environment({"MPI4PY_LIBMPI": str(tmp_path / "none.so"), "MPI4PY_MPIABI": None})
    )
    assert refused(job, "MPI cannot be started", "--simulate")


def test_runs_from_any_folder(tmp_path, operands):
    job = mpirun(2, "A.npy", "B.npy", "-o", "C.npy", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    np.testing.assert_allclose(np.load(tmp_path / "C.npy"), operands[2])
    assert tmp_path != REPOSITORY
