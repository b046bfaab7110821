"""Where a matrix comes from: an array of the user's, a file, or random numbers. Any part of it can be had.

A rank that has a source takes its own part from it. A file is a source wherever it can be opened and is the
same one, random numbers are everywhere, an array is only where the user gave it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from mpi_matmul.comm.protocol import as_sendable, snapshot
from mpi_matmul.layout import Array, Shape, length
from mpi_matmul.operands import Problem, RandomMatrix, pose
from mpi_matmul.storage import FileError, NpyFile


class Source(Protocol):
    """A matrix of which parts can be read; never changed."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def part(self, rows: slice, columns: slice) -> Array:
        """That part in native byte order; it may be a read-only view."""
        ...

    def recipe(self) -> Any:
        """How others can open the same, for JSON; None if they cannot."""
        ...


class WholeArray:
    """An array in memory."""

    def __init__(self, array: Array) -> None:
        self.shape: Shape = (array.shape[0], array.shape[1])
        self.dtype = array.dtype
        self._array = array.view()
        self._array.flags.writeable = False
        # In a file that is mapped, a kernel would wait for the disk again and again.
        self._as_it_is = array.dtype.isnative and array.flags.aligned and not _is_mapped(array)

    def part(self, rows: slice, columns: slice) -> Array:
        part = self._array[rows, columns]
        return part if self._as_it_is else snapshot(part)

    def recipe(self) -> None:
        return None


class Readable:
    """A file, or random numbers: each part is read, or made, when it is asked for."""

    def __init__(self, matrix: RandomMatrix | NpyFile, shape: Shape, recipe: Any) -> None:
        self._matrix, self.shape, self._recipe = matrix, shape, recipe
        self.dtype = matrix.dtype

    def part(self, rows: slice, columns: slice) -> Array:
        part = np.empty((length(rows), length(columns)), self.dtype.newbyteorder("="))
        self._matrix.read(rows, columns, part)
        return part

    def recipe(self) -> Any:
        return self._recipe


def _opened(
    operand: Any, name: str, one_dimensional: Literal["row", "column"]
) -> Array | NpyFile | RandomMatrix:
    """``operand``, an array or a path, with shape and dtype; TypeError if it holds no numbers."""
    if isinstance(operand, str | os.PathLike):
        return NpyFile(operand, one_dimensional)
    if isinstance(operand, RandomMatrix):
        return operand
    try:
        return as_sendable(operand)
    except TypeError:
        masked = isinstance(operand, np.ma.MaskedArray)
        what = "is a masked array" if masked else f"has dtype {np.asarray(operand).dtype}"
        raise TypeError(f"{name} {what}, expected numbers or bool") from None


def source_of(operand: Array | NpyFile | RandomMatrix, one_dimensional: Literal["row", "column"]) -> Source:
    """The source of an operand of one or two dimensions; FileError when its file cannot be read."""
    if isinstance(operand, RandomMatrix):
        facts = [list(operand.shape), operand.dtype.str, list(operand.seed), operand.density]
        return Readable(operand, operand.shape, {"random": facts})
    if isinstance(operand, NpyFile):
        recipe = {
            "file": os.path.abspath(operand.path),
            "print": operand.fingerprint(),
            "as": one_dimensional,
        }
        return Readable(operand, operand.matrix_shape, recipe)
    if operand.ndim == 2:
        return WholeArray(operand)
    return WholeArray(operand[np.newaxis, :] if one_dimensional == "row" else operand[:, np.newaxis])


def pose_sources(a: Any, b: Any, a_name: str = "a", b_name: str = "b") -> tuple[Source, Source, Problem]:
    """Two operands (arrays or paths) as sources, and the problem that they pose.

    Raises ValueError and TypeError as `operands.pose` does, and FileError.
    """
    a, b = _opened(a, a_name, "row"), _opened(b, b_name, "column")
    problem = pose(a, b, a_name, b_name)
    return source_of(a, "row"), source_of(b, "column"), problem


def open_recipe(recipe: Any) -> Source | None:
    """The source that another rank described, or None: there is no such file here, or not the same one."""
    if recipe is None:
        return None
    if "random" in recipe:
        shape, dtype, seed, density = recipe["random"]
        matrix = RandomMatrix((shape[0], shape[1]), np.dtype(dtype), tuple(seed), density)
        return source_of(matrix, "row")
    try:
        source = source_of(NpyFile(recipe["file"], recipe["as"]), recipe["as"])
    except FileError:
        return None
    return source if source.recipe()["print"] == recipe["print"] else None


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


@dataclass(frozen=True)
class Operand:
    """One of a and b as this rank knows it. ``readers``: for each rank, whether it has a source."""

    shape: Shape
    dtype: np.dtype[Any]
    source: Source | None = None
    readers: list[bool] = field(default_factory=list)
