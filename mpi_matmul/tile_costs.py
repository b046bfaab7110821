"""What the kernels that cut their bricks into tiles (see `mpi_matmul.tiles`) cost, without cutting them.

A rank is known by its brick, of which there are at most eight kinds on a mesh, and by what its neighbours
own. So formulas count, by arithmetic or on arrays, what `Tiles` would list, and answer for 100 000 ranks too.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi_matmul import blocks
from mpi_matmul.layout import block_length, length
from mpi_matmul.mesh import Coordinates, Mesh
from mpi_matmul.operands import Problem
from mpi_matmul.tiles import Part, Tiles
from mpi_matmul.work import Formulas, Outline

Integers = npt.NDArray[Any]
FEW = 16


def sent_bytes(problem: Problem, mesh: Mesh, rank: int) -> int:
    """Bytes that ``rank`` sends inside the product.

    Of its part of a all but what the next rank along n owns, of b all but what the next one along m owns, of
    the sums of c all but its own.
    """
    here = mesh.coordinates(rank)
    tiles, (i, l, j) = Tiles(problem, mesh, here), here  # noqa: E741
    of_a = tiles.rows * (tiles.inner - _share_of(tiles.inner, mesh.n, j + 1)) * tiles.a_itemsize
    of_b = tiles.columns * (tiles.inner - _share_of(tiles.inner, mesh.m, i + 1)) * tiles.b_itemsize
    of_c = tiles.columns * (tiles.rows - _share_of(tiles.rows, mesh.k, l)) * tiles.sum_itemsize
    return of_a + of_b + of_c


def sent_messages(problem: Problem, mesh: Mesh, rank: int) -> int:
    """Messages that ``rank`` sends inside the product."""
    counts, (i, l, j) = _counts(problem, mesh, mesh.coordinates(rank)), mesh.coordinates(rank)  # noqa: E741
    of_next = int(counts.parts_of_a[(j + 1) % mesh.n]), int(counts.parts_of_b[(i + 1) % mesh.m])
    return counts.messages(*of_next, counts.tiles_of(l))


def most_bytes(problem: Problem, mesh: Mesh) -> int:
    """Bytes of the rank that sends most: of each kind of brick, one whose neighbours own least."""
    m, n = (
        [_before_the_least(*kind, parts) for kind in _kinds(size, parts)]
        for size, parts in ((problem.m, mesh.m), (problem.n, mesh.n))
    )
    k = [last - 1 for _, last in _kinds(problem.k, mesh.k)]
    return max(sent_bytes(problem, mesh, mesh.rank_at(place)) for place in product(m, k, n))


def most_messages(problem: Problem, mesh: Mesh) -> int:
    """Messages of the rank that sends most."""
    sizes = zip((problem.m, problem.k, problem.n), mesh.shape, strict=True)
    most = 0
    for of_m, of_k, of_n in product(*(_kinds(*axis) for axis in sizes)):
        counts = _counts(problem, mesh, (of_m[0], of_k[0], of_n[0]))
        of_next = _least_ahead(counts.parts_of_a, *of_n), _least_ahead(counts.parts_of_b, *of_m)
        most = max(most, counts.messages(*of_next, counts.tiles_of(of_k[1] - 1)))
    return most


def outline(problem: Problem, mesh: Mesh) -> Outline:
    """As if all owners had equal parts of the largest brick.

    Where c stays, a piece is a group of parts of k; where its sums travel, a tile of its rows.
    """
    tiles = Tiles(problem, mesh, (0, 0, 0))
    ranges = max(1, min(mesh.m + mesh.n - math.gcd(mesh.m, mesh.n), tiles.inner))
    parts = ranges * tiles.blocks_in(-(-tiles.inner // ranges))
    of_rows = mesh.k * tiles.tiles_in(-(-tiles.rows // mesh.k))
    of_a, of_b, of_c = (1 - 1 / along for along in (mesh.n, mesh.m, mesh.k))
    messages = round(of_rows * parts * of_a + parts * of_b + of_rows * of_c)
    passes = min(parts, max(1, 4 * tiles.inner // (3 * blocks.LEAST_ROWS)))  # short parts are laid together
    pieces = passes if tiles.c_stays else max(1, of_rows)
    return Outline(messages, pieces, passes, gathers_b=not tiles.c_stays)


def extra_bytes(problem: Problem, mesh: Mesh, rank: int) -> int:
    """The most memory that ``rank`` needs besides its shards."""
    i, _, j = mesh.coordinates(rank)
    counts, total = _counts(problem, mesh, mesh.coordinates(rank)), 0
    tiles = counts.tiles
    if mesh.n > 1:
        lengths = counts.in_turn([part.a_owner != j for part in counts.few], counts.row_tiles)
        total += tiles.tile_rows * (lengths + counts.laid_together) * tiles.a_itemsize
        total += 2 * blocks.BLOCK_BYTES
    if mesh.m > 1:
        panels = tiles.inner - tiles.inner // mesh.m
        if tiles.c_stays:
            panels = counts.in_turn([part.b_owner != i for part in counts.few], 1)
        total += (panels + counts.laid_together) * tiles.columns * tiles.b_itemsize
    if not tiles.c_stays:
        number = 2 * blocks.SUM_WINDOW + 2 if mesh.k > 1 else 1
        total += number * tiles.tile_rows * tiles.columns * tiles.sum_itemsize
    return total


FORMULAS = Formulas(sent_bytes, sent_messages, extra_bytes, most_bytes, most_messages, outline)


class _Ranges:
    """The ``inner`` of a brick, cut where its owner of a or of b changes: owners and sizes of the ranges."""

    def __init__(self, inner: int, m: int, n: int) -> None:
        starts = np.concatenate([_starts(inner, m), _starts(inner, n)])
        starts.sort()
        sizes = np.diff(starts, append=inner)
        # Where two start together there is nothing between them; an empty brick is one empty range.
        starts, self.sizes = (starts[sizes > 0], sizes[sizes > 0]) if inner else (starts[:1], sizes[:1])
        self.longest = int(self.sizes.max())
        self.a_owners, self.b_owners = _owners(starts, inner, n), _owners(starts, inner, m)


_ranges = lru_cache(16)(_Ranges)


class _Counts:
    """How many parts of each owner the ``inner`` of a brick has, and how long the longest is."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self._ranges = tiles, _ranges(tiles.inner, tiles.mesh.m, tiles.mesh.n)

    @cached_property
    def part_length(self) -> int:
        """The largest part of ``inner``."""
        if self._whole:
            return self._ranges.longest
        sizes: set[int] = set(self._ranges.sizes.tolist())
        return max(-(-size // self.tiles.blocks_in(size)) for size in sizes)

    @cached_property
    def few(self) -> list[Part]:
        """The parts, where they are so few that each matters for the memory; else none."""
        return self.tiles.parts if self.number <= FEW else []

    def in_turn(self, of_others: list[bool], times: int) -> int:
        """Items of ``inner`` in the places of blocks on their way; ``of_others``: which of the few come."""
        most = blocks.WINDOW + 2
        if self.few and times * sum(of_others) <= most:
            parts = zip(self.few, of_others, strict=True)
            return times * sum(length(part.inner) for part, comes in parts if comes)
        return most * self.part_length

    @cached_property
    def laid_together(self) -> int:
        """The most items of ``inner`` that are laid together in memory of their own: see `Tiles.groups`."""
        if self.few:
            several = [parts for parts in self.tiles.groups if len(parts) > 1]
            return max((sum(length(part.inner) for part in parts) for parts in several), default=0)
        if self._ranges.sizes.min() >= blocks.LEAST_ROWS:
            return 0
        return min(self.tiles.inner, blocks.LEAST_ROWS + self.part_length)

    @property
    def _whole(self) -> bool:
        """Whether ranges are not cut further: no shorter one is, if the longest is not."""
        return self.tiles.blocks_in(self._ranges.longest) == 1

    @cached_property
    def _parts(self) -> Integers:
        sizes = self._ranges.sizes
        if self._whole:
            return np.ones_like(sizes)
        different, which = np.unique(sizes, return_inverse=True)
        return np.array([self.tiles.blocks_in(int(size)) for size in different])[which]

    @cached_property
    def number(self) -> int:
        """Of all parts."""
        return int(self._parts.sum())

    @cached_property
    def parts_of_a(self) -> Integers:
        """How many parts each owner of a has."""
        return np.bincount(self._ranges.a_owners, self._parts, self.tiles.mesh.n)

    @cached_property
    def parts_of_b(self) -> Integers:
        """How many parts each owner of b has."""
        return np.bincount(self._ranges.b_owners, self._parts, self.tiles.mesh.m)

    @cached_property
    def row_tiles(self) -> int:
        """The tiles of the rows of all owners."""
        tiles, owners = self.tiles, self.tiles.mesh.k
        small, larger = divmod(tiles.rows, owners)
        number: int = larger * tiles.tiles_in(small + 1) + (owners - larger) * tiles.tiles_in(small)
        return number

    def messages(self, a_next: int, b_next: int, own_tiles: int) -> int:
        """All but those of these parts and tiles of rows: the next ones' of a and b, of c the rank's own."""
        of_a, of_b = self.number - a_next, self.number - b_next
        return self.row_tiles * of_a + of_b + self.row_tiles - own_tiles

    def tiles_of(self, owner: int) -> int:
        """The tiles of the rows of one owner on the line along k."""
        return self.tiles.tiles_in(_share_of(self.tiles.rows, self.tiles.mesh.k, owner))


def _counts(problem: Problem, mesh: Mesh, here: Coordinates) -> _Counts:
    """The same for all ranks with a brick of this kind."""
    sizes = zip((problem.m, problem.k, problem.n), mesh.shape, here, strict=True)
    i, l, j = (next(a for a, b in _kinds(size, ranks) if a <= place < b) for size, ranks, place in sizes)  # noqa: E741
    return _counts_of_kind(problem, mesh, (i, l, j))


@lru_cache(64)
def _counts_of_kind(problem: Problem, mesh: Mesh, here: Coordinates) -> _Counts:
    return _Counts(Tiles(problem, mesh, here))


def _starts(size: int, parts: int) -> Integers:
    """Where the block ranges start."""
    small, larger = divmod(size, parts)
    index = np.arange(parts)
    return index * small + np.minimum(index, larger)


def _owners(items: Integers, size: int, parts: int) -> Integers:
    """In whose range these items lie."""
    small, larger = divmod(size, parts)
    in_larger = larger * (small + 1)
    of_smaller = larger + (items - in_larger) // max(small, 1)
    return np.where(items < in_larger, items // (small + 1), of_smaller if size else 0)


def _share_of(size: int, parts: int, place: int) -> int:
    return block_length(size, parts, place % parts)


def _kinds(size: int, parts: int) -> list[tuple[int, int]]:
    """The first place, and that after the last, of all whose block ranges are equally long."""
    larger = size % parts
    return [(0, larger), (larger, parts)] if larger else [(0, parts)]


def _before_the_least(first: int, last: int, parts: int) -> int:
    """Of these places that before the one which owns least: the later, the less, but after the last is 0."""
    return last - 1 if last < parts else max(first, last - 2)


def _least_ahead(numbers: Integers, first: int, last: int) -> int:
    """The least number of a place that comes after one of these."""
    after_the_last = [numbers[0]] if last == len(numbers) else [numbers[last]]
    return int(min([*after_the_last, *([numbers[first + 1 : last].min()] if last > first + 1 else [])]))
