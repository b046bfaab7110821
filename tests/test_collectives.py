"""The collectives against a line of numpy each: any ranks, sizes, dtypes, topologies; messages and bytes."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from itertools import pairwise, product

import numpy as np
import pytest
from worlds import threads

from mpi_matmul.comm import collectives
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.group import GroupMailbox
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.launch import on_threads
from mpi_matmul.layout import block_range

BLOCK, LEAST, TREE, DIRECT = 64, 32, 40, 80  # bytes
TOPOLOGIES = ("tree", "ring", "auto", None)
WITH_DIRECT = ("tree", "direct", "ring", "auto", None)
DTYPES = ("f8", "f4", "f2", "i4", "i1", "u1", "?", "c16", "g")


@pytest.fixture(autouse=True)
def in_small_blocks(monkeypatch):
    """Arrays of some hundred bytes go in many blocks, as large ones do."""
    sizes = {"BLOCK_BYTES": BLOCK, "LEAST_BLOCK_BYTES": LEAST, "TREE_BYTES": TREE, "DIRECT_BYTES": DIRECT}
    for name, value in sizes.items():
        assert hasattr(collectives, name)
        monkeypatch.setattr(collectives, name, value)


# ---- what each is: the call, numpy's line, and what a rank sends ----
# `given[i]` is what rank i gives: an array, or for reduce_scatter and scatter a list of one for each rank.


def total(arrays):
    return np.asarray(functools.reduce(np.add, arrays))


class Broadcast:
    name, topologies, in_parts = "broadcast", TOPOLOGIES, False

    def call(self, mailbox, given, root, **options):
        return collectives.broadcast(mailbox, given if mailbox.rank == root else None, root, **options)

    def numpys(self, given, rank, root):
        return given[root]

    def sent(self, given, rank, root, topology):
        p, n = len(given), given[root].nbytes
        place = (rank - root) % p
        children = sum(2**b > place and place + 2**b < p for b in range(9))
        if way(topology, n / p, "tree") == "tree":
            return children, children * n
        return (children + chain_blocks(n), n) if place < p - 1 else (children, 0)


class Reduce:
    name, topologies, in_parts = "reduce", TOPOLOGIES, False

    def call(self, mailbox, given, root, **options):
        return collectives.reduce(mailbox, given, root, **options)

    def numpys(self, given, rank, root):
        return total(given) if rank == root else None

    def sent(self, given, rank, root, topology):
        n = given[rank].nbytes
        if rank == root:
            return 0, 0
        return (1, n) if way(topology, n / len(given), "tree") == "tree" else (chain_blocks(n), n)


class AllReduce:
    name, topologies, in_parts = "all_reduce", WITH_DIRECT, False

    def call(self, mailbox, given, root, **options):
        return collectives.all_reduce(mailbox, given, **options)

    def numpys(self, given, rank, root):
        return total(given)

    def sent(self, given, rank, root, topology):
        p, array = len(given), given[rank]
        if way(topology, array.nbytes / p) == "tree":
            return doublings(rank, p), doublings(rank, p) * array.nbytes
        ranges = [block_range(array.size, p, r) for r in range(p)]
        n = [(stop - start) * array.itemsize for start, stop in ranges]
        if way(topology, array.nbytes / p) == "direct":
            return 2 * (p - 1), sum(n) + (p - 2) * n[rank]
        return round_messages(n, rank) + round_messages(n, rank + 1), 2 * sum(n) - n[rank] - n[(rank + 1) % p]


class AllGather:
    name, topologies, in_parts = "all_gather", WITH_DIRECT, False

    def call(self, mailbox, given, root, **options):
        return collectives.all_gather(mailbox, given, **options)

    def numpys(self, given, rank, root):
        return list(given)

    def sent(self, given, rank, root, topology):
        p, n = len(given), [array.nbytes for array in given]
        if topology == "tree":
            rounds = [min(2**b, p - 2**b) for b in range(9) if 2**b < p]
            return p - 1, sum(n[(rank + i) % p] for distance in rounds for i in range(distance))
        long = [size if way(topology, size, "direct") == "ring" else 0 for size in n]
        straight = 0 if long[rank] else (p - 1) * n[rank]
        return p - 1 + round_messages(long, rank + 1), straight + sum(long) - long[(rank + 1) % p]


class ReduceScatter:
    name, topologies, in_parts = "reduce_scatter", WITH_DIRECT, True

    def call(self, mailbox, given, root, **options):
        return collectives.reduce_scatter(mailbox, given, **options)

    def numpys(self, given, rank, root):
        return total([parts[rank] for parts in given])

    def sent(self, given, rank, root, topology):
        p, n = len(given), [part.nbytes for part in given[rank]]
        if way(topology, sum(n) / p) == "tree":
            return doublings(rank, p), doublings(rank, p) * sum(n)
        if way(topology, sum(n) / p) == "direct":
            return p - 1, sum(n) - n[rank]
        return round_messages(n, rank), sum(n) - n[rank]


class Gather:
    name, topologies, in_parts = "gather", (None,), False

    def call(self, mailbox, given, root, **options):
        return collectives.gather(mailbox, given, root, **options)

    def numpys(self, given, rank, root):
        return list(given) if rank == root else None

    def sent(self, given, rank, root, topology):
        return (0, 0) if rank == root else (1, given[rank].nbytes)


class Scatter:
    name, topologies, in_parts = "scatter", (None,), True

    def call(self, mailbox, given, root, **options):
        return collectives.scatter(mailbox, given if mailbox.rank == root else None, root, **options)

    def numpys(self, given, rank, root):
        return given[root][rank]

    def sent(self, given, rank, root, topology):
        others = [part.nbytes for owner, part in enumerate(given[root]) if owner != root]
        return (len(others), sum(others)) if rank == root else (0, 0)


ALL = [Broadcast(), Reduce(), AllReduce(), AllGather(), ReduceScatter(), Gather(), Scatter()]


def of_these(*names):
    chosen = [one for one in ALL if one.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("one", chosen, ids=names)


every = of_these(*(one.name for one in ALL))
every_sum = of_these("reduce", "all_reduce", "reduce_scatter")


def explicit(one, *more):
    """The topologies to try where it is enough to try each."""
    return (
        [*(name for name in one.topologies if name not in (None, "auto")), *more]
        if one.topologies[1:]
        else [None]
    )


def way(topology, part_bytes, between="direct"):
    if topology in (None, "auto"):
        return "tree" if part_bytes <= TREE else between if part_bytes <= DIRECT else "ring"
    return topology


def blocks(nbytes, block=BLOCK, itemsize=8):
    return -(-nbytes // (block // itemsize * itemsize))


def chain_blocks(nbytes):
    return blocks(nbytes, min(max(nbytes // collectives.CHAIN_BLOCKS, LEAST), BLOCK))


def round_messages(sizes, but):
    return sum(blocks(n) for owner, n in enumerate(sizes) if owner != but % len(sizes))


def doublings(rank, p):
    """Messages of a rank in recursive doubling among the first 2^b, and with those beyond."""
    b = p.bit_length() - 1
    return 1 if rank >= 2**b else b + (rank + 2**b < p)


# ---- what they are given ----


def numbers(rank, size, dtype="f8"):
    """Whole numbers that are few enough to be added without rounding, in any order."""
    return ((np.arange(size) * 7 + rank * 5) % 13 - 4).astype(dtype)


def given_to(one, p, size, dtype="f8", uneven=False):
    """What each of p ranks gives, of ``size`` items in all where it is split."""
    if one.name in ("broadcast", "reduce", "all_reduce"):
        return [numbers(rank, size, dtype) for rank in range(p)]
    parts = [
        [whole[cut] for cut in cuts(size, p, uneven)] for whole in (numbers(r, size, dtype) for r in range(p))
    ]
    return parts if one.in_parts else [parts[rank][rank] for rank in range(p)]


def cuts(size, p, uneven):
    """As block_range splits; or ``uneven``: nothing, then all, to a few, then nothing."""
    if not uneven:
        return [slice(*block_range(size, p, index)) for index in range(p)]
    edges = [0, 0, *(max(size - 2 * i, 0) for i in reversed(range(p - 1)))][: p + 1]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def copied(given):
    return [part.copy() for part in given] if isinstance(given, list) else given.copy()


# ---- the checks ----


def assert_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for pair in zip(got, expected, strict=True):
            assert_same(*pair)
    elif expected is not None:
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)


def check(mailbox, one, given, root=0, topology=None):
    """The result, what was given, and what was sent."""
    counting, mine, before = CountingMailbox(mailbox), given[mailbox.rank], copied(given[mailbox.rank])
    options = {} if one.topologies == (None,) else {"topology": topology}
    got = one.call(counting, mine, root, **options)
    assert_same(got, one.numpys(given, mailbox.rank, root))
    assert_same(mine, before)
    sent = counting.sent_messages, counting.sent_bytes
    assert sent == one.sent(given, mailbox.rank, root, topology)
    return got


def sizes_for(world_size):
    return sorted({0, 1, world_size - 1, world_size, 2 * world_size + 1, 8 * world_size, 13 * world_size + 1})


def roots_of(mailbox):
    return sorted({0, mailbox.world_size // 2, mailbox.world_size - 1})


# ---- in every world ----


@every
def test_numpy_has_the_same(world, one):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for size, topology in product(sizes_for(mailbox.world_size), one.topologies):
            check(mailbox, one, given_to(one, mailbox.world_size, size), 0, topology)

    world.run(program)


@of_these("broadcast", "reduce", "gather", "scatter")
def test_any_root(world, one):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for root, topology in product(roots_of(mailbox), explicit(one)):
            check(mailbox, one, given_to(one, mailbox.world_size, 21), root, topology)

    world.run(program)


@of_these("all_gather", "reduce_scatter", "gather", "scatter")
def test_any_split(world, one):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for topology in explicit(one, "auto"):
            check(mailbox, one, given_to(one, mailbox.world_size, 70, uneven=True), 0, topology)

    world.run(program)


@every
def test_some_of_the_ranks(world, one):
    """Two halves at the same time, all in another order, and one alone."""
    p = world.num_devices
    partitions = [[range(0, p, 2), range(1, p, 2)], [range(p - 1, -1, -1)], [[rank] for rank in range(p)]]

    def program(comm, rank):
        for groups, topology in product(partitions, explicit(one)):
            (ranks,) = [list(ranks) for ranks in groups if rank in ranks]
            mailbox = GroupMailbox(mailbox_of(comm, rank), ranks)
            check(mailbox, one, given_to(one, len(ranks), 21), len(ranks) - 1, topology)

    world.run(program)


@every
def test_any_dtype(world, one):
    """Also sums that wrap around (i1), and of bool, which is "or"."""

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for dtype, topology in product(DTYPES, explicit(one)):
            given = given_to(one, mailbox.world_size, 19, dtype)
            if dtype == "i1":
                given = [[100 + part for part in of] if one.in_parts else 100 + of for of in given]
            options = {"topology": topology} if topology else {}
            got = one.call(mailbox, given[rank], 0, **options)
            assert_same(got, one.numpys(given, rank, 0))

    world.run(program)


LAYOUTS = {
    "2-D": lambda x: x.reshape(4, 6),
    "0-d": lambda x: x[5].reshape(()),
    "Fortran order": lambda x: np.asfortranarray(x.reshape(4, 6)),
    "strides": lambda x: x.reshape(4, 6)[::-2, 1::3],
    "read-only": lambda x: np.broadcast_to(x[:3], (5, 3)),
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "no rows": lambda x: x[:0].reshape(0, 3),
    "no columns": lambda x: x[:0].reshape(3, 0),
    "a list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(world, layout):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        p = mailbox.world_size
        arrays = [LAYOUTS[layout](numbers(rank, 24)) for rank in range(p)]
        native = [np.array(array, dtype="f8") for array in arrays]
        mine = arrays[rank]
        for topology in WITH_DIRECT[:4]:
            options = {"topology": topology}
            assert_same(collectives.all_reduce(mailbox, mine, **options), total(native))
            assert_same(collectives.all_gather(mailbox, mine, **options), native)
            assert_same(collectives.reduce_scatter(mailbox, arrays, **options), total([native[rank]] * p))
        for topology in TOPOLOGIES[:3]:
            options = {"topology": topology}
            given = mine if rank == p - 1 else None
            assert_same(collectives.broadcast(mailbox, given, p - 1, **options), native[p - 1])
            of_all = collectives.reduce(mailbox, mine, 0, **options)
            assert_same(of_all, total(native) if rank == 0 else None)

    world.run(program)


def test_whole_and_announced_arrays_in_one_gathering(world):
    """One of no items and a long first dimension, too: what is announced is nothing else."""
    shapes = [(3,), (0, 10**6), (50,), (0,), (2, 40), (10**6, 0)]

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        given = [np.full(shapes[owner % 6], owner, "f8") for owner in range(mailbox.world_size)]
        for topology in WITH_DIRECT:
            check(mailbox, AllGather(), given, 0, topology)
            for root in roots_of(mailbox) if topology != "direct" else []:
                check(mailbox, Broadcast(), given, root, topology)

    world.run(program)


def test_one_after_the_other_without_a_pause(world):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for turn in range(3):
            for one in ALL:
                check(mailbox, one, given_to(one, mailbox.world_size, 10 + turn), turn % mailbox.world_size)

    world.run(program)


@every
def test_blocks_as_large_as_real_ones(world, one, monkeypatch):
    """For MPI: such as wait for the other side."""
    for name, value in {"BLOCK_BYTES": 1 << 18, "LEAST_BLOCK_BYTES": 1 << 17}.items():
        monkeypatch.setattr(collectives, name, value)

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        given = given_to(one, mailbox.world_size, 150_001)
        for topology in explicit(one):
            options = {"topology": topology} if topology else {}
            assert_same(one.call(mailbox, given[rank], 0, **options), one.numpys(given, rank, 0))

    world.run(program)


def test_facts(world):
    facts = [{"short": 1}, ["long"] * 40, None, ""]

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for root, fact in product(roots_of(mailbox), facts):
            assert collectives.broadcast_facts(mailbox, fact if rank == root else "not mine", root) == fact
            every_fact = collectives.gather_facts(mailbox, [rank, fact], root)
            assert every_fact == ([[r, fact] for r in range(mailbox.world_size)] if rank == root else None)

    world.run(program)


# ---- where the result is ----


@every
def test_the_result_is_where_it_is_to_be(world, one):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        given = given_to(one, mailbox.world_size, 30)
        expected = one.numpys(given, rank, 0)
        for topology in explicit(one, "auto"):
            out = None if expected is None else copied(expected)
            for part in out if isinstance(out, list) else [] if out is None else [out]:
                part.fill(77)
            options = {"topology": topology} if topology else {}
            got = one.call(mailbox, given[rank], 0, out=out, **options)
            assert_same(got, expected)
            if one.name != "broadcast" or rank:
                assert_same(got if out is None else out, expected)
            for mine, theirs in zip(*[x if isinstance(x, list) else [x] for x in (got, out)], strict=True):
                assert mine is theirs or (one.name == "broadcast" and rank == 0)

    world.run(program)


@every_sum
def test_a_sum_is_new_also_of_one_rank(one):
    def program(comm, rank):
        for topology in one.topologies:
            given = [[np.ones(20)]] if one.in_parts else [np.ones(20)]
            got = one.call(mailbox_of(comm, rank), given[0], 0, topology=topology)
            assert not np.shares_memory(got, given[0][0] if one.in_parts else given[0])

    threads(1).run(program)


# ---- the same bits ----


def rough(rank, size, dtype):
    """Numbers whose sum depends on the order."""
    values = np.random.default_rng([7, rank]).standard_normal(size) * 10.0 ** np.arange(-4, size - 4).clip(
        -4, 3
    )
    return values.astype(dtype)


def bits(array):
    """Of a long double without the bytes that only fill up."""
    return tuple(map(repr, array)) if array.dtype.char == "g" else array.tobytes()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "g", "c16"])
@pytest.mark.parametrize("topology", ["tree", "direct", "ring"])
def test_the_same_bits_in_each_run_and_on_each_rank(world, dtype, topology):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        mine = rough(rank, 50, dtype)
        turns = [collectives.all_reduce(mailbox, mine, topology=topology) for _ in range(3)]
        on_others = collectives.all_gather(mailbox, turns[0])
        assert len({bits(array) for array in turns + on_others}) == 1

    world.run(program)


@pytest.mark.parametrize("topology", ["tree", "direct", "ring"])
def test_which_nan_it_is_is_the_same_on_each_rank(topology):
    """The sum of two NaNs is one of them."""

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        mine = np.full(12, 0x7FF8000000000000 + rank, np.uint64).view("f8")
        everywhere = collectives.all_gather(mailbox, collectives.all_reduce(mailbox, mine, topology=topology))
        assert len({bits(array) for array in everywhere}) == 1

    for number in (2, 3, 4, 7):
        threads(number).run(program)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_the_order_of_the_ring_is_the_one_that_is_told(world, dtype):
    """From the rank after the one where the sum is to be, round to that one."""

    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        p = mailbox.world_size
        arrays = [rough(owner, 40, dtype) for owner in range(p)]
        order = lambda last: total([arrays[(last + 1 + hop) % p] for hop in range(p)])  # noqa: E731
        for root in roots_of(mailbox):
            got = collectives.reduce(mailbox, arrays[rank], root, topology="ring")
            assert_same(got, order(root) if rank == root else None)
        expected = [order(last)[slice(*block_range(40, p, last))] for last in range(p)]
        assert_same(collectives.all_reduce(mailbox, arrays[rank], topology="ring"), np.concatenate(expected))
        parts = np.array_split(arrays[rank], p)
        assert_same(collectives.reduce_scatter(mailbox, parts, topology="ring"), expected[rank])

    world.run(program)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_direct_adds_as_numpys_line_does(world, dtype):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        arrays = [rough(owner, 40, dtype) for owner in range(mailbox.world_size)]
        parts = np.array_split(arrays[rank], len(arrays))
        assert_same(collectives.all_reduce(mailbox, arrays[rank], topology="direct"), total(arrays))
        expected = np.array_split(total(arrays), len(arrays))[rank]
        assert_same(collectives.reduce_scatter(mailbox, parts, topology="direct"), expected)

    world.run(program)


# ---- no memory is written while it is sent, and nobody waits in a circle ----


class Meeting:
    """Where messages change hands: none before both sides are there, and then as it is at that moment."""

    def __init__(self):
        self.changed = threading.Condition()
        self.sends, self.receives = defaultdict(deque), defaultdict(deque)

    def match(self, route):
        sends, receives = self.sends[route], self.receives[route]
        while sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            if receive.data is None:
                receive.data = np.empty_like(send.data)
            assert receive.data.shape == send.data.shape
            receive.data[...] = send.data
            send.done = receive.done = True
        self.changed.notify_all()


class Met:
    def __init__(self, meeting, data):
        self.meeting, self.data, self.done = meeting, data, False

    def wait(self):
        with self.meeting.changed:
            assert self.meeting.changed.wait_for(lambda: self.done, timeout=20), "waits in a circle"
        return self.data


class LateMailbox(Mailbox):
    """A send is finished when its receive was started, and not before: MPI's way with large messages."""

    def __init__(self, meeting, rank, world_size):
        self.meeting, self.rank, self.world_size = meeting, rank, world_size

    def send(self, dst, data):
        self.start_send(dst, data.copy())

    def start_send(self, dst, data):
        return self._started(self.meeting.sends, (self.rank, dst), data)

    def start_recv(self, src, out=None):
        return self._started(self.meeting.receives, (src, self.rank), out)

    def _started(self, queues, route, data):
        with self.meeting.changed:
            queues[route].append(Met(self.meeting, data))
            started = queues[route][-1]
            self.meeting.match(route)
        return started


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8])
@every
def test_messages_that_change_hands_late(one, number):
    meeting = Meeting()

    def program(_, rank):
        mailbox = LateMailbox(meeting, rank, number)
        for uneven, topology in product((False, True), explicit(one, "auto")):
            for size in (7, 90 * number):
                check(mailbox, one, given_to(one, number, size, uneven=uneven), number - 1, topology)

    on_threads(number, program)
    assert not any(map(len, [*meeting.sends.values(), *meeting.receives.values()]))


