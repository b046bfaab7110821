"""An all-gather round the ring of ranks, in blocks that are consumed as they arrive.

Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, Int. J.
High Performance Computing Applications 19(1), 2005, section 4.1 (ring algorithm); here cut into blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.layout import Array, Shape

Place = Callable[[int, int], Array | None]


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
