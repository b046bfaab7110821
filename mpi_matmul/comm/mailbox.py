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

from mpi_matmul.comm.protocol import Matching, PointToPoint, Transfer, misfit, rank_in_world
from mpi_matmul.layout import Array


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

    def __init__(self, comm: Matching, rank: int) -> None:
        self.rank, self.world_size, self._comm = rank, comm.num_devices, comm

    def send(self, dst: int, data: Array) -> None:
        self._comm.send(self.rank, dst, data)

    def start_send(self, dst: int, data: Array) -> Transfer:
        return self._comm.start_send(self.rank, dst, data)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        return self._comm.start_recv(src, self.rank, out)


class Queues:
    """What one rank has to do with each other rank, in order: messages that came early, receives to serve."""

    def __init__(self) -> None:
        self.arrived: defaultdict[int, deque[Array]] = defaultdict(deque)
        self.started: defaultdict[int, deque[_Awaited]] = defaultdict(deque)


class SortingMailbox(Mailbox):
    """Over a bare two-method communicator: early arrivals wait here, sorted by sender."""

    def __init__(self, comm: PointToPoint, rank: int, queues: Queues) -> None:
        self.rank, self.world_size, self._comm, self._queues = rank, comm.num_devices, comm, queues

    def send(self, dst: int, data: Array) -> None:
        self._comm.send(self.rank, dst, data)

    def start_send(self, dst: int, data: Array) -> Transfer:
        self._comm.send(self.rank, dst, data)
        return _Sent(data)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        receive = _Awaited(self, rank_in_world("src", src, self.world_size), out)
        self._queues.started[receive.src].append(receive)
        return receive

    def serve(self, receive: _Awaited) -> None:
        """Serve the receives from one source in the order in which they were started, up to this one."""
        arrived, started = self._queues.arrived, self._queues.started[receive.src]
        while receive.message is None:
            while not arrived[receive.src]:
                sender, data = self._comm.recv(self.rank)
                arrived[sender].append(data)
            started.popleft().message = arrived[receive.src].popleft()


class _Sent:
    def __init__(self, data: Array) -> None:
        self._data = data

    def wait(self) -> Array:
        return self._data


class _Awaited:
    def __init__(self, mailbox: SortingMailbox, src: int, out: Array | None) -> None:
        self._mailbox, self.src, self._out = mailbox, src, out
        self.message: Array | None = None

    def wait(self) -> Array:
        self._mailbox.serve(self)
        assert self.message is not None
        if self._out is None:
            return self.message
        error = misfit(self._out, self.message.shape, self.message.dtype, self.src)
        if error is not None:
            raise error
        self._out[...] = self.message
        return self._out


# id of a communicator -> rank -> its queues. By identity: somebody else's object need not be hashable, and
# equal is not the same.
_queues: dict[int, dict[int, Queues]] = {}
_queues_lock = threading.Lock()
_without_weak_references: list[PointToPoint] = []


def mailbox_of(comm: PointToPoint, rank: int) -> Mailbox:
    """The mailbox of ``rank`` on ``comm``.

    What came early stays with ``comm`` for its whole life: a message of the next product may arrive
    during the present one, and must still be there then.
    """
    rank = rank_in_world("rank", rank, comm.num_devices)
    if isinstance(comm, Matching):
        return MatchingMailbox(comm, rank)
    with _queues_lock:
        if id(comm) not in _queues:
            _forget_with(comm)
            _queues[id(comm)] = {}
        return SortingMailbox(comm, rank, _queues[id(comm)].setdefault(rank, Queues()))


def _forget_with(comm: PointToPoint) -> None:
    """Give up the queues of ``comm`` when it goes; one that cannot tell is kept, and so its id is too."""
    try:
        weakref.finalize(comm, _queues.pop, id(comm))
    except TypeError:
        _without_weak_references.append(comm)
