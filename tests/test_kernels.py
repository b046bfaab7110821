"""Every kernel against numpy's plain product: any shape, any dtype, any number of ranks, in every world."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import worlds

from mpi_matmul import blocks, tile_costs
from mpi_matmul.kernels import KERNELS
from mpi_matmul.mesh import Mesh
from mpi_matmul.operands import pose

pytestmark = pytest.mark.parametrize("strategy", KERNELS)


@pytest.fixture(params=worlds.WITH_RENDEZVOUS)
def world(request):
    """Each world in turn."""
    return worlds.world_of(request)


def counting_up(*shape, dtype=float):
    return (np.arange(np.prod(shape, dtype=int)) % 11 - 3).reshape(shape).astype(dtype)


def assert_same(c, expected):
    assert c.dtype == expected.dtype
    assert c.shape == expected.shape
    np.testing.assert_array_equal(c, expected)


def check_product(world, strategy, a, b):
    a_before, b_before = a.copy(), b.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = np.matmul(a, b)
        for c, _ in world.product(strategy, a, b):
            assert_same(c, expected)
            assert not np.shares_memory(c, a)
            assert not np.shares_memory(c, b)
    np.testing.assert_array_equal(a, a_before)
    np.testing.assert_array_equal(b, b_before)


SHAPES = {
    "sizes divide": (16, 8, 12),
    "square": (8, 8, 8),
    "nothing divides": (7, 5, 11),
    "one number": (1, 1, 1),
    "one row": (1, 5, 9),
    "one column": (9, 5, 1),
    "k is one": (6, 1, 7),
    "fewer rows than ranks": (3, 40, 50),
    "fewer columns than ranks": (50, 40, 2),
    "no rows": (0, 4, 5),
    "no columns": (3, 4, 0),
    "nothing to add up": (3, 0, 2),
    "nothing at all": (0, 0, 0),
    "no rows and no columns": (0, 3, 0),
    "tall": (301, 3, 2),
    "wide": (2, 3, 301),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_shapes(world, strategy, shape, dtype):
    m, k, n = shape
    check_product(world, strategy, counting_up(m, k, dtype=dtype), counting_up(k, n, dtype=dtype))


def test_every_small_shape(world, strategy):
    for m, k, n in itertools.product(range(18), (1, 4, 5), (1, 3)):
        if world.name.startswith("threads") or m % 4 == 1:
            check_product(world, strategy, counting_up(m, k), counting_up(k, n))


def test_the_example_with_known_numbers(world, strategy):
    for c, _ in world.product(strategy, np.arange(12.0).reshape(4, 3), np.arange(12.0).reshape(3, 4)):
        assert c[0].tolist() == [20, 23, 26, 29]
        assert c[3].tolist() == [128, 158, 188, 218]


OPERANDS = {
    "float16 whose partial sums overflow": (
        np.array([[60000, 60000, -60000, -60000]], np.float16),
        np.ones((4, 1), np.float16),
    ),
    "bool is or of ands": (np.array([[1, 1], [0, 1]], bool),) * 2,
    "big-endian": (np.arange(6, dtype=">f8").reshape(2, 3), np.arange(6, dtype=">f8").reshape(2, 3).T),
    "Fortran order": (np.asfortranarray(counting_up(9, 7)), np.asfortranarray(counting_up(7, 5))),
    "int32 wraps around": (np.array([[100000, 100000]], np.int32), np.array([[100000], [100000]], np.int32)),
    "int64 beyond float64": (np.array([[2**53 + 1, 1]]), np.ones((2, 1), np.int64)),
    "uint8 wraps around": (counting_up(5, 9, dtype="u1"), counting_up(9, 4, dtype="u1")),
    "nan and inf": (np.array([[1, np.nan], [np.inf, 0], [1, 1]]), np.array([[1, 2, 3], [0, -np.inf, 4]])),
    "complex64": (counting_up(5, 4) + 1j * counting_up(5, 4).astype("c8"), counting_up(4, 3, dtype="c8")),
    "long double": (counting_up(5, 4, dtype="g"), counting_up(4, 6, dtype="g")),
    "float32 by int64": (counting_up(5, 4, dtype="f4"), counting_up(4, 6, dtype="i8")),
    "bool by float16": (counting_up(5, 4) > 0, counting_up(4, 6, dtype="f2")),
    "int8 by uint16": (counting_up(5, 4, dtype="i1"), counting_up(4, 6, dtype="u2")),
    "lists": ([[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]]),
    "strided": (counting_up(12, 8)[::2, ::-2], counting_up(8, 9)[::2, ::3]),
    "vector by matrix": (counting_up(4), counting_up(4, 6)),
    "matrix by vector": (counting_up(5, 4), counting_up(4)),
    "vector by vector": (counting_up(4), counting_up(4)),
}


@pytest.mark.parametrize("case", OPERANDS)
def test_dtypes_and_layouts(world, strategy, case):
    a, b = OPERANDS[case]
    expected = np.matmul(a, b)
    for c, run in world.product(strategy, a, b, check="exact"):
        assert_same(c, expected)
        assert run.check.passed


def test_a_matrix_by_itself_and_by_its_transpose(world, strategy):
    a = np.random.default_rng(7).standard_normal((13, 13))
    before = a.tobytes()
    for b in (a, a.T):
        for c, run in world.product(strategy, a, b, check="exact"):
            assert run.check.passed
            assert not np.shares_memory(a, c)
    assert a.tobytes() == before


@pytest.mark.parametrize("check", ["exact", "probe", "auto"])
def test_float32_with_a_long_k_is_accepted(world, strategy, check):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 16, 4096)).astype(np.float32)
    for c, run in world.product(strategy, a, b.T.copy(), check=check):
        assert run.check.passed, run.check
        assert run.check.kind == {"auto": "exact"}.get(check, check)
        assert 0 < run.check.error_bound < 1
        assert c.dtype == np.float32


def on_every_mesh(world, strategy):
    kernel = KERNELS[strategy]
    return [kernel.on(mesh) for mesh in kernel.meshes(world.num_devices)]


def travels(on):
    """How often a, b and c are sent inside the product: what is split over an axis along which it is needed
    whole.

    A sum of c is made of what all ranks along k have.
    """
    pm, pk, pn = on.mesh.shape
    a, b = on.kernel.a.rows + on.kernel.a.columns, on.kernel.b.rows + on.kernel.b.columns
    return (pn - 1) * ("n" in a), (pm - 1) * ("m" in b), pk - 1


def items_sent(on, m, k, n):
    """By all ranks together."""
    of_a, of_b, of_c = travels(on)
    return of_a * m * k + of_b * k * n + of_c * m * n


@pytest.mark.parametrize(
    ("kernel", "mesh", "expected"),
    [
        ("dp", (4, 1, 1), (0, 0, 0)),
        ("fsdp", (4, 1, 1), (0, 3, 0)),
        ("tp_column", (1, 1, 4), (0, 0, 0)),
        ("tp_row", (1, 4, 1), (0, 0, 3)),
        ("fsdp_tp", (2, 1, 2), (0, 1, 0)),
        ("summa", (2, 1, 3), (2, 1, 0)),
        ("summa", (1, 2, 3), (2, 0, 1)),
        ("grid3d", (2, 3, 4), (3, 1, 2)),
    ],
)
def test_what_travels(strategy, kernel, mesh, expected):
    if strategy == kernel:
        assert travels(KERNELS[kernel].on(Mesh(*mesh))) == expected


def check_traffic(on, run, problem):
    """Every rank sends what the formulas say, and all together what the table says."""
    ranks = range(on.mesh.size)
    assert run.kernel_sent_bytes == [on.sent_bytes(problem, rank) for rank in ranks]
    assert run.kernel_sent_messages == [on.sent_messages(problem, rank) for rank in ranks]


def test_traffic_inside_the_product(world, strategy):
    """On every mesh of these ranks, with sizes that do not divide."""
    m, k, n = 10, 7, 9
    a, b = counting_up(m, k, dtype="f4"), counting_up(k, n, dtype="f4")
    for on in on_every_mesh(world, strategy):
        for c, run in world.product(on, a, b):
            assert_same(c, a @ b)
            check_traffic(on, run, pose(a, b))
            assert sum(run.kernel_sent_bytes) == 4 * items_sent(on, m, k, n)


def test_float16_travels_as_what_it_is_added_up_in(world, strategy):
    a, b = counting_up(9, 8, dtype="f2"), counting_up(8, 7, dtype="f2")
    for on in on_every_mesh(world, strategy):
        of_c = travels(on)[2] * 9 * 7
        for c, run in world.product(on, a, b):
            assert_same(c, a @ b)
            check_traffic(on, run, pose(a, b))
            assert sum(run.kernel_sent_bytes) == 2 * items_sent(on, 9, 8, 7) + 2 * of_c


def test_the_traffic_check_finds_a_message_too_many(strategy):
    world, on = worlds.threads(4), next(iter(KERNELS[strategy].meshes(4)))
    on = KERNELS[strategy].on(on)
    a, b = counting_up(9, 8), counting_up(8, 7)
    ((_, run),) = world.product(on, a, b)
    run.kernel_sent_messages[1] += 1
    with pytest.raises(AssertionError):
        check_traffic(on, run, pose(a, b))


def test_small_shapes_on_every_mesh(world, strategy):
    for on in on_every_mesh(world, strategy):
        for m, k, n in ((1, 1, 1), (0, 4, 5), (3, 0, 2), (3, 4, 0), (2, 11, 3), (5, 2, 13), (13, 3, 2)):
            for dtype in ("f8", "f2") if m == 2 else ("f8",):
                a, b = counting_up(m, k, dtype=dtype), counting_up(k, n, dtype=dtype)
                for c, run in world.product(on, a, b):
                    assert_same(c, a @ b)
                    check_traffic(on, run, pose(a, b))


def test_the_sums_of_a_kernel_are_added_up_in_one_order(world, strategy):
    """The same bits every run."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 40, 40)).astype("f4")
    for on in on_every_mesh(world, strategy):
        bits = [c.tobytes() for _ in range(3) for c, _ in world.product(on, a, b)]
        assert len(set(bits)) == min(len(bits), 1)


