"""One rank's side of a communicator: "the next message from rank r", over any communicator.

A bare ``recv`` returns whatever came first, and as soon as two ranks can both have something for me that
may be the wrong one. A mailbox keeps early arrivals per sender. Where the transport can match senders by
itself (MPI), it does; where it cannot, everything here is made of ``send`` and ``recv``.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from typing import Any

from mpi_matmul.comm.protocol import Matching, PointToPoint, Transfer, check_expected, rank_in_world
from mpi_matmul.layout import Array

Arrivals = defaultdict[int, deque[Array]]


class Mailbox(ABC):
    """Messages of one rank. Transfers from one source finish in the order in which they were started."""

    rank: int
    world_size: int

    @abstractmethod
    def send(self, dst: int, data: Array) -> None:
        """Hand over the present value of ``data``; never waits for ``dst``."""

    @abstractmethod
    def start_send(self, dst: int, data: Array) -> Transfer:
        """Start sending; ``data`` must not change before ``wait()``."""

    @abstractmethod
    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        """Start receiving the next message from ``src``, into ``out`` if it is given."""

    def recv(self, src: int) -> Array:
        """The next message from ``src``."""
        return self.start_recv(src).wait()


class MatchingMailbox(Mailbox):
    """Over a transport that matches senders itself."""

    def __init__(self, comm: Any, rank: int) -> None:
        self.rank, self.world_size, self._comm = rank, comm.num_devices, comm

    def send(self, dst: int, data: Array) -> None:
        self._comm.send(self.rank, dst, data)

    def start_send(self, dst: int, data: Array) -> Transfer:
        transfer: Transfer = self._comm.start_send(self.rank, dst, data)
        return transfer

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        transfer: Transfer = self._comm.start_recv(self.rank, src, out)
        return transfer


class SortingMailbox(Mailbox):
    """Over a bare two-method communicator: early arrivals wait here, sorted by sender."""

    def __init__(self, comm: PointToPoint, rank: int, arrived: Arrivals) -> None:
        self.rank, self.world_size, self._comm, self._arrived = rank, comm.num_devices, comm, arrived

    def send(self, dst: int, data: Array) -> None:
        self._comm.send(self.rank, dst, data)

    def start_send(self, dst: int, data: Array) -> Transfer:
        self._comm.send(self.rank, dst, data)
        return _Sent(data)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        return _Awaited(self, rank_in_world("src", src, self.world_size), out)

    def next_from(self, src: int) -> Array:
        while not self._arrived[src]:
            sender, data = self._comm.recv(self.rank)
            self._arrived[sender].append(data)
        return self._arrived[src].popleft()


class _Sent:
    def __init__(self, data: Array) -> None:
        self._data = data

    def wait(self) -> Array:
        return self._data


class _Awaited:
    def __init__(self, mailbox: SortingMailbox, src: int, out: Array | None) -> None:
        self._mailbox, self._src, self._out = mailbox, src, out

    def wait(self) -> Array:
        data = self._mailbox.next_from(self._src)
        if self._out is None:
            return data
        check_expected(self._out, data.shape, data.dtype, self._src)
        self._out[...] = data
        return self._out


# id of a communicator -> rank -> what has come early. Nothing here keeps a communicator alive.
_arrivals: dict[int, dict[int, Arrivals]] = {}
_arrivals_lock = threading.Lock()


def mailbox_of(comm: PointToPoint, rank: int) -> Mailbox:
    """The mailbox of ``rank`` on ``comm``.

    What came early stays with ``comm`` for its whole life: a message of the next product may arrive
    during the present one, and must still be there then.
    """
    rank = rank_in_world("rank", rank, comm.num_devices)
    if isinstance(comm, Matching):
        return MatchingMailbox(comm, rank)
    with _arrivals_lock:
        if id(comm) not in _arrivals:
            # By identity: somebody else's object need not be hashable, and equal is not the same.
            weakref.finalize(comm, _arrivals.pop, id(comm))
            _arrivals[id(comm)] = {}
        return SortingMailbox(comm, rank, _arrivals[id(comm)].setdefault(rank, defaultdict(deque)))
