"""Freivalds' probe, c @ x against a @ (b @ x), of matrices that lie over the ranks in any rectangular parts.

What is compared, within which bounds, and how surely an error is found: `verify.probe_check`. Here: who adds
up what. Every rank multiplies its own parts by the same random x, (n, t), and by y = b @ x, (k, t), which is
the sum of what all ranks have of it. The rows of c @ x and a @ y are added up where they are judged: the r-th
block of rows on rank r. Nothing larger than vectors is sent, and nothing at all but y where a and c are split
by rows alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from mpi_matmul.comm.collectives import all_reduce, broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.row_sums import RowSums
from mpi_matmul.layout import Array, Shape, block_range, length
from mpi_matmul.operands import Problem
from mpi_matmul.verify import (
    PROBE_TRIALS,
    Check,
    RowFacts,
    finite_columns,
    finite_rows,
    merge_checks,
    misfit,
    norms_of,
    overflows,
    part_squares,
    probe_check,
    probe_places,
    probe_times,
    probe_vectors,
    row_facts,
    row_squares,
)

# Of random vectors and their products at a time; with less room the probe goes over a, b and c more often.
PROBE_BYTES = 8 << 20

Place = tuple[slice, slice]


@dataclass(frozen=True)
class Part:
    """What a rank answers for: ``shard`` is these rows and columns of the whole matrix.

    The parts of all ranks are the whole matrix, each of its elements once; a rank's part may be empty.
    """

    shard: Array
    rows: slice
    columns: slice


def shared_part(shard: Array, places: Sequence[Place], rank: int) -> Part:
    """The part of ``rank``, which owns ``shard`` at ``places[rank]``: owners of a place share its rows."""
    rows, columns = places[rank]
    owners = [other for other, place in enumerate(places) if place == places[rank]]
    start, stop = block_range(length(rows), len(owners), owners.index(rank))
    return Part(shard[start:stop], slice(rows.start + start, rows.start + stop), columns)


def first_part(shard: Array, places: Sequence[Place], rank: int) -> Part:
    """The part of ``rank``, which owns ``shard`` at ``places[rank]``: the first owner has all of a place."""
    rows, columns = places[rank]
    if places.index(places[rank]) == rank:
        return Part(shard, rows, columns)
    return Part(shard[:0], slice(rows.start, rows.start), columns)


def probe(
    mailbox: Mailbox,
    problem: Problem,
    a: Part,
    b: Part,
    c: Part,
    seed: int,
    root: int,
    trials: int = PROBE_TRIALS,
) -> Check | None:
    """The verdict on ``root`` (None elsewhere) on c (m, n) = a (m, k) @ b (k, n). Every rank calls this.

    A wrong shape or dtype of c on any rank is a failed check; parts that are not the whole of a matrix raise
    ValueError on every rank.
    """
    places, wrong = _survey(mailbox, problem, (a, b, c), root)
    if wrong:
        return Check("probe", False, math.inf, 0.0, wrong) if mailbox.rank == root else None
    sides = _Sides(mailbox, problem, a, b, c, places)
    product = np.dtype(problem.dtype)
    skip, facts, checks = None, None, []
    if product.kind not in "biu":
        skip = sides.nonfinite_columns()
        facts, check = sides.whole_rows(~skip)
        checks.append(check)
    for first, number in _batches(trials, problem, places, mailbox.world_size):
        x = probe_vectors(problem.n, product, [seed, first], number, skip)
        checks.append(probe_check(*sides.times(x), sides.judged.start, facts))
    verdicts = gather_facts(mailbox, asdict(merge_checks(checks)), root)
    return None if verdicts is None else merge_checks([Check(**of_rank) for of_rank in verdicts])


class _Sides:
    """Both sides of the comparison; a rank has the whole of the rows that it judges, whoever holds them."""

    def __init__(
        self, mailbox: Mailbox, problem: Problem, a: Part, b: Part, c: Part, places: list[list[Place]]
    ) -> None:
        self._mailbox, self._problem, self._a, self._b, self._c = mailbox, problem, a, b, c
        self._a_rows, self._c_rows = (
            RowSums(mailbox, problem.m, [rows for rows, _ in of_ranks]) for of_ranks in (places[0], places[2])
        )
        self.judged = self._c_rows.block

    def times(self, x: Array) -> tuple[Array, Array]:
        """Of the judged rows c @ x and a @ (b @ x), (rows, t) each, for x (n, t)."""
        with np.errstate(all="ignore"):
            of_b = probe_times(self._b.shard, x[self._b.columns])
            y = self._sum_over_ranks(_at(self._problem.k, self._b.rows, of_b))
            found = self._c_rows.add_up(probe_times(self._c.shard, x[self._c.columns]))
            return found, self._a_rows.add_up(probe_times(self._a.shard, y[self._a.columns]))

    def nonfinite_columns(self) -> NDArray[np.bool_]:
        """Which columns of b hold a NaN or an Inf, (n,)."""
        of_b = ~finite_columns(self._b.shard)
        return self._sum_over_ranks(_at(self._problem.n, self._b.columns, of_b))

    def whole_rows(self, b_finite: NDArray[np.bool_]) -> tuple[RowFacts, Check]:
        """What the judged rows are like; and whether NaN and Inf have their places in this rank's c.

        b_finite (n,): which columns of b are finite.
        """
        product, c = np.dtype(self._problem.dtype), self._c
        a_finite = ~self._a_rows.add_up(~finite_rows(self._a.shard))
        b_squares = self._sum_over_ranks(part_squares(self._b.shard, product))
        a_squares = self._a_rows.add_up(row_squares(self._a.shard, product))
        with np.errstate(over="ignore"):
            reach = norms_of(a_squares) * norms_of(b_squares)
        finite, large = self._c_rows.tell(np.stack([a_finite, overflows(reach, product)], axis=1)).T
        check, misplaced = probe_places(
            c.shard, finite, large, b_finite[c.columns], c.rows.start, c.columns.start
        )
        c_norms = norms_of(self._c_rows.add_up(row_squares(c.shard, product)))
        misplaced = self._c_rows.add_up(misplaced)
        sizes = self._problem.k, self._problem.n
        return row_facts(product, *sizes, a_finite, misplaced, reach, c_norms), check

    def _sum_over_ranks(self, array: Array) -> Array:
        """The sum of every rank's ``array``, the same bits on every rank; of bool the "or"."""
        return all_reduce(self._mailbox, array)


