"""Start real MPI jobs from a test: `run_ranks(3, [sys.executable, "-m", "mpi_matmul"])`.

The job gets a time limit, and nothing of it is left behind when the limit is reached. A job that ends by
itself is returned, whatever its exit status: the test is the judge.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Open MPI refuses root, and more ranks than cores, until told otherwise; 4.x reads OMPI_MCA_*, 5.x reads
# PRTE_MCA_*, and MPICH none of these. Ranks that share cores must not be pinned to one each.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


# Open MPI 5.0 says this now and then on a busy machine, before it has started any rank.
NEVER_STARTED = "listener thread failed to start"
NOTHING_CONFIGURED = tempfile.TemporaryDirectory()


def find_mpirun() -> str | None:
    """The mpirun to test with: the one named in MPIRUN, else the neighbour of this Python, else PATH's."""
    named = os.environ.get("MPIRUN")
    if named:
        return shutil.which(named)
    neighbour = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    return neighbour or shutil.which("mpirun")


def job_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment, fit for mpirun; `changes` come last, a value of None removes the name."""
    env = {**MPI_ENVIRONMENT, **os.environ}
    # A job started from some other folder must still find the package of this checkout.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # What is calibrated on this machine decides what "auto" takes.
    env["XDG_CONFIG_HOME"] = NOTHING_CONFIGURED.name
    env.pop("MPI_MATMUL_MACHINE", None)
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run_ranks(
    num_ranks: int,
    argv: Sequence[str | os.PathLike[str]],
    timeout: float = 60,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `mpirun -n num_ranks argv...` and return how it ended, with its stdout and stderr as text.

    `env` changes the environment of the job (None as a value removes a name). A launcher that could not even
    start is asked once more. A job that outlives `timeout` seconds is killed, all of it, and fails the test
    with everything it had printed.
    """
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.fail("no mpirun: install the 'openmpi' or 'mpich' extra, or set MPIRUN to the path of yours")
    command = [mpirun, "-n", str(num_ranks), *map(os.fspath, argv)]
    job = run_command(command, timeout=timeout, env=job_environment(env), cwd=cwd)
    if NEVER_STARTED in job.stderr:
        job = run_command(command, timeout=timeout, env=job_environment(env), cwd=cwd)
    return job


def run_command(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end or to the time limit, and leave none of its processes behind."""
    # Files, not pipes: a grandchild that survives would keep a pipe open, and reading it would hang.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_job(process)
        stdout, stderr = (read_back(stream) for stream in (out, err))
    if timed_out:
        shown = " ".join(command)
        pytest.fail(f"still running after {timeout} s: {shown}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def eventually(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true value of ``condition()``; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"it did not come about within {seconds} s")
        time.sleep(0.1)
    return value


def read_back(stream: tempfile._TemporaryFileWrapper) -> str:
    """Everything that was written to a temporary file, whatever its bytes are."""
    os.lseek(stream.fileno(), 0, os.SEEK_SET)
    with open(os.dup(stream.fileno()), "rb") as raw:
        return raw.read().decode("utf-8", errors="replace")


def end_job(process: subprocess.Popen) -> None:
    """End a process and all its descendants, politely first so that mpirun can end its ranks itself."""
    # Listed before the parent dies: an orphan cannot be traced, and a rank may have a group of its own.
    members = descendants(process.pid) if process.poll() is None else []
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for child, parent in process_table():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:  # grows while it is walked
        found += children.get(parent, [])
    return found[1:]


def process_table() -> list[tuple[int, int]]:
    """(pid, parent pid) of every process that has not ended: from /proc where there is one, else from ps."""
    if not Path("/proc/self/stat").exists():
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
        )
        rows = [line.split() for line in listing.stdout.splitlines()]
    else:
        rows = [row for entry in Path("/proc").glob("[0-9]*") for row in proc_row(entry)]
    # Z: ended, and not yet waited for by its parent
    return [(int(pid), int(parent)) for pid, parent, state in rows if not state.startswith("Z")]


def proc_row(entry: Path) -> list[tuple[str, str, str]]:
    """[(pid, parent pid, state)] of one folder in /proc; [] if the process is gone by now."""
    with contextlib.suppress(OSError):
        # "pid (name) state parent ...", where the name may hold spaces and brackets
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        return [(entry.name, parent, state)]
    return []
