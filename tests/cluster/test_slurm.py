"""Slurm for real, on hosts that are containers: srun and sbatch start the program across two of them."""

import json
import re
import shlex
import time

import docker_engine
import pytest
from hosts import Cluster
from launcher import REPOSITORY

# The image may have to be built, and Slurm asks in ever longer intervals whether a job has ended.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# Where the image has these files.
SLURM = "/source/tests/cluster/slurm"
JOB = f"{SLURM}/job.sbatch"

PROGRAM = ("python", "-m", "mpi_matmul")
SMALL = ("--shape", "301", "203", "107")
FOUR_RANKS = ("srun", "--nodes=2", "--ntasks=4", "--mpi=pmix")

README_BLOCK = re.search(
    r"^```sh slurm\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE
)
README_COMMANDS = README_BLOCK[1].splitlines()

MAKE_OPERANDS = """
import numpy as np
random = np.random.default_rng(5)
np.save("A.npy", random.random((301, 203)))
np.save("B.npy", random.random((203, 107)))
"""
CHECK_PRODUCT = """
import numpy as np
a, b, c = np.load("A.npy"), np.load("B.npy"), np.load("C.npy")
np.testing.assert_allclose(c, a @ b, rtol=1e-12)
"""
CRASH = """
import os
import numpy as np
from mpi4py import MPI
from mpi_matmul import matmul
rank = MPI.COMM_WORLD.rank
a, b = (np.ones((301, 203)), np.ones((203, 107))) if rank == 0 else (None, None)
matmul(a, b)
if rank == 1:
    os._exit(3)
matmul(a, b)
"""
# In place of the program: how many threads BLAS has inside a job, on each rank.
COUNT_THREADS = """#!/bin/sh
exec /opt/mpi_matmul/bin/python -c '
from mpi_matmul.cores import blas_threads_in_use
from mpi_matmul.launch import on_mpi
print("threads:", on_mpi(lambda *_: blas_threads_in_use()))'
"""


@pytest.fixture(scope="module")
def slurm():
    docker_engine.need_docker()
    with Cluster(2, image=docker_engine.test_image()) as cluster:
        succeed(cluster, "launcher", f"{SLURM}/start", *cluster.names)
        yield cluster


