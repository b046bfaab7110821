"""python -m mpi_matmul.plan: what a product would cost on so many ranks, before anything is started."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpi_matmul.choose import AUTO, choose, fewer_ranks, reason, seconds
from mpi_matmul.costs import Cost, Ranks, costs_of, in_order, least_touched_items
from mpi_matmul.ending import status_of
from mpi_matmul.kernels import KERNELS
from mpi_matmul.launch import launched_processes
from mpi_matmul.machine import CORES, Machine, default_path, load_machine
from mpi_matmul.operands import Problem, pose, random_operands
from mpi_matmul.options import BAD_INPUT, OK, Parser, Said, at_least, byte_size, dtype_named, wrong
from mpi_matmul.outputs import say
from mpi_matmul.report import size
from mpi_matmul.storage import FileError, OutputFile, shown

MOST_RANKS, MOST = 1_000_000, 10**15  # of ranks, and of a dimension
SHOWN_MESHES = 3  # of a kernel that has a choice
LOOKED_AT = 16  # of those that seem to need least memory

TITLES = (
    *("strategy", "mesh", "memory", "sends", "moved in all", "messages", "touches", "of least"),
    *("copies", "product", "together", "fits"),
)


def main(argv: Sequence[str]) -> int:
    """Run the program of this process; the exit status."""
    return status_of(lambda: _start(argv))


def _start(argv: Sequence[str]) -> int:
    options = parse(argv)
    people = sys.stderr if options.json == "-" else sys.stdout
    plan = Plan(options.problem, options.on, options.machine_used, options.file, options.max_memory)
    try:
        report = None if options.json in (None, "-") else OutputFile(options.json)
        plan.refuse()
    except ValueError as error:
        raise Said(f"mpi_matmul: {error}", BAD_INPUT) from None
    say(to_table(plan, options.all), people)
    if options.json is not None:
        _write(json.dumps(to_facts(plan), indent=2, allow_nan=False), report)
    return OK


def _write(text: str, report: OutputFile | None) -> None:
    if report is not None:
        report.write_text(text + "\n")
    elif sys.stdout is None:
        raise FileError("standard output", "is closed")
    else:
        say(text, sys.stdout)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, complete, with the ``problem``, the ranks it is ``on``, and ``from_file``. Raises Said."""
    options = _parser().parse_args(argv)
    if launched_processes() > 1:
        raise wrong("a plan is made by one process: start it without mpirun")
    if options.hosts is not None and options.hosts > options.ranks:
        raise wrong(f"--hosts {options.hosts} is more than --ranks {options.ranks}")
    m, k, n = options.shape
    try:
        options.problem = pose(*random_operands(0, m, k, n, options.dtype.newbyteorder("=")))
    except (ValueError, TypeError) as error:
        raise wrong(str(error)) from None
    options.on, options.machine_used = _ranks_and_machine(options)
    measured = options.machine_used.measured
    options.file = shown(options.machine or default_path()) if measured else None
    return options


