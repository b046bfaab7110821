"""The local product, set or added in place, against numpy's, for every dtype and layout."""

from __future__ import annotations

import ctypes
import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_matmul import accumulate
from mpi_matmul.accumulate import can_be_cut, multiply_into

BLAS = ["f4", "f8", "c8", "c16"]
DTYPES = [*BLAS, "f2", "g", "G", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def numbers(*shape, dtype="f8", start=-3):
    """Whole numbers so small that every product is exact."""
    values = ((np.arange(np.prod(shape, dtype=int)) * 5 + start) % 7).reshape(shape)
    values = values - (0 if np.dtype(dtype).kind in "u?" else 3)
    return (values * (1 + 2j) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def placed(values, lie):
    """``values`` in memory as ``lie`` has it; a view of something larger, whose rest must not change."""
    room, view = LAYOUTS[lie](values.shape, values.dtype)
    view[...] = values
    assert view.shape == values.shape
    return room, view


def room_for(*shape, dtype):
    return np.full(shape, 1, dtype)


def part_of_c_order(shape, dtype):
    room = room_for(shape[0] + 2, shape[1] + 3, dtype=dtype)
    return room, room[1 : 1 + shape[0], 2 : 2 + shape[1]]


def strided(rows, columns):
    def lie(shape, dtype):
        room = room_for(abs(rows) * shape[0] + 1, abs(columns) * shape[1] + 1, dtype=dtype)
        return room, room[: abs(rows) * shape[0], : abs(columns) * shape[1]][::rows, ::columns]

    return lie


def turned(lie):
    def of_the_transpose(shape, dtype):
        room, view = lie(shape[::-1], dtype)
        return room, view.T

    return of_the_transpose


def unaligned(shape, dtype):
    size = np.dtype(dtype).itemsize
    room = np.ones(shape[0] * shape[1] * size + 1, np.uint8)
    return room, room[1:].view(dtype).reshape(shape)


def between_records(shape, dtype):
    """Rows that are not a whole number of items apart."""
    record = np.dtype([("row", dtype, (shape[1],)), ("rest", "u1", (3,))])
    room = np.ones(shape[0], record)
    return room, room["row"]


LAYOUTS = {
    "C order": lambda shape, dtype: (room := room_for(*shape, dtype=dtype), room),
    "Fortran order": turned(lambda shape, dtype: (room := room_for(*shape, dtype=dtype), room)),
    "a part": part_of_c_order,
    "a part in Fortran order": turned(part_of_c_order),
    "every second row": strided(2, 1),
    "every third column": strided(1, 3),
    "rows backwards": strided(-1, 1),
    "columns backwards": strided(1, -1),
    "all backwards": strided(-1, -1),
    "both strided, turned": turned(strided(2, -2)),
    "unaligned": unaligned,
    "between records": between_records,
}
SHAPES = {
    "ordinary": (5, 7, 6),
    "one row": (1, 7, 6),
    "one column": (5, 7, 1),
    "k is one": (5, 1, 6),
    "one number": (1, 1, 1),
    "a row by a column": (1, 7, 1),
    "no rows": (0, 7, 6),
    "no columns": (5, 7, 0),
    "nothing to add up": (5, 0, 6),
    "nothing at all": (0, 0, 0),
}


def check_added(a, b, c, room):
    """``c`` has become c + a @ b, and nothing around it has changed."""
    before, around = c.copy(), room.copy()
    expected = before + np.matmul(a, b).astype(c.dtype)
    assert multiply_into(a, b, c, add=True) is c
    np.testing.assert_array_equal(c, expected)
    c[...] = before
    assert room.tobytes() == around.tobytes()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype, shape):
    m, k, n = shape
    a, b = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, start=2)
    room, c = placed(numbers(m, n, dtype=dtype, start=5), "a part")
    check_added(a, b, c, room)