def _at(size: int, place: slice, part: Array) -> Array:
    """``part`` in its place among ``size`` rows that are 0."""
    whole = np.zeros((size, *part.shape[1:]), part.dtype)
    whole[place] = part
    return whole


def _survey(
    mailbox: Mailbox, problem: Problem, parts: Sequence[Part], root: int
) -> tuple[list[list[Place]], str]:
    """Where the parts of a, b and c lie, in rank order each; and the first rank's c that cannot be one."""
    own = [[part.rows.start, part.rows.stop, part.columns.start, part.columns.stop] for part in parts]
    c_shape = length(parts[2].rows), length(parts[2].columns)
    wrong = misfit(parts[2].shard, c_shape, np.dtype(problem.dtype))
    facts = broadcast_facts(mailbox, gather_facts(mailbox, [own, wrong], root), root)
    places = [[_place(*of_rank[index]) for of_rank, _ in facts] for index in range(3)]
    shapes = problem.a_shape, problem.b_shape, problem.c_shape
    for name, of_ranks, shape in zip("abc", places, shapes, strict=True):
        _refuse_gaps(name, of_ranks, shape)
    return places, next((wrong for _, wrong in facts if wrong), "")


def _place(top: int, bottom: int, left: int, right: int) -> Place:
    return slice(top, bottom), slice(left, right)


def _refuse_gaps(name: str, places: list[Place], shape: Shape) -> None:
    covered, whole = sum(length(rows) * length(columns) for rows, columns in places), shape[0] * shape[1]
    if covered != whole:
        raise ValueError(f"the parts of {name} have {covered} elements, expected {whole} of {shape}")


def _batches(
    trials: int, problem: Problem, places: list[list[Place]], world_size: int
) -> Iterator[tuple[int, int]]:
    """First and number of the trials made at a time, the same on every rank."""
    held = (
        length(a_rows) + length(c_rows) for (a_rows, _), (c_rows, _) in zip(places[0], places[2], strict=True)
    )
    judged = -(-problem.m // world_size)
    longest = max(problem.k + problem.n, max(held) + 2 * judged)
    step = max(1, PROBE_BYTES // max(1, longest * _width(problem)))
    return ((first, min(step, trials - first)) for first in range(0, trials, step))


def _width(problem: Problem) -> int:
    """Bytes of a number in the vectors of a probe, as far as that is known before."""
    dtype = np.dtype(problem.dtype)
    return dtype.itemsize if dtype.kind in "biu" else max(dtype.itemsize, 8)
