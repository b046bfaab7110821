"""The all-gather round the ring: order and values, what is on its way, whose memory it is in."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import worlds

from mpi_matmul.comm import ring
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.ring import (
    Places,
    reduce_order,
    ring_all_gather,
    ring_broadcasts,
    ring_reduce_scatter,
)

WINDOWS = (1, 2, 3, 7)
NUMBERS = range(6)


@pytest.fixture(params=worlds.WITH_RENDEZVOUS)
def world(request):
    """Each world in turn."""
    return worlds.world_of(request)


def shape_of(i, owner):
    """Another one for each block; some are empty."""
    return (i + owner) % 3, 1 + owner % 4 + i


def block_of(i, owner):
    """A block that says which it is."""
    return np.full(shape_of(i, owner), 100 * owner + i, np.int32)


def name_of(block):
    """(i, owner) of a block that is not empty."""
    owner, i = divmod(int(block.flat[0]), 100)
    return i, owner


def own_blocks(rank, number):
    return (block_of(i, rank) for i in range(number))


def places(window):
    return Places(window + 1, 2 * 10, np.dtype(np.int32), shape_of)


def expected_order(rank, world_size, number):
    return [(i, (rank - hop) % world_size) for i in range(number) for hop in range(world_size)]


# ---- in every world ----


@pytest.mark.parametrize("window", WINDOWS)
def test_all_blocks_come_in_order(world, window):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for number, with_places in product(NUMBERS, (True, False)):
            place = {"place": places(window)} if with_places else {}
            ring = ring_all_gather(mailbox, own_blocks(rank, number), number, window, **place)
            for i, owner in expected_order(rank, world.num_devices, number):
                block = next(ring)
                assert block.dtype == np.int32
                assert block.shape == shape_of(i, owner)
                np.testing.assert_array_equal(block, block_of(i, owner))
            assert next(ring, None) is None

    world.run(program)


@pytest.mark.parametrize("window", [1, 3])
def test_blocks_as_large_as_real_ones(world, window):
    """Several megabytes on their way, in places that are used again and again."""
    number, size = 4, 200_000
    shape = lambda i, owner: (1, size + owner)  # noqa: E731

    def program(comm, rank):
        mailbox, seen = mailbox_of(comm, rank), 0
        own = (np.full(shape(i, rank), 100 * rank + i, float) for i in range(number))
        place = Places(window + 1, size + world.num_devices, np.dtype(float), shape)
        for block in ring_all_gather(mailbox, own, number, window, place):
            i, owner = expected_order(rank, world.num_devices, number)[seen]
            assert block.shape == shape(i, owner)
            assert (block == 100 * owner + i).all()
            seen += 1
        assert seen == number * world.num_devices

    world.run(program)


@pytest.mark.parametrize("window", WINDOWS)
def test_traffic(world, window):
    """p - 1 messages a block; a rank passes on all blocks but those that its neighbour ahead began with."""
    number, world_size = 4, world.num_devices

    def program(comm, rank):
        mailbox = CountingMailbox(mailbox_of(comm, rank))
        for _ in ring_all_gather(mailbox, own_blocks(rank, number), number, window):
            pass
        ahead = (rank + 1) % world_size
        passed_on = [
            block_of(i, owner) for i in range(number) for owner in range(world_size) if owner != ahead
        ]
        assert mailbox.sent_messages == (world_size - 1) * number
        assert mailbox.sent_bytes == (sum(block.nbytes for block in passed_on) if world_size > 1 else 0)

    world.run(program)


def test_rings_follow_one_another_without_a_pause(world):
    def program(comm, rank):
        mailbox = mailbox_of(comm, rank)
        for turn in range(20):
            ring = ring_all_gather(mailbox, iter([np.array([[turn, rank]])]), 1, 2)
            assert [block.tolist() for block in ring] == [
                [[turn, (rank - hop) % world.num_devices]] for hop in range(world.num_devices)
            ]

    world.run(program)


# ---- one rank, watched ----


class WatchedMailbox(Mailbox):
    """One rank of a world that is not there: blocks come as they would, and everything is noted.

    What comes is in its place as soon as it is expected; what is sent is read as late as possible.
    """

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        behind = (rank - 1) % world_size
        self._coming = (block for block in expected_order(behind, world_size, 99) if block[1] != rank)
        self.expected = self.sending = self.most_expected = self.most_sending = 0
        self.sent, self.addresses, self.unfinished = [], set(), []

    def send(self, dst, data):
        raise AssertionError("blocks are sent without a copy")

    def start_send(self, dst, data):
        assert dst == (self.rank + 1) % self.world_size
        return Sending(self, data)

    def start_recv(self, src, out=None):
        assert src == (self.rank - 1) % self.world_size
        return Expecting(self, out)


class Sending:
    def __init__(self, mailbox, data):
        self.mailbox, self.data, self.value = mailbox, data, data.copy()
        mailbox.sent.append(name_of(data))
        mailbox.unfinished.append(self)
        mailbox.most_sending = max(mailbox.most_sending, len(mailbox.unfinished))

    def wait(self):
        if self in self.mailbox.unfinished:  # only the first time: afterwards the memory is free
            self.mailbox.unfinished.remove(self)
            assert (self.data == self.value).all(), "changed while it was being sent"
        return self.data


class Expecting:
    def __init__(self, mailbox, out):
        self.mailbox, value = mailbox, whole_block(*next(mailbox._coming))
        mailbox.expected += 1
        mailbox.most_expected = max(mailbox.most_expected, mailbox.expected)
        self.data = value if out is None else out
        self.data[...] = value
        mailbox.addresses.add(self.data.ctypes.data)

    def wait(self):
        self.mailbox.expected -= 1
        return self.data


def whole_block(i, owner):
    return np.full((2, 3), 100 * owner + i, np.int32)


def whole_places(window):
    return Places(window + 1, 6, np.dtype(np.int32), lambda i, owner: (2, 3))


def watched_ring(mailbox, number, window):
    own = (whole_block(i, mailbox.rank) for i in range(number))
    return ring_all_gather(mailbox, own, number, window, whole_places(window))


WATCHED = list(product((2, 3, 4, 8), WINDOWS))


@pytest.fixture(
    params=WATCHED, ids=[f"{world_size} ranks, window {window}" for world_size, window in WATCHED]
)
def watched(request):
    """A mailbox for each rank of a small world, and the window."""
    world_size, window = request.param
    return [WatchedMailbox(rank, world_size) for rank in range(world_size)], window


@pytest.mark.parametrize("number", NUMBERS)
def test_a_block_is_valid_until_the_next_is_asked_for(watched, number):
    """Though the next ones arrive at once, and whatever is being sent is read at the very end."""
    mailboxes, window = watched
    for mailbox in mailboxes:
        order = iter(expected_order(mailbox.rank, mailbox.world_size, number))
        for block in watched_ring(mailbox, number, window):
            assert (block == whole_block(*next(order))).all()
        assert next(order, None) is None


@pytest.mark.parametrize("number", NUMBERS)
def test_every_block_is_sent_on_once(watched, number):
    mailboxes, window = watched
    for mailbox in mailboxes:
        for _ in watched_ring(mailbox, number, window):
            pass
        ahead = (mailbox.rank + 1) % mailbox.world_size
        owners = set(range(mailbox.world_size)) - {ahead}
        assert sorted(mailbox.sent) == sorted(product(range(number), owners))


def test_blocks_leave_in_the_order_in_which_the_neighbour_takes_them(watched):
    mailboxes, window = watched
    for mailbox in mailboxes:
        for _ in watched_ring(mailbox, 5, window):
            pass
        ahead, world_size = (mailbox.rank + 1) % mailbox.world_size, mailbox.world_size
        assert mailbox.sent == [block for block in expected_order(ahead, world_size, 5) if block[1] != ahead]


def test_no_more_than_the_window_is_on_its_way(watched):
    mailboxes, window = watched
    for mailbox in mailboxes:
        for _ in watched_ring(mailbox, 10, window):
            assert mailbox.expected <= window
            assert len(mailbox.unfinished) <= window + 1
        assert mailbox.most_expected == window
        assert mailbox.most_sending <= window + 1


def test_the_window_is_full_while_a_block_is_multiplied(watched):
    mailboxes, window = watched
    for mailbox in mailboxes:
        left = 10 * (mailbox.world_size - 1)
        for block in watched_ring(mailbox, 10, window):
            left -= name_of(block)[1] != mailbox.rank
            assert mailbox.expected == min(window, left)


def test_a_block_is_passed_on_before_it_is_multiplied(watched):
    mailboxes, window = watched
    for mailbox in mailboxes:
        ahead = (mailbox.rank + 1) % mailbox.world_size
        for block in watched_ring(mailbox, 3, window):
            assert name_of(block) in mailbox.sent or name_of(block)[1] == ahead


def test_all_sends_are_finished_at_the_end(watched):
    mailboxes, window = watched
    for mailbox in mailboxes:
        for _ in watched_ring(mailbox, 3, window):
            pass
        assert not mailbox.unfinished
        assert not mailbox.expected


def test_few_places_are_used_again_and_again(watched):
    mailboxes, window = watched
    for mailbox in mailboxes:
        for _ in watched_ring(mailbox, 10, window):
            pass
        assert len(mailbox.addresses) == min(window + 1, 10 * (mailbox.world_size - 1))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_own_blocks_are_asked_for_when_it_is_their_turn(world_size):
    asked = []

    def own():
        for i in range(4):
            asked.append(i)
            yield whole_block(i, 1 % world_size)

    mailbox = WatchedMailbox(1 % world_size, world_size)
    for block in ring_all_gather(mailbox, own(), 4, 2):
        i, owner = name_of(block)
        is_last = owner == (mailbox.rank + 1) % world_size and world_size > 1  # then the next leaves already
        assert asked == list(range(min(4, i + 1 + is_last)))


@pytest.mark.parametrize("number", NUMBERS)
def test_of_two_ranks_own_blocks_fill_the_window(number):
    mailbox = WatchedMailbox(0, 2)
    ring = watched_ring(mailbox, number, 3)
    next(ring, None)
    assert mailbox.sent == [(i, 0) for i in range(min(number, 4))]


class SilentMailbox(Mailbox):
    """Nothing may be sent or received."""

    rank, world_size = 0, 1

    def send(self, dst, data):
        raise AssertionError("a message")

    start_send = start_recv = send


def test_alone_nothing_is_sent_and_blocks_are_not_copied():
    own = [np.arange(i) for i in range(5)]
    for number in NUMBERS:
        blocks = list(ring_all_gather(SilentMailbox(), iter(own[:number]), number, 2))
        assert len(blocks) == number
        assert all(block is mine for block, mine in zip(blocks, own, strict=False))


def test_alone_blocks_are_asked_for_one_at_a_time():
    asked = []
    own = (asked.append(i) or np.array([i]) for i in range(3))
    for i, _ in enumerate(ring_all_gather(SilentMailbox(), own, 3, 2)):
        assert asked == list(range(i + 1))


# ---- memory in turn ----


def test_places_are_used_in_turn():
    place = Places(3, 20, np.dtype(np.int16), lambda i, owner: (i, owner))
    taken = [place(i, 4) for i in range(1, 6)]
    assert [block.shape for block in taken] == [(i, 4) for i in range(1, 6)]
    assert all(block.dtype == np.int16 and block.flags.c_contiguous for block in taken)
    for first, second in product(range(5), repeat=2):
        shared = np.shares_memory(taken[first], taken[second])
        assert shared == ((first - second) % 3 == 0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 5), (20, 1)])
def test_a_place_has_the_shape_that_is_asked_for(shape):
    assert Places(2, 20, np.dtype("f8"), lambda i, owner: shape)(0, 0).shape == shape


def test_a_block_that_is_larger_than_its_place_is_an_error():
    with pytest.raises(ValueError, match="reshape"):
        Places(2, 20, np.dtype("f8"), lambda i, owner: (3, 7))(0, 0)


# ---- broadcasts round the ring, in one order for all ----


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("owners", ["in turn", "one after the other", "all of the last", "none"])
def test_broadcasts_come_in_their_order(world, window, owners):
    p = world.num_devices
    owners = {
        "in turn": [i % p for i in range(3 * p + 1)],
        "one after the other": [i // 3 for i in range(3 * p)],
        "all of the last": [p - 1] * 7,
        "none": [],
    }[owners]

    def program(comm, rank):
        mailbox = CountingMailbox(mailbox_of(comm, rank))
        memory = [np.empty((2 + p, 50), np.int32) for _ in range(window + 2)]
        foreign = [i for i, owner in enumerate(owners) if owner != rank]

        def place(i):
            rows, columns = shape_of(i, owners[i])
            return memory[foreign.index(i) % len(memory)].reshape(-1)[: rows * columns].reshape(rows, columns)

        blocks = ring_broadcasts(mailbox, owners, lambda i: block_of(i, rank), window, place)
        for i, owner in enumerate(owners):
            np.testing.assert_array_equal(next(blocks), block_of(i, owner))
        assert next(blocks, None) is None
        not_ours = [owner for owner in owners if owner != (rank + 1) % p]
        assert mailbox.sent_messages == len(not_ours)

    world.run(program)


# ---- sums round the ring ----


def sums(world, window, sizes, order=reduce_order):
    """Each rank adds 10**rank to every item; what each owner has in the end, and what is sent."""
    p = world.num_devices
    parts = [[slice(start, start + size) for start, size in shares] for shares in sizes]

    def program(comm, rank):
        mailbox = CountingMailbox(mailbox_of(comm, rank))
        mine = np.full(sum(size for _, size in sizes[rank]), -1.0)
        first = sizes[rank][0][0] if sizes[rank] else 0
        memory = [np.empty(9) for _ in range(2 * window + 2)]
        taken = iter(range(10**6))

        def place(owner, part):
            if owner == rank:
                return mine[part.start - first : part.stop - first]
            return memory[next(taken) % len(memory)][: part.stop - part.start]

        for _, total, begun in ring_reduce_scatter(mailbox, parts, window, place):
            total[...] = (total if begun else 0) + 10.0**rank
        assert mailbox.sent_messages == sum(len(share) for owner, share in enumerate(sizes) if owner != rank)
        assert (mine == sum(10.0**other for other in range(p))).all()

    world.run(program)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tiles", [0, 1, 2, 5])
def test_every_rank_adds_its_part_to_every_sum(world, window, tiles):
    """Owners have different numbers of parts, and some have none."""
    sizes = [
        [(100 * owner + 9 * i, 1 + (i + owner) % 9) for i in range(tiles - owner % 2)]
        for owner in range(world.num_devices)
    ]
    for share in sizes:  # parts of one owner lie side by side
        start = 0
        for i, (_, size) in enumerate(share):
            share[i] = (start, size)
            start += size
    sums(world, window, sizes)


def test_to_send_everything_first_would_make_all_wait(monkeypatch):
    """Why the owners take turns; and the communicator that finds it is seen to find it."""

    def owner_by_owner(parts, rank):
        owners = [(rank - 1 - hop) % len(parts) for hop in range(len(parts))]
        return [(owner, i) for owner in owners for i in range(len(parts[owner]))]

    sizes = [[(0, 2), (2, 2), (4, 2), (6, 2), (8, 2)]] * 3
    sums(worlds.rendezvous(3, patience=20), 2, sizes)
    monkeypatch.setattr(ring, "reduce_order", owner_by_owner)
    with pytest.raises(TimeoutError):
        sums(worlds.rendezvous(3, patience=0.5), 2, sizes)
