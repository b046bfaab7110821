"""Who owns what: pure arithmetic."""

import itertools

import numpy as np
import pytest

from mpi_matmul.kernels.fsdp_tp import mesh_of_nodes
from mpi_matmul.layout import COLUMNS, REPLICATED, ROWS, Placement, block_range
from mpi_matmul.mesh import AXES, Mesh, all_meshes


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 9])
def test_blocks_are_those_of_numpys_array_split(length, parts):
    items = np.arange(length)
    for index, expected in enumerate(np.array_split(items, parts)):
        start, stop = block_range(length, parts, index)
        assert items[start:stop].tolist() == expected.tolist()


ON_MESHES = [
    (Placement("rows", rows=("m",)), Mesh(3, 2, 1)),
    (Placement("columns", columns=("n",)), Mesh(1, 1, 10)),
    (Placement("blocks", rows=("m",), columns=("k", "n")), Mesh(2, 3, 2)),
    (Placement("blocks", rows=("k", "m"), columns=("n",)), Mesh(4, 2, 3)),
    (Placement("blocks", rows=("m",), columns=("n",)), Mesh(2, 1, 2, ranks=(3, 0, 2, 1))),
    (REPLICATED, Mesh(2, 2, 1)),
]


@pytest.mark.parametrize(("placement", "mesh"), ON_MESHES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (13, 4), (0, 3), (1, 1)])
def test_the_shards_of_a_matrix_are_the_whole_in_as_many_copies_as_it_says(placement, mesh, shape):
    distribution = placement.on(mesh)
    found, first = np.zeros(shape, int), np.zeros(shape, int)
    for rank in range(mesh.size):
        rows, columns = distribution.slices(shape, rank)
        found[rows, columns] += 1
        first[rows, columns] += distribution.first_owner(rank) == rank
        assert distribution.shard_shape(shape, rank) == found[rows, columns].shape
    assert (found == distribution.copies).all()
    assert (first == 1).all()
    matrix = np.arange(found.size).reshape(shape)
    for rank, part in enumerate(distribution.split(matrix)):
        np.testing.assert_array_equal(part, matrix[distribution.slices(shape, rank)])
        twin = distribution.first_owner(rank)
        assert distribution.slices(shape, twin) == distribution.slices(shape, rank)


def test_ranks_own_neighbouring_parts_the_first_axis_first():
    blocks = Placement("blocks", columns=("n", "m")).on(Mesh(2, 1, 2))
    assert [blocks.slices((1, 8), rank)[1] for rank in range(4)] == [
        slice(0, 2),
        slice(4, 6),
        slice(2, 4),
        slice(6, 8),
    ]
    assert [ROWS.on(Mesh(3, 1, 1)).slices((8, 1), rank)[0].start for rank in range(3)] == [0, 3, 6]
    assert COLUMNS.on(Mesh(3, 1, 1)).shard_shape((4, 8), 2) == (4, 2)


# ---- meshes ----


@pytest.mark.parametrize("mesh", [Mesh(2, 3, 4), Mesh(1, 1, 5), Mesh(2, 2, 1, ranks=(2, 0, 3, 1))], ids=str)
def test_a_rank_stands_where_its_coordinates_say(mesh):
    assert sorted(mesh.rank_at(mesh.coordinates(rank)) for rank in range(mesh.size)) == list(range(mesh.size))
    for rank in range(mesh.size):
        for axis in AXES:
            line = mesh.line(axis, rank)
            assert len(line) == mesh.along(axis)
            assert line[mesh.coordinate(axis, rank)] == rank
            assert len({mesh.coordinates(other)[AXES.index(axis)] for other in line}) == len(line)


def test_two_lines_of_a_mesh_meet_in_one_rank():
    mesh = Mesh(3, 2, 4)
    for rank in range(mesh.size):
        for one, other in itertools.combinations(AXES, 2):
            assert set(mesh.line(one, rank)) & set(mesh.line(other, rank)) == {rank}


@pytest.mark.parametrize("size", [1, 2, 7, 12, 36, 97])
def test_all_meshes_are_all_and_each_once(size):
    found = [mesh.shape for mesh in all_meshes(size)]
    sizes = range(1, size + 1)
    expected = {(m, k, size // m // k) for m in sizes if size % m == 0 for k in sizes if size // m % k == 0}
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_nodes_make_a_mesh_wherever_the_launcher_put_their_ranks():
    for hosts in (["h1", "h1", "h2", "h2"], ["h1", "h2", "h1", "h2"], ["b", "a", "a", "b"]):
        mesh = mesh_of_nodes(hosts)
        assert mesh.shape == (2, 1, 2)
        for rank in range(4):
            assert len({hosts[other] for other in mesh.line("n", rank)}) == 1
            assert len({hosts[other] for other in mesh.line("m", rank)}) == 2
    assert mesh_of_nodes(["h1", "h1", "h1", "h2", "h2", "h2", "h2", "h2", "h2"]).shape == (3, 1, 3)
    assert mesh_of_nodes(["h1", "h1", "h2"]).shape == (3, 1, 1)
