"""Messages in which every rank takes part, made of a mailbox's send and recv.

Every rank calls the same function in the same order, and what is said of all ranks (root, topology, for sums
shape and dtype) is the same on each; it is not compared, and ranks that differ may wait for ever. p is the
number of ranks of the mailbox, all of a world or (with a `GroupMailbox`) some of them. Arrays may have any
shape, also no items at all, and any dtype that can be sent; what is not C-contiguous in native byte order is
copied once. Arrays that are given are never changed, except ``out``: where the result is to be, of its shape
and dtype, C-contiguous, and for a sum not where a term is. Without it there is a new one. On a rank that has
no result, or has it already (root, of `broadcast`), it is not used.

Topologies:

* "tree" takes the fewest messages, in about log2 p rounds, each of whole arrays.
* "direct" (for what is from all to all) sends every part straight to where it is to be, in one round.
* "ring" sends no more bytes, all of them to the next rank, so no two ranks share a link: in blocks, each of
  which goes on as soon as it is there. Those of a whole array along a chain of ranks have a CHAIN_BLOCKS-th
  of it, but at least LEAST_BLOCK_BYTES and at most BLOCK_BYTES; those of the p parts that go round have
  BLOCK_BYTES.
* "auto" (or None) goes by the size of a p-th part (for `all_gather`, of each array): up to TREE_BYTES the
  tree, up to DIRECT_BYTES direct (or, where there is no such, the tree), beyond that the ring. The more
  ranks, the more rounds a ring has, which the bytes have to be worth.

Where only the sender knows the size (`broadcast`, `all_gather`), what goes by the ring is announced before:
by an array (0, *shape) of its dtype, a message of no bytes. With "auto" any array with a first dimension of 0
is announced, so nothing else looks like an announcement; and short arrays of an `all_gather` go direct, as
the tree has no fewer messages for them.

Sums are those of ``np.add``, one pair of arrays after the other, in the dtype of the arrays: bool is "or",
integers wrap around, float16 is rounded after each addition. Their order depends on p, root, topology and
sizes alone, so the bits are the same in each run; with "direct" it is that of the ranks.

Sources: [T] Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, Int.
J. High Performance Computing Applications 19(1), 2005, pages 49-66. [P] Patarasuk, Yuan, Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations, J. Parallel and Distributed Computing 69(2), 2009, pages
117-124. [C] Patarasuk, Yuan, Faraj, Techniques for Pipelined Broadcast on Ethernet Switched Clusters, the
same journal 68(6), 2008, pages 809-824. [B] Bruck, Ho, Kipnis, Upfal, Weathersby, Efficient Algorithms for
All-to-All Communications in Multiport Message-Passing Systems, IEEE Trans. Parallel and Distributed Systems
8(11), 1997, pages 1143-1156.

In the formulas n is the number of bytes of an array, n_r that of the array (or the part) of rank r, N that
of all of them together, blocks(n) the number of blocks that n bytes are cut into.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer, as_sendable, is_plain, rank_in_world
from mpi_matmul.layout import Array

Topology = Literal["auto", "tree", "direct", "ring"]

# The 0.1 ms that a message takes in Python is worth some 100 kB.
TREE_BYTES, DIRECT_BYTES = 64 << 10, 256 << 10
BLOCK_BYTES = 4 << 20
CHAIN_BLOCKS, LEAST_BLOCK_BYTES = 16, 256 << 10
WINDOW = 2  # blocks that are on their way while one is used


# ---- one array to all, all arrays to one ----


def broadcast(
    mailbox: Mailbox,
    array: Array | None,
    root: int,
    *,
    out: Array | None = None,
    topology: Topology | None = None,
) -> Array:
    """The array of ``root``, on every rank (there it is ``array`` itself): ``arrays[root]``.

    tree: binomial, ceil(log2 p) rounds, p - 1 messages, of which the rank at place i = (rank - root) % p
    sends one to each place i + 2^b < p with 2^b > i, of n bytes ([T], broadcast).
    ring: a chain from root to root - 1, which is the only one that sends no blocks: blocks(n) messages, n
    bytes, after the announcement, which takes the messages of the tree and no bytes ([C]).
    ValueError for a root outside the world, another topology, or an ``out`` of another shape or dtype.
    """
    ranks, own = _from_root(mailbox, root), None if mailbox.rank != root else _plain(array)
    way = _way(topology, 0 if own is None else own.nbytes / len(ranks), "tree", "ring")
    if topology == "tree":
        array, sends = pass_down(mailbox, out if own is None else own, ranks)
        _finish(sends)
        return array
    first, sends = pass_down(mailbox, None if own is None else _opening(own, way), ranks)
    _finish(sends)
    whole = own if own is not None else _place_of(first, out)
    if _is_announcement(first):
        _pass_along(mailbox, whole, ranks)
    return whole


def reduce(
    mailbox: Mailbox, array: Array, root: int, *, out: Array | None = None, topology: Topology | None = None
) -> Array | None:
    """The sum of all arrays on ``root``, None elsewhere: ``functools.reduce(np.add, arrays)``.

    All of one shape and dtype.
    tree: binomial, ceil(log2 p) rounds; every rank but root sends 1 message of n bytes ([T], reduce).
    ring: a chain of sums from root + 1 to root; every rank but root sends blocks(n) messages, n bytes, and
    needs memory for 2 WINDOW blocks ([C], the other way round).
    ValueError as for `broadcast`; RuntimeError where another rank's array does not fit.
    """
    ranks, own = _from_root(mailbox, root), _plain(array)
    total = _fitting(out, own.shape, own.dtype, [own]) if mailbox.rank == root else None
    if _way(topology, own.nbytes / len(ranks), "tree", "ring") == "ring":
        return _add_along(mailbox, own, total, [*ranks[1:], root])
    _add_up(mailbox, own, total, ranks)
    return total


def gather(
    mailbox: Mailbox, array: Array, root: int, *, out: Sequence[Array] | None = None
) -> list[Array] | None:
    """Every rank's array on ``root`` (its own is ``array`` itself), None elsewhere: ``list(arrays)``.

    Any sizes. Every rank but root sends 1 message of n_r bytes, straight to root (a tree would send what is
    long more than once). ``out`` has the place of each. ValueError for a root outside the world.
    """
    if mailbox.rank != rank_in_world("root", root, mailbox.world_size):
        mailbox.start_send(root, array).wait()
        return None
    places = _places(out, mailbox.world_size)
    own = _put(array, places[root])  # before others come, who may have their places in ``array``
    arrivals = {src: mailbox.start_recv(src, place) for src, place in enumerate(places) if src != root}
    return [own if src == root else arrivals[src].wait() for src in range(mailbox.world_size)]


def scatter(
    mailbox: Mailbox, arrays: Sequence[Array] | None, root: int, *, out: Array | None = None
) -> Array:
    """Of the p arrays on ``root``, each rank the one at its place (on root itself): ``arrays[rank]``.

    Any sizes. root sends p - 1 messages, N - n_root bytes, straight to the others. ValueError for a root
    outside the world, or for another number of arrays.
    """
    if mailbox.rank != rank_in_world("root", root, mailbox.world_size):
        return mailbox.start_recv(root, out).wait()
    arrays = _one_each(arrays, mailbox.world_size)
    sends = [mailbox.start_send(dst, array) for dst, array in enumerate(arrays) if dst != root]
    _finish(sends)
    return _put(arrays[root], out)  # now that the others have theirs, among which ``out`` may be


# ---- all to all ----


def all_gather(
    mailbox: Mailbox, array: Array, *, out: Sequence[Array] | None = None, topology: Topology | None = None
) -> list[Array]:
    """Every rank's array, on every rank (its own is ``array`` itself): ``list(arrays)``.

    Any sizes. ``out`` has the place of each: with the parts of one array, that is their concatenation.
    tree: Bruck's, ceil(log2 p) rounds, p - 1 messages a rank; in the round of distance d = 1, 2, 4... < p,
    the arrays of the min(d, p - d) ranks from rank on, to rank - d ([B]; [T], allgather).
    direct: its own array to all others: one round, p - 1 messages, (p - 1) n_rank bytes.
    ring: all but the array of rank + 1, blocks(n_r) messages each, N - n_(rank + 1) bytes; before that, the
    announcements: p - 1 messages of no bytes ([T], allgather).
    ValueError for another topology, or for places of another number, shape or dtype.
    """
    own = _plain(array)
    way = _way(topology, own.nbytes, "tree", "direct", "ring")
    places = _places(out, mailbox.world_size)
    own = _put(own, places[mailbox.rank])
    if topology == "tree":
        return _pass_in_rounds(mailbox, own, places)
    if topology == "direct":
        return _pass_to_all(mailbox, own, places)
    openings = _pass_to_all(mailbox, _opening(own, way), [None] * mailbox.world_size)
    arrays = [
        own if src == mailbox.rank else _place_of(opening, place)
        for src, (opening, place) in enumerate(zip(openings, places, strict=True))
    ]
    announced = [_is_announcement(opening) for opening in openings]
    _pass_round(mailbox, [_blocks(one) if long else [] for one, long in zip(arrays, announced, strict=True)])
    return arrays


def reduce_scatter(
    mailbox: Mailbox, parts: Sequence[Array], *, out: Array | None = None, topology: Topology | None = None
) -> Array:
    """The sum of what all ranks have for this one: ``functools.reduce(np.add, [of[rank] for of in parts])``.

    ``parts`` are p arrays of one dtype, of any sizes (such as ``np.array_split(array, p)``), alike on every
    rank.
    tree: `all_reduce` of all parts together, of which a rank keeps its own.
    direct: all parts but its own, each to its rank: one round, p - 1 messages, N - n_rank bytes; memory for
    the p - 1 parts that come ([T], reduce-scatter, pairwise exchange).
    ring: all parts but its own, blocks(n_r) messages each, N - n_rank bytes; memory for 2 WINDOW blocks.
    The sum for rank r is added from rank r + 1 on, to r ([P], first half).
    ValueError for another number of parts, several dtypes, another topology, or an ``out`` that does not
    fit; RuntimeError where another rank's parts do not fit.
    """
    parts = [_plain(part) for part in _one_each(parts, mailbox.world_size)]
    own = parts[mailbox.rank]
    if any(part.dtype != own.dtype for part in parts):
        raise ValueError(f"parts have the dtypes {[str(part.dtype) for part in parts]}, expected one for all")
    total = _fitting(out, own.shape, own.dtype, parts)
    way = _way(topology, sum(part.nbytes for part in parts) / len(parts), "tree", "direct", "ring")
    if way != "tree":
        (_add_round if way == "ring" else _add_from_all)(mailbox, parts, total)
        return total
    whole = np.concatenate([part.reshape(-1) for part in parts])
    sums = np.empty_like(whole)
    _add_in_rounds(mailbox, whole, sums)
    start = sum(part.size for part in parts[: mailbox.rank])
    total[...] = sums[start : start + own.size].reshape(own.shape)
    return total


def all_reduce(
    mailbox: Mailbox, array: Array, *, out: Array | None = None, topology: Topology | None = None
) -> Array:
    """The sum of all arrays, on every rank the same bits: ``functools.reduce(np.add, arrays)``.

    All of one shape and dtype.
    tree: recursive doubling among the first q = 2^floor(log2 p) ranks, log2 q rounds, a message of n bytes
    in each; the p - q others give their arrays to rank - q before and get the sum after it: 1 message more
    for those that send it, and 1 in all for the others ([T], allreduce).
    direct: `reduce_scatter` and `all_gather` so, of p parts as block_range splits the items: two rounds,
    2 (p - 1) messages, N + (p - 2) n_rank bytes.
    ring: `reduce_scatter` and `all_gather` round the ring, of the same parts: 2 N - n_rank - n_(rank + 1)
    bytes, that is 2 (p - 1) / p of the array ([P]: the fewest possible).
    ValueError for another topology or an ``out`` that does not fit; RuntimeError where another rank's array
    does not.
    """
    own = _plain(array)
    total = _fitting(out, own.shape, own.dtype, [own])
    way = _way(topology, own.nbytes / mailbox.world_size, "tree", "direct", "ring")
    if way == "tree":
        _add_in_rounds(mailbox, own, total)
        return total
    parts, sums = (np.array_split(whole.reshape(-1), mailbox.world_size) for whole in (own, total))
    if way == "direct":
        _add_from_all(mailbox, parts, sums[mailbox.rank])
        _pass_to_all(mailbox, sums[mailbox.rank], sums)
    else:
        _add_round(mailbox, parts, sums[mailbox.rank])
        _pass_round(mailbox, [_blocks(part) for part in sums])
    return total


def barrier(mailbox: Mailbox) -> None:
    """Return when every rank has come here. Dissemination: ceil(log2 p) rounds, one message a rank each.

    Source: Hensgen, Finkel, Manber, Two Algorithms for Barrier Synchronization, Int. J. Parallel
    Programming 17(1), 1988, pages 1-17.
    """
    distance = 1
    while distance < mailbox.world_size:
        mailbox.send((mailbox.rank + distance) % mailbox.world_size, np.empty(0, np.uint8))
        mailbox.recv((mailbox.rank - distance) % mailbox.world_size)
        distance *= 2


# ---- small values ----


def broadcast_facts(mailbox: Mailbox, facts: Any, root: int) -> Any:
    """A small value that JSON can hold, from ``root`` to every rank."""
    return _from_text(broadcast(mailbox, _to_text(facts) if mailbox.rank == root else None, root))


def gather_facts(mailbox: Mailbox, facts: Any, root: int) -> list[Any] | None:
    """Every rank's small value on ``root``, in rank order (None elsewhere)."""
    texts = gather(mailbox, _to_text(facts), root)
    return None if texts is None else [_from_text(text) for text in texts]