# ---- blocks and windows of every size ----

FORCED = {
    "a row a block, one on its way": {"BLOCK_BYTES": 1, "LEAST_ROWS": 1, "GOOD_COLUMNS": 1, "WINDOW": 1},
    "a number a block": {"BLOCK_BYTES": 1, "LEAST_ROWS": 1, "LEAST_COLUMNS": 1, "GOOD_COLUMNS": 1},
    "odd blocks, two on their way": {"BLOCK_BYTES": 200, "LEAST_ROWS": 3, "GOOD_COLUMNS": 5, "WINDOW": 2},
    "tiles of columns": {"BLOCK_BYTES": 24, "LEAST_ROWS": 2, "WINDOW": 5},
    "everything side by side": {"LEAST_ROWS": 5, "LEAST_COLUMNS": 1000, "BLOCK_BYTES": 300},
    "two owners side by side": {"LEAST_ROWS": 4, "LEAST_COLUMNS": 9, "GOOD_COLUMNS": 9, "BLOCK_BYTES": 150},
    "sums of one row": {"SUM_BYTES": 1, "LEAST_SUM_ROWS": 1, "SUM_WINDOW": 1, "GOOD_ROWS": 1},
    "many small tiles": {
        "SUM_BYTES": 60,
        "LEAST_SUM_ROWS": 2,
        "GOOD_ROWS": 3,
        "BLOCK_BYTES": 40,
        "LEAST_ROWS": 2,
        "WINDOW": 2,
    },
}


