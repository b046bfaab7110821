"""Before any work, on rank 0: operands opened, outputs possible, strategies chosen, memory enough for
each."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mpi_matmul.check import choose_check
from mpi_matmul.choose import AUTO, choose, fewer_ranks, prediction, reason, to_facts
from mpi_matmul.cores import processors
from mpi_matmul.costs import Cost, Place, Ranks, refuse_beyond
from mpi_matmul.kernels import Strategy
from mpi_matmul.machine import Machine, load_machine
from mpi_matmul.operands import Problem, random_operands
from mpi_matmul.outputs import Outputs
from mpi_matmul.report import Prediction
from mpi_matmul.sources import Source, pose_sources


@dataclass(frozen=True)
class Chosen:
    """One product to be made: how, how it is checked, what is predicted of it, and why it was chosen, if it
    was."""

    strategy: Strategy
    check: str
    predicted: Prediction
    because: str | None
    remark: str | None

    @property
    def facts(self) -> list[Any]:
        """What every rank must know, for JSON."""
        return [to_facts(self.strategy), self.check]


def open_door(
    options: argparse.Namespace, outputs: Outputs, places: list[Place]
) -> tuple[tuple[Source, Source, Problem], list[Chosen]]:
    """The operands, and what is to be done with them. Raises ValueError or TypeError with one line."""
    if options.operands:
        a_name, b_name = options.operands
        a, b, problem = pose_sources(a_name, b_name, a_name, b_name)
    else:
        m, k, n = options.shape
        a, b, problem = pose_sources(*random_operands(options.seed, m, k, n, options.dtype))
    outputs.check(problem, options.operands)
    ranks = Ranks.on([place.host for place in places])
    machine = load_machine(ranks.hosts, len(processors()))
    chosen = [_choose(options, name, problem, ranks, places, machine) for name in options.strategy]
    return (a, b, problem), chosen


def _choose(
    options: argparse.Namespace,
    name: str,
    problem: Problem,
    ranks: Ranks,
    places: list[Place],
    machine: Machine,
) -> Chosen:

    def fits(cost: Cost) -> bool:
        try:
            affordable_check(options, cost.strategy, problem, places)
        except ValueError:
            return False
        return True

    cost = choose(name, problem, ranks, machine, options.mesh or (), fits)
    try:
        check = affordable_check(options, cost.strategy, problem, places)
    except ValueError as error:
        raise ValueError(f"no strategy fits: {error}" if name == AUTO else str(error)) from None
    because = reason(cost, problem, ranks, machine) if name == AUTO else None
    remark = fewer_ranks(cost, problem, ranks, machine, options.max_memory) if name == AUTO else None
    return Chosen(cost.strategy, check, prediction(cost), because, remark)


def affordable_check(
    options: argparse.Namespace, strategy: Strategy, problem: Problem, places: list[Place]
) -> str:
    """The check of a strategy, for which there is memory; ValueError when there is not."""
    check = choose_check(options.check, problem)
    try:
        refuse_beyond(options.max_memory, strategy, problem, check, places)
    except ValueError:
        if options.check != "auto" or check == "probe":
            raise
        check = "probe"
        refuse_beyond(options.max_memory, strategy, problem, check, places)
    return check