@pytest.mark.parametrize("lie_of_c", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i4"])
def test_every_layout(dtype, lie_of_c):
    for lie_of_a in LAYOUTS:
        for lie_of_b in LAYOUTS:
            _, a = placed(numbers(4, 6, dtype=dtype), lie_of_a)
            _, b = placed(numbers(6, 3, dtype=dtype, start=2), lie_of_b)
            room, c = placed(numbers(4, 3, dtype=dtype, start=5), lie_of_c)
            check_added(a, b, c, room)


@pytest.mark.parametrize("lie", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_layout_of_rows_columns_and_nothing(shape, lie):
    """Strides that numpy leaves to chance, where an axis has one item or none, must mislead nobody."""
    m, k, n = shape
    if lie == "between records" and 0 in shape:
        shape = m, k, n = (1, 1, 1)
    _, a = placed(numbers(m, k), lie)
    _, b = placed(numbers(k, n, start=2), lie)
    room, c = placed(numbers(m, n, start=5), lie)
    check_added(a, b, c, room)


@pytest.mark.parametrize("dtype", BLAS)
def test_operands_repeated_without_memory(dtype):
    a = np.broadcast_to(numbers(1, 6, dtype=dtype), (4, 6))
    b = np.broadcast_to(numbers(6, 1, dtype=dtype), (6, 3))
    room, c = placed(numbers(4, 3, dtype=dtype), "C order")
    check_added(a, b, c, room)


@pytest.mark.parametrize(("dtype", "half"), [("c8", "f4"), ("c16", "f8")])
def test_rows_that_are_half_an_item_further_apart(dtype, half):
    a, b, c = (np.ones((5, 2 * 6 + 1), half)[:, :-1].view(dtype)[:, :columns] for columns in (5, 6, 6))
    assert c.strides[0] % c.itemsize
    for matrix in (a, b, c):
        matrix[...] = numbers(*matrix.shape, dtype=dtype)
    check_added(a, b, c, c.base)


@pytest.mark.parametrize("dtype", BLAS)
def test_a_matrix_by_its_transpose(dtype):
    a = numbers(5, 5, dtype=dtype)
    room, c = placed(numbers(5, 5, dtype=dtype, start=1), "C order")
    check_added(a, a.T, c, room)


MIXED = {
    "float32 by int64": ("f4", "i8"),
    "int8 by uint16": ("i1", "u2"),
    "bool by float64": ("?", "f8"),
    "complex64 by float64": ("c8", "f8"),
    "float64 by float32": ("f8", "f4"),
    "float32 by float64": ("f4", "f8"),
    "long double by float32": ("g", "f4"),
    "big-endian": (">f8", ">f8"),
    "big-endian by native": (">f8", "f8"),
}


@pytest.mark.parametrize(("of_a", "of_b"), MIXED.values(), ids=MIXED)
def test_mixed_dtypes(of_a, of_b):
    a, b = numbers(5, 7, dtype=of_a), numbers(7, 6, dtype=of_b, start=2)
    room, c = placed(numbers(5, 6, dtype=np.result_type(a, b), start=5), "a part")
    check_added(a, b, c, room)


def test_a_big_endian_sum():
    room, c = placed(numbers(5, 6, dtype=">f8"), "C order")
    check_added(numbers(5, 7, dtype=">f8"), numbers(7, 6, dtype=">f8"), c, room)


def test_integers_wrap_around_and_bool_is_or_of_ands():
    c = np.array([[250]], "u1")
    assert (
        multiply_into(np.array([[4, 1]], "u1"), np.array([[2], [3]], "u1"), c, add=True) == (250 + 11) % 256
    )
    for before in (False, True):
        c = np.array([[before]])
        assert multiply_into(np.array([[True, False]]), np.array([[False], [True]]), c, add=True) == before
        assert multiply_into(np.array([[True, True]]), np.array([[False], [True]]), c, add=True)


# ---- set, not added ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_a_place_the_product_is_a_new_array(dtype, shape):
    m, k, n = shape
    a, b = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype)
    product = multiply_into(a, b, None, add=False)
    assert product.dtype == dtype
    np.testing.assert_array_equal(product, a @ b)


@pytest.mark.parametrize("lie", LAYOUTS)
@pytest.mark.parametrize("left_behind", [np.nan, np.inf])
def test_what_was_in_memory_does_not_matter_when_the_product_is_set(lie, left_behind):
    for shape in SHAPES.values():
        m, k, n = shape
        if lie == "between records" and 0 in shape:
            continue
        a, b = numbers(m, k), numbers(k, n)
        _, c = placed(np.full((m, n), left_behind), lie)
        assert multiply_into(a, b, c, add=False) is c
        np.testing.assert_array_equal(c, a @ b)


@pytest.mark.parametrize("dtype", BLAS)
def test_nan_and_inf_in_what_is_added_to_stay(dtype):
    c = np.array([[np.nan, np.inf, 1]], dtype)
    multiply_into(np.zeros((1, 2), dtype), np.zeros((2, 3), dtype), c, add=True)
    np.testing.assert_array_equal(c, np.array([[np.nan, np.inf, 1]], dtype))


# ---- what does not fit ----

MISFITS = {
    "rows": ((4, 5), (5, 6), (3, 6)),
    "columns": ((4, 5), (5, 6), (4, 7)),
    "transposed": ((4, 5), (5, 6), (6, 4)),
    "k": ((4, 5), (4, 6), (4, 6)),
    "one row would do for numpy": ((4, 5), (5, 6), (1, 6)),
    "one column would do for numpy": ((4, 5), (5, 1), (4, 6)),
    "nothing": ((0, 5), (5, 6), (4, 6)),
}


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("dtype", ["f8", "i4"])
@pytest.mark.parametrize("shapes", MISFITS.values(), ids=MISFITS)
def test_shapes_that_do_not_fit_raise_and_change_nothing(shapes, dtype, add):
    a, b, c = (numbers(*shape, dtype=dtype) for shape in shapes)
    before = c.copy()
    with pytest.raises(ValueError, match=r"\d"):
        multiply_into(a, b, c, add)
    np.testing.assert_array_equal(c, before)


# ---- by BLAS, and without ----


@pytest.fixture
def without_blas(monkeypatch):
    monkeypatch.setattr(accumulate, "_gemm", lambda char: None)


@contextmanager
def calls_of_blas(monkeypatch):
    """The types for which BLAS was called."""
    called, real = [], accumulate._gemm

    def noted(char):
        return lambda *matrices: (called.append(char), real(char)(*matrices))

    with monkeypatch.context() as patched:
        patched.setattr(accumulate, "_gemm", noted)
        yield called


@pytest.mark.parametrize("char", "fdFD")
def test_numpy_has_a_blas_that_adds_up(char):
    assert accumulate._gemm(char) is not None


BY_BLAS = ["C order", "Fortran order", "a part", "a part in Fortran order", "every second row"]


@pytest.mark.parametrize("char", "fdFD")
@pytest.mark.parametrize("lie", BY_BLAS)
def test_blas_takes_parts_of_matrices_as_they_lie(char, lie, monkeypatch):
    _, a = placed(numbers(4, 6, dtype=char), lie)
    _, b = placed(numbers(6, 3, dtype=char), lie)
    with calls_of_blas(monkeypatch) as called:
        room, c = placed(numbers(4, 3, dtype=char), "a part")
        check_added(a, b, c, room)
    assert called == [char]


@pytest.mark.parametrize("dtype", BLAS)
def test_the_same_without_blas(dtype, without_blas, monkeypatch):
    monkeypatch.setattr(accumulate, "TEMPORARY_BYTES", 100)  # several panels
    for m, k, n in SHAPES.values():
        a, b = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype)
        room, c = placed(numbers(m, n, dtype=dtype), "a part")
        check_added(a, b, c, room)


