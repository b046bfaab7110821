"""What travels on a mesh of ranks: tiles of a along n, panels of b along m, sums of c along k."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np

from mpi_matmul import blocks
from mpi_matmul.accumulate import sum_dtype
from mpi_matmul.comm.ring import reduce_order, ring_broadcasts, ring_reduce_scatter
from mpi_matmul.layout import Array, Shape, length
from mpi_matmul.tiles import Part, Tiles
from mpi_matmul.work import Work

Turn = tuple[
    slice, list[Part]
]  # rows of a, and parts of the brick's inner dimension to be multiplied at once


def tiles_of_a(work: Work, tiles: Tiles, a_shard: Array, turns: list[Turn]) -> Iterator[Array]:
    """The tile of a of each turn, from whichever ranks on this one's line along n own it.

    A tile is valid until the next one is asked for; all must be asked for, and the end.
    """
    if work.mesh.n == 1:
        return (_columns(a_shard[rows], [tiles.a_part(part) for part in parts]) for rows, parts in turns)
    blocks_of_a = [(rows, part) for rows, parts in turns for part in parts]

    def own(i: int) -> Array:
        rows, part = blocks_of_a[i]
        return a_shard[rows, tiles.a_part(part)]

    shapes = [(length(rows), length(part.inner)) for rows, part in blocks_of_a]
    owners = [part.a_owner for _, part in blocks_of_a]
    arriving = _passed_along(work, "n", own, owners, shapes, a_shard.dtype)
    beside = [[(length(rows), length(part.inner)) for part in parts] for rows, parts in turns]
    return _together(arriving, beside, 1, a_shard.dtype, keep=False)


def panels_of_b(work: Work, tiles: Tiles, b_shard: Array, keep: bool) -> Iterator[Array]:
    """The rows of b of each group of parts, from whichever ranks on this one's line along m own them.

    Without ``keep`` a panel is valid until the next one is asked for.
    """
    if work.mesh.m == 1:
        return (_columns(b_shard.T, list(map(tiles.b_part, parts))).T for parts in tiles.groups)
    in_order = [part for parts in tiles.groups for part in parts]

    def own(i: int) -> Array:
        return b_shard[tiles.b_part(in_order[i])]

    shapes = [(length(part.inner), tiles.columns) for part in in_order]
    owners = [part.b_owner for part in in_order]
    arriving = _passed_along(work, "m", own, owners, shapes, b_shard.dtype, keep)
    below = [[(length(part.inner), tiles.columns) for part in parts] for parts in tiles.groups]
    return _together(arriving, below, 0, b_shard.dtype, keep)


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
    return list(product([tiles.shares[owner][i] for owner, i in order], tiles.groups))


def turns_by_parts(tiles: Tiles) -> list[Turn]:
    """For each group of parts all tiles of rows."""
    return [(rows, parts) for parts in tiles.groups for rows in tiles.shares[0]]


def _columns(matrix: Array, parts: list[slice]) -> Array:
    """Some columns of what is all here: a view, if they are neighbours."""
    if all(left.stop == right.start for left, right in pairwise(parts)):
        return matrix[:, parts[0].start : parts[-1].stop]
    return np.concatenate([matrix[:, part] for part in parts], axis=1)


def _passed_along(
    work: Work,
    axis: str,
    own: Callable[[int], Array],
    owners: list[int],
    shapes: list[Shape],
    dtype: np.dtype[Any],
    keep: bool = False,
) -> Iterator[Array]:
    here = work.mesh.coordinate(axis, work.mailbox.rank)
    foreign = [math.prod(shape) for shape, owner in zip(shapes, owners, strict=True) if owner != here]
    number = 0 if keep else min(blocks.WINDOW + 2, len(foreign))
    memory = _memory(number, max(foreign, default=0), dtype)

    def place(i: int) -> Array:
        return np.empty(shapes[i], dtype) if keep else memory(shapes[i])

    return ring_broadcasts(work.along(axis), owners, own, blocks.WINDOW, place)


def _together(
    arriving: Iterator[Array], groups: list[list[Shape]], axis: int, dtype: np.dtype[Any], keep: bool
) -> Iterator[Array]:
    """The blocks of each group one below the other (axis 0) or side by side (axis 1); one alone as it is."""
    shapes = [_joined(group, axis) for group in groups]
    largest = max((math.prod(shapes[i]) for i, group in enumerate(groups) if len(group) > 1), default=0)
    memory = _memory(0 if keep else 1, largest, dtype)
    for shape, group in zip(shapes, groups, strict=True):
        if len(group) == 1:
            yield next(arriving)
            continue
        panel = np.empty(shape, dtype) if keep else memory(shape)
        start, lines = 0, panel if axis == 0 else panel.T
        for block in group:
            came = next(arriving)
            lines[start : start + block[axis]] = came if axis == 0 else came.T
            start += block[axis]
        yield panel
    next(arriving, None)  # ends when the last block has been passed on


def _joined(group: list[Shape], axis: int) -> Shape:
    total = sum(shape[axis] for shape in group)
    return (total, group[0][1]) if axis == 0 else (group[0][0], total)


def _memory(number: int, size: int, dtype: np.dtype[Any]) -> Callable[[Shape], Array]:
    """Gives the memory of ``number`` arrays of at most ``size`` items in turn."""
    places = deque(np.empty((number, size), dtype))

    def take(shape: Shape) -> Array:
        places.rotate(-1)
        array: Array = places[-1][: math.prod(shape)].reshape(shape)
        return array

    return take
