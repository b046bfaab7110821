"""Check a product that lies over the ranks: on root against numpy's, or by every rank on its own rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpi_matmul.comm.collectives import all_reduce, broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.kernels import Strategy
from mpi_matmul.layout import ROWS, Array
from mpi_matmul.operands import Problem, operations
from mpi_matmul.sources import Operand
from mpi_matmul.verify import (
    PROBE_TRIALS,
    Check,
    OperandFacts,
    exact_check,
    merge_checks,
    merge_facts,
    operand_facts,
    probe_check,
    probe_times,
    probe_vectors,
)

# A check against numpy's product repeats the whole product on one rank, which then holds a, b and c. It is
# affordable while it costs seconds: at 50 GF/s a core with BLAS, at 1 GF/s for types that BLAS does not know.
AFFORDABLE_OPERATIONS, AFFORDABLE_WITHOUT_BLAS = 5e11, 1e10
AFFORDABLE_BYTES = 2 << 30
# Of random vectors and their products at a time; with less room the probe goes over a, b and c more often.
PROBE_BYTES = 8 << 20


@dataclass(frozen=True)
class Product:
    """One product as it lies: where a and b come from, c whole on root (or None), and this rank's shards."""

    a: Operand
    b: Operand
    c: Array | None
    a_shard: Array
    b_shard: Array
    c_shard: Array


def choose_check(kind: str, strategy: Strategy, problem: Problem) -> str:
    """Which of "exact", "probe" and "none"; "auto" is exact while that is affordable, else the probe.

    ValueError for a probe of a kernel that cannot be probed.
    """
    if kind == "probe" and not can_probe(strategy):
        raise ValueError(f"the probe needs a and c by rows, which {strategy} has not")
    if kind != "auto":
        return kind
    with_blas = np.dtype(problem.dtype).char in "fdFD"
    most = AFFORDABLE_OPERATIONS if with_blas else AFFORDABLE_WITHOUT_BLAS
    fits = problem.nbytes <= AFFORDABLE_BYTES
    return "exact" if (operations(problem) <= most and fits) or not can_probe(strategy) else "probe"


def check_product(
    mailbox: Mailbox,
    strategy: Strategy,
    problem: Problem,
    product: Product,
    kind: str,
    seed: int,
    root: int,
) -> Check | None:
    """The verdict on ``root`` (None elsewhere), by "exact", "probe" or "none". Every rank calls this."""
    if kind == "probe":
        return _probe(mailbox, strategy, problem, product, seed, root)
    if mailbox.rank != root:
        return None
    if kind == "none":
        return Check("none", True, 0.0, 0.0)
    assert product.c is not None
    return exact_check(_whole(product.a), _whole(product.b), product.c)


def _whole(operand: Operand) -> Array:
    assert operand.source is not None
    return operand.source.part(slice(0, operand.shape[0]), slice(0, operand.shape[1]))


def can_probe(strategy: Strategy) -> bool:
    """Whether every rank has whole rows of a and the same rows of c, as the probe needs them."""
    return strategy.kernel.a == strategy.kernel.c == ROWS


def _probe(
    mailbox: Mailbox, strategy: Strategy, problem: Problem, product: Product, seed: int, root: int
) -> Check | None:
    """Compare c @ x with a @ (b @ x), each rank for its own rows of a and c; b may lie in any way."""
    rows, _ = strategy.c.slices(problem.c_shape, mailbox.rank)
    b_rows, columns = strategy.b.slices(problem.b_shape, mailbox.rank)
    facts = operand_facts(product.b_shard, columns, problem.n)
    replicated = strategy.b.copies == mailbox.world_size
    if not replicated:
        facts = _merge_over_ranks(mailbox, facts, root)
    trials = max(1, min(PROBE_TRIALS, PROBE_BYTES // max(1, (problem.k + problem.n) * _width(problem))))
    found = []
    for first in range(0, PROBE_TRIALS, trials):
        number, dtype = min(trials, PROBE_TRIALS - first), np.dtype(problem.dtype)
        x = probe_vectors(problem.n, dtype, [seed, first], number, skip=facts.nonfinite_columns)
        part = probe_times(product.b_shard, x[columns])
        y = np.zeros((problem.k, part.shape[1]), part.dtype)
        y[b_rows] = part
        if not replicated:
            y = all_reduce(mailbox, y)
        found.append(probe_check(product.a_shard, product.c_shard, x, y, facts, rows.start))
    verdicts = gather_facts(mailbox, asdict(merge_checks(found)), root)
    return None if verdicts is None else merge_checks([Check(**of_rank) for of_rank in verdicts])


def _width(problem: Problem) -> int:
    """Bytes of a number in the vectors of a probe, as far as that is known before."""
    dtype = np.dtype(problem.dtype)
    return dtype.itemsize if dtype.kind in "biu" else max(dtype.itemsize, 8)


def _merge_over_ranks(mailbox: Mailbox, facts: OperandFacts, root: int) -> OperandFacts:
    columns = np.flatnonzero(facts.nonfinite_columns)
    parts = gather_facts(mailbox, [facts.exponent, facts.squares, columns.tolist()], root)
    parts = broadcast_facts(mailbox, parts, root)
    return merge_facts([_facts_from(facts, *part) for part in parts])


def _facts_from(like: OperandFacts, exponent: int, squares: float, columns: list[int]) -> OperandFacts:
    nonfinite: Any = np.zeros(like.nonfinite_columns.shape, np.bool_)
    nonfinite[columns] = True
    return OperandFacts(like.dtype, exponent, squares, nonfinite)
