"""How b is cut: every number once, the same on every rank, in little memory."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from mpi_matmul import blocks
from mpi_matmul.blocks import Cut, ring_order, row_blocks, together
from mpi_matmul.layout import block_range, length

MB = 1 << 20

# name -> (k, n, itemsize, world_size)
CUTS = {
    "nothing at all": (0, 0, 8, 3),
    "no rows": (0, 7, 8, 3),
    "no columns": (7, 0, 8, 3),
    "one number, one rank": (1, 1, 8, 1),
    "one number, many ranks": (1, 1, 8, 16),
    "one column": (5000, 1, 8, 4),
    "one row": (1, 5000, 4, 3),
    "more ranks than columns": (1009, 5, 8, 13),
    "primes": (1009, 1013, 8, 7),
    "large primes": (10007, 10009, 4, 5),
    "bytes": (3001, 4099, 1, 3),
    "one rank": (4096, 4096, 8, 1),
    "two ranks": (4096, 4096, 8, 2),
    "many ranks": (4096, 4096, 8, 64),
    "rows that do not divide": (383, 4099, 8, 4),
    "long k": (300_000, 64, 8, 4),
    "wide": (257, 200_003, 8, 3),
    "very wide": (3, 20_000_003, 8, 4),
    "very wide, one row": (1, 50_000_000, 16, 3),
    "large numbers": (1000, 70_001, 32, 3),
}


@pytest.fixture(params=CUTS.values(), ids=CUTS)
def case(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["k is cut", "k is not cut"])
def cut(request, case):
    return Cut(*case, split_k=request.param)


ROWS_OF_A = (0, 1, 100, 5000, 10**7)


# ---- what a cut consists of ----


def test_every_number_of_every_shard_is_in_one_block(cut, case):
    k, n, _, world_size = case
    for owner in range(world_size):
        start, stop = block_range(n, world_size, owner)
        parts = [cut.part(owner, step) for step in cut.steps]
        tiles = sorted({(columns.start, columns.stop) for _, columns in parts})
        assert_one_after_the_other(tiles, stop - start)
        for tile in tiles:
            # An empty tile may share its place with another one.
            rows = [(part.start, part.stop) for part, at in parts if (at.start, at.stop) == tile]
            if tile[0] < tile[1]:
                assert_one_after_the_other(rows, k)


def assert_one_after_the_other(ranges, end):
    """From 0 to ``end`` without a gap."""
    assert [ranges[0][0], *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), end]
    assert all(start <= stop for start, stop in ranges)


@pytest.mark.parametrize("name", ["no rows", "one number, many ranks", "more ranks than columns", "primes"])
@pytest.mark.parametrize("forced", [{}, {"BLOCK_BYTES": 1, "LEAST_ROWS": 1}, {"BLOCK_BYTES": 900}])
def test_every_number_of_b_is_in_one_block(name, forced, monkeypatch):
    """Counted one by one, also with blocks so small that shards are tiled."""
    for setting, value in forced.items():
        monkeypatch.setattr(blocks, setting, value)
    k, n, itemsize, world_size = CUTS[name]
    cut, seen = Cut(k, min(n, 90), itemsize, world_size), np.zeros((k, min(n, 90)), int)
    for step, owner in product(cut.steps, range(world_size)):
        seen[step.rows, cut.columns([owner], step)] += 1
    assert (seen == 1).all()


def test_the_block_of_an_owner_is_the_same_seen_from_everywhere(cut, case):
    """As a part of its shard, as columns of c, and as a shape that others receive."""
    _, n, _, world_size = case
    picked = sorted({0, 1, len(cut.steps) // 2, len(cut.steps) - 1} & set(range(len(cut.steps))))
    for number, owner in product(picked, range(world_size)):
        step, first = cut.steps[number], block_range(n, world_size, owner)[0]
        rows, in_shard = cut.part(owner, step)
        in_c = cut.columns([owner], step)
        assert rows == step.rows
        assert (in_c.start, in_c.stop) == (first + in_shard.start, first + in_shard.stop)
        assert cut.shape(number, owner) == (length(rows), length(in_shard))


def test_the_rows_of_the_first_step_of_a_tile_begin_at_zero(cut):
    """There the product is set, at the others it is added."""
    tiles = [step.tile for step in cut.steps]
    assert tiles == sorted(tiles)
    assert sorted(set(tiles)) == list(range(cut.tiles))
    for before, step in pairwise([blocks.Step(slice(0, 0), -1), *cut.steps]):
        assert (step.rows.start == 0 and before.tile < step.tile) or before.rows.stop == step.rows.start


def test_two_ranks_that_cut_on_their_own_cut_alike(case):
    assert Cut(*case).steps == Cut(*case).steps


def test_k_is_cut_only_where_that_is_allowed(case):
    steps = Cut(*case, split_k=False).steps
    assert all(step.rows == slice(0, case[0]) for step in steps)


# ---- sizes ----


@pytest.mark.parametrize(
    ("k", "n", "itemsize", "world_size"),
    [(0, 0, 8, 2), (1, 1, 8, 4), (64, 64, 8, 2), (300, 300, 8, 3), (512, 512, 8, 2), (256, 4096, 4, 2)],
)
def test_a_small_product_is_one_block(k, n, itemsize, world_size):
    cut = Cut(k, n, itemsize, world_size)
    assert [(step.rows, step.tile) for step in cut.steps] == [(slice(0, k), 0)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("shape", [(2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384)])
def test_a_large_product_is_several_blocks_of_the_right_size(shape, world_size):
    cut = Cut(*shape, 8, world_size)
    largest = cut.largest_block * 8
    assert len(cut.steps) > 1
    assert largest <= 2 * blocks.BLOCK_BYTES
    assert all(length(step.rows) >= blocks.LEAST_ROWS // 2 for step in cut.steps)


def test_shards_with_long_rows_are_tiled():
    assert Cut(4096, 4096, 8, 2).tiles == 1
    wide = Cut(4096, 1_000_000, 8, 2)
    assert wide.tiles > 1
    assert wide.largest_block * 8 <= 2 * blocks.BLOCK_BYTES


ORDINARY_K = (0, 1, 7, 100, 256, 512, 1000, 1024, 2048, 4096, 8192, 10_007, 65_536)
ORDINARY_N = (0, 1, 7, 100, 512, 1024, 2048, 4096, 8192, 10_007, 65_536, 1_000_003, 20_000_000)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("itemsize", [1, 4, 8, 16])
def test_few_megabytes_are_in_flight(itemsize, world_size):
    for k, n in product(ORDINARY_K, ORDINARY_N):
        if k * n * itemsize <= world_size << 36:
            assert Cut(k, n, itemsize, world_size).bytes_in_flight() <= 64 * MB, (k, n)


def test_nothing_is_in_flight_in_a_world_of_one():
    assert Cut(4096, 4096, 8, 1).bytes_in_flight() == Cut(4096, 4096, 8, 1).largest_block == 0


def test_the_largest_block_has_room_for_every_block(cut, case):
    world_size = case[3]
    sizes = {
        int(np.prod(cut.shape(number, owner)))
        for number, owner in product(range(len(cut.steps)), range(world_size))
    }
    assert cut.largest_block == (max(sizes) if world_size > 1 else 0)


def test_the_largest_panel_has_room_for_every_group(cut, case):
    for m, rank in product(ROWS_OF_A, range(min(case[3], 4))):
        groups = together(m, cut, rank)
        rows, columns = cut.largest_panel(groups)
        for step, owners in product(cut.steps[:200], groups):
            if len(owners) > 1:
                assert length(step.rows) <= rows
                assert length(cut.columns(owners, step)) <= columns
        if all(len(owners) == 1 for owners in groups):
            assert rows * columns == 0


def test_what_is_in_flight_has_been_counted(cut, case):
    """The places in which blocks arrive, and the panel in which they lie side by side."""
    _, _, itemsize, world_size = case
    for m, rank in product(ROWS_OF_A, range(min(world_size, 4))):
        panel = int(np.prod(cut.largest_panel(together(m, cut, rank)))) if world_size > 1 else 0
        assert ((blocks.WINDOW + 1) * cut.largest_block + panel) * itemsize <= cut.bytes_in_flight()


ROWS = {
    "nothing": (0, 8, [(0, 0)]),
    "one row": (1, 8, [(0, 1)]),
    "as one, because it is small": (300, 64, [(0, 300)]),
    "one is asked for": (10_000, 1, [(0, 10_000)]),
    "even halves": (512, 2, [(0, 256), (256, 512)]),
    "fewer than asked for": (700, 64, [(0, 234), (234, 467), (467, 700)]),
    "none is still one": (512, 0, [(0, 512)]),
}


@pytest.mark.parametrize(("k", "number", "expected"), ROWS.values(), ids=ROWS)
def test_row_blocks(k, number, expected):
    assert [(rows.start, rows.stop) for rows in row_blocks(k, number)] == expected


# ---- who is multiplied together ----


@pytest.mark.parametrize(
    ("world_size", "rank", "expected"),
    [(1, 0, [0]), (3, 0, [0, 2, 1]), (4, 2, [2, 1, 0, 3]), (5, 4, [4, 3, 2, 1, 0])],
)
def test_blocks_come_round_the_ring_backwards(world_size, rank, expected):
    assert ring_order(world_size, rank) == expected


def test_groups_are_everybody_in_ring_order_and_neighbours(cut, case):
    world_size = case[3]
    for m, rank in product(ROWS_OF_A, range(world_size)):
        groups = together(m, cut, rank)
        assert [owner for group in groups for owner in group] == ring_order(world_size, rank)
        if len(groups) > 1:
            assert all(group == list(range(group[0], group[-1] - 1, -1)) for group in groups)


def test_the_columns_of_a_group_are_those_of_its_owners(cut, case):
    step = cut.steps[-1]
    for m, rank in product(ROWS_OF_A, range(min(case[3], 4))):
        for owners in together(m, cut, rank):
            of_owners = [cut.columns([owner], step) for owner in sorted(owners)]
            assert cut.columns(owners, step) == slice(of_owners[0].start, of_owners[-1].stop)
            assert all(left.stop == right.start for left, right in pairwise(of_owners))


GROUPS = {
    "wide shards alone, if a has few rows": (1000, (4096, 4096, 8, 4), 1, [[1], [0], [3], [2]]),
    "narrow shards side by side": (400, (4096, 512, 8, 4), 2, [[2, 1], [0], [3]]),
    "everybody, if b is narrow": (1000, (4096, 64, 8, 4), 2, [[2, 1, 0, 3]]),
    "more of them, if a has more rows than b has columns": (
        10**5,
        (4096, 8192, 8, 8),
        1,
        [[1, 0], [7, 6], [5, 4], [3, 2]],
    ),
    "tiles alone": (10**7, (4096, 10**6, 8, 3), 0, [[0], [2], [1]]),
    "more ranks than columns": (1000, (100, 2, 8, 3), 1, [[1, 0, 2]]),
}


@pytest.mark.parametrize(("m", "case", "rank", "expected"), GROUPS.values(), ids=GROUPS)
def test_who_is_multiplied_together(m, case, rank, expected):
    assert together(m, Cut(*case), rank) == expected
