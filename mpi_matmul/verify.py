"""The judge of a product: numpy's own product as the oracle, the rounding bound, and Freivalds' probe.

a is (m, k), b is (k, n), c is the (m, n) array that claims to be a @ b. Integers and bool must be equal
exactly, NaN and Inf must stand in the same places (where sums overflow on the way, in places that some order
of the sum gives), and everything else must lie within a rounding bound.

**The bound of `exact_check`.** u is the unit roundoff of the type in which numpy adds up (float32 for
float16; twice that for complex), e is the spacing of c's own type at 1.0 where that type is narrower than
the sum's (float16), else 0. With the Euclidean norms of row i of a and of column j of b,

    |c_ij - numpy_ij| <= 6 u ||a_i|| ||b_j||  +  (min(k u, 1/256) + e) |numpy_ij|  +  underflow

Rounding errors that are independent and of mean zero add up to about u times the root of the sum of the
squared partial sums (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, section 2 and Theorem 3.1;
Cauchy-Schwarz turns their |a_i|.|b_j| into the norms). Partial sums that walk at random keep this below u
||a_i|| ||b_j|| at any k: the first term. If they grow steadily to the result (data of one sign), it is
below k u |c_ij|, even when equal addends make every error point the same way: the second term, capped so
that it never excuses an error of 1 %.

What is left are sums that go far up and come back (sorted data). An element above the bound is therefore
**looked at again**: its dot product is added up in three orders, and with s the largest partial sum and d
the largest error of a running sum on its way, c may differ by 4 (sqrt(k) u s + d), but never by more than
what holds for every order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 3.1; once for each of the two products):

    |c_ij - numpy_ij| <= 2 k u ||a_i|| ||b_j||  +  e |numpy_ij|  +  underflow

**The probe** compares c @ x with a @ (b @ x) for random x (Freivalds, Probabilistic machines can use less
running time, IFIP Congress 1977, pp. 839-842): see `probe_check`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_matmul.layout import Array

PROBE_TRIALS = 20
"""Random vectors of a probe: a wrong row slips through with probability 2**-20 at most."""

PANEL_BYTES = 8 << 20
"""Size of the largest temporary array: whole matrices are worked off in panels of rows."""

# The factors of the formulas, measured: correct products pass, whatever the order of summation, on data that
# is random, constant, sorted, alternating, cancelling or of widely different sizes, for k from 1 to 100 000.
NORM_FACTOR = 6.0
BIAS_LIMIT = 1 / 256
LOOK_FACTOR = 4.0
PROBE_ORDER_FACTOR = 8.0
PROBE_FACTOR = 4.0

# Looking again costs a few passes over a row and a column, so a panel gets only so many looks.
LOOKS_PER_PANEL = 256


@dataclass(frozen=True)
class Check:
    """What the judge says; `max_error` and `error_bound` belong to the element with the largest error /
    bound.

    An error that has no size (NaN or Inf in the wrong place, wrong shape or dtype) counts as `math.inf`.
    """

    kind: str  # "exact", "probe" or "none"
    passed: bool
    max_error: float
    error_bound: float
    detail: str = ""


@dataclass(frozen=True)
class RowFacts:
    """What a probe must know of some rows of c and the same rows of a, whoever holds them: (rows,) each."""

    a_finite: NDArray[np.bool_]
    misplaced: NDArray[np.bool_]  # c is finite where it should not be, or the other way round
    beyond: NDArray[np.bool_]  # so large that sums of c may leave their range
    bound: Array


def product_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of numpy's product of operands of these dtypes; TypeError if it cannot multiply them."""
    dtype: np.dtype[Any] = np.matmul(np.empty((0, 0), a), np.empty((0, 0), b)).dtype
    return dtype


