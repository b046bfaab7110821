"""What travels on a mesh of ranks: tiles of a along n, panels of b along m, sums of c along k."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from mpi_matmul import blocks
from mpi_matmul.accumulate import sum_dtype
from mpi_matmul.comm.ring import reduce_order, ring_broadcasts, ring_reduce_scatter
from mpi_matmul.layout import Array, Shape, length
from mpi_matmul.tiles import Part, Tiles
from mpi_matmul.work import Work

Turn = tuple[slice, Part]  # rows of a, and a part of the brick's inner dimension


def tiles_of_a(work: Work, tiles: Tiles, a_shard: Array, turns: list[Turn]) -> Iterator[Array]:
    """The tile of a of each turn, from whichever rank on this one's line along n owns it."""

    def own(i: int) -> Array:
        rows, part = turns[i]
        return a_shard[rows, tiles.a_part(part)]

    shapes = [(length(rows), length(part.inner)) for rows, part in turns]
    owners = [part.a_owner for _, part in turns]
    return _passed_along(work, "n", own, owners, shapes, a_shard.dtype, keep=False)


def panels_of_b(work: Work, tiles: Tiles, b_shard: Array, keep: bool) -> Iterator[Array]:
    """The rows of b of each part, from whichever rank on this one's line along m owns them.

    Without ``keep`` a panel is valid until the next one is asked for.
    """

    def own(i: int) -> Array:
        return b_shard[tiles.b_part(tiles.parts[i])]

    shapes = [(length(part.inner), tiles.columns) for part in tiles.parts]
    owners = [part.b_owner for part in tiles.parts]
    return _passed_along(work, "m", own, owners, shapes, b_shard.dtype, keep)


def sums_of_c(work: Work, tiles: Tiles, c_shard: Array) -> Iterator[tuple[slice, Array, bool]]:
    """``(rows, total, begun)``: the sums that come by on this rank's line along k, its own ones last.

    ``total`` is to be filled with the product of these rows, or where it has ``begun``, increased by it,
    before the next is asked for. In the end ``c_shard`` has this rank's.
    """
    here, dtype = work.here[1], sum_dtype(c_shard.dtype)
    others = _memory(
        2 * blocks.SUM_WINDOW + 2 if work.mesh.k > 1 else 1, tiles.tile_rows * tiles.columns, dtype
    )
    first = tiles.shares[here][0].start if tiles.shares[here] else 0

    def own(rows: slice) -> Array:
        return c_shard[rows.start - first : rows.stop - first]

    def place(owner: int, rows: slice) -> Array:
        if owner == here and dtype == c_shard.dtype:
            return own(rows)
        return others((length(rows), tiles.columns))

    for (owner, rows), total, begun in ring_reduce_scatter(
        work.along("k"),
        [[(owner, rows) for rows in share] for owner, share in enumerate(tiles.shares)],
        blocks.SUM_WINDOW,
        lambda owner, part: place(owner, part[1]),
    ):
        yield rows, total, begun
        if owner == here and dtype != c_shard.dtype:
            with np.errstate(over="ignore"):
                own(rows)[...] = total


def turns_by_rows(tiles: Tiles, here: int) -> list[Turn]:
    """For each tile of rows, in the order in which `sums_of_c` has them, all parts."""
    order = reduce_order(tiles.shares, here)
    return list(product([tiles.shares[owner][i] for owner, i in order], tiles.parts))


def turns_by_parts(tiles: Tiles) -> list[Turn]:
    """For each part all tiles of rows."""
    return [(rows, part) for part in tiles.parts for rows in tiles.shares[0]]


def _passed_along(
    work: Work,
    axis: str,
    own: Callable[[int], Array],
    owners: list[int],
    shapes: list[Shape],
    dtype: np.dtype[Any],
    keep: bool,
) -> Iterator[Array]:
    here = work.mesh.coordinate(axis, work.mailbox.rank)
    largest = max((rows * columns for rows, columns in shapes), default=0)
    travels = work.mesh.along(axis) > 1 and any(owner != here for owner in owners)
    memory = _memory(blocks.WINDOW + 2 if travels and not keep else 0, largest, dtype)

    def place(i: int) -> Array:
        return np.empty(shapes[i], dtype) if keep else memory(shapes[i])

    return ring_broadcasts(work.along(axis), owners, own, blocks.WINDOW, place)


def _memory(number: int, size: int, dtype: np.dtype[Any]) -> Callable[[Shape], Array]:
    """Gives the memory of ``number`` arrays of at most ``size`` items in turn."""
    places = deque(np.empty((number, size), dtype))

    def take(shape: Shape) -> Array:
        places.rotate(-1)
        array: Array = places[-1][: shape[0] * shape[1]].reshape(shape)
        return array

    return take