def test_a_late_mailbox_shows_what_is_written_too_early_and_a_circle():
    meeting = Meeting()

    def overwrites(_, rank):
        mailbox = LateMailbox(meeting, rank, 1)
        data = np.ones(3)
        sending = mailbox.start_send(0, data)
        data[:] = 2
        assert mailbox.start_recv(0).wait()[0] == 2
        sending.wait()

    on_threads(1, overwrites)
    never = Met(meeting, None)
    meeting.changed.wait_for = lambda predicate, timeout: predicate()
    with pytest.raises(AssertionError, match="in a circle"):
        never.wait()


# ---- what is refused ----


def alone(call, *arguments, **options):
    return threads(1).run(lambda comm, rank: call(mailbox_of(comm, rank), *arguments, **options))[0]


@pytest.mark.parametrize("name", ["broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter"])
def test_another_topology(name):
    arguments = ([np.ones(3)], 0)[: 2 if name in ("broadcast", "reduce") else 1]
    ways = "tree or ring" if name in ("broadcast", "reduce") else "tree or direct or ring"
    with pytest.raises(ValueError, match=f"(?m)topology is 'star', expected auto, {ways}$"):
        alone(getattr(collectives, name), *arguments, topology="star")


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_a_root_outside_the_world(name):
    with pytest.raises(ValueError, match="root is 1, expected a rank from 0 to 0"):
        alone(getattr(collectives, name), [np.ones(3)], 1)


