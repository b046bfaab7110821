"""Who owns what: pure arithmetic."""

import numpy as np
import pytest

from mpi_matmul.layout import COLUMNS, REPLICATED, ROWS, block_range


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 9])
def test_blocks_are_those_of_numpys_array_split(length, parts):
    items = np.arange(length)
    for index, expected in enumerate(np.array_split(items, parts)):
        start, stop = block_range(length, parts, index)
        assert items[start:stop].tolist() == expected.tolist()


@pytest.mark.parametrize("placement", [ROWS, COLUMNS], ids=lambda placement: placement.name)
@pytest.mark.parametrize("world_size", [1, 3, 10])
def test_the_shards_of_a_split_are_the_whole_once(placement, world_size):
    matrix = np.arange(35).reshape(5, 7)
    shards = list(placement.split(matrix, world_size))
    np.testing.assert_array_equal(np.concatenate(shards, axis=placement.axis), matrix)
    for rank, shard in enumerate(shards):
        assert shard.shape == placement.shard_shape(matrix.shape, world_size, rank)


def test_a_replicated_matrix_is_whole_on_every_rank():
    matrix = np.arange(6).reshape(2, 3)
    assert all((shard == matrix).all() for shard in REPLICATED.split(matrix, 4))
