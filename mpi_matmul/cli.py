"""argv -> one run -> report -> exit status."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from mpi_matmul import memory
from mpi_matmul.comm.collectives import barrier, broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint
from mpi_matmul.cores import blas_threads_in_use
from mpi_matmul.kernels import kernel_named
from mpi_matmul.launch import LaunchError, launched_processes, launched_rank, on_mpi, on_threads, start_mpi
from mpi_matmul.layout import Array
from mpi_matmul.multiply import multiply, pass_door
from mpi_matmul.operands import Problem, admit, random_operands
from mpi_matmul.options import BAD_INPUT, INTERRUPTED, OK, Said, parse
from mpi_matmul.outputs import Outputs, complain, say
from mpi_matmul.progress import Progress
from mpi_matmul.report import Report
from mpi_matmul.storage import FileError, open_matrix
from mpi_matmul.versions import versions


def main(argv: Sequence[str]) -> int:
    """Run the program of this process; the exit status. Rank 0 speaks for all."""
    try:
        options = parse(argv)
        if options.simulate is None:
            library = start_mpi().library_version()
            return on_mpi(lambda comm, rank: run(options, comm, rank, library))
        if launched_processes() > 1:
            raise Said(
                "mpi_matmul: --simulate runs all ranks in one process: start it without mpirun\n", BAD_INPUT
            )
        return on_threads(options.simulate, lambda comm, rank: run(options, comm, rank, None))[0]
    except Said as said:
        return _say_once(said)
    except LaunchError as error:
        if launched_rank() == 0:
            complain(f"mpi_matmul: {error}", sys.stderr)
        return BAD_INPUT
    except MemoryError as error:
        complain(f"mpi_matmul: not enough memory: {error}", sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        complain("mpi_matmul: interrupted", sys.stderr)
        return INTERRUPTED


def run(options: argparse.Namespace, comm: PointToPoint, rank: int, mpi_library: str | None) -> int:
    """The program of one rank (on threads without ``mpi_library``); the same exit status on every rank."""
    baseline = memory.resident()
    mailbox = mailbox_of(comm, rank)
    outputs = Outputs(options.output, options.json)
    admitted = pass_door(mailbox, lambda: _door(options, outputs), root=0)
    if isinstance(admitted, Exception):
        return _end(mailbox, BAD_INPUT, str(admitted))
    a, b, problem = admitted
    facts = [platform.node(), versions(), blas_threads_in_use(), baseline]
    hosts, software, threads, baselines = _all_ranks(mailbox, facts)
    report = Report(
        mailbox.world_size,
        "mpi" if mpi_library else "threads",
        mpi_library,
        hosts,
        software,
        threads,
        [problem.m, problem.k, problem.n],
        problem.dtype,
    )
    c = _run_all(options, mailbox, problem, a, b, report, baselines)
    status, message = OK, ""
    if rank == 0:
        try:
            status = outputs.publish(report, None if c is None else c.reshape(problem.result_shape))
        except FileError as error:
            status, message = BAD_INPUT, str(error)
    return _end(mailbox, status, message)


def _door(options: argparse.Namespace, outputs: Outputs) -> tuple[Array, Array, Problem]:
    """On rank 0: operands read or made, outputs possible. Raises ValueError or TypeError with one line."""
    if options.operands:
        a_name, b_name = options.operands
        a, b, problem = admit(open_matrix(a_name), open_matrix(b_name), a_name, b_name)
    else:
        a, b, problem = admit(*_random_operands(options))
    outputs.check(problem, options.operands)
    return a, b, problem


def _random_operands(options: argparse.Namespace) -> tuple[Array, Array]:
    m, k, n = options.shape
    rng = np.random.default_rng(options.seed)
    try:
        return random_operands(rng, m, k, n, options.dtype)
    except (MemoryError, ValueError) as error:  # numpy says "array is too big" with a ValueError
        raise ValueError(f"--shape {m} {k} {n}: not enough memory on rank 0 ({error})") from None


def _all_ranks(mailbox: Mailbox, facts: list[Any]) -> tuple[list[Any], ...]:
    """On rank 0, a list for each fact, in rank order; empty lists elsewhere."""
    rows = gather_facts(mailbox, facts, 0) or []
    return tuple([row[column] for row in rows] for column in range(len(facts)))


def _run_all(
    options: argparse.Namespace,
    mailbox: Mailbox,
    problem: Problem,
    a: Any,
    b: Any,
    report: Report,
    baselines: list[int],
) -> Array | None:
    """Every strategy in turn, into ``report``; the last product (on rank 0)."""
    c: Array | None = None
    with Progress(sys.stderr) if mailbox.rank == 0 else nullcontext() as progress:
        for name in options.strategy:
            c = None  # the previous product makes room
            memory.reset_peak()
            c, run_of_kernel = multiply(
                mailbox,
                kernel_named(name),
                problem,
                a,
                b,
                check=options.check,
                seed=options.seed,
                say=progress.now if progress else lambda activity: None,
            )
            if run_of_kernel is not None:
                report.runs.append(replace(run_of_kernel, baseline_memory_bytes=baselines))
    return c


def _end(mailbox: Mailbox, status: int, message: str) -> int:
    """Say ``message`` once and agree on rank 0's exit status; no rank leaves before it is said."""
    if message and mailbox.rank == 0:
        complain(f"mpi_matmul: {message}", sys.stderr)
    agreed: int = broadcast_facts(mailbox, status, 0)
    barrier(mailbox)
    return agreed


def _say_once(said: Said) -> int:
    status = said.status
    if launched_processes() == 1 or launched_rank() == 0:
        try:
            say(said.text.rstrip("\n"), sys.stderr if said.status else sys.stdout)
        except FileError:
            status = BAD_INPUT
    if launched_processes() > 1:
        with suppress(LaunchError):  # a launcher may end the job when the first rank leaves: leave together
            on_mpi(lambda comm, rank: barrier(mailbox_of(comm, rank)))
    return status