@pytest.mark.parametrize(
    "out", [np.ones(4), np.ones(3, "f4"), np.ones(6)[::2], np.broadcast_to(np.ones(1), 3)]
)
def test_a_place_that_does_not_fit(out):
    for call, arguments in (
        (collectives.reduce, [np.ones(3), 0]),
        (collectives.all_reduce, [np.ones(3)]),
        (collectives.reduce_scatter, [[np.ones(3)]]),
        (collectives.scatter, [[np.ones(3)], 0]),
    ):
        with pytest.raises(ValueError, match=r"out is \(\d,\) float\d\d, .*; expected \(3,\) float64"):
            alone(call, *arguments, out=out)
    for call, arguments in ((collectives.gather, [np.ones(3), 0]), (collectives.all_gather, [np.ones(3)])):
        with pytest.raises(ValueError, match=r"out is"):
            alone(call, *arguments, out=[out])


def test_a_sum_where_its_terms_are():
    array = np.ones(8)
    for call, arguments in (
        (collectives.reduce, [array, 0]),
        (collectives.all_reduce, [array]),
        (collectives.reduce_scatter, [[array]]),
    ):
        with pytest.raises(ValueError, match="out shares memory with an array that is given"):
            alone(call, *arguments, out=array)


def test_another_number_of_parts():
    for call in (collectives.reduce_scatter, functools.partial(collectives.scatter, root=0)):
        with pytest.raises(ValueError, match="got 2 arrays, expected 1: one a rank"):
            alone(call, [np.ones(3)] * 2)
    with pytest.raises(ValueError, match="got no arrays, expected 1"):
        alone(collectives.scatter, None, 0)
    with pytest.raises(ValueError, match="got 0 arrays, expected 1"):
        alone(collectives.all_gather, np.ones(3), out=[])