def _to_text(facts: Any) -> Array:
    return np.frombuffer(json.dumps(facts).encode(), np.uint8)


def _from_text(text: Array) -> Any:
    return json.loads(text.tobytes())


# ---- trees: whole arrays, few rounds ----


def pass_down(mailbox: Mailbox, array: Array | None, ranks: list[int]) -> tuple[Array, list[Transfer]]:
    """One message down a binomial tree of ``ranks``, whose root is the first: what came, and what goes on.

    On the root ``array`` is the message; elsewhere it is received into it, or into a new array without one.
    """
    place = ranks.index(mailbox.rank)
    if place:
        parent = ranks[place - (1 << (place.bit_length() - 1))]
        array = mailbox.start_recv(parent, array).wait()
    assert array is not None
    steps = (1 << bit for bit in range(place.bit_length(), len(ranks).bit_length()))
    children = [ranks[place + step] for step in steps if place + step < len(ranks)]
    return array, [mailbox.start_send(child, array) for child in children]


def _add_up(mailbox: Mailbox, array: Array, total: Array | None, ranks: list[int]) -> None:
    """The sum of all up a binomial tree of ``ranks``, in ``total`` of the first of them (None elsewhere)."""
    place, some, step = ranks.index(mailbox.rank), array, 1
    while step < len(ranks) and not place & step:
        if place + step < len(ranks):
            free = total if total is not None and some is array else np.empty_like(array)
            other = mailbox.start_recv(ranks[place + step], free).wait()
            some = np.add(some, other, out=other if some is array else some)
        step *= 2
    if place:
        mailbox.start_send(ranks[place - step], some).wait()
    elif total is not None and some is array:  # alone
        total[...] = array


