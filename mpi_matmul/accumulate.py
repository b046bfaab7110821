"""The local product, added in place: c += a @ b on parts of matrices, without a temporary of the size of c.

numpy can write a product into ``out`` but cannot add one to it. The BLAS that numpy has loaded can: its
``cblas_?gemm`` takes strides, adds in place, and ctypes releases the GIL while it runs, so that transfers go
on meanwhile. Where that BLAS has no such function, and for types that BLAS does not know, numpy multiplies
into a small temporary that is then added.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpi_matmul.cores import blas_libraries
from mpi_matmul.layout import Array

TEMPORARY_BYTES = 8 << 20
_LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_LARGEST_INT = 2**31 - 1  # of a BLAS whose integers have 32 bits

Gemm = Callable[[Array, Array, Array], None]


def multiply_into(a: Array, b: Array, c: Array | None, add: bool) -> Array:
    """``c`` (m, n), set to ``a`` (m, k) @ ``b`` (k, n), or with ``add`` increased by it, in place.

    Without ``c`` (and without ``add``) a new array. All may be strided; types other than c's are converted as
    numpy.matmul does. Sums of integers wrap around, bool is "or" of "and". A product of float16 must not be
    added up in parts: see `can_be_cut`.
    """
    dtype = np.result_type(a, b) if c is None else c.dtype
    if a.dtype != dtype or b.dtype != dtype:
        return _multiply_converted(a, b, np.empty((a.shape[0], b.shape[1]), dtype) if c is None else c, add)
    if not add:
        product: Array = np.matmul(a, b, out=c)
        return product
    assert c is not None
    if (a.shape[1], c.shape) != (b.shape[0], (a.shape[0], b.shape[1])):
        raise ValueError(f"a block {a.shape} @ {b.shape} cannot be added to {c.shape}")
    gemm = _gemm(c.dtype.char) if _suits_blas(a, b, c) else None
    if gemm is not None and c.size and a.shape[1]:
        gemm(a, b, c)
    else:
        _add_in_panels(a, b, c)
    return c


def can_be_cut(dtype: np.dtype[Any]) -> bool:
    """Whether a product of this dtype may be added up in parts.

    Not float16: numpy adds it up in float32, and a partial sum may be too large for float16.
    """
    return dtype.newbyteorder("=") != np.float16


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which parts of a product of ``dtype`` may be added up, by numpy's rules."""
    return dtype.newbyteorder("=") if can_be_cut(dtype) else np.dtype(np.float32)


def _multiply_converted(a: Array, b: Array, c: Array, add: bool) -> Array:
    """With operands of other types, a part at a time: numpy would convert the whole a and b first."""
    np.matmul(a[:0], b[:, :0], out=c[:0, :0])  # operands that do not fit raise here
    step = _lines(c.itemsize * b.shape[1]) if can_be_cut(c.dtype) else b.shape[0]
    for start in range(0, max(b.shape[0], 1), max(step, 1)):
        part = slice(start, start + step)
        b_part = b[part].astype(c.dtype)
        row_step = _lines(c.itemsize * b_part.shape[0])
        for row in range(0, a.shape[0], row_step):
            rows = slice(row, row + row_step)
            multiply_into(a[rows, part].astype(c.dtype), b_part, c[rows], add or start > 0)
    return c


def _lines(nbytes: int) -> int:
    """How many lines of so many bytes a temporary may hold."""
    return max(1, TEMPORARY_BYTES // max(1, nbytes))


def _suits_blas(a: Array, b: Array, c: Array) -> bool:
    return (
        c.dtype.char in _LETTERS
        and a.dtype == b.dtype == c.dtype
        and _lies_by_rows(c)
        and all(_lies_by_rows(x) or _lies_by_rows(x.T) for x in (a, b))
        and max(*a.shape, *b.shape) <= _LARGEST_INT
    )


def _lies_by_rows(x: Array) -> bool:
    """Whether the items of a row are neighbours, and rows a whole number of items apart, as BLAS wants it."""
    neighbours: bool = x.shape[1] <= 1 or x.strides[1] == x.itemsize
    apart: bool = x.shape[0] <= 1 or x.strides[0] % x.itemsize == 0
    return neighbours and apart and _fits(x) and x.flags.aligned and x.dtype.isnative


def _fits(x: Array) -> bool:
    return bool(max(1, x.shape[1]) <= _distance(x) <= _LARGEST_INT)


def _distance(x: Array) -> int:
    """From row to row, in items."""
    return x.strides[0] // x.itemsize if x.shape[0] > 1 else max(1, x.shape[1])


def _operand(x: Array) -> tuple[int, int, int]:
    """How BLAS is told of an operand: as it is or transposed, address, distance."""
    by_rows = _lies_by_rows(x)
    return (
        (_AS_IT_IS, x.ctypes.data, _distance(x)) if by_rows else (_TRANSPOSED, x.ctypes.data, _distance(x.T))
    )


def _add_in_panels(a: Array, b: Array, c: Array) -> None:
    """By numpy alone; a temporary holds some rows of the product at a time."""
    step = _lines(c.shape[1] * c.itemsize)
    for start in range(0, c.shape[0], step):
        rows = slice(start, start + step)
        c[rows] += np.matmul(a[rows], b)


@functools.cache
def _gemm(char: str) -> Gemm | None:
    """c += a @ b for one type, by numpy's own BLAS, if that can be found and proves to be right."""
    for library in blas_libraries():
        for prefix in ("scipy_", ""):  # as in numpy's wheels; "64": its integers have 64 bits
            for suffix in ("64_", "_64", ""):
                function = getattr(library, f"{prefix}cblas_{_LETTERS[char]}gemm{suffix}", None)
                if function is not None and _is_right(gemm := _wrapped(function, char, suffix), char):
                    return gemm
    return None


def _wrapped(function: Any, char: str, suffix: str) -> Gemm:
    # Where the width is unknown, 64 bits are right for both: a callee of 32 bits takes the lower half of what
    # it is given. Apple packs arguments more tightly.
    integer = ctypes.c_int32 if sys.platform == "darwin" and not suffix else ctypes.c_int64
    dtype = np.dtype(char)
    scalar = {"f": ctypes.c_float, "d": ctypes.c_double}.get(char, ctypes.c_void_p)
    one_array = np.ones(1, dtype)  # complex scalars are passed by address
    one = one_array.ctypes.data if dtype.kind == "c" else 1.0
    matrix = (ctypes.c_void_p, integer)
    function.restype = None
    function.argtypes = (*(ctypes.c_int,) * 3, *(integer,) * 3, scalar, *matrix, *matrix, scalar, *matrix)

    def gemm(a: Array, b: Array, c: Array, keep_alive: Array = one_array) -> None:
        sizes = (c.shape[0], c.shape[1], a.shape[1])
        (turn_a, *at_a), (turn_b, *at_b) = _operand(a), _operand(b)
        function(_ROW_MAJOR, turn_a, turn_b, *sizes, one, *at_a, *at_b, one, c.ctypes.data, _distance(c))

    return gemm


def _is_right(gemm: Gemm, char: str) -> bool:
    """Whether a small product of parts of matrices comes out as numpy's."""
    a, b, c = (np.arange(30).reshape(5, 6).astype(char)[:rows, :columns] for rows, columns in _TRIAL)
    expected = c + a @ b
    gemm(a, b, c)
    return bool((c == expected).all())


_TRIAL = ((3, 4), (4, 5), (3, 5))