def exact_check(a: Array, b: Array, c: Array) -> Check:
    """Compare c (m, n) with numpy's a (m, k) @ b (k, n), a panel of rows at a time.

    A wrong shape or dtype of c is a failed check; operands that do not fit each other raise ValueError.
    Where sums leave the range of their type, their order decides between a number, Inf and NaN: any of these
    that some order gives is accepted, and `detail` says for how many elements.
    """
    np.matmul(a[:0], b[:, :0])  # operands that do not fit raise here
    product = product_dtype(a.dtype, b.dtype)
    wrong = misfit(c, (a.shape[0], b.shape[1]), product)
    if wrong:
        return Check("exact", False, math.inf, 0.0, wrong)
    b = b.astype(product, copy=False)  # once, not once a panel
    panels = _row_panels(c.shape[0], max(b.shape) * max(product.itemsize, 8))
    if product.kind in "biu":
        return merge_checks([_judge_equal(a[rows] @ b, c[rows], rows.start) for rows in panels])
    norms = _row_norms(b.T)
    return merge_checks(
        [
            _judge_rounding(a[rows].astype(product, copy=False), b, norms, c[rows], rows.start)
            for rows in panels
        ]
    )


def merge_checks(checks: Sequence[Check]) -> Check:
    """The worst of several checks of one kind; it passes if all of them do. ValueError if there is none.

    `detail` is the first failure's (or the first remark, when all passed).
    """
    if not checks:
        raise ValueError("merge_checks needs at least one check")
    passed = all(check.passed for check in checks)
    heard = [check for check in checks if check.passed == passed]
    worst = max(heard, key=lambda check: _ratio(check.max_error, check.error_bound))
    detail = next((check.detail for check in heard if check.detail), "")
    return Check(worst.kind, passed, worst.max_error, worst.error_bound, detail)


# ---- one panel against numpy ----


def _judge_equal(reference: Array, c_rows: Array, first_row: int) -> Check:
    """Integers and bool, (rows, n) each: equal exactly, so that the bound is 0."""
    wrong = np.argwhere(reference != c_rows)
    if not wrong.size:
        return Check("exact", True, 0.0, 0.0)
    found, expected = c_rows[tuple(wrong.T)], reference[tuple(wrong.T)]
    worst = int(np.argmax(np.abs(found.astype(np.float64) - expected.astype(np.float64))))
    row, column = wrong[worst]
    error = abs(int(found[worst]) - int(expected[worst]))
    detail = f"c[{first_row + row}, {column}] is {found[worst]}, numpy has {expected[worst]}"
    return Check("exact", False, float(error), 0.0, detail)


def _judge_rounding(a_rows: Array, b: Array, column_norms: Array, c_rows: Array, first_row: int) -> Check:
    """Floating point, all of one dtype: c_rows (rows, n) against a_rows (rows, k) @ b (k, n)."""
    if not c_rows.size:
        return Check("exact", True, 0.0, 0.0)
    with np.errstate(all="ignore"):
        reference = a_rows @ b
        error = _difference(c_rows, reference)
        reach = np.multiply.outer(_row_norms(a_rows), column_norms)
        bound = _bound(reference, reach, a_rows.shape[1])
        _look_again(a_rows, b, reference, reach, error, bound)
        settled = _settle_overflow(a_rows, b, c_rows, reference, reach, error)
        worst = int(np.argmax(_ratio(error, bound)))
    row, column = divmod(worst, c_rows.shape[1])
    worst_error, worst_bound = float(error[row, column]), float(bound[row, column])
    if error[row, column] <= bound[row, column]:
        detail = f"{settled} elements differ from numpy's because sums overflow on the way" if settled else ""
        return Check("exact", True, worst_error, worst_bound, detail)
    place, found, expected = f"c[{first_row + row}, {column}]", c_rows[row, column], reference[row, column]
    allowed = f", allowed {worst_bound:.3g}" if math.isfinite(worst_error) else ""
    detail = f"{place} is {found}, numpy has {expected}{allowed}"
    return Check("exact", False, worst_error, worst_bound, detail)