def _add_in_rounds(mailbox: Mailbox, array: Array, total: Array) -> None:
    """The sum of all, in ``total`` of every rank, by recursive doubling."""
    rank, core = mailbox.rank, 1 << (mailbox.world_size.bit_length() - 1)
    if rank >= core:
        mailbox.start_send(rank - core, array).wait()
        mailbox.start_recv(rank - core, total).wait()
        return
    some, sends, distance = array, list[Transfer](), 1
    if rank + core < mailbox.world_size:
        other = mailbox.start_recv(rank + core, np.empty_like(array)).wait()
        some = np.add(some, other, out=other)
    while distance < core:
        peer, is_last = rank ^ distance, 2 * distance == core
        sends.append(mailbox.start_send(peer, some))
        other = mailbox.start_recv(peer, total if is_last else np.empty_like(array)).wait()
        # In one order on both sides: of two NaNs, the sum is the first.
        some = np.add(*((some, other) if rank < peer else (other, some)), out=other)
        distance *= 2
    if some is array:  # alone
        total[...] = array
    if rank + core < mailbox.world_size:
        sends.append(mailbox.start_send(rank + core, total))
    _finish(sends)


def _pass_in_rounds(mailbox: Mailbox, array: Array, places: Sequence[Array | None]) -> list[Array]:
    """Every rank's array, in rank order, by Bruck's rounds."""
    rank, world_size, distance = mailbox.rank, mailbox.world_size, 1
    held, sends = [array], list[Transfer]()  # of rank, rank + 1, ...
    while distance < world_size:
        number, src = min(distance, world_size - distance), (rank + distance) % world_size
        sends += [mailbox.start_send((rank - distance) % world_size, one) for one in held[:number]]
        owners = [(src + i) % world_size for i in range(number)]
        held += [one.wait() for one in [mailbox.start_recv(src, places[owner]) for owner in owners]]
        distance *= 2
    _finish(sends)
    return [held[(owner - rank) % world_size] for owner in range(world_size)]


