"""A grid of ranks over the m x k x n products of numbers that a @ b is made of.

c (m, n) needs, for each of its elements, k products: in all a brick of m x k x n. A mesh cuts it into
m x k x n smaller bricks, one a rank: that rank multiplies rows of a by columns of b for a part of k. Ranks on
a line along n share the same part of a, on a line along m the same part of b, and on a line along k their
sums are parts of the same elements of c.

>>> mesh = Mesh(2, 1, 3)
>>> [mesh.coordinates(rank) for rank in range(3)]
[(0, 0, 0), (0, 0, 1), (0, 0, 2)]
>>> mesh.line("n", 4), mesh.line("m", 4)
([3, 4, 5], [1, 4])
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

AXES = ("m", "k", "n")
Coordinates = tuple[int, int, int]


@dataclass(frozen=True)
class Mesh:
    """``m`` x ``k`` x ``n`` ranks, numbered with n fastest; or ``ranks`` says which rank stands where."""

    m: int
    k: int
    n: int
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def shape(self) -> Coordinates:
        return self.m, self.k, self.n

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def along(self, axis: str) -> int:
        """How many ranks stand on a line along ``axis``."""
        return self.shape[AXES.index(axis)]

    def coordinates(self, rank: int) -> Coordinates:
        place = rank if self.ranks is None else self._places[rank]
        return place // (self.k * self.n), place // self.n % self.k, place % self.n

    def coordinate(self, axis: str, rank: int) -> int:
        """The place of ``rank`` on its line along ``axis``."""
        return self.coordinates(rank)[AXES.index(axis)]

    def rank_at(self, coordinates: Coordinates) -> int:
        i, l, j = coordinates  # noqa: E741
        place = (i * self.k + l) * self.n + j
        return place if self.ranks is None else self.ranks[place]

    def line(self, axis: str, rank: int) -> list[int]:
        """The ranks on the line along ``axis`` through ``rank``, in order."""
        here, index = list(self.coordinates(rank)), AXES.index(axis)
        places = (tuple([*here[:index], place, *here[index + 1 :]]) for place in range(self.along(axis)))
        return [self.rank_at((i, j, k)) for i, j, k in places]

    @cached_property
    def _places(self) -> dict[int, int]:
        assert self.ranks is not None
        return {rank: place for place, rank in enumerate(self.ranks)}


def all_meshes(size: int) -> Iterator[Mesh]:
    """Every mesh of ``size`` ranks."""
    for m in divisors(size):
        for k in divisors(size // m):
            yield Mesh(m, k, size // m // k)


def divisors(number: int) -> list[int]:
    """In ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