def test_parts_of_several_dtypes():
    def program(comm, rank):
        collectives.reduce_scatter(mailbox_of(comm, rank), [np.ones(3), np.ones(3, "f4")])

    with pytest.raises(ValueError, match=r"float64.*float32.*expected one for all"):
        threads(2).run(program)


def test_what_cannot_be_added():
    with pytest.raises(TypeError, match="expected numbers or bool"):
        alone(collectives.all_reduce, np.array(["a"]))


@pytest.mark.parametrize(
    ("name", "topology"), [*product(("reduce", "all_reduce"), ("tree", "ring")), ("all_reduce", "direct")]
)
def test_arrays_that_differ_between_ranks(name, topology):
    def program(comm, rank):
        arguments = [0] if name == "reduce" else []
        getattr(collectives, name)(mailbox_of(comm, rank), np.ones(3 + rank), *arguments, topology=topology)

    with pytest.raises(RuntimeError, match="sender and receiver disagree"):
        threads(2).run(program)


# ---- the checks fail ----


def wrong_ways():
    right = Broadcast()
    result, change, more = Broadcast(), Broadcast(), Broadcast()
    result.call = lambda mailbox, given, root, **options: right.call(mailbox, given + 1, root, **options)

    def twice(mailbox, given, root, **options):
        right.call(mailbox, given, root, **options)
        return right.call(mailbox, given, root, **options)

    def changing(mailbox, given, root, **options):
        got = right.call(mailbox, given, root, **options).copy()
        given[0] += 1
        return got

    change.call, more.call = changing, twice
    return {"another result": result, "what was given has changed": change, "more was sent": more}