# ---- straight to where it is to be: one round ----


def _pass_to_all(mailbox: Mailbox, array: Array, places: Sequence[Array | None]) -> list[Array]:
    """Every rank's array, in rank order."""
    others = _others(mailbox)
    sends = [mailbox.start_send(other, array) for other in others]
    coming = {other: mailbox.start_recv(other, places[other]) for other in reversed(others)}
    arrays = [array if src == mailbox.rank else coming[src].wait() for src in range(mailbox.world_size)]
    _finish(sends)
    return arrays


def _add_from_all(mailbox: Mailbox, parts: Sequence[Array], total: Array) -> None:
    """The sum of all ranks' parts for this one, in ``total``, added in rank order."""
    others, own = _others(mailbox), parts[mailbox.rank]
    sends = [mailbox.start_send(other, parts[other]) for other in others]
    coming = {other: mailbox.start_recv(other, np.empty_like(own)) for other in reversed(others)}
    arrays = (own if src == mailbox.rank else coming[src].wait() for src in range(mailbox.world_size))
    first = next(arrays)
    for array in arrays:
        first = np.add(first, array, out=total)
    if first is own:  # alone
        total[...] = own
    _finish(sends)


def _others(mailbox: Mailbox) -> list[int]:
    """From the next rank on: not all begin with the same."""
    return [(mailbox.rank + distance) % mailbox.world_size for distance in range(1, mailbox.world_size)]