def _settle_overflow(
    a_rows: Array, b: Array, c_rows: Array, reference: Array, reach: Array, error: Array
) -> int:
    """Where sums may leave their range, and c and numpy differ in that: set the error to 0 if c is a value
    that some order of the sum gives. The number of such elements."""
    largest = np.finfo(np.result_type(reference.dtype, np.float32)).max
    odd = ~(np.isfinite(c_rows) & np.isfinite(reference)) & (error > 0) & (reach > largest)
    odd &= np.logical_and.outer(np.isfinite(a_rows).all(axis=1), finite_columns(b))
    rows, columns = np.nonzero(odd)
    step = max(1, PANEL_BYTES // max(1, 32 * a_rows.shape[1]))
    settled = 0
    for start in range(0, rows.size, step):
        some = rows[start : start + step], columns[start : start + step]
        possible = _some_order_gives(c_rows[some], a_rows[some[0]], b[:, some[1]].T, largest)
        error[some[0][possible], some[1][possible]] = 0.0
        settled += int(possible.sum())
    return settled


def _some_order_gives(c: Array, left: Array, right: Array, largest: Any) -> NDArray[np.bool_]:
    """Which c, (s,), can be the sum of left * right (s, k).

    Inf if the addends of its sign leave the range, NaN if those of both signs do, a number near the true sum.
    """
    if c.dtype.kind == "c":
        real = _some_order_gives(
            c.real, np.hstack([left.real, left.imag]), np.hstack([right.real, -right.imag]), largest
        )
        imaginary = _some_order_gives(
            c.imag, np.hstack([left.real, left.imag]), np.hstack([right.imag, right.real]), largest
        )
        return real & imaginary
    addends = left.astype(np.longdouble) * right.astype(np.longdouble)
    up, down = addends.clip(min=0).sum(axis=1), addends.clip(max=0).sum(axis=1)
    near = 2 * left.shape[1] * np.finfo(c.dtype).eps * (up - down)
    number = np.abs(c.astype(np.longdouble) - (up + down)) <= near
    choices = [np.isnan(c), c == np.inf, c == -np.inf]
    return np.select(choices, [(up > largest) & (-down > largest), up > largest, -down > largest], number)


def _difference(c: Array, reference: Array) -> Array:
    """|c - reference| in at least float64; 0 where both are the same NaN or Inf, inf where only one is."""
    error: Array = np.abs(np.subtract(c, reference, dtype=np.result_type(c.dtype, np.float64)))
    error[_same_place(c, reference)] = 0.0
    error[np.isnan(error)] = np.inf
    return error


def _same_place(c: Array, reference: Array) -> NDArray[np.bool_]:
    """Where both are equal, or both NaN.

    A complex number that is not finite counts as equal to any other such: which of its parts are NaN
    depends on how the multiplication is written, not on the operands alone.
    """
    if c.dtype.kind == "c":
        return np.equal(c, reference) | ~(np.isfinite(c) | np.isfinite(reference))
    return np.equal(c, reference) | (np.isnan(c) & np.isnan(reference))


def _bound(reference: Array, reach: Array, k: int) -> Array:
    """The first bound of the page above, (rows, n), for reach = ||a_i|| ||b_j||."""
    unit, spacing, underflow = _rounding(reference.dtype, k)
    size = np.abs(reference).astype(reach.dtype, copy=False)
    size[~np.isfinite(size)] = 0.0
    bound: Array = NORM_FACTOR * unit * reach + (min(k * unit, BIAS_LIMIT) + spacing) * size + underflow
    return bound.clip(max=np.finfo(bound.dtype).max)


def _look_again(a_rows: Array, b: Array, reference: Array, reach: Array, error: Array, bound: Array) -> None:
    """Widen the bound, in place, where it was exceeded and the dot product itself explains it.

    The worst elements of a panel are recomputed. If there are more, the rest (which err less) is held to the
    bound that is true for every order of summation.
    """
    suspects = np.flatnonzero((error > bound) & np.isfinite(error))
    if not suspects.size:
        return
    k = a_rows.shape[1]
    unit, spacing, underflow = _rounding(reference.dtype, k)
    sizes = np.abs(reference.flat[suspects]).astype(reach.dtype)
    any_order = 2 * k * unit * reach.flat[suspects] + spacing * sizes + underflow
    first = bound.flat[suspects]
    allowed = any_order.copy()
    worst = np.argsort(error.flat[suspects] / first)[-LOOKS_PER_PANEL:]
    for part in _row_panels(worst.size, 4 * k * np.dtype(np.clongdouble).itemsize):
        look = worst[part]
        rows, columns = np.divmod(suspects[look], reference.shape[1])
        stray = _stray(a_rows[rows], b.T[columns], unit)
        allowed[look] = np.fmin(any_order[look], LOOK_FACTOR * stray + spacing * sizes[look])
    bound.flat[suspects] = np.maximum(first, allowed)


def _stray(left: Array, right: Array, unit: Any) -> Array:
    """How far sums of these products may stray, left and right (s, k) -> (s,).

    That is sqrt(k) u max |partial sum|, plus the largest error that running sums meet on their way.

    On their way: where a sum goes up and comes back, its errors may cancel in one order and not in another.
    What an addition loses is found, in any type, by TwoSum (Knuth; Higham, Accuracy and Stability, 4.3).
    """
    adding = np.result_type(left.dtype, np.float32)
    k = left.shape[1]
    largest: Any = 0.0
    error: Any = 0.0
    for order in (slice(None), slice(None, None, -1), np.argsort(np.arange(k) % 8, kind="stable")):
        addends = left[:, order].astype(adding) * right[:, order].astype(adding)
        after = np.cumsum(addends, axis=1)
        before = np.concatenate([np.zeros((len(after), 1), adding), after[:, :-1]], axis=1)[:, :k]
        taken = after - before
        lost = (before - (after - taken)) + (addends - taken)
        largest = np.maximum(largest, np.abs(after).max(axis=1, initial=0.0))
        error = np.maximum(error, np.abs(np.cumsum(lost, axis=1)).max(axis=1, initial=0.0))
    stray: Array = math.sqrt(k) * unit * largest + error
    return stray


# ---- the probe ----


def probe_vectors(
    n: int,
    product: np.dtype[Any],
    seed: int | Sequence[int],
    trials: int = PROBE_TRIALS,
    skip: NDArray[np.bool_] | None = None,
) -> Array:
    """Random x, (n, trials), the same for the same arguments; rows marked in skip (n,) are 0.

    Floating point: +1 and -1, as float64 or longdouble. Integers: 0 and 1 in the product's own dtype, where
    arithmetic modulo 2**w is exact. Bool: an "or" hides errors instead of adding them up, so each x picks one
    column of c, all different while there are enough: a wrong column is found only if it is picked.
    """
    rng = np.random.default_rng(seed)
    if product.kind == "b":
        x = np.zeros((n, trials), np.bool_)
        picked = rng.permutation(n)[:trials]
        x[picked, np.arange(picked.size)] = True
    elif product.kind in "iu":
        x = rng.integers(0, 2, (n, trials), np.int8).astype(product)
    else:
        x = (2 * rng.integers(0, 2, (n, trials), np.int8) - 1).astype(_real(product))
    if skip is not None:
        x[skip] = 0
    return x


def probe_times(matrix_shard: Array, x_rows: Array) -> Array:
    """matrix_shard (r, s) @ x_rows (s, t) -> (r, t), with NaN and Inf of the shard taken as 0.

    Added up in the type of x_rows (or its complex partner), so at least float64 for floating point; the
    shard is converted a panel of rows at a time. Where ranks own different columns of the matrix, their
    answers are added up (in that same dtype; "or" for bool).
    """
    adding = np.result_type(matrix_shard.dtype, x_rows.dtype)
    answer = np.zeros((matrix_shard.shape[0], x_rows.shape[1]), adding)
    x_rows = x_rows.astype(adding, copy=False)
    with np.errstate(all="ignore"):
        for rows in _row_panels(matrix_shard.shape[0], matrix_shard.shape[1] * adding.itemsize):
            answer[rows] = _finite_part(matrix_shard[rows].astype(adding, copy=False)) @ x_rows
    return answer


def probe_check(found: Array, expected: Array, first_row: int, facts: RowFacts | None = None) -> Check:
    """Judge rows of c from `first_row` on: found (rows, t) = c @ x, expected (rows, t) = a @ (b @ x).

    x (n, t) is from `probe_vectors`, with skip for the columns of b that are not finite. A row may have been
    added up of parts, in any order. Floating point needs facts, and `probe_places` besides.

    Integers: c @ x must equal a @ y. If a row of c is wrong in column j, flipping x_j changes c @ x by that
    error, so at most one of the two values of x_j hides it: t trials miss a wrong row with probability
    2**-t at most. Bool: t of the n columns are compared; w wrong columns are missed with probability (1 -
    t/n)**w at most.

    Floating point, for row i in every trial, with v the unit roundoff of float64 (longdouble for longdouble):

        |c_i . x - a_i . y| <= (8 sqrt(k) u + 4 (sqrt(k) + sqrt(n)) v) ||a_i|| ||b||_F
                               + 4 (min(k u, 1/256) + e + sqrt(n) v) ||c_i||  +  underflow

    x gives the errors of a row, each bounded as in Theorem 3.1 of Higham and Mary, random signs: their sum
    stays near the root of the sum of their squares (Hoeffding). A flip of x_j changes c_i . x by twice the
    error of c_ij: a row with an element wrong by more than the bound is missed with probability 2**-t at
    most.

    A row that has overflowed, with ||a_i|| ||b||_F so large that it may, is not judged; `detail` says so.
    """
    if not found.shape[0]:
        return Check("probe", True, 0.0, 0.0)
    if facts is None:
        return _probe_equal(found, expected, first_row)
    with np.errstate(all="ignore"):
        residual = np.abs(found - expected)
    unheard = facts.beyond & ~np.isfinite(residual).all(axis=1)
    skipped = (facts.misplaced | unheard) & facts.a_finite
    return _probe_verdict(
        residual, facts.bound, facts.a_finite & ~skipped, np.flatnonzero(skipped), first_row
    )


def probe_places(
    c_part: Array,
    a_finite: NDArray[np.bool_],
    may_overflow: NDArray[np.bool_],
    b_finite: NDArray[np.bool_],
    first_row: int,
    first_column: int,
) -> tuple[Check, NDArray[np.bool_]]:
    """Judge where a part of c (r, s) is NaN or Inf, and say which of its rows (r,) have that misplaced.

    Row i must be nowhere finite where row i of a is not (a_finite, (r,)), column j where column j of b is
    not (b_finite, (s,)), and finite elsewhere, unless may_overflow (r,) says that the row may overflow.
    first_row and first_column, the part's place in c, are used in the detail only.
    """
    misplaced = np.zeros(c_part.shape[0], np.bool_)
    checks = [Check("probe", True, 0.0, 0.0)]
    for rows in _row_panels(c_part.shape[0], c_part.shape[1] * np.dtype(np.float64).itemsize):
        finite, expected = np.isfinite(c_part[rows]), a_finite[rows, None] & b_finite
        wrong = finite != expected
        misplaced[rows] = wrong.any(axis=1)
        forbidden = np.argwhere(wrong & (finite | ~may_overflow[rows, None]))
        if forbidden.size:
            row, column = int(forbidden[0, 0]) + rows.start, int(forbidden[0, 1])
            wanted = "finite" if expected[row - rows.start, column] else "NaN or Inf"
            place, value = f"c[{first_row + row}, {first_column + column}]", c_part[row, column]
            checks.append(Check("probe", False, math.inf, 0.0, f"{place} is {value}, it must be {wanted}"))
    return merge_checks(checks), misplaced


def overflows(reach: Array, product: np.dtype[Any]) -> NDArray[np.bool_]:
    """Whether numbers of a row of c may leave their range, (rows,), for reach = ||a_i|| ||b||_F."""
    beyond: NDArray[np.bool_] = reach > np.finfo(product).max / 2
    return beyond


def row_facts(
    product: np.dtype[Any],
    k: int,
    n: int,
    a_finite: NDArray[np.bool_],
    misplaced: NDArray[np.bool_],
    reach: Array,
    c_norms: Array,
) -> RowFacts:
    """The facts of whole rows, (rows,) each: reach = ||a_i|| ||b||_F, c_norms = ||c_i||."""
    with np.errstate(all="ignore"):
        beyond = reach * max(n, 1) > np.finfo(product).max
        return RowFacts(a_finite, misplaced, beyond, _probe_bound(product, k, n, reach, c_norms))


def row_squares(part: Array, product: np.dtype[Any]) -> Array:
    """The squared norms of the rows of a part (r, s), NaN and Inf taken as 0, so that they can be added up.

    (r, 3), of large, medium and small rows, each with a scale of its own, so that neither squares nor sums of
    squares overflow or lose what is small (Blue, A Portable Fortran Program to Find the Euclidean Norm of a
    Vector, ACM TOMS 4(1), 1978, pp. 15-23). In the real type of the product, float64 at least.
    """
    squares = np.empty((part.shape[0], 3), _real(product))
    for rows in _row_panels(part.shape[0], 3 * squares.itemsize):
        squares[rows] = _scaled_squares(_row_norms(part[rows]).astype(squares.dtype))
    return squares


def part_squares(part: Array, product: np.dtype[Any]) -> Array:
    """The sum (3,) of `row_squares` over a part."""
    panels = _row_panels(part.shape[0], 3 * _real(product).itemsize)
    squares: Array = sum(row_squares(part[rows], product).sum(axis=0) for rows in panels)
    return squares


def _scaled_squares(norms: Array) -> Array:
    """(r,) -> (r, 3): the square of each in one column, 0 in the others."""
    limit, scales = _scales(norms.dtype)
    size = (norms <= limit).astype(np.int8) + (norms < 1 / limit)
    with np.errstate(all="ignore"):
        scaled: Array = np.where(size[:, None] == np.arange(3), norms[:, None] * scales, 0)
        return scaled**2


def norms_of(squares: Array) -> Array:
    """The norms (r,) of sums (r, 3) of `row_squares`; at most the largest number of their type."""
    with np.errstate(all="ignore"):
        roots = np.sqrt(squares)
        roots /= _scales(squares.dtype)[1]
        norms: Array = np.hypot.reduce(roots, axis=-1)
    return norms.clip(max=np.finfo(norms.dtype).max)


def _scales(dtype: np.dtype[Any]) -> tuple[Any, Array]:
    """From where on a number is large (small: from the reciprocal on), and the factors for large, medium and
    small ones."""
    exponent = np.finfo(dtype).maxexp
    one = np.ones(3, dtype)
    scale = exponent * 3 // 5
    # The squares of medium numbers leave room for 2**64 of them.
    return np.ldexp(one[0], exponent // 2 - 32), np.ldexp(one, [-scale, 0, scale])


def _probe_equal(found: Array, expected: Array, first_row: int) -> Check:
    """Integers and bool: c @ x == a @ y."""
    wrong = np.argwhere(found != expected)
    if not wrong.size:
        return Check("probe", True, 0.0, 0.0)
    row, trial = wrong[0]
    error = abs(int(found[row, trial]) - int(expected[row, trial]))
    values = f"c @ x is {found[row, trial]}, a @ (b @ x) is {expected[row, trial]}"
    return Check("probe", False, float(error), 0.0, f"row {first_row + row} of c: {values}")


def _probe_bound(product: np.dtype[Any], k: int, n: int, reach: Array, c_norms: Array) -> Array:
    """The bound of `probe_check`, (rows,)."""
    unit, spacing, underflow = _rounding(product, k)
    own = np.finfo(reach.dtype).eps / 2
    along = PROBE_ORDER_FACTOR * math.sqrt(k) * unit + PROBE_FACTOR * (math.sqrt(k) + math.sqrt(n)) * own
    across = PROBE_FACTOR * (min(k * unit, BIAS_LIMIT) + spacing + math.sqrt(n) * own)
    bound: Array = along * reach + across * c_norms + n * underflow
    return bound.clip(max=np.finfo(bound.dtype).max)


def _probe_verdict(
    residual: Array, bound: Array, judged: NDArray[np.bool_], skipped: Array, first_row: int
) -> Check:
    """The worst of the judged rows: residual (rows, t) against bound (rows,); skipped holds row numbers."""
    error = np.where(np.isnan(residual), np.inf, residual).max(axis=1, initial=0.0)
    error[~judged] = 0.0
    row = int(np.argmax(_ratio(error, bound)))
    passed = bool(error[row] <= bound[row])
    worst_error, worst_bound = float(error[row]), float(bound[row])
    detail = ""
    if skipped.size:
        detail = f"{skipped.size} rows of c, from row {first_row + skipped[0]} on, not judged: they overflow"
    if not passed:
        sizes = f"c @ x differs from a @ (b @ x) by {worst_error:.3g}, allowed {worst_bound:.3g}"
        detail = f"row {first_row + row} of c: {sizes}"
    return Check("probe", passed, worst_error, worst_bound, detail)


# ---- what both need ----


def _rounding(product: np.dtype[Any], k: int) -> tuple[Any, Any, Any]:
    """Unit roundoff of the sums, spacing of a narrower result at 1.0, the most that k underflows add up
    to."""
    adding, result = np.finfo(np.result_type(product, np.float32)), np.finfo(product)
    narrower = result.bits < adding.bits
    # complex: a product is two real products and an addition for each part (Higham, section 3.6)
    unit = adding.eps / 2 * (2 if product.kind == "c" else 1)
    real = _real(product).type
    underflow = 4 * k * real(adding.smallest_subnormal) + narrower * real(result.smallest_subnormal)
    return real(unit), real(result.eps if narrower else 0.0), underflow


def _real(product: np.dtype[Any]) -> np.dtype[Any]:
    """The type of norms, bounds and probe vectors: float64, or longdouble where the product is as wide."""
    return np.result_type(np.float64 if product.kind in "biu" else np.finfo(product).dtype, np.float64)


def _row_norms(matrix: Array) -> Array:
    """Euclidean norms of the rows, (m,), NaN and Inf taken as 0; scaled, so that no square overflows."""
    norms = np.zeros(matrix.shape[0], _real(matrix.dtype))
    kind = np.result_type(matrix.dtype, norms.dtype)
    with np.errstate(all="ignore"):
        for rows in _row_panels(matrix.shape[0], matrix.shape[1] * kind.itemsize):
            panel = np.ascontiguousarray(_finite_part(matrix[rows].astype(kind, copy=False)))
            sizes = np.abs(panel.view(norms.dtype))  # of complex numbers both parts, whose size may overflow
            scale = sizes.max(axis=1, initial=0.0)
            sizes /= np.where(scale > 0, scale, 1)[:, None]
            norms[rows] = scale * np.sqrt(np.einsum("ij,ij->i", sizes, sizes))
    return norms.clip(max=np.finfo(norms.dtype).max)


def finite_rows(matrix: Array) -> NDArray[np.bool_]:
    """Which rows of matrix (r, s) are finite throughout, (r,)."""
    finite = np.ones(matrix.shape[0], np.bool_)
    for rows in _row_panels(matrix.shape[0], matrix.shape[1]):
        finite[rows] = np.isfinite(matrix[rows]).all(axis=1)
    return finite


def finite_columns(matrix: Array) -> NDArray[np.bool_]:
    """Which columns of matrix (r, s) are finite throughout, (s,)."""
    finite = np.ones(matrix.shape[1], np.bool_)
    for rows in _row_panels(matrix.shape[0], matrix.shape[1]):
        finite &= np.isfinite(matrix[rows]).all(axis=0)
    return finite


def _finite_part(panel: Array) -> Array:
    """The panel with 0 for NaN and Inf; the same array if there are none."""
    finite = np.isfinite(panel)
    return panel if finite.all() else np.where(finite, panel, panel.dtype.type(0))


def _row_panels(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices that cover range(rows), each of at most PANEL_BYTES or one row; at least one, if empty."""
    step = max(1, PANEL_BYTES // max(1, row_bytes))
    return (slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


def _ratio(error: Any, bound: Any) -> Any:
    """error / bound, 0 where both are 0."""
    error, bound = np.asarray(error), np.asarray(bound)
    empty = np.where(error > 0, np.inf, 0.0).astype(np.result_type(error, bound))
    return np.divide(error, bound, out=empty, where=bound > 0)[()]


def misfit(c: Array, shape: tuple[int, int], dtype: np.dtype[Any]) -> str:
    """Why c cannot be the product at all, or nothing."""
    if c.shape == shape and c.dtype == dtype:
        return ""
    return f"c is {c.shape} {c.dtype}, the product is {shape} {dtype}"
