"""argv -> one run -> report -> exit status."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from mpi_matmul import memory
from mpi_matmul.check import choose_check
from mpi_matmul.comm.collectives import broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint
from mpi_matmul.cores import blas_threads_in_use
from mpi_matmul.costs import Place, refuse_beyond
from mpi_matmul.deliver import delivered
from mpi_matmul.ending import end, status_of
from mpi_matmul.kernels import Kernel, kernel_named
from mpi_matmul.launch import launched_processes, on_mpi, on_threads, start_mpi
from mpi_matmul.layout import Array
from mpi_matmul.multiply import multiply, pass_door
from mpi_matmul.operands import Problem, random_operands
from mpi_matmul.options import BAD_INPUT, OK, Said, parse
from mpi_matmul.outputs import Outputs
from mpi_matmul.progress import Progress
from mpi_matmul.report import Report
from mpi_matmul.sources import Operand, Source, pose_sources
from mpi_matmul.storage import FileError
from mpi_matmul.versions import versions


def main(argv: Sequence[str]) -> int:
    """Run the program of this process; the exit status. Rank 0 speaks for all."""
    return status_of(lambda: _start(argv))


def _start(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.simulate is None:
        library = start_mpi().library_version()
        return on_mpi(lambda comm, rank: run(options, comm, rank, library))
    if launched_processes() > 1:
        raise Said(
            "mpi_matmul: --simulate runs all ranks in one process: start it without mpirun\n", BAD_INPUT
        )
    return on_threads(options.simulate, lambda comm, rank: run(options, comm, rank, None))[0]


def run(options: argparse.Namespace, comm: PointToPoint, rank: int, mpi_library: str | None) -> int:
    """The program of one rank (on threads without ``mpi_library``); the same exit status on every rank."""
    baseline = memory.resident()
    mailbox = mailbox_of(comm, rank)
    outputs = Outputs(options.output, options.json)
    facts = [platform.node(), versions(), blas_threads_in_use(), baseline, memory.available()]
    hosts, software, threads, baselines, available = _all_ranks(mailbox, facts)
    places = list(map(Place, hosts, baselines, available))
    checks: dict[str, str] = {}
    admitted = pass_door(mailbox, lambda: _door(options, outputs, places, checks), root=0)
    if isinstance(admitted, Exception):
        return end(mailbox, BAD_INPUT, str(admitted))
    problem = admitted[2]
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
    checks = broadcast_facts(mailbox, checks, 0)
    c_shard = _run_all(options, checks, mailbox, *admitted, report, baselines)
    status, message = OK, ""
    try:
        status = _publish(options, mailbox, problem, outputs, report, c_shard)
    except FileError as error:
        status, message = BAD_INPUT, str(error)
    return end(mailbox, status, message)


def _door(
    options: argparse.Namespace, outputs: Outputs, places: list[Place], checks: dict[str, str]
) -> tuple[Source, Source, Problem]:
    """On rank 0: operands opened, outputs possible, memory enough for each strategy and its check.

    Raises ValueError or TypeError with one line.
    """
    if options.operands:
        a_name, b_name = options.operands
        a, b, problem = pose_sources(a_name, b_name, a_name, b_name)
    else:
        m, k, n = options.shape
        a, b, problem = pose_sources(*random_operands(options.seed, m, k, n, options.dtype))
    outputs.check(problem, options.operands)
    for name in options.strategy:
        checks[name] = _affordable_check(options, kernel_named(name), problem, places)
    return a, b, problem


def _affordable_check(
    options: argparse.Namespace, kernel: Kernel, problem: Problem, places: list[Place]
) -> str:
    """The check of a strategy, for which there is memory; ValueError when there is not."""
    check = choose_check(options.check, problem)
    try:
        refuse_beyond(options.max_memory, kernel, problem, check, places)
    except ValueError:
        if options.check != "auto" or check == "probe":
            raise
        check = "probe"
        refuse_beyond(options.max_memory, kernel, problem, check, places)
    return check


def _all_ranks(mailbox: Mailbox, facts: list[Any]) -> tuple[list[Any], ...]:
    """On rank 0, a list for each fact, in rank order; empty lists elsewhere."""
    rows = gather_facts(mailbox, facts, 0) or []
    return tuple([row[column] for row in rows] for column in range(len(facts)))


def _run_all(
    options: argparse.Namespace,
    checks: dict[str, str],
    mailbox: Mailbox,
    a: Operand,
    b: Operand,
    problem: Problem,
    report: Report,
    baselines: list[int],
) -> Array:
    """Every strategy in turn, into ``report``; this rank's shard of the last product."""
    c_shard: Array | None = None
    with Progress(sys.stderr) if mailbox.rank == 0 else nullcontext() as progress:
        for name in options.strategy:
            c_shard = None  # the previous product makes room
            memory.reset_peak()
            outcome = multiply(
                mailbox,
                kernel_named(name),
                problem,
                a,
                b,
                check=checks[name],
                seed=options.seed,
                say=progress.now if progress else lambda activity: None,
                whole=False,
            )
            if outcome.run is not None:
                report.runs.append(replace(outcome.run, baseline_memory_bytes=baselines))
            c_shard = outcome.c_shard
            del outcome
    assert c_shard is not None
    return c_shard


def _publish(
    options: argparse.Namespace,
    mailbox: Mailbox,
    problem: Problem,
    outputs: Outputs,
    report: Report,
    c_shard: Array,
) -> int:
    """Product and report to where they go; the exit status on rank 0. FileError, on rank 0, if that fails."""
    with ExitStack() as stack:
        commit = nothing
        if broadcast_facts(mailbox, options.output is not None and report.passed, 0):
            placement = kernel_named(options.strategy[-1]).c
            product = delivered(mailbox, outputs.product, c_shard, placement, problem)
            try:
                commit = stack.enter_context(product)
            except FileError:
                outputs.show(report)
                raise
        return outputs.publish(report, commit) if mailbox.rank == 0 else OK


def nothing() -> None:
    """There is no product to commit."""
