"""From a name, which may be "auto", to the strategy that runs: a kernel on one mesh, and why this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mpi_matmul.costs import AS_GOOD, Cost, Ranks, cheapest, costs_of
from mpi_matmul.kernels import KERNELS, Strategy, kernel_named
from mpi_matmul.machine import Machine
from mpi_matmul.mesh import Mesh
from mpi_matmul.operands import Problem
from mpi_matmul.report import Prediction, size

AUTO = "auto"
NAMES = (*KERNELS, AUTO)
FASTER = 1.1  # fewer ranks are worth a word if all of them would take so many times as long


def choose(
    name: str,
    problem: Problem,
    ranks: Ranks,
    machine: Machine,
    mesh: Sequence[int] = (),
    fits: Callable[[Cost], bool] = lambda cost: True,
) -> Cost:
    """The cost of the strategy to take: of one name the best mesh, of "auto" the best of all.

    ``fits`` says whether there is memory; where nothing fits, that which needs least is taken, to be refused
    with its numbers. ValueError for an unknown name, or a mesh that does not suit.
    """
    if name != AUTO:
        kernel_named(name)
    costs = costs_of([name], problem, ranks, machine, mesh)
    if not costs:
        raise ValueError(f"{name} has no mesh for {ranks.number} ranks on {ranks.hosts} hosts")
    if len(costs) == 1:
        return costs[0]
    return cheapest(costs, fits) or min(costs, key=lambda cost: cost.memory_about)


def reason(chosen: Cost, problem: Problem, ranks: Ranks, machine: Machine) -> str:
    """Why "auto" takes this one, in a sentence."""
    others = [cost for cost in costs_of(KERNELS, problem, ranks, machine) if not _same(cost, chosen)]
    second = min(others, key=lambda cost: cost.seconds, default=None)
    text = f"{chosen.strategy} is predicted to take {seconds(chosen.seconds)} and to move {_moved(chosen)}"
    if second is None or chosen.ranks == 1:
        return text
    if second.seconds * AS_GOOD < chosen.seconds:
        needs = size(second.memory_bytes)
        return f"{text}; {second.strategy} would take {seconds(second.seconds)}, but needs {needs} a rank"
    if second.seconds < chosen.seconds:
        within = f"within {AS_GOOD - 1:.0%} of the fastest"
        return f"{text}, {within} ({second.strategy}: {seconds(second.seconds)} and {_moved(second)})"
    return f"{text}, the next best ({second.strategy}) {seconds(second.seconds)} and {_moved(second)}"


def seconds(number: float) -> str:
    """For people."""
    if number >= 999.5:
        return f"{number:.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if number * factor >= 0.9995:
            return f"{number * factor:.3g} {unit}"
    return f"{number * 1e6:.2g} us"


def fewer_ranks(
    chosen: Cost, problem: Problem, ranks: Ranks, machine: Machine, memory: int | None = None
) -> str | None:
    """What to say when so many ranks are too many for this product, with the number that would be faster.

    ``memory`` is what a rank may need at most, if there is a limit: with fewer ranks it needs more.
    """
    best, number = chosen.seconds, ranks.number
    on_one_host = -(-ranks.number // ranks.hosts)
    tried = ranks.number // 2
    while tried >= 1:
        fewer = Ranks(tried, max(1, min(ranks.hosts, tried // on_one_host)), placed=ranks.placed)
        costs = costs_of([AUTO], problem, fewer, machine)
        fitting = (cost for cost in costs if memory is None or cost.memory_about <= memory)
        taken = min((cost.seconds for cost in fitting), default=math.inf)
        if taken < best:
            best, number = taken, tried
        tried //= 2
    if best * FASTER >= chosen.seconds:
        return None
    noun = "rank is" if number == 1 else "ranks are"
    return (
        f"{number} {noun} predicted to be faster for this product: "
        f"{seconds(best)} instead of {seconds(chosen.seconds)} with {ranks.number}"
    )


def prediction(cost: Cost) -> Prediction:
    """What the report says beside what is measured."""
    return Prediction(cost.multiply_seconds, cost.copy_seconds, cost.sent_bytes, cost.memory_bytes)


def to_facts(strategy: Strategy) -> list[Any]:
    """A strategy for JSON."""
    mesh = strategy.mesh
    return [strategy.name, mesh.shape, mesh.ranks]


def from_facts(facts: list[Any]) -> Strategy:
    name, (m, k, n), ranks = facts
    return kernel_named(name).on(Mesh(m, k, n, None if ranks is None else tuple(ranks)))


def _same(one: Cost, other: Cost) -> bool:
    """Whether two are one and the same work under two names."""
    if one.strategy.name == other.strategy.name:
        return True
    return (one.mesh.shape, one.sent_bytes, one.copied_bytes) == (
        other.mesh.shape,
        other.sent_bytes,
        other.copied_bytes,
    )


def _moved(cost: Cost) -> str:
    return size(cost.sent_bytes + cost.copied_bytes)