@pytest.fixture(autouse=True)
def no_counts_from_other_tests():
    """What formulas remember holds for one size of blocks."""
    forget()
    yield
    forget()


def forget():
    tile_costs._counts_of_kind.cache_clear()


def force(monkeypatch, settings):
    forget()
    for name, value in settings.items():
        assert hasattr(blocks, name)
        monkeypatch.setattr(blocks, name, value)


@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize("shape", [(7, 23, 19), (20, 12, 3), (3, 31, 40), (5, 0, 4), (9, 11, 0)])
def test_blocks_and_windows_of_any_size(world, strategy, monkeypatch, forced, shape):
    force(monkeypatch, FORCED[forced])
    m, k, n = shape
    check_product(world, strategy, counting_up(m, k), counting_up(k, n))
    a, b = counting_up(m, k, dtype="f4"), counting_up(k, n, dtype="f4")
    for on in on_every_mesh(world, strategy):
        for c, run in world.product(on, a, b):
            assert_same(c, a @ b)
            check_traffic(on, run, pose(a, b))
            assert sum(run.kernel_sent_bytes) == 4 * items_sent(on, m, k, n)


@pytest.mark.parametrize("case", OPERANDS)
def test_dtypes_and_layouts_in_small_blocks(world, strategy, monkeypatch, case):
    force(monkeypatch, FORCED["two owners side by side"])
    a, b = OPERANDS[case]
    for c, _ in world.product(strategy, a, b):
        assert_same(c, np.matmul(a, b))


def test_float16_is_never_added_up_in_parts(world, strategy, monkeypatch):
    """numpy adds it up in float32: 600 times 200 and then back is 0, but 120000 is no float16."""
    force(monkeypatch, FORCED["a row a block, one on its way"])
    a = np.repeat(np.array([[200, -200]], np.float16), 600, axis=1)
    for c, _ in world.product(strategy, np.repeat(a, 5, axis=0), np.ones((1200, 7), np.float16)):
        assert (c == 0).all()


def test_several_blocks_of_the_real_size(world, strategy):
    """As it comes: more than one block of k, more than one message a neighbour."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(-9, 9, (40, 1100)), rng.integers(-9, 9, (1100, 1200))
    for dtype in ("f8", "c16", "i8"):
        for c, run in world.product(strategy, a.astype(dtype), b.astype(dtype)):
            assert_same(c, a.astype(dtype) @ b.astype(dtype))
            if strategy == "fsdp" and world.num_devices > 1:
                assert min(run.kernel_sent_messages) > world.num_devices - 1


def test_the_operands_of_the_root_are_sent_as_they_lie(world, strategy):
    """Fortran order, parts, other byte order, and rows enough for several panels."""
    rng = np.random.default_rng(4)
    a = rng.integers(-9, 9, (3000, 700)).astype(">f8")
    for lie in (np.asfortranarray, lambda x: x[::-1, ::-1], lambda x: x):
        if world.num_devices <= 4:
            b = lie(rng.integers(-9, 9, (700, 50)).astype("f8"))
            check_product(world, strategy, lie(a), b)
