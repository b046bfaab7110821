"""The worlds in which one and the same program of a rank must give the same: threads, a bare
communicator of somebody else's, and (with --with-mpi) the ranks of mpirun.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpi_matmul.choose import choose
from mpi_matmul.comm import engine
from mpi_matmul.comm.mailbox import mailbox_of
from mpi_matmul.comm.protocol import Matching, as_sendable, snapshot
from mpi_matmul.costs import Ranks
from mpi_matmul.launch import on_threads
from mpi_matmul.machine import default_machine
from mpi_matmul.multiply import multiply, pass_door
from mpi_matmul.sources import pose_sources

Program = Callable[[Any, int], Any]


class BareCommunicator:
    """Somebody else's: two methods and a number. Messages of one pair keep their order; between senders the
    order is random, and so are the delays."""

    def __init__(self, num_devices: int, seed: int = 0, patience: float = 20.0) -> None:
        self.num_devices = num_devices
        self._random = random.Random(seed)
        self._patience = patience
        self._arrived = threading.Condition()
        self._waiting = [[deque() for _ in range(num_devices)] for _ in range(num_devices)]

    def send(self, src: int, dst: int, data: Any) -> None:
        time.sleep(self._random.random() * 1e-3)
        with self._arrived:
            self._waiting[dst][src].append(np.array(data, order="C"))
            self._arrived.notify_all()

    def recv(self, dst: int) -> tuple[int, Any]:
        time.sleep(self._random.random() * 1e-3)
        with self._arrived:
            if not self._arrived.wait_for(lambda: any(self._waiting[dst]), self._patience):
                raise TimeoutError(f"device {dst} waits for a message that does not come")
            src = self._random.choice([src for src, queue in enumerate(self._waiting[dst]) if queue])
            return src, self._waiting[dst][src].popleft()


class RendezvousCommunicator(Matching):
    """What is sent without a copy leaves only when the receiver has a place for it, as large messages do
    in MPI libraries: ranks that all wait for their sends, before they receive, wait for ever."""

    def __init__(self, num_devices: int, patience: float = 20.0) -> None:
        self.num_devices, self._patience = num_devices, patience
        self._changed = threading.Condition()
        self._sends: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def send(self, src: int, dst: int, data: Any) -> None:
        self.start_send(src, dst, snapshot(as_sendable(data)))

    def recv(self, dst: int) -> tuple[int, Any]:
        raise NotImplementedError

    def start_send(self, src: int, dst: int, data: Any) -> Any:
        return self._start(self._sends, self._receives, src, dst, data)

    def start_recv(self, src: int, dst: int, out: Any = None) -> Any:
        return self._start(self._receives, self._sends, src, dst, out)

    def _start(self, mine: Any, others: Any, src: int, dst: int, array: Any) -> Any:
        with self._changed:
            transfer = _Meeting(self, array)
            mine[src, dst].append(transfer)
            while self._sends[src, dst] and self._receives[src, dst]:
                data = self._sends[src, dst].popleft().met(None)
                self._receives[src, dst].popleft().met(data)
            self._changed.notify_all()
        return transfer

    def wait_for(self, transfer: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: transfer.done, self._patience):
                raise TimeoutError("a transfer never meets its counterpart")


class _Meeting:
    def __init__(self, comm: RendezvousCommunicator, array: Any) -> None:
        self._comm, self._array, self.done = comm, array, False

    def met(self, data: Any) -> Any:
        """The two sides have come together: what is sent is taken now, and not before."""
        self.done = True
        if data is not None and self._array is None:
            self._array = snapshot(data)
        elif data is not None:
            assert (self._array.shape, self._array.dtype) == (data.shape, data.dtype)
            self._array[...] = data
        return self._array

    def wait(self) -> Any:
        self._comm.wait_for(self)
        return self._array


class World:
    """``run(program)`` runs ``program(comm, rank)`` on every rank; the results known here, in rank order."""

    def __init__(self, name: str, num_devices: int, run: Callable[[Program], list[Any]]) -> None:
        self.name, self.num_devices, self.run = name, num_devices, run

    def __repr__(self) -> str:
        return self.name

    def product(self, strategy: str, a: Any, b: Any, check: str = "none") -> list[Any]:
        """``(c, run)`` of the whole story (distribute, multiply, collect, check), where it is known here."""

        def program(comm: Any, rank: int) -> Any:
            mailbox = mailbox_of(comm, rank)
            admitted = pass_door(mailbox, lambda: pose_sources(a, b), 0)
            if isinstance(admitted, Exception):
                raise admitted
            operands, problem = admitted[:2], admitted[2]
            on = strategy_of(strategy, problem, self.num_devices)
            outcome = multiply(mailbox, on, problem, *operands, check=check)
            return None if outcome.c is None else (outcome.c.reshape(problem.result_shape), outcome.run)

        return [outcome for outcome in self.run(program) if outcome is not None]


def strategy_of(strategy: Any, problem: Any, num_devices: int) -> Any:
    """A name on the mesh that would be chosen, or what is a strategy already."""
    if not isinstance(strategy, str):
        return strategy
    return choose(strategy, problem, Ranks(num_devices), default_machine(1)).strategy


def threads(num_devices: int) -> World:
    return World(f"threads-{num_devices}", num_devices, lambda program: on_threads(num_devices, program))


def bare(num_devices: int, seed: int = 0) -> World:
    def run(program: Program) -> list[Any]:
        comm = BareCommunicator(num_devices, seed)
        return on_threads(num_devices, lambda _, rank: program(comm, rank))

    return World(f"bare-{num_devices}", num_devices, run)


def rendezvous(num_devices: int, patience: float = 20.0) -> World:
    def run(program: Program) -> list[Any]:
        comm = RendezvousCommunicator(num_devices, patience)
        return on_threads(num_devices, lambda _, rank: program(comm, rank))

    return World(f"rendezvous-{num_devices}", num_devices, run)


def mpi(comm: Any) -> World:
    """This process is one rank: ``run`` returns the result of this rank alone."""
    from mpi_matmul.comm.mpi import MPICommunicator

    def run(program: Program) -> list[Any]:
        communicator = MPICommunicator(comm)
        result = program(communicator, communicator.rank)
        communicator.close()
        return [result]

    return World("mpi", comm.Get_size(), run)


WORLDS = [
    *(pytest.param((threads, number), id=f"threads-{number}") for number in (1, 2, 3, 4, 8)),
    *(pytest.param((bare, number), id=f"bare-{number}") for number in (3, 5)),
    pytest.param("mpi", id="mpi", marks=pytest.mark.mpi),
    pytest.param("mpi in small pieces", id="mpi-in-small-pieces", marks=pytest.mark.mpi),
]
# For what does not use the bare ``recv``.
WITH_RENDEZVOUS = [*WORLDS, pytest.param((rendezvous, 4), id="rendezvous-4")]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    """Each world in turn."""
    return world_of(request)


def world_of(request: pytest.FixtureRequest) -> World:
    if isinstance(request.param, str):
        if request.param == "mpi in small pieces":
            cut_small(request.getfixturevalue("monkeypatch"))
        return mpi(request.getfixturevalue("mpi_comm"))
    make, number = request.param
    return make(number)


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only happens with large messages happens with small ones: pieces, queues, and the thread."""
    import mpi_matmul.comm.mpi

    monkeypatch.setattr(mpi_matmul.comm.mpi, "PIECE_BYTES", 65537)
    for name, value in {
        "LARGE_BYTES": 1,
        "IN_FLIGHT": 1,
        "OPEN": 1,
        "WATCHED_BYTES": 1,
        "LONG_NAP": 1e-3,
    }.items():
        assert hasattr(engine, name)
        monkeypatch.setattr(engine, name, value)
