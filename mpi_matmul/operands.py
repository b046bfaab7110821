"""The door: what may be multiplied, and what the product will be."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi_matmul.comm.protocol import as_sendable
from mpi_matmul.layout import Array, Shape
from mpi_matmul.verify import product_dtype


@dataclass(frozen=True)
class Problem:
    """a (m, k) @ b (k, n): sizes, dtypes by their numpy names, and the shape that the caller gets."""

    m: int
    k: int
    n: int
    a_dtype: str
    b_dtype: str
    dtype: str
    result_shape: tuple[int, ...]

    @property
    def a_shape(self) -> Shape:
        return self.m, self.k

    @property
    def b_shape(self) -> Shape:
        return self.k, self.n

    @property
    def c_shape(self) -> Shape:
        return self.m, self.n


def admit(a: Any, b: Any, a_name: str = "a", b_name: str = "b") -> tuple[Array, Array, Problem]:
    """Both operands as 2-D views, and the problem that they pose, by the rules of numpy.matmul.

    A 1-D a is a row, a 1-D b is a column, and that dimension is dropped from the result. Raises ValueError
    with both shapes when they do not fit or are not 1-D or 2-D, TypeError when the dtypes cannot be
    multiplied.
    """
    a, b = _numbers(a, a_name), _numbers(b, b_name)
    if not (1 <= a.ndim <= 2 and 1 <= b.ndim <= 2):
        raise ValueError(f"{a_name} {a.shape} and {b_name} {b.shape}: expected operands of 1 or 2 dimensions")
    if a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"{a_name} {a.shape} and {b_name} {b.shape} do not fit: "
            f"{a.shape[-1]} columns against {b.shape[0]} rows"
        )
    try:
        dtype = product_dtype(a.dtype, b.dtype)
    except TypeError:
        raise TypeError(
            f"{a_name} {a.dtype} and {b_name} {b.dtype}: numpy cannot multiply these dtypes"
        ) from None
    result_shape = a.shape[:-1] + b.shape[1:]
    if math.prod(result_shape) * dtype.itemsize > sys.maxsize:
        raise ValueError(f"{a_name} {a.shape} and {b_name} {b.shape}: no memory can hold the product")
    a = a if a.ndim == 2 else a[np.newaxis, :]
    b = b if b.ndim == 2 else b[:, np.newaxis]
    problem = Problem(
        a.shape[0], a.shape[1], b.shape[1], str(a.dtype), str(b.dtype), str(dtype), result_shape
    )
    return a, b, problem


def _numbers(operand: Any, name: str) -> Array:
    try:
        return as_sendable(operand)
    except TypeError:
        what = "is a masked array" if isinstance(operand, np.ma.MaskedArray) else _dtype_of(operand)
        raise TypeError(f"{name} {what}, expected numbers or bool") from None


def _dtype_of(operand: Any) -> str:
    return f"has dtype {np.asarray(operand).dtype}"


def random_operands(
    rng: np.random.Generator, m: int, k: int, n: int, dtype: npt.DTypeLike
) -> tuple[Array, Array]:
    """Random a (m, k) and b (k, n): standard normal; 0 to 9 for integers; bool whose product is half True."""
    half = min(0.5, math.sqrt(math.log(2) / max(k, 1)))
    return _random_matrix(rng, (m, k), dtype, half), _random_matrix(rng, (k, n), dtype, half)


def _random_matrix(rng: np.random.Generator, shape: Shape, dtype: npt.DTypeLike, density: float) -> Array:
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.random(shape) < density
    if kind.kind in "iu":
        return rng.integers(0, 10, shape).astype(kind)
    if kind.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind)
    return rng.standard_normal(shape).astype(kind, copy=False)
