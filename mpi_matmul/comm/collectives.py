"""Messages in which every rank takes part, made of a mailbox's send and recv.

Every rank calls the same function in the same order. p is the number of ranks.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.layout import Array


def broadcast(mailbox: Mailbox, array: Array | None, root: int) -> Array:
    """``array`` of ``root``, on every rank. A binomial tree: ceil(log2 p) rounds, p - 1 messages.

    Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH,
    Int. J. High Performance Computing Applications 19(1), 2005, pages 49-66.
    """
    ranks = [(root + step) % mailbox.world_size for step in range(mailbox.world_size)]
    array, sends = pass_down(mailbox, array if mailbox.rank == root else None, ranks)
    for send in sends:
        send.wait()
    return array


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


def gather(mailbox: Mailbox, array: Array, root: int) -> list[Array] | None:
    """Every rank's ``array`` on ``root``, in rank order (None elsewhere); any sizes. p - 1 messages."""
    if mailbox.rank != root:
        mailbox.start_send(root, array).wait()
        return None
    arrivals = {src: mailbox.start_recv(src) for src in range(mailbox.world_size) if src != root}
    return [array if src == root else arrivals[src].wait() for src in range(mailbox.world_size)]


def all_sum(mailbox: Mailbox, array: Array) -> Array:
    """The sum of every rank's ``array``, on every rank, added in rank order: the same bits each run.

    Down a chain of ranks, and back by a broadcast: no rank holds more than two of them.
    """
    total = array
    if mailbox.rank:
        total = mailbox.recv(mailbox.rank - 1)
        total += array
    if mailbox.rank < mailbox.world_size - 1:
        mailbox.start_send(mailbox.rank + 1, total).wait()
    return broadcast(mailbox, total, mailbox.world_size - 1)


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


def broadcast_facts(mailbox: Mailbox, facts: Any, root: int) -> Any:
    """A small value that JSON can hold, from ``root`` to every rank."""
    return _from_text(broadcast(mailbox, _to_text(facts), root))


def gather_facts(mailbox: Mailbox, facts: Any, root: int) -> list[Any] | None:
    """Every rank's small value on ``root``, in rank order (None elsewhere)."""
    texts = gather(mailbox, _to_text(facts), root)
    return None if texts is None else [_from_text(text) for text in texts]


def _to_text(facts: Any) -> Array:
    return np.frombuffer(json.dumps(facts).encode(), np.uint8)


def _from_text(text: Array) -> Any:
    return json.loads(text.tobytes())
