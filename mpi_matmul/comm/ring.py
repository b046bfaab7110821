"""What travels round a ring of ranks while they multiply, in blocks that are consumed as they arrive.

* `ring_all_gather`: everybody's blocks come to everybody, the own ones first.
* `ring_broadcasts`: the same, but in one order for all ranks.
* `ring_reduce_scatter`: sums come by, every rank adds its part, and each sum ends on its owner.

Sources: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, Int. J.
High Performance Computing Applications 19(1), 2005, section 4.1 (ring all-gather) and 4.3 (its counterpart
for sums); broadcasts in a pipeline round the rows and columns of a grid: van de Geijn, Watts, SUMMA: Scalable
Universal Matrix Multiplication Algorithm, Concurrency: Practice and Experience 9(4), 1997, pages 255-274.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.layout import Array, Shape

Place = Callable[[int, int], Array | None]
T = TypeVar("T")


def ring_all_gather(
    mailbox: Mailbox, own: Iterable[Array], number: int, window: int, place: Place = lambda i, owner: None
) -> Iterator[Array]:
    """Every rank's blocks: for each i, the i-th block of rank, rank - 1, and so on; p * ``number`` blocks.

    ``own`` gives this rank's ``number`` blocks (the same number on every rank), each asked for when its turn
    comes. The i-th block of ``owner`` is received into ``place(i, owner)``, or into a new array. A block is
    valid until the next one is asked for; all must be asked for, and the end.

    p - 1 messages a block; to one rank at most ``window`` are on their way besides the block that it has, so
    memory of ``window`` + 1 blocks can be used in turn (see `Places`).
    """
    ahead, behind = (mailbox.rank + 1) % mailbox.world_size, (mailbox.rank - 1) % mailbox.world_size
    hops = mailbox.world_size - 1
    coming = ((i, (behind - hop) % mailbox.world_size) for i in range(number) for hop in range(hops))
    arriving: deque[Transfer] = deque()
    leaving: deque[Transfer] = deque()

    def pass_on(block: Array) -> Transfer:
        if len(leaving) > window:
            leaving.popleft().wait()
        leaving.append(mailbox.start_send(ahead, block))
        return leaving[-1]

    def expect(number: int) -> None:
        arriving.extend(mailbox.start_recv(behind, place(*block)) for block in islice(coming, number))

    blocks, sent = iter(own), deque[Array]()

    def send_own(number: int) -> None:
        for block in islice(blocks, number):
            if hops:
                pass_on(block)
            sent.append(block)

    send_own(1 + window if hops == 1 else 1)  # with two ranks nothing else goes the same way
    expect(window)
    passed_on: Transfer | None = None
    while sent:
        yield sent.popleft()
        for hop in range(hops):
            block, before = arriving.popleft().wait(), passed_on
            passed_on = pass_on(block) if hop < hops - 1 else None
            if before is not None:  # only now the block before is done with, and its place is free
                before.wait()
            # Sends first: to start a receive may take as long as it takes to copy the block.
            send_own(hop == hops - 1)
            expect(1)
            yield block
        send_own(not hops)
    for transfer in leaving:
        transfer.wait()


def ring_broadcasts(
    mailbox: Mailbox,
    owners: Sequence[int],
    own: Callable[[int], Array],
    window: int,
    place: Callable[[int], Array | None] = lambda i: None,
) -> Iterator[Array]:
    """Block 0, 1, 2, ...: block i is ``own(i)`` of rank ``owners[i]``, passed on from rank to rank.

    What comes from others is received into ``place(i)``, or into a new array; memory of ``window`` + 2 blocks
    can be used in turn. Then a block is valid until the next one is asked for. All must be asked for, and the
    end. A rank sends every block but those that the next rank owns, one message each; at most ``window`` are
    on their way to it besides the block that it has.
    """
    rank, ahead = mailbox.rank, (mailbox.rank + 1) % mailbox.world_size
    behind = (mailbox.rank - 1) % mailbox.world_size
    coming = deque(i for i, owner in enumerate(owners) if owner != rank)
    going = deque(i for i, owner in enumerate(owners) if owner != ahead)
    arriving: deque[Transfer] = deque()
    leaving: deque[tuple[int, Transfer]] = deque()

    def pass_on(i: int, block: Array | None) -> None:
        """In order: block i, once it is here, and own ones ahead of time."""
        while going and going[0] <= i + window:
            number = going[0]
            data = own(number) if owners[number] == rank else block if number == i else None
            if data is None:
                return
            leaving.append((going.popleft(), mailbox.start_send(ahead, data)))

    def expect(until: int) -> None:
        while coming and coming[0] <= until:
            number = coming.popleft()
            while leaving and leaving[0][0] <= number - window - 2:
                leaving.popleft()[1].wait()  # and its place is free
            arriving.append(mailbox.start_recv(behind, place(number)))

    for i, owner in enumerate(owners):
        pass_on(i, None)  # sends first: to start a receive may take as long as it takes to copy the block
        expect(i + window)
        block = own(i) if owner == rank else arriving.popleft().wait()
        pass_on(i, block)
        yield block
    for _, transfer in leaving:
        transfer.wait()


def reduce_order(parts: Sequence[Sequence[T]], rank: int) -> list[tuple[int, int]]:
    """``(owner, i)``: the order in which `ring_reduce_scatter` has ``parts[owner][i]`` on ``rank``.

    The first part of every owner, then the second ones, and so on: if every rank began with all that it sends
    and nobody receives yet, all would wait.
    """
    owners = [(rank - 1 - hop) % len(parts) for hop in range(len(parts))]
    return [(owner, i) for i in range(max(map(len, parts))) for owner in owners if i < len(parts[owner])]


def ring_reduce_scatter(
    mailbox: Mailbox,
    parts: Sequence[Sequence[T]],
    window: int,
    place: Callable[[int, T], Array],
) -> Iterator[tuple[T, Array, bool]]:
    """Sums to which every rank adds its part: ``(part, total, begun)`` for each part of every owner in turn.

    ``parts[owner]`` are the parts of the sum that ``owner`` is to have, the same on every rank. The caller
    fills ``total``, or where it has ``begun``, adds to it, before it asks for the next; then it goes on to
    the next rank, and the last one that adds is the owner, in its own ``place(owner, part)``. Memory of 2
    ``window`` + 2 parts of others can be used in turn. The order of a sum is always owner + 1, ..., owner.

    Every rank sends each part of the others once. Each sum goes p - 1 times from rank to rank.
    """
    rank, world_size = mailbox.rank, mailbox.world_size
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    begins_here = behind
    order = [(owner, parts[owner][i]) for owner, i in reduce_order(parts, rank)]
    arriving: deque[Array | Transfer] = deque()
    leaving: deque[Transfer] = deque()

    def expect(numbers: Iterable[int]) -> None:
        for number in numbers:
            owner, part = order[number]
            total = place(owner, part)
            arriving.append(total if owner == begins_here else mailbox.start_recv(behind, total))

    expect(range(min(window, len(order))))
    for i, (owner, part) in enumerate(order):
        expect(range(i + window, min(i + window + 1, len(order))))
        coming = arriving.popleft()
        total = coming if isinstance(coming, np.ndarray) else coming.wait()
        yield part, total, owner != begins_here
        if owner != rank:
            leaving.append(mailbox.start_send(ahead, total))
            if len(leaving) > window:
                leaving.popleft().wait()
    for transfer in leaving:
        transfer.wait()


class Places:
    """The memory of ``number`` blocks, of at most ``size`` items each, used in turn."""

    def __init__(
        self, number: int, size: int, dtype: np.dtype[Any], shape: Callable[[int, int], Shape]
    ) -> None:
        """``shape(i, owner)`` is the shape of the i-th block of ``owner``."""
        self._memory = deque(np.empty((number, size), dtype))
        self._shape = shape

    def __call__(self, i: int, owner: int) -> Array:
        shape = self._shape(i, owner)
        self._memory.rotate(-1)
        block: Array = self._memory[-1][: math.prod(shape)].reshape(shape)
        return block
