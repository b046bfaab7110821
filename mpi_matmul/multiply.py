"""The story of a product on one page: distribute -> kernel -> collect -> check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_matmul import memory
from mpi_matmul.check import Product, check_product, choose_check
from mpi_matmul.comm.collectives import barrier, broadcast_facts, gather_facts
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint, rank_in_world
from mpi_matmul.distribute import Arrivals, Door, Returns, empty_result, scatter
from mpi_matmul.kernels import Kernel, kernel_named
from mpi_matmul.launch import on_mpi
from mpi_matmul.layout import Array
from mpi_matmul.operands import Problem
from mpi_matmul.report import Run
from mpi_matmul.sources import Operand, Source, open_recipe, pose_sources

Say = Callable[[Callable[[], str]], None]


@dataclass(frozen=True)
class Outcome:
    """A product: this rank's shard, and on the root what the run was like and the whole c, if wanted."""

    c_shard: Array
    c: Array | None
    run: Run | None


def multiply(
    mailbox: Mailbox,
    kernel: Kernel,
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
    clock, counter = _Clock(kernel.name, say), CountingMailbox(mailbox)
    check = choose_check(check, problem)
    barrier(mailbox)  # nobody's clock runs while another still checks the product before
    with clock("distribute"):
        arrivals = Arrivals()
        b_shard = scatter(mailbox, b, kernel.b, root, arrivals)
        if kernel.streams:
            arrivals.finish()
        a_shard = scatter(mailbox, a, kernel.a, root, arrivals)
        if not kernel.streams:
            arrivals.finish()
            barrier(mailbox)
        whole = whole or check == "exact"
        c, c_shard = empty_result(problem.c_shape, np.dtype(problem.dtype), kernel.c, mailbox, root, whole)
        returns = Returns(mailbox, c, c_shard, kernel.c, root) if whole else None
    with clock("multiply", lambda: f"{counter.sent_messages} blocks passed on" * (counter.sent_messages > 0)):
        stream = [Door(arrivals, returns)] if kernel.streams else []
        kernel.multiply(counter, a_shard, b_shard, c_shard, *stream)
    with clock("collect"):
        arrivals.finish()
        if returns is not None:
            returns.finish()
    with clock("check"):
        product = Product(a, b, c, a_shard, b_shard, c_shard)
        verdict = check_product(mailbox, kernel, problem, product, check, seed, root)
    mine = [clock.seconds, counter.sent_messages, counter.sent_bytes, memory.peak()]
    facts = gather_facts(mailbox, mine, root)
    if facts is None or verdict is None:
        return Outcome(c_shard, None, None)
    return Outcome(c_shard, c, Run.of(kernel.name, problem, facts, verdict))


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


def matmul(a: Any, b: Any, comm: Any = None, strategy: str = "fsdp", root: int = 0) -> Any:
    """``a @ b`` on the ranks of an MPI communicator (mpi4py; default: the world). Collective.

    ``a`` and ``b`` are whole on ``root`` (arrays, or paths of .npy files) and ignored elsewhere; the
    product is returned on ``root``, None elsewhere. The meaning is numpy.matmul's for operands of one and
    two dimensions: result dtype, integer wrap-around, NaN and Inf, empty dimensions. Operands are never
    changed, and the product shares no memory with them.

    ``strategy`` is the name of a kernel ("dp", "fsdp"). Raises, on every rank alike, ValueError for
    shapes that do not fit, unreadable files, a strategy or root that is unknown or not the same on all
    ranks, and TypeError for dtypes that cannot be multiplied. Any other failure on any rank ends the MPI
    job with that rank's traceback; from the first call on, so does an exception that nobody catches
    (through ``sys.excepthook``): no rank is left waiting for one that has died.
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
        kernel = kernel_named(strategy)
        root = rank_in_world("root", root, mailbox.world_size)
    except (ValueError, TypeError) as error:
        return error
    admitted = pass_door(mailbox, lambda: pose_sources(a, b), root)
    if isinstance(admitted, Exception):
        return admitted
    c = multiply(mailbox, kernel, admitted[2], *admitted[:2], root).c
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
