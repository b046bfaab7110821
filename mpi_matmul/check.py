"""Check a product that lies over the ranks: on root against numpy's, or by all ranks with the probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.kernels import Strategy
from mpi_matmul.layout import Array, Distribution, Shape
from mpi_matmul.operands import Problem, operations
from mpi_matmul.probe import Part, first_part, probe, shared_part
from mpi_matmul.sources import Operand
from mpi_matmul.verify import Check, exact_check

# A check against numpy's product repeats the whole product on one rank, which then holds a, b and c. It is
# affordable while it costs seconds: at 50 GF/s a core with BLAS, at 1 GF/s for types that BLAS does not know.
AFFORDABLE_OPERATIONS, AFFORDABLE_WITHOUT_BLAS = 5e11, 1e10
AFFORDABLE_BYTES = 2 << 30


@dataclass(frozen=True)
class Product:
    """One product as it lies: where a and b come from, c whole on root (or None), and this rank's shards."""

    a: Operand
    b: Operand
    c: Array | None
    a_shard: Array
    b_shard: Array
    c_shard: Array


def choose_check(kind: str, problem: Problem) -> str:
    """Which of "exact", "probe" and "none"; "auto" is exact while that is affordable, else the probe."""
    if kind != "auto":
        return kind
    with_blas = np.dtype(problem.dtype).char in "fdFD"
    most = AFFORDABLE_OPERATIONS if with_blas else AFFORDABLE_WITHOUT_BLAS
    affordable = operations(problem) <= most and problem.nbytes <= AFFORDABLE_BYTES
    return "exact" if affordable else "probe"


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


def _part(
    mailbox: Mailbox, distribution: Distribution, shape: Shape, shard: Array, part_of: Callable[..., Part]
) -> Part:
    """What this rank answers for of a matrix of ``shape``, of which it owns ``shard``."""
    places = [distribution.slices(shape, rank) for rank in range(mailbox.world_size)]
    return part_of(shard, places, mailbox.rank)


def _probe(
    mailbox: Mailbox, strategy: Strategy, problem: Problem, product: Product, seed: int, root: int
) -> Check | None:
    """By all ranks, wherever a, b and c lie; of several copies of a part of c the first is judged."""
    a = _part(mailbox, strategy.a, problem.a_shape, product.a_shard, shared_part)
    b = _part(mailbox, strategy.b, problem.b_shape, product.b_shard, shared_part)
    c = _part(mailbox, strategy.c, problem.c_shape, product.c_shard, first_part)
    return probe(mailbox, problem, a, b, c, seed, root)
