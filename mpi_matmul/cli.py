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
from mpi_matmul.choose import from_facts
from mpi_matmul.comm.collectives import broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint
from mpi_matmul.cores import blas_threads_in_use
from mpi_matmul.costs import Place
from mpi_matmul.deliver import delivered
from mpi_matmul.door import Chosen, open_door
from mpi_matmul.ending import end, status_of
from mpi_matmul.kernels import Strategy
from mpi_matmul.launch import launched_processes, on_mpi, on_threads, start_mpi
from mpi_matmul.layout import Array
from mpi_matmul.multiply import multiply, pass_door
from mpi_matmul.operands import Problem
from mpi_matmul.options import BAD_INPUT, OK, Said, parse
from mpi_matmul.outputs import Outputs
from mpi_matmul.progress import Progress
from mpi_matmul.report import Report
from mpi_matmul.sources import Operand, Source
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
    chosen: list[Chosen] = []

    def door() -> tuple[Source, Source, Problem]:
        operands, plan = open_door(options, outputs, places)
        chosen.extend(plan)
        return operands

    admitted = pass_door(mailbox, door, root=0)
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
    plan = broadcast_facts(mailbox, [one.facts for one in chosen], 0)
    c_shard = _run_all(options, plan, mailbox, *admitted, report)
    _complete(report, chosen, baselines)
    status, message = OK, ""
    try:
        status = _publish(options, mailbox, problem, outputs, report, c_shard, from_facts(plan[-1][0]))
    except FileError as error:
        status, message = BAD_INPUT, str(error)
    return end(mailbox, status, message)


def _complete(report: Report, chosen: list[Chosen], baselines: list[int]) -> None:
    """On rank 0: what was known before the products were made."""
    for number, one in enumerate(chosen):
        report.runs[number] = replace(
            report.runs[number],
            baseline_memory_bytes=baselines,
            predicted=one.predicted,
            chosen_because=one.because,
            remark=one.remark,
        )


def _all_ranks(mailbox: Mailbox, facts: list[Any]) -> tuple[list[Any], ...]:
    """On rank 0, a list for each fact, in rank order; empty lists elsewhere."""
    rows = gather_facts(mailbox, facts, 0) or []
    return tuple([row[column] for row in rows] for column in range(len(facts)))


def _run_all(
    options: argparse.Namespace,
    plan: list[Any],
    mailbox: Mailbox,
    a: Operand,
    b: Operand,
    problem: Problem,
    report: Report,
) -> Array:
    """Every strategy in turn, into ``report``; this rank's shard of the last product."""
    c_shard: Array | None = None
    with Progress(sys.stderr) if mailbox.rank == 0 else nullcontext() as progress:
        for strategy, check in plan:
            c_shard = None  # the previous product makes room
            memory.reset_peak()
            outcome = multiply(
                mailbox,
                from_facts(strategy),
                problem,
                a,
                b,
                check=check,
                seed=options.seed,
                say=progress.now if progress else lambda activity: None,
                whole=False,
            )
            if outcome.run is not None:
                report.runs.append(outcome.run)
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
    strategy: Strategy,
) -> int:
    """Product and report to where they go; the exit status on rank 0. FileError, on rank 0, if that fails."""
    with ExitStack() as stack:
        commit = nothing
        if broadcast_facts(mailbox, options.output is not None and report.passed, 0):
            product = delivered(mailbox, outputs.product, c_shard, strategy.c, problem)
            try:
                commit = stack.enter_context(product)
            except FileError:
                outputs.show(report)
                raise
        return outputs.publish(report, commit) if mailbox.rank == 0 else OK


def nothing() -> None:
    """There is no product to commit."""
