"""Start the ranks: threads here, or this process as one rank of an MPI job. One failure stops all."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

from mpi_matmul.comm.protocol import PointToPoint
from mpi_matmul.comm.threads import Communicator
from mpi_matmul.cores import blas_threads, processors, share_cores, threads_per_rank

T = TypeVar("T")

# Number of processes and own number, as launchers tell them to each process that they start.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
)


class LaunchError(RuntimeError):
    """The ranks cannot be started as asked; the message is for the user."""


def on_threads(num_devices: int, program: Callable[[Communicator, int], T]) -> list[T]:
    """Run ``program(comm, rank)`` on one thread a device; what each returned, in rank order.

    When a device fails the others are woken, all threads end, and its exception is raised here with the
    device named. Raises comm.threads.Deadlock when all devices wait for messages that nobody sends.
    """
    comm = Communicator(num_devices)
    results: list[Any] = [None] * num_devices
    failures: list[BaseException] = []

    def device(rank: int) -> None:
        try:
            results[rank] = program(comm, rank)
        except BaseException as error:
            failures.append(error)  # the first one is the cause, the others were woken by it
            comm.abort(rank, error)
            with suppress(Exception):  # an exception may be of any class
                error.add_note(f"raised on device {rank} of {num_devices}")
        finally:
            comm.finished(rank)

    threads = [
        threading.Thread(target=device, args=(rank,), name=f"device {rank}") for rank in range(num_devices)
    ]
    comm.started(range(num_devices))
    with blas_threads(threads_per_rank([processors()] * num_devices)):
        _run_all(threads, comm)
    if failures:
        raise failures[0]
    return results


def _run_all(threads: list[threading.Thread], comm: Communicator) -> None:
    started = []
    try:
        for thread in threads:
            _start(thread)
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException as error:  # Ctrl-C, or no more threads: leave none behind
        comm.stop(error)
        for thread in started:
            thread.join()
        raise


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise LaunchError(f"cannot start {thread.name}: {error}") from error


def on_mpi(program: Callable[[PointToPoint, int], T], comm: Any = None) -> T:
    """Run ``program(comm, rank)`` as this rank of an MPI communicator (default: the world); collective.

    When it raises on any rank, that rank's traceback is shown and the job ends; in a world of one the
    exception simply goes on. Raises LaunchError when MPI cannot start, or when a launcher started
    several processes and each believes to be alone.
    """
    mpi = start_mpi()
    communicator = mpi.MPICommunicator(comm)
    try:
        of_ranks = communicator.gather_on_host(processors())
        if share_cores(of_ranks):
            communicator.share_cores()
        with blas_threads(threads_per_rank(of_ranks)):
            value = program(communicator, communicator.rank)
        communicator.close()
    except BaseException as error:
        communicator.abort(communicator.rank, error)
        raise
    return value


def start_mpi() -> ModuleType:
    """The MPI module, started, in the world that the launcher meant."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # mpi4py's doubts: what matters is said below
            import mpi_matmul.comm.mpi as mpi
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise LaunchError(f"MPI cannot be started ({reason}); --simulate P needs no MPI") from error
    if mpi.is_finalized():
        raise LaunchError("MPI was finalized earlier in this program, and cannot be started again")
    if mpi.world_size() == 1 and launched_processes() > 1:
        raise LaunchError(
            f"the launcher started {launched_processes()} processes, "
            f"but {mpi.library_version()} sees one rank: "
            "mpirun and the MPI library that mpi4py loads do not belong together"
        )
    return mpi


def launched_processes() -> int:
    """How many processes a launcher says that it started; 1 without a launcher."""
    return _launcher_facts()[0]


def launched_rank() -> int:
    """This process among them, as far as a launcher says; 0 without a launcher."""
    return _launcher_facts()[1]


def _launcher_facts() -> tuple[int, int]:
    """(processes, own number) by the innermost launcher: an mpirun within a Slurm step knows better."""
    for size, rank in _LAUNCHERS:
        if _number(size) is not None:
            return _number(size) or 1, _number(rank) or 0
    if "SLURM_STEP_ID" in os.environ:  # srun's older name for it, which sbatch sets too
        return _number("SLURM_NTASKS") or 1, _number("SLURM_PROCID") or 0
    return 1, 0


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else None