def _ranks_and_machine(options: argparse.Namespace) -> tuple[Ranks, Machine]:
    """Without ``--hosts`` a host has so many ranks as it has cores by default, or had in its calibration."""
    try:
        on_a_host = max(CORES, load_machine(1, path=options.machine).ranks)
        hosts = options.hosts or -(-options.ranks // on_a_host)
        ranks = Ranks(options.ranks, hosts, placed=options.hosts is not None)
        return ranks, load_machine(hosts, path=options.machine)
    except FileError as error:
        raise Said(f"mpi_matmul: {error}", BAD_INPUT) from None


def _parser() -> Parser:
    parser = Parser(
        prog="python -m mpi_matmul.plan",
        description="What a product of two matrices, sharded over so many ranks, would cost with each\n"
        "kernel, and which one --strategy auto takes. Nothing is started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, number = parser.add_argument, at_least(1, MOST_RANKS)
    add("--shape", nargs=3, type=at_least(0, MOST), metavar=("M", "K", "N"), required=True, help=_SHAPE_HELP)
    add("--ranks", type=number, metavar="P", required=True, help="how many ranks there are")
    add(
        "--hosts",
        type=number,
        metavar="H",
        help=f"on so many hosts, filled up one by one (default: {CORES} ranks a host, anywhere)",
    )
    add("--dtype", type=dtype_named, metavar="D", default=np.dtype("float64"), help="numpy dtype (float64)")
    add("--max-memory", type=byte_size, metavar="SIZE", help="that a rank has, such as 8GB")
    add("--machine", metavar="FILE", help="made by bench --calibrate (default: yours, if there is one)")
    add(
        "--all", action="store_true", help=f"every mesh (default: {SHOWN_MESHES} of those that have a choice)"
    )
    add("--json", metavar="FILE", help="write the plan, with every mesh, for programs (- for stdout)")
    return parser


_SHAPE_HELP = "a is (M, K), b is (K, N)"
_EPILOG = """\
columns: mesh: ranks along m x k x n; memory: of the rank that needs most, its shards and what is on its way
(Python and MPI take some 100 MB more); sends, messages: inside the product, by the rank that sends most;
moved in all: by all ranks, copies of what is replicated included; touches: what a rank uses of a, b and c
on average; of least: that, by what some rank must touch whatever the strategy; copies, product, together:
predicted seconds; fits: whether a rank with --max-memory has room.

Exit status: 0 planned; 2 bad usage, or nothing fits."""


@dataclass(frozen=True)
class Plan:
    """All strategies for one product."""

    problem: Problem
    ranks: Ranks
    machine: Machine
    file: str | None = None
    limit: int | None = None

    @cached_property
    def costs(self) -> dict[str, list[Cost]]:
        """Of each kernel, the best mesh first."""
        return {name: in_order(costs_of([name], self.problem, self.ranks, self.machine)) for name in KERNELS}

    @cached_property
    def chosen(self) -> Cost:
        return choose(AUTO, self.problem, self.ranks, self.machine, fits=self.fits)

    @property
    def least_items(self) -> float:
        """What some rank must touch; more, if it has little memory."""
        memory = math.inf if self.limit is None else self.limit / self.itemsize
        return least_touched_items(*self.problem.sizes, self.ranks.number, memory)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.problem.dtype).itemsize

    @property
    def remarks(self) -> list[str]:
        """Why this one, and whether fewer ranks would do."""
        facts = (self.chosen, self.problem, self.ranks, self.machine)
        return [text for text in (f"auto: {reason(*facts)}", fewer_ranks(*facts, self.limit)) if text]

    def fits(self, cost: Cost) -> bool:
        return self.limit is None or (cost.memory_about <= self.limit and cost.memory_bytes <= self.limit)

    def refuse(self) -> None:
        """ValueError with the strategy that needs least, when none fits."""
        if not self.fits(self.chosen):
            costs = (cost for costs in self.costs.values() for cost in costs)
            about = sorted(costs, key=lambda cost: cost.memory_about)
            least = min(about[:LOOKED_AT], key=lambda cost: cost.memory_bytes)
            raise ValueError(
                f"no strategy fits into --max-memory {size(self.limit or 0)}: {least.strategy} needs least, "
                f"{size(least.memory_bytes)} on a rank"
            )

    def ratio(self, cost: Cost) -> float:
        """What a rank touches, by what some rank must touch; 1 where there is nothing to touch."""
        return cost.touched_items / self.least_items if self.least_items else 1.0


# ---- for people ----


def to_table(plan: Plan, every_mesh: bool) -> str:
    """A heading (the product, the machine, the bound), a line a strategy and mesh, and what auto takes."""
    shown_costs = [
        cost for costs in plan.costs.values() for cost in costs[: None if every_mesh else SHOWN_MESHES]
    ]
    rows = [TITLES, *(_row(plan, cost) for cost in shown_costs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join([*_heading(plan), *lines, *plan.remarks])


def _network(plan: Plan) -> str:
    alone = plan.machine.hosts == 1 < plan.ranks.hosts
    return " on one host: of the network a default" if alone else ""


def _heading(plan: Plan) -> list[str]:
    m, k, n = plan.problem.sizes
    ranks, hosts = plan.ranks.number, plan.ranks.hosts
    source = (
        f"calibrated, {plan.file}{_network(plan)}"
        if plan.file
        else "defaults, not measured: bench --calibrate does that"
    )
    least = math.ceil(plan.least_items)
    items = f"{_number(least, 'item')} of a, b and c"
    return [
        f"({m} x {k}) @ ({k} x {n}) {plan.problem.dtype} "
        f"on {_number(ranks, 'rank')}, {_number(hosts, 'host')}",
        f"machine: {plan.machine} ({source})",
        f"some rank must touch {items} at least: {size(least * plan.itemsize)}",
    ]


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(plan: Plan, cost: Cost) -> tuple[str, ...]:
    return (
        cost.strategy.name,
        str(cost.mesh),
        size(cost.memory_bytes),
        size(cost.most_sent_bytes),
        size(cost.sent_bytes + cost.copied_bytes),
        str(cost.sent_messages),
        size(cost.touched_items * plan.itemsize),
        f"{plan.ratio(cost):.2f}",
        *map(seconds, (cost.copy_seconds, cost.multiply_seconds, cost.seconds)),
        "-" if plan.limit is None else "yes" if plan.fits(cost) else "no",
    )


# ---- for programs ----


def to_facts(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it: bytes, items and seconds; every mesh."""
    machine = plan.machine
    return {
        "shape": list(plan.problem.sizes),
        "dtype": plan.problem.dtype,
        "ranks": plan.ranks.number,
        "hosts": plan.ranks.hosts,
        "machine": {"file": plan.file, **{name: getattr(machine, name) for name in NUMBERS}},
        "max_memory_bytes": plan.limit,
        "least_touched_items": plan.least_items,
        "chosen": _facts(plan, plan.chosen),
        "because": plan.remarks,
        "strategies": [_facts(plan, cost) for costs in plan.costs.values() for cost in costs],
    }


NUMBERS = ("latency", "bandwidth", "flops")


def _facts(plan: Plan, cost: Cost) -> dict[str, Any]:
    return {
        "strategy": cost.strategy.name,
        "mesh": list(cost.mesh.shape),
        "memory_bytes": cost.memory_bytes,
        "most_sent_bytes": cost.most_sent_bytes,
        "sent_bytes": cost.sent_bytes,
        "copied_bytes": cost.copied_bytes,
        "sent_messages": cost.sent_messages,
        "touched_items": cost.touched_items,
        "touched_ratio": plan.ratio(cost),
        "copy_seconds": cost.copy_seconds,
        "multiply_seconds": cost.multiply_seconds,
        "seconds": cost.seconds,
        "fits": None if plan.limit is None else plan.fits(cost),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