@pytest.mark.parametrize("temporary", [0, 1, 47, 48, 49, 200, 10**6])
def test_panels_of_any_size(temporary, without_blas, monkeypatch):
    monkeypatch.setattr(accumulate, "TEMPORARY_BYTES", temporary)
    room, c = placed(numbers(11, 6), "C order")
    check_added(numbers(11, 5), numbers(5, 6), c, room)


def nothing(a, b, c):
    """An arithmetic that leaves everything as it is."""


WRONG = {
    "does nothing": nothing,
    "sets": lambda a, b, c: np.matmul(a, b, out=c),
    "subtracts": lambda a, b, c: np.subtract(c, a @ b, out=c),
    "adds twice": lambda a, b, c: np.add(c, 2 * (a @ b), out=c),
    "forgets the last column": lambda a, b, c: np.add(c[:, :-1], (a @ b)[:, :-1], out=c[:, :-1]),
    "forgets the last of k": lambda a, b, c: np.add(c, a[:, :-1] @ b[:-1], out=c),
}


@pytest.mark.parametrize("char", "fdFD")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_arithmetic_is_refused(wrong, char):
    assert not accumulate._is_right(wrong, char)


@pytest.mark.parametrize("char", "fdFD")
def test_the_right_arithmetic_is_accepted(char):
    assert accumulate._is_right(lambda a, b, c: np.add(c, a @ b, out=c), char)