# ---- rings and chains: blocks, few bytes ----


def _pass_along(mailbox: Mailbox, array: Array, chain: list[int]) -> None:
    """``array`` of the first of the chain into those of the others."""
    place, blocks = chain.index(mailbox.rank), _chain_blocks(array)
    arriving = _arriving(mailbox, chain[place - 1], blocks) if place else blocks
    last = place == len(chain) - 1
    _finish([mailbox.start_send(chain[place + 1], block) for block in arriving if not last])


def _add_along(mailbox: Mailbox, array: Array, total: Array | None, chain: list[int]) -> Array | None:
    """The sum of the arrays along the chain, in ``total`` of its last rank (None elsewhere)."""
    place, own = chain.index(mailbox.rank), _chain_blocks(array)
    buffers = _Buffers(own, array.dtype)
    if not place:
        blocks: Iterable[Array] = own
        if total is not None:  # alone
            total[...] = array
    else:
        places = (buffers.take(block.size) for block in own) if total is None else _chain_blocks(total)
        blocks = _added(own, _arriving(mailbox, chain[place - 1], places))
    for block in blocks:
        if total is None:
            buffers.leaving.append(mailbox.start_send(chain[place + 1], block))
    _finish(buffers.leaving)
    return total


def _pass_round(mailbox: Mailbox, blocks: Sequence[Sequence[Array]]) -> None:
    """Each rank's blocks round the ring, into the places of all others."""
    if mailbox.world_size == 1:
        return
    ahead, behind = _neighbours(mailbox)
    # Sends first: to start a receive may take as long as it takes to copy the block.
    sends = [mailbox.start_send(ahead, block) for block in blocks[mailbox.rank]]
    owners = [(mailbox.rank - hop) % mailbox.world_size for hop in range(1, mailbox.world_size)]
    arriving = _arriving(mailbox, behind, (block for owner in owners for block in blocks[owner]))
    for owner in owners:
        for _, block in zip(blocks[owner], arriving, strict=False):
            if owner != ahead:
                sends.append(mailbox.start_send(ahead, block))
    _finish(sends)


