"""The story of a product on one page: distribute -> kernel -> collect -> check."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_matmul import memory
from mpi_matmul.check import Product, check_product, choose_check
from mpi_matmul.choose import AUTO, NAMES, choose, from_facts, to_facts
from mpi_matmul.comm.collectives import barrier, broadcast_facts, gather_facts
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint, rank_in_world
from mpi_matmul.cores import processors
from mpi_matmul.costs import Ranks
from mpi_matmul.distribute import Arrivals, Door, Returns, empty_result, scatter
from mpi_matmul.kernels import Strategy
from mpi_matmul.launch import on_mpi
from mpi_matmul.layout import Array
from mpi_matmul.machine import load_machine
from mpi_matmul.operands import Problem
from mpi_matmul.report import Run
from mpi_matmul.sources import Operand, Source, open_recipe, pose_sources
from mpi_matmul.stream import ALL_HERE
from mpi_matmul.work import Work

Say = Callable[[Callable[[], str]], None]


@dataclass(frozen=True)
class Outcome:
    """A product: this rank's shard, and on the root what the run was like and the whole c, if wanted."""

    c_shard: Array
    c: Array | None
    run: Run | None


def multiply(
    mailbox: Mailbox,
    strategy: Strategy,
    problem: Problem,
    a: Operand,
    b: Operand,
    root: int = 0,
    check: str = "none",
    seed: int = 0,
    say: Say = lambda activity: None,
    whole: bool = True,
) -> Outcome:
    """The product of ``a`` (m, k) and ``b`` (k, n), with ``whole`` (or an exact check) gathered on ``root``.

    Every rank calls this with the same problem.
    """
    clock, counter = _Clock(str(strategy), say), CountingMailbox(mailbox)
    streams = strategy.kernel.streams
    check = choose_check(check, problem)
    barrier(mailbox)  # nobody's clock runs while another still checks the product before
    with clock("distribute"):
        arrivals = Arrivals()
        b_shard = scatter(mailbox, b, strategy.b, root, arrivals)
        if streams:
            arrivals.finish()
        a_shard = scatter(mailbox, a, strategy.a, root, arrivals)
        if not streams:
            arrivals.finish()
            barrier(mailbox)
        whole = whole or check == "exact"
        c, c_shard = empty_result(problem.c_shape, np.dtype(problem.dtype), strategy.c, mailbox, root, whole)
        returns = Returns(mailbox, c, c_shard, strategy.c, root) if whole else None
    with clock("multiply", lambda: f"{counter.sent_messages} blocks passed on" * (counter.sent_messages > 0)):
        stream = Door(arrivals, returns) if streams else ALL_HERE
        work = Work(counter, strategy.mesh, problem, stream)
        strategy.kernel.multiply(work, a_shard, b_shard, c_shard)
    with clock("collect"):
        arrivals.finish()
        if returns is not None:
            returns.finish()
    with clock("check"):
        product = Product(a, b, c, a_shard, b_shard, c_shard)
        verdict = check_product(mailbox, strategy, problem, product, check, seed, root)
    mine = [clock.seconds, counter.sent_messages, counter.sent_bytes, memory.peak()]
    facts = gather_facts(mailbox, mine, root)
    if facts is None or verdict is None:
        return Outcome(c_shard, None, None)
    return Outcome(c_shard, c, Run.of(strategy.name, str(strategy.mesh), problem, facts, verdict))


class _Clock:
    """Seconds of each phase on this rank."""

    def __init__(self, strategy: str, say: Say) -> None:
        self.seconds: dict[str, float] = {}
        self._strategy, self._say = strategy, say

    @contextmanager
    def __call__(self, phase: str, detail: Callable[[], str] | None = None) -> Iterator[None]:
        self._say(lambda: ", ".join(filter(None, [f"{self._strategy}: {phase}", detail and detail()])))
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start