@pytest.fixture
def afresh():
    """Nothing is remembered of the libraries, before and after."""
    accumulate._gemm.cache_clear()
    yield
    accumulate._gemm.cache_clear()


SIGNATURE = (
    *(ctypes.c_int,) * 3,
    *(ctypes.c_int64,) * 3,
    ctypes.c_double,
    *(ctypes.c_void_p, ctypes.c_int64) * 2,
)
SIGNATURE = (*SIGNATURE, ctypes.c_double, ctypes.c_void_p, ctypes.c_int64)
USELESS = ctypes.CFUNCTYPE(None, *SIGNATURE)(lambda *arguments: None)


def test_a_library_that_is_wrong_is_passed_over_for_the_next(monkeypatch, afresh):
    useful = accumulate.blas_libraries()
    monkeypatch.setattr(accumulate, "blas_libraries", lambda: [SimpleNamespace(cblas_dgemm=USELESS)])
    assert accumulate._gemm("d") is None
    accumulate._gemm.cache_clear()
    monkeypatch.setattr(accumulate, "blas_libraries", lambda: [SimpleNamespace(cblas_dgemm=USELESS), *useful])
    assert accumulate._gemm("d") is not None


@pytest.mark.parametrize("libraries", [[], [SimpleNamespace()]], ids=["none", "one that knows no gemm"])
def test_without_a_library_numpy_adds_up(libraries, monkeypatch, afresh):
    monkeypatch.setattr(accumulate, "blas_libraries", lambda: libraries)
    assert accumulate._gemm("d") is None
    room, c = placed(numbers(4, 3), "C order")
    check_added(numbers(4, 6), numbers(6, 3), c, room)


# ---- memory ----


def peak_of(operands):
    tracemalloc.start()
    try:
        multiply_into(*operands, add=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", BLAS)
@pytest.mark.parametrize("lie", BY_BLAS)
def test_blas_needs_no_temporary(dtype, lie):
    accumulate._gemm(np.dtype(dtype).char)
    _, a = placed(numbers(400, 20, dtype=dtype), lie)
    _, b = placed(numbers(20, 300, dtype=dtype), lie)
    _, c = placed(numbers(400, 300, dtype=dtype), "a part")
    assert peak_of((a, b, c)) < 20_000


@pytest.mark.parametrize(
    ("dtype", "lie"),
    [("i8", "C order"), ("g", "C order"), ("f8", "columns backwards"), ("f8", "Fortran order")],
)
def test_numpy_needs_a_small_temporary(dtype, lie, monkeypatch):
    monkeypatch.setattr(accumulate, "TEMPORARY_BYTES", 100_000)
    a, b = numbers(1000, 5, dtype=dtype), numbers(5, 300, dtype=dtype)
    _, c = placed(numbers(1000, 300, dtype=dtype), lie)
    assert 50_000 < peak_of((a, b, c)) < 100_000 + 200_000 < c.nbytes / 5  # numpy has buffers of its own


def test_the_temporary_is_a_few_megabytes():
    a, b, c = numbers(3000, 2, dtype="i8"), numbers(2, 1500, dtype="i8"), numbers(3000, 1500, dtype="i8")
    assert peak_of((a, b, c)) < accumulate.TEMPORARY_BYTES + (1 << 20) < c.nbytes / 3


# ---- what may be cut ----


@pytest.mark.parametrize("dtype", [*DTYPES, ">f8"])
def test_only_float16_may_not_be_added_up_in_parts(dtype):
    assert can_be_cut(np.dtype(dtype)) == (dtype != "f2")