def succeed(cluster, host, *command, **options):
    """What ``command`` printed; it must end well."""
    done = cluster.run(host, *command, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def submit(cluster, *arguments, **options):
    """Submit the batch script and wait for it: the status of the job, and its output."""
    done = cluster.run("launcher", "sbatch", "--wait", "--parsable", *arguments, **options)
    job = done.stdout.strip()
    assert job.isdigit(), done.stdout + done.stderr
    # One that hangs would keep the others waiting.
    succeed(cluster, "launcher", "scancel", job)
    return done.returncode, succeed(cluster, "launcher", "cat", f"mpi_matmul-{job}.out")


def own_words(text):
    """The lines that are not Slurm's."""
    return [line for line in text.splitlines() if not line.startswith(("srun: ", "slurmstepd"))]


@pytest.mark.parametrize("command", README_COMMANDS)
def test_the_commands_of_the_readme(slurm, command):
    """In a folder like a user's: operands, and the repository's own files."""
    folder = "/home/mpi/readme"
    succeed(slurm, "launcher", "mkdir", "--parents", folder)
    succeed(slurm, "launcher", "ln", "--symbolic", "--force", "--no-dereference", "/source/tests", folder)
    succeed(slurm, "launcher", "python", "-c", MAKE_OPERANDS, folder=folder)
    succeed(slurm, "launcher", *shlex.split(command), folder=folder, env=["SBATCH_WAIT=1"])
    if "C.npy" in command:
        succeed(slurm, "launcher", "sh", "-c", f"python -c '{CHECK_PRODUCT}' && rm C.npy", folder=folder)


def test_the_readme_has_commands(slurm):
    assert [command.split()[0] for command in README_COMMANDS] == ["sbatch", "sbatch", "srun"]


def test_srun_over_two_hosts(slurm):
    done = slurm.run("launcher", *FOUR_RANKS, *PROGRAM, *SMALL, "--json", "report.json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    report = json.loads(succeed(slurm, "launcher", "cat", "report.json"))
    assert report["world_size"] == len(report["hosts"]) == 4
    assert set(report["hosts"]) == set(slurm.names)
    checks = {run["strategy"]: run["check"]["passed"] for run in report["runs"]}
    assert checks == {"dp": True, "fsdp": True}


def test_the_batch_script_is_accepted(slurm):
    done = slurm.run("launcher", "sbatch", "--test-only", JOB, "A.npy", "B.npy", "-o", "C.npy")
    assert done.returncode == 0, done.stderr
    assert "using 4 processors on nodes launcher,worker1" in done.stderr


def test_the_batch_script_multiplies_files_of_the_first_node(slurm):
    succeed(slurm, "launcher", "python", "-c", MAKE_OPERANDS)
    status, output = submit(slurm, JOB, "A.npy", "B.npy", "-o", "C.npy")
    assert status == 0, output
    assert re.search(r"on 4 ranks, .* 2 hosts: launcher\b.* worker1\b", output), output
    succeed(slurm, "launcher", "python", "-c", CHECK_PRODUCT)
    # The other node had no part in the files.
    assert ".npy" not in succeed(slurm, "worker1", "ls")


def test_the_batch_script_ends_with_the_status_of_the_program(slurm):
    status, output = submit(slurm, JOB, "A.npy", "B.npy", "--no-such-flag")
    assert status == 2, output
    assert output.count("--no-such-flag") == 1


def test_what_is_asked_for_on_the_command_line_counts(slurm):
    status, output = submit(slurm, "--nodes=1", "--ntasks-per-node=3", JOB, *SMALL)
    assert status == 0, output
    assert re.search(r"on 3 ranks, .* launcher\b", output), output
    assert "worker1" not in output


def test_a_usage_error_is_said_once(slurm):
    done = slurm.run("launcher", *FOUR_RANKS, *PROGRAM, "--no-such-flag")
    assert (done.returncode, done.stdout) == (2, "")
    assert own_words(done.stderr) == [
        "mpi_matmul: unrecognized arguments: --no-such-flag (--help tells more)"
    ]


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_srun_does_not_bring_together(slurm, nodes):
    """Without pmix each process believes to be alone: said once, and nothing is multiplied."""
    srun = ("srun", f"--nodes={nodes}", "--ntasks=4", "--mpi=none")
    done = slurm.run("launcher", *srun, *PROGRAM, *SMALL, "--json", "alone.json")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = own_words(done.stderr)
    assert line.startswith("mpi_matmul: the launcher started 4 processes, but Open MPI v5")
    assert "sees one rank" in line
    assert "alone.json" not in succeed(slurm, "launcher", "ls")


def test_a_rank_that_crashes_ends_the_job(slurm):
    for host in slurm.names:
        succeed(slurm, host, "tee", "crash.py", stdin=CRASH)
    start = time.monotonic()
    done = slurm.run("launcher", *FOUR_RANKS, "python", "crash.py", timeout=60)
    assert time.monotonic() - start < 30
    assert done.returncode not in (0, 124, 137)
    assert "task 1: Exited with exit code 3" in done.stderr


@pytest.mark.parametrize("cpus", [1, 2])
def test_blas_threads_follow_cpus_per_task(slurm, cpus):
    """Seen by a program that stands where the batch script expects Python."""
    for host in slurm.names:
        succeed(slurm, host, "mkdir", "--parents", "instead")
        succeed(slurm, host, "tee", "instead/python", stdin=COUNT_THREADS)
        succeed(slurm, host, "chmod", "+x", "instead/python")
    path = succeed(slurm, "launcher", "printenv", "PATH").strip()
    options = (f"--cpus-per-task={cpus}", "--ntasks-per-node=1")
    status, output = submit(slurm, *options, JOB, env=[f"PATH=/home/mpi/instead:{path}"])
    # BLAS starts no more threads than there are cores.
    threads = min(cpus, int(succeed(slurm, "launcher", "nproc")))
    assert (status, output.splitlines()) == (0, [f"threads: {threads}"] * 2), output