def matmul(a: Any, b: Any, comm: Any = None, strategy: str = AUTO, root: int = 0) -> Any:
    """``a @ b`` on the ranks of an MPI communicator (mpi4py; default: the world). Collective.

    ``a`` and ``b`` are whole on ``root`` (arrays, or paths of .npy files) and ignored elsewhere; the
    product is returned on ``root``, None elsewhere. The meaning is numpy.matmul's for operands of one and
    two dimensions: result dtype, integer wrap-around, NaN and Inf, empty dimensions. Operands are never
    changed, and the product shares no memory with them.

    ``strategy`` is the name of a kernel (see `mpi_matmul.kernels`), which runs on its best mesh, or "auto":
    the kernel and mesh that are predicted to be fastest here (see `mpi_matmul.costs`). Raises, on every rank
    alike, ValueError for shapes that do not fit, unreadable files, a strategy or root that is unknown or not
    the same on all ranks, and TypeError for dtypes that cannot be multiplied. Any other failure on any rank
    ends the MPI job with that rank's traceback; from the first call on, so does an exception that nobody
    catches (through ``sys.excepthook``): no rank is left waiting for one that has died.
    """

    def program(communicator: PointToPoint, rank: int) -> Any:
        return _matmul(mailbox_of(communicator, rank), a, b, strategy, root)

    outcome = on_mpi(program, comm)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _matmul(mailbox: Mailbox, a: Any, b: Any, strategy: str, root: int) -> Any:
    try:
        _agree(mailbox, strategy=strategy, root=root)
        if strategy not in NAMES:
            raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(NAMES)}")
        root = rank_in_world("root", root, mailbox.world_size)
    except (ValueError, TypeError) as error:
        return error
    hosts = gather_facts(mailbox, platform.node(), root)
    chosen: list[Any] = []

    def door() -> tuple[Source, Source, Problem]:
        assert hosts is not None
        *sources, problem = pose_sources(a, b)
        ranks = Ranks.on(hosts)
        chosen.append(
            to_facts(choose(strategy, problem, ranks, load_machine(ranks.hosts, len(processors()))).strategy)
        )
        return sources[0], sources[1], problem

    admitted = pass_door(mailbox, door, root)
    if isinstance(admitted, Exception):
        return admitted
    on = from_facts(broadcast_facts(mailbox, chosen, root)[0])
    c = multiply(mailbox, on, admitted[2], *admitted[:2], root).c
    return None if c is None else c.reshape(admitted[2].result_shape)[()]


def _agree(mailbox: Mailbox, **arguments: Any) -> None:
    """The same ValueError on every rank unless each argument is the same on every rank."""
    mine = {name: str(value) for name, value in arguments.items()}
    of_ranks = broadcast_facts(mailbox, gather_facts(mailbox, mine, 0), 0)
    for rank, others in enumerate(of_ranks):
        for name, value in of_ranks[0].items():
            if others[name] != value:
                raise ValueError(f"{name} is {value} on rank 0 and {others[name]} on rank {rank}")


def pass_door(
    mailbox: Mailbox, door: Callable[[], tuple[Source, Source, Problem]], root: int
) -> tuple[Operand, Operand, Problem] | ValueError | TypeError:
    """What ``door()`` gives on ``root``, as every rank knows it; or the same error everywhere."""
    sources: list[Source | None] = [None, None]
    facts: Any = None
    if mailbox.rank == root:
        try:
            *sources, problem = door()
            facts = {"problem": vars(problem), "recipes": [source.recipe() for source in sources if source]}
        except (ValueError, TypeError) as error:
            facts = {"error": str(error), "is_type_error": isinstance(error, TypeError)}
    facts = broadcast_facts(mailbox, facts, root)
    if "error" in facts:
        return TypeError(facts["error"]) if facts["is_type_error"] else ValueError(facts["error"])
    if mailbox.rank != root:
        sources = [open_recipe(recipe) for recipe in facts["recipes"]]
    problem = Problem(**{**facts["problem"], "result_shape": tuple(facts["problem"]["result_shape"])})
    mine = [source is not None for source in sources]
    readers = broadcast_facts(mailbox, gather_facts(mailbox, mine, root), root)
    a, b = (
        Operand(shape, np.dtype(dtype), source, [of_rank[index] for of_rank in readers])
        for index, (shape, dtype, source) in enumerate(
            [(problem.a_shape, problem.a_dtype, sources[0]), (problem.b_shape, problem.b_dtype, sources[1])]
        )
    )
    return a, b, problem