@pytest.mark.parametrize("wrong", wrong_ways())
def test_the_check_fails_for(wrong):
    one = wrong_ways()[wrong]

    def program(comm, rank):
        check(mailbox_of(comm, rank), one, given_to(one, 2, 20))

    with pytest.raises(AssertionError):
        threads(2).run(program)


@pytest.mark.parametrize(
    "wrong", [None, np.ones(2), np.ones(3, "f4"), np.ones((3, 1)), np.arange(3.0), [np.ones(3)]]
)
def test_it_is_not_the_same(wrong):
    with pytest.raises(AssertionError):
        assert_same(wrong, np.ones(3))
    with pytest.raises(AssertionError):
        assert_same([np.ones(3), wrong], [np.ones(3)] * 2)


def test_uneven_cuts_are_uneven_and_whole():
    for p, size in product(range(1, 9), (0, 1, 5, 70)):
        parts = cuts(size, p, uneven=True)
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert len(parts) == p
        assert sum(part.stop - part.start for part in parts) == (size if p > 1 else 0)
    assert cuts(70, 4, uneven=True) == [slice(0, 0), slice(0, 66), slice(66, 68), slice(68, 70)]


# ---- places among the arrays that are given ----


def test_the_place_of_the_roots_own_may_be_among_what_it_scatters(world):
    def program(comm, rank):
        mailbox, p = mailbox_of(comm, rank), world.num_devices
        arrays = [np.full(200_000, 10.0 + i) for i in range(p)] if rank == 0 else None
        out = arrays[p - 1] if arrays else None
        assert (collectives.scatter(mailbox, arrays, 0, out=out) == 10 + rank).all()

    world.run(program)


def test_the_roots_own_may_be_in_the_place_of_another_that_is_gathered(world):
    def program(comm, rank):
        mailbox, p = mailbox_of(comm, rank), world.num_devices
        out = [np.empty(1000) for _ in range(p)]
        own = out[-1] if rank == 0 else np.empty(1000)
        own[...] = 10 + rank
        arrays = collectives.gather(mailbox, own, 0, out=out if rank == 0 else None)
        if arrays is not None:
            assert [array[0] for array in arrays] == [10 + i for i in range(p)]

    world.run(program)
