"""The judge as a specification: what passes in any order of summation, what fails, what a probe misses."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest

from mpi_matmul import verify
from mpi_matmul.comm.mailbox import mailbox_of
from mpi_matmul.comm.threads import Communicator
from mpi_matmul.operands import pose
from mpi_matmul.probe import Part
from mpi_matmul.probe import probe as run_probe
from mpi_matmul.verify import (
    Array,
    Check,
    exact_check,
    merge_checks,
    norms_of,
    part_squares,
    probe_times,
    probe_vectors,
    row_squares,
)

FLOATS = ["float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"]
WHOLE = ["bool", "int8", "uint8", "int32", "uint64"]


def normal(m: int, k: int, n: int, dtype: str = "float64", seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    if np.dtype(dtype).kind == "c":
        return (a + 1j * a[::-1]).astype(dtype), (b - 1j * b[:, ::-1]).astype(dtype)
    return a.astype(dtype), b.astype(dtype)


def whole(m: int, k: int, n: int, dtype: str, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (m, k)).astype(dtype), rng.integers(0, 2, (k, n)).astype(dtype)


def numpy_product(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        return a @ b


def probe(a: Array, b: Array, c: Array, seed: int = 0, trials: int = 20) -> Check:
    """A whole probe as it is run on one rank; test_probe.py has the same over ranks."""
    parts = (Part(x, slice(0, shape[0]), slice(0, shape[1])) for x, shape in shapes(a, b, c))
    check = run_probe(mailbox_of(Communicator(1), 0), pose(a, b), *parts, seed, 0, trials)
    assert check is not None
    return check


def shapes(a: Array, b: Array, c: Array) -> list[tuple[Array, tuple[int, int]]]:
    """a, b and c, each with the shape that it should have."""
    return [(a, a.shape), (b, b.shape), (c, (a.shape[0], b.shape[1]))]


JUDGES = pytest.mark.parametrize("judge", [exact_check, probe], ids=["exact", "probe"])


# ---- a right product passes ----


def one_by_one(a: Array, b: Array, order: slice) -> Array:
    """Every element added up one product at a time, in the type in which numpy adds up."""
    adding = np.result_type(a.dtype, np.float32)
    terms = a.T[order, :, None].astype(adding) * b[order, None, :].astype(adding)
    return np.add.accumulate(terms, axis=0)[-1].astype(a.dtype)


def in_blocks(a: Array, b: Array, blocks: int) -> Array:
    adding = np.result_type(a.dtype, np.float32)
    lefts, rights = np.array_split(a.astype(adding), blocks, 1), np.array_split(b.astype(adding), blocks, 0)
    return sum(left @ right for left, right in zip(lefts, rights, strict=True)).astype(a.dtype)


ORDERS: dict[str, Callable[[Array, Array], Array]] = {
    "numpy's": lambda a, b: a @ b,
    "row by row": lambda a, b: np.concatenate([a[i : i + 1] @ b for i in range(len(a))]),
    "column by column": lambda a, b: np.stack([a @ column for column in b.T], axis=1),
    "transposed": lambda a, b: (np.ascontiguousarray(b.T) @ np.ascontiguousarray(a.T)).T,
    "k in 2 blocks": lambda a, b: in_blocks(a, b, 2),
    "k in 7 blocks": lambda a, b: in_blocks(a, b, 7),
    "first to last": lambda a, b: one_by_one(a, b, slice(None)),
    "last to first": lambda a, b: one_by_one(a, b, slice(None, None, -1)),
}


def ramp(k: int, turn: int) -> Array:
    """+1 and -1 in long runs: partial sums go up and come back, while equal addends err the same way."""
    return np.where(np.arange(k) // turn % 2, -1.0, 1.0)


def crumbs(k: int) -> Array:
    """A one, then numbers too small to change it one by one."""
    return np.where(np.arange(k) == 0, 1.0, 1e-7)


def hilbert(rows: int, columns: int) -> Array:
    return 1 / (1 + np.add.outer(np.arange(rows), np.arange(columns)))


# a (4, k) and b (k, 4); b is even where a makes the partial sums
DATA: dict[str, Callable[[np.random.Generator, int], tuple[Array, Array]]] = {
    "normal": lambda rng, k: (rng.standard_normal((4, k)), rng.standard_normal((k, 4))),
    "positive": lambda rng, k: (rng.random((4, k)), rng.random((k, 4))),
    "all 0.1": lambda rng, k: (np.full((4, k), 0.1), np.full((k, 4), 0.1)),
    "sorted": lambda rng, k: (np.linspace(-1, 1, k) * (1 + rng.random((4, 1))), np.full((k, 4), 0.7)),
    "up, then down": lambda rng, k: (rng.random((4, 1)) * ramp(k, (k + 1) // 2), np.full((k, 4), 0.7)),
    "up, down, up": lambda rng, k: (rng.random((4, 1)) * ramp(k, (k + 2) // 3), np.full((k, 4), 0.7)),
    "alternating": lambda rng, k: (rng.random((4, 1)) * ramp(k, 1), rng.random((k, 4))),
    "crumbs": lambda rng, k: (crumbs(k) * np.ones((4, 1)), np.sign(0.5 - crumbs(k)[::-1, None]) * np.ones(4)),
    "of all sizes": lambda rng, k: (np.exp(3 * rng.standard_normal((4, k))) / 1000, rng.random((k, 4)) - 0.5),
    "Hilbert's": lambda rng, k: (hilbert(4, k), ramp(k, 1)[:, None] * hilbert(k, 4)),
}


@JUDGES
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("k", [1, 2, 65, 3000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble", "complex64"])
def test_every_order_of_summation_passes(judge: Callable[..., Check], kind: str, k: int, dtype: str) -> None:
    a, b = DATA[kind](np.random.default_rng(k), k)
    if np.dtype(dtype).kind == "c":
        a, b = a * (1 + 0.5j), b * (0.3 - 1j)
    a, b = a.astype(dtype), b.astype(dtype)
    for name, multiply in ORDERS.items():
        check = judge(a, b, multiply(a, b))
        assert check.passed, f"{name}: {check.detail}"
        assert check.max_error <= check.error_bound


@JUDGES
@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers_and_bool_pass_when_equal(judge: Callable[..., Check], dtype: str) -> None:
    a, b = whole(9, 40, 7, dtype)
    check = judge(a, b, numpy_product(a, b))
    assert check.passed
    assert (check.max_error, check.error_bound) == (0.0, 0.0)


@JUDGES
@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(np.full((1, 2), 10**5, np.int32), np.full((2, 1), 10**5, np.int32), id="int32 wraps"),
        pytest.param(np.array([[2**53 + 1, 1]]), np.ones((2, 1), np.int64), id="int64 beyond float64"),
        pytest.param(np.float16([[6e4, 6e4, -6e4, -6e4]]), np.ones((4, 1), np.float16), id="float16 sums"),
        pytest.param(np.array([[1, 2]], np.int32), np.array([[0.1], [0.2]]), id="int32 by float64"),
        pytest.param(np.array([[True, False]]), np.float32([[0.1], [0.2]]), id="bool by float32"),
        pytest.param(np.array([[2**62 + 1]]), np.array([[3.0]], np.longdouble), id="int64 by longdouble"),
        pytest.param(np.array([[1, 2]], np.uint64), np.array([[-1], [2]]), id="uint64 by int64 (a float64)"),
        pytest.param(np.array([[1.5, 2]]), np.array([[1j], [2]], np.complex64), id="float64 by complex64"),
        pytest.param(np.arange(6.0).reshape(2, 3).astype(">f8"), np.ones((3, 2)), id="big-endian"),
        pytest.param(np.asfortranarray(np.eye(3)), np.ones((3, 2))[::-1], id="Fortran order and strides"),
        pytest.param(np.full((2, 3), 1e200), np.full((3, 2), 1e-200), id="huge by tiny"),
        pytest.param(np.full((2, 3), 1e300), np.full((3, 2), -1e300), id="overflow to -inf"),
        pytest.param(np.full((2, 3), 5e-324), np.full((3, 2), 0.7), id="subnormal"),
        pytest.param(np.full((2, 3), 1e-170), np.full((3, 2), 1e-170), id="underflow to 0"),
        pytest.param(np.full((2, 3), 6e4, np.float16), np.full((3, 2), 2, np.float16), id="float16 overflow"),
    ],
)
def test_arithmetic_that_is_special_passes(judge: Callable[..., Check], a: Array, b: Array) -> None:
    assert judge(a, b, numpy_product(a, b)).passed


@JUDGES
@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "float16"])
@pytest.mark.parametrize("shape", [(3, 0, 2), (0, 3, 2), (3, 2, 0), (0, 0, 0)], ids=str)
def test_empty_dimensions_pass(judge: Callable[..., Check], shape: tuple[int, int, int], dtype: str) -> None:
    m, k, n = shape
    a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
    assert judge(a, b, np.zeros((m, n), dtype)).passed
    if m and n:
        assert not judge(a, b, np.ones((m, n), dtype)).passed


@JUDGES
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_pass_where_numpy_has_them(judge: Callable[..., Check], dtype: str) -> None:
    a, b = normal(6, 5, 8, dtype)
    a[1, 2], a[4, 0], b[3, 5], b[0, 7] = np.nan, np.inf, -np.inf, np.nan
    assert judge(a, b, numpy_product(a, b)).passed


def test_panels_of_one_row_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(6, 300, 5, "float32")
    c = a @ b
    whole_check, whole_probe = exact_check(a, b, c), probe(a, b, c)
    monkeypatch.setattr(verify, "PANEL_BYTES", 1)
    assert exact_check(a, b, c).passed
    assert exact_check(a, b, c).error_bound == pytest.approx(whole_check.error_bound, rel=2)
    assert probe(a, b, c).error_bound == pytest.approx(whole_probe.error_bound)
    c[4, 3] *= 1.01
    assert "c[4, 3]" in exact_check(a, b, c).detail
    assert "row 4" in probe(a, b, c).detail


# ---- a wrong product fails ----


def test_each_element_of_the_float32_case_is_missed_when_1_percent_off() -> None:
    a, b = normal(16, 4096, 16, "float32")
    c = a @ b
    assert exact_check(a, b, c).passed
    for row, column in np.ndindex(c.shape):
        for factor in (0.99, 1.01):
            wrong = c.copy()
            wrong[row, column] *= np.float32(factor)
            check = exact_check(a, b, wrong)
            assert not check.passed
            assert check.detail.startswith(f"c[{row}, {column}] is ")
            assert check.max_error > check.error_bound > 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 4, 200])
def test_one_element_1_percent_off_fails(dtype: str, k: int) -> None:
    a, b = normal(5, k, 6, dtype)
    c = a @ b
    for row, column in np.ndindex(c.shape):
        wrong = c.copy()
        wrong[row, column] *= wrong.dtype.type(1.01)
        assert not exact_check(a, b, wrong).passed


def test_data_that_cancel_do_not_excuse_a_wrong_element() -> None:
    """Every right element is looked at again here, with more of them than there are looks."""
    rng = np.random.default_rng(0)
    a, b = rng.random((40, 1)) * ramp(3000, 1000), 1 + rng.random((1, 40)) * np.ones((3000, 1))
    a, b = a.astype(np.float32), b.astype(np.float32)
    c = one_by_one(a, b, slice(None, None, -1))
    assert exact_check(a, b, c).passed
    c[17, 23] *= 1.01
    assert exact_check(a, b, c).detail.startswith("c[17, 23]")


DAMAGE: dict[str, Callable[[Array], None]] = {
    "two rows swapped": lambda c: c.__setitem__([1, 2], c[[2, 1]]),
    "two columns swapped": lambda c: c.__setitem__((slice(None), [0, 5]), c[:, [5, 0]]),
    "a block missing": lambda c: c.__setitem__((slice(2, 4), slice(3, 6)), 0),
    "a block of another place": lambda c: c.__setitem__((slice(0, 3), slice(0, 3)), c[3:6, 3:6].copy()),
    "everything twice": lambda c: np.add(c, c, out=c),
}


@JUDGES
@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint64"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_fails(judge: Callable[..., Check], dtype: str, damage: Callable[[Array], None]) -> None:
    a, b = normal(7, 50, 8, dtype) if dtype in FLOATS else whole(7, 50, 8, dtype)
    c = a @ b
    damage(c)
    check = judge(a, b, c)
    assert not check.passed
    assert check.max_error > check.error_bound
    assert check.detail


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@JUDGES
def test_a_stray_nan_or_inf_fails(judge: Callable[..., Check], dtype: str, bad: float) -> None:
    a, b = normal(4, 5, 6, dtype)
    c = a @ b
    c[2, 3] = bad
    check = judge(a, b, c)
    assert not check.passed
    assert check.max_error == math.inf
    assert "c[2, 3]" in check.detail


@JUDGES
@pytest.mark.parametrize("place", ["row of a", "column of b"])
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_nan_or_inf_that_is_not_there_fails(judge: Callable[..., Check], place: str, bad: float) -> None:
    a, b = normal(4, 5, 6)
    (a if place == "row of a" else b)[2, 2] = bad
    c = numpy_product(a, b)
    c[2, 2] = 1.0
    assert "c[2, 2] is 1.0" in judge(a, b, c).detail


def test_an_inf_of_the_wrong_sign_and_a_nan_for_an_inf_fail() -> None:
    a, b = np.array([[np.inf, 1.0]]), np.ones((2, 1))
    assert exact_check(a, b, np.array([[np.inf]])).passed
    assert not exact_check(a, b, np.array([[-np.inf]])).passed
    assert exact_check(a, b, np.array([[np.nan]])).detail == "c[0, 0] is nan, numpy has inf"


@pytest.mark.parametrize(
    ("c", "found"),
    [
        pytest.param(np.zeros((2, 4), np.float32), "(2, 4) float32", id="dtype"),
        pytest.param(np.zeros((2, 3)), "(2, 3) float64", id="shape"),
        pytest.param(np.zeros((2, 4), ">f8"), "(2, 4) >f8", id="byte order"),
    ],
)
def test_a_wrong_form_fails(c: Array, found: str) -> None:
    a, b = np.zeros((2, 3)), np.zeros((3, 4))
    for check in (exact_check(a, b, c), probe(a, b, c)):
        assert not check.passed
        assert check.detail == f"c is {found}, the product is (2, 4) float64"


@pytest.mark.parametrize("dtype", WHOLE)
def test_one_whole_number_off_by_one_fails(dtype: str) -> None:
    a, b = whole(5, 4, 6, dtype)
    c = a @ b
    c[3, 4] = not c[3, 4] if dtype == "bool" else c[3, 4] + c.dtype.type(1)
    check = exact_check(a, b, c)
    assert (check.passed, check.error_bound) == (False, 0.0)
    assert check.max_error in (1.0, 2.0**8 - 1)
    assert check.detail == f"c[3, 4] is {c[3, 4]}, numpy has {(a @ b)[3, 4]}"


def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="matmul"):
        exact_check(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3)))


def test_numpy_allclose_would_judge_worse() -> None:
    """Why the judge exists: allclose rejects a right float32 product and accepts a wrong large one."""
    a, b = normal(16, 4096, 16, "float32")
    c = one_by_one(a, b, slice(None))
    assert not np.allclose(c, a @ b)
    assert exact_check(a, b, c).passed
    a, b = np.full((1, 1), 1e9), np.ones((1, 1))
    assert np.allclose(a @ b + 1000.0, a @ b)
    assert not exact_check(a, b, a @ b + 1000.0).passed


# ---- how often the probe misses ----


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "uint64"])
def test_a_single_wrong_block_is_never_missed_with_20_trials(dtype: str) -> None:
    a, b = normal(12, 100, 12, dtype) if dtype in FLOATS else whole(12, 100, 12, dtype)
    c = a @ b
    c[4:8, 8:12] = (a[4:8] @ b[:, :4]) + c.dtype.type(1)
    assert not any(probe(a, b, c, seed).passed for seed in range(100))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int8", "uint64"])
def test_one_trial_misses_a_single_wrong_element_half_the_time_at_most(dtype: str) -> None:
    a, b = normal(3, 20, 10, dtype) if dtype in FLOATS else whole(3, 20, 10, dtype)
    c = a @ b
    c[1, 4] += c.dtype.type(1)
    missed = sum(probe(a, b, c, seed, trials=1).passed for seed in range(400))
    assert missed <= 200 + 4 * 10  # four standard deviations
    assert not any(probe(a, b, c, seed).passed for seed in range(100))


def test_errors_that_could_hide_each_other_are_missed_half_the_time_at_most() -> None:
    a, b = whole(3, 20, 10, "int8")
    c = a @ b
    c[1, [4, 7]] += np.array([64, 64], np.int8) * np.int8(2)  # 128 + 128 is 0 modulo 256
    missed = sum(probe(a, b, c, seed, trials=1).passed for seed in range(400))
    assert 100 < missed <= 240
    assert not any(probe(a, b, c, seed).passed for seed in range(100))


def test_bool_finds_what_lies_in_the_columns_that_it_picks() -> None:
    a, b = np.eye(100, dtype=np.bool_), np.random.default_rng(0).random((100, 100)) < 0.5
    c = a @ b
    c[50, 50] ^= True
    missed = sum(probe(a, b, c, seed).passed for seed in range(300))
    assert 240 - 30 <= missed <= 240 + 30  # 20 of the 100 columns are picked
    assert not probe(a, b, c, trials=100).passed


def test_a_row_that_overflows_is_reported_and_the_others_are_judged() -> None:
    a, b = normal(4, 3, 5, "float16")
    a[1] = 60000
    b[:, 2] = 60000
    check = probe(a, b, numpy_product(a, b))
    assert check.passed
    assert "not judged" in check.detail
    c = numpy_product(a, b)
    c[0, 0] += np.float16(1000)
    assert "row 0 of c: c @ x differs" in probe(a, b, c).detail


# ---- the pieces of the probe ----


@pytest.mark.parametrize("product", [*FLOATS, *WHOLE])
def test_vectors_are_the_same_for_the_same_seed_only(product: str) -> None:
    first, again, other = (probe_vectors(50, np.dtype(product), seed, 7) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.shape == (50, 7)


@pytest.mark.parametrize(
    ("product", "dtype", "values"),
    [
        ("float16", "float64", [-1, 1]),
        ("complex64", "float64", [-1, 1]),
        ("clongdouble", "longdouble", [-1, 1]),
        ("uint8", "uint8", [0, 1]),
        ("bool", "bool", [False, True]),
    ],
)
def test_vectors_are_of_the_type_that_loses_nothing(product: str, dtype: str, values: list[int]) -> None:
    x = probe_vectors(100, np.dtype(product), 0)
    assert x.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(np.unique(x), values)
    skip = np.arange(100) == 7
    assert not probe_vectors(100, np.dtype(product), 0, skip=skip)[7].any()


def test_bool_vectors_pick_different_columns() -> None:
    x = probe_vectors(30, np.dtype(bool), 0, 20)
    assert (x.sum(axis=0) == 1).all()
    assert (x.sum(axis=1) <= 1).all()


@pytest.mark.parametrize("scale", [1.0, 1e300, 1e150, 1e-150, 1e-310], ids=str)
@pytest.mark.parametrize("product", ["float32", "complex128", "longdouble"])
def test_norms_of_parts_add_up_to_those_of_the_whole(scale: float, product: str) -> None:
    matrix = np.array([[3.0, 0.0, np.nan], [0.0, 0.0, 0.0], [1e-9, 1.0, 2.0]]) * scale
    parts = [row_squares(matrix[:, columns], np.dtype(product)) for columns in ([0], [1, 2], [])]
    norms = np.array([3.0, 0.0, math.sqrt(5)]) * scale
    np.testing.assert_allclose(norms_of(sum(parts)).astype(float), norms, rtol=1e-12)
    whole = norms_of(part_squares(matrix, np.dtype(product)))
    assert float(whole) == pytest.approx(math.sqrt(14) * scale, rel=1e-12, abs=0)


def test_norms_of_parts_of_widely_different_sizes() -> None:
    sizes = np.array([[1e-320], [1e-160], [1e-140], [1.0], [1e140], [1e160], [1.5e308]])
    squares = row_squares(sizes, np.dtype(float))
    np.testing.assert_allclose(norms_of(squares), sizes[:, 0], rtol=1e-12)
    np.testing.assert_allclose(norms_of(np.cumsum(squares, axis=0)), sizes[:, 0], rtol=1e-12)
    assert norms_of(squares[-1] * 4) == np.finfo(float).max
    np.testing.assert_allclose(norms_of(squares * 4)[:-1], 2 * sizes[:-1, 0], rtol=1e-12)


def test_a_shard_is_multiplied_panel_by_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = normal(10, 6, 3, "float32")
    monkeypatch.setattr(verify, "PANEL_BYTES", 100)
    found = probe_times(a, x.astype(np.float64))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, a.astype(float) @ x.astype(float), rtol=1e-14)


# ---- several checks ----


def test_the_worst_check_speaks_for_all() -> None:
    good, better = Check("exact", True, 0.5, 1.0), Check("exact", True, 0.0, 0.0)
    bad, worse = Check("exact", False, 2.0, 1.0, "first"), Check("exact", False, 3.0, 1.0, "second")
    assert merge_checks([better, good]) == good
    assert merge_checks([good, bad, worse]) == Check("exact", False, 3.0, 1.0, "first")
    with pytest.raises(ValueError, match="at least one"):
        merge_checks([])


def test_a_check_is_plain_numbers() -> None:
    a, b = normal(3, 4, 5, "longdouble")
    for check in (exact_check(a, b, a @ b), probe(a, b, a @ b), exact_check(a, b, -(a @ b))):
        assert json.loads(json.dumps(asdict(check))) == asdict(check)


# ---- at the edge of the range ----


def test_sums_that_overflow_on_the_way_are_not_judged_and_that_is_said():
    """Whether such a sum ends as a number, Inf or NaN is a matter of its order."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 64, 64)) * 5e18).astype(np.float32)
    c = a @ b
    with np.errstate(all="ignore"):
        other_order = (a[:, ::-1].astype(np.float64) @ b[::-1].astype(np.float64)).astype(np.float32)
    assert (np.isfinite(c) != np.isfinite(other_order)).any()
    check = exact_check(a, b, other_order)
    assert check.passed
    assert "overflow" in check.detail
    wrong = other_order.copy()
    row, column = np.argwhere(np.isfinite(c) & np.isfinite(other_order))[0]
    wrong[row, column] *= -1
    assert not exact_check(a, b, wrong).passed