def _add_round(mailbox: Mailbox, parts: Sequence[Array], total: Array) -> None:
    """The sum of all ranks' parts for this one, in ``total``; each part goes from its rank + 1 round to it.

    WINDOW blocks of each part at a time, so that little memory is on its way.
    """
    rank, blocks, sums = mailbox.rank, [_blocks(part) for part in parts], _blocks(total)
    if mailbox.world_size == 1:
        total[...] = parts[0]
        return
    ahead, behind = _neighbours(mailbox)
    buffers = _Buffers((block for of_part in blocks for block in of_part), total.dtype)
    turns = [slice(first, first + WINDOW) for first in range(0, max(map(len, blocks)), WINDOW)]
    owners = [(rank - hop) % mailbox.world_size for hop in range(2, mailbox.world_size)]
    coming = (
        (owner, block)
        for turn in turns
        for owner in [*owners, rank]
        for block in (sums if owner == rank else blocks[owner])[turn]
    )
    places = (block if owner == rank else buffers.take(block.size) for owner, block in coming)
    arriving = _arriving(mailbox, behind, places)
    own = ([mailbox.start_send(ahead, block) for block in blocks[behind][turn]] for turn in turns)
    sends = next(own, [])
    for turn in turns:
        for owner in owners:
            for block in _added(blocks[owner][turn], arriving):
                buffers.leaving.append(mailbox.start_send(ahead, block))
        sends += next(own, [])  # and nothing goes ahead of what is added below
        for _ in _added(blocks[rank][turn], arriving):
            pass
    _finish(sends)
    _finish(buffers.leaving)


def _added(own: Iterable[Array], arriving: Iterator[Array]) -> Iterator[Array]:
    """What comes, each with the own block added to it; no more is taken than there are own ones."""
    for mine, block in zip(own, arriving, strict=False):
        yield np.add(block, mine, out=block)


def _arriving(mailbox: Mailbox, src: int, places: Iterable[Array]) -> Iterator[Array]:
    """The blocks from ``src``, each in its place; WINDOW more are expected while one is used."""
    expected = deque[Transfer]()
    for place in places:
        expected.append(mailbox.start_recv(src, place))
        if len(expected) > WINDOW:
            yield expected.popleft().wait()
    while expected:
        yield expected.popleft().wait()


class _Buffers:
    """Memory for 2 WINDOW blocks that go on to the next rank, used in turn.

    A block is taken WINDOW blocks before it is there: what its memory held before has been sent then (it is
    in ``leaving``), and in a ring there is no waiting in a circle, as it was a round earlier.
    """

    def __init__(self, blocks: Iterable[Array], dtype: np.dtype[Any]) -> None:
        """For blocks like these."""
        self.leaving = deque[Transfer]()
        self._size = max((block.size for block in blocks), default=0)
        self._dtype, self._memory = dtype, deque[Array]()

    def take(self, size: int) -> Array:
        if len(self._memory) < 2 * WINDOW:
            self._memory.append(np.empty(self._size, self._dtype))
        else:
            self.leaving.popleft().wait()
            self._memory.rotate(-1)
        return self._memory[-1][:size]


