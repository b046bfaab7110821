"""The door: what may be multiplied, and what the product will be."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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
    def nbytes(self) -> int:
        """The size of a, b and c together."""
        sizes = ((self.a_shape, self.a_dtype), (self.b_shape, self.b_dtype), (self.c_shape, self.dtype))
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in sizes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n

    @property
    def a_shape(self) -> Shape:
        return self.m, self.k

    @property
    def b_shape(self) -> Shape:
        return self.k, self.n

    @property
    def c_shape(self) -> Shape:
        return self.m, self.n


class Described(Protocol):
    """Something of a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


def pose(a: Described, b: Described, a_name: str = "a", b_name: str = "b") -> Problem:
    """The problem that two operands pose, by the rules of numpy.matmul.

    A 1-D a is a row, a 1-D b is a column, and that dimension is dropped from the result. Raises ValueError
    with both shapes when they do not fit or are not 1-D or 2-D, TypeError when the dtypes cannot be
    multiplied.
    """
    if not (1 <= len(a.shape) <= 2 and 1 <= len(b.shape) <= 2):
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
    m = a.shape[0] if len(a.shape) == 2 else 1
    n = b.shape[1] if len(b.shape) == 2 else 1
    return Problem(m, a.shape[-1], n, str(a.dtype), str(b.dtype), str(dtype), result_shape)


def operations(problem: Problem) -> int:
    """Additions and multiplications of real numbers in the product."""
    per_term = 8 if np.dtype(problem.dtype).kind == "c" else 2
    return per_term * problem.m * problem.k * problem.n


def random_operands(
    seed: int, m: int, k: int, n: int, dtype: npt.DTypeLike
) -> tuple[RandomMatrix, RandomMatrix]:
    """Random a (m, k) and b (k, n): standard normal; 0 to 9 for integers; bool whose product is half True."""
    half = min(0.5, math.sqrt(math.log(2) / max(k, 1)))
    kind = np.dtype(dtype)
    return RandomMatrix((m, k), kind, (seed, 0), half), RandomMatrix((k, n), kind, (seed, 1), half)


@dataclass(frozen=True)
class RandomMatrix:
    """A matrix of which any part can be made anywhere, the same for every number of ranks.

    It is made in tiles, each by a random generator of its own.
    """

    shape: Shape
    dtype: np.dtype[Any]
    seed: tuple[int, ...]
    density: float = 0.5  # of True, for bool

    def read(self, rows: slice, columns: slice, out: Array) -> None:
        """Fill ``out`` with that part."""
        for i, of_rows, rows_of_tile in _overlaps(rows) if out.size else ():
            for j, of_columns, columns_of_tile in _overlaps(columns):
                out[of_rows, of_columns] = self._tile(i, j)[rows_of_tile, columns_of_tile]

    def _tile(self, i: int, j: int) -> Array:
        rng = np.random.default_rng((*self.seed, i, j))
        shape = min(_TILE, self.shape[0] - i * _TILE), min(_TILE, self.shape[1] - j * _TILE)
        if self.dtype.kind == "b":
            return rng.random(shape) < self.density
        if self.dtype.kind in "iu":
            return rng.integers(0, 10, shape)
        if self.dtype.kind == "c":
            return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        return rng.standard_normal(shape, np.float32 if self.dtype == np.float32 else np.float64)


_TILE = 512


def _overlaps(part: slice) -> Iterator[tuple[int, slice, slice]]:
    """The tiles that ``part`` of an axis meets: number, place within the part, place within the tile."""
    for index in range(part.start // _TILE, -(-part.stop // _TILE)):
        start, stop = max(part.start, index * _TILE), min(part.stop, (index + 1) * _TILE)
        yield (
            index,
            slice(start - part.start, stop - part.start),
            slice(start - index * _TILE, stop - index * _TILE),
        )