def test_complex_numbers_whose_size_is_beyond_the_range():
    a = np.full((3, 3), 1.5e308 * (1 + 1j))
    b = np.eye(3, dtype=complex)
    c = a @ b
    assert exact_check(a, b, c).passed
    c[1, 2] = 1.4e308 * (1 + 1j)
    assert not exact_check(a, b, c).passed


OVERFLOWS = {
    "one addend beyond the range": ([[1e20]], [[1e20]], [[np.inf]], [[0], [-np.inf], [np.nan]]),
    "an operand that is Inf": ([[np.inf, 1e30]], [[1], [1e30]], [[np.inf]], [[0], [np.nan]]),
    "an operand that is NaN": ([[np.nan, 1e30]], [[1], [1e30]], [[np.nan]], [[0], [np.inf]]),
    "no addend beyond the range": ([[1e30, 1, 1]], [[0], [1e30], [1]], [[1e30]], [[np.nan], [np.inf]]),
    "one sign beyond the range": (
        [[3e38, 3e38, -3e38]],
        [[1], [1], [1]],
        [[np.inf]],
        [[np.nan], [-np.inf], [0]],
    ),
}


@pytest.mark.parametrize("case", OVERFLOWS)
def test_only_what_some_order_of_the_sum_gives_is_accepted(case):
    a, b, c, wrong = (np.array(values, np.float32) for values in OVERFLOWS[case])
    with np.errstate(all="ignore"):
        assert exact_check(a, b, c).passed
        for value in wrong:
            assert not exact_check(a, b, value.reshape(1, 1)).passed, value
    if case == "one sign beyond the range":
        assert exact_check(a, b, np.array([[3e38]], np.float32)).passed