def _chain_blocks(array: Array) -> list[Array]:
    """Many enough that all ranks of a chain are soon busy."""
    return _blocks(array, min(max(array.nbytes // CHAIN_BLOCKS, LEAST_BLOCK_BYTES), BLOCK_BYTES))


def _blocks(array: Array, block_bytes: int | None = None) -> list[Array]:
    """The items of a C-contiguous array in flat blocks; of no items, no block."""
    flat, step = array.reshape(-1), max(1, (block_bytes or BLOCK_BYTES) // array.itemsize)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def _finish(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


# ---- who speaks to whom, in which way ----


def _from_root(mailbox: Mailbox, root: int) -> list[int]:
    root = rank_in_world("root", root, mailbox.world_size)
    return [(root + place) % mailbox.world_size for place in range(mailbox.world_size)]


def _neighbours(mailbox: Mailbox) -> tuple[int, int]:
    return (mailbox.rank + 1) % mailbox.world_size, (mailbox.rank - 1) % mailbox.world_size


def _way(topology: str | None, part_bytes: float, *ways: str) -> str:
    """Which of ``ways`` it is, with p-th parts of this size."""
    if topology not in (None, "auto", *ways):
        raise ValueError(f"topology is {topology!r}, expected auto, {' or '.join(ways)}")
    if topology in ways:
        return str(topology)
    if part_bytes > DIRECT_BYTES:
        return "ring"
    return "direct" if part_bytes > TREE_BYTES and "direct" in ways else "tree"


def _opening(array: Array, way: str) -> Array:
    """What goes before: the array itself, or its announcement."""
    return np.empty((0, *array.shape), array.dtype) if way == "ring" or array.shape[:1] == (0,) else array


def _is_announcement(opening: Array) -> bool:
    return opening.shape[:1] == (0,)


# ---- where arrays are ----


def _plain(array: Any) -> Array:
    """``array`` as it can be sent and cut: itself, or else a C-contiguous copy in native byte order."""
    array = as_sendable(array)
    return array if is_plain(array) else np.array(array, array.dtype.newbyteorder("="), order="C")


def _fitting(
    out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], given: Iterable[Array] = ()
) -> Array:
    """``out`` if it can take such an array and is not where ``given`` are, else ValueError; or a new one."""
    if out is None:
        return np.empty(shape, dtype)
    if (out.shape, out.dtype) != (shape, dtype) or not (out.flags.c_contiguous and out.flags.writeable):
        order = "C-contiguous" if out.flags.c_contiguous else "not C-contiguous"
        access = "" if out.flags.writeable else ", read-only"
        raise ValueError(
            f"out is {out.shape} {out.dtype}, {order}{access}; expected {shape} {dtype}, C-contiguous"
        )
    if any(np.may_share_memory(out, one) for one in given):
        raise ValueError("out shares memory with an array that is given, which would change")
    return out


def _put(array: Array, out: Array | None) -> Array:
    """``array`` in ``out``, where it may be already; itself without one."""
    if out is None:
        return array
    out = _fitting(out, array.shape, array.dtype)
    if out is not array:
        out[...] = array
    return out


def _place_of(opening: Array, out: Array | None) -> Array:
    """Where the array is to be that was opened so; there, if there was no more to it."""
    if _is_announcement(opening):
        return _fitting(out, opening.shape[1:], opening.dtype)
    return _put(opening, out)


def _places(out: Sequence[Array] | None, number: int) -> Sequence[Array | None]:
    return [None] * number if out is None else _one_each(out, number)


def _one_each(arrays: Sequence[Array] | None, number: int) -> Sequence[Array]:
    if arrays is None or len(arrays) != number:
        got = "no" if arrays is None else len(arrays)
        raise ValueError(f"got {got} arrays, expected {number}: one a rank")
    return arrays
