"""The Communicator on MPI: mpi4py's point-to-point send and receive, arrays as buffers.

A message is a header (dtype and shape, a few words) and then the bytes of the array, in pieces. The
header says how much will come, so any array can be received without having been announced; the pieces
keep every count far below the 2**31 that MPI can express, and let the receiver take the first piece while
the sender still copies the next. Header and pieces have a tag of their own: MPI keeps messages between
two ranks in order, so the i-th header belongs to the i-th array.

This is the one module that imports mpi4py, and importing it starts MPI.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import mpi4py
import numpy as np

from mpi_matmul.comm.protocol import (
    Matching,
    as_sendable,
    check_expected,
    is_plain,
    rank_in_world,
    snapshot,
)
from mpi_matmul.layout import Array

_was_imported = "mpi4py.MPI" in sys.modules  # by the user: then its options no longer count
if not _was_imported:
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # started below, when all is well
from mpi4py import MPI  # noqa: E402


def _start() -> None:
    """Start MPI. RuntimeError when mpirun is of another maker: MPICH would end in an error of its own."""
    launched_by_open_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ and "PMI_RANK" not in os.environ
    if launched_by_open_mpi and "MPICH" in MPI.Get_library_version():
        raise RuntimeError("mpirun is Open MPI's, but the MPI library that mpi4py loads is MPICH")
    MPI.Init_thread()
    if _was_imported:
        atexit.register(_finalize)


def _finalize() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


if not MPI.Is_initialized():
    _start()

T = TypeVar("T")

HEADER_TAG, DATA_TAG = 1, 2
PIECE_BYTES = 16 * 2**20
_MAX_DIMENSIONS = 64
_DTYPE_BYTES = 16
_LAUNCHER = os.getppid()
_HEADER_WORDS = 1 + _DTYPE_BYTES // 8 + _MAX_DIMENSIONS


class MPICommunicator(Matching):
    """``send`` and ``recv`` between the ranks of an MPI communicator (default: the world).

    ``comm`` is duplicated, so no message of the caller's is ever mistaken for one of ours; making and
    closing are collective over ``comm``. Sends finish in the background and at the latest in ``close``
    (or when the program ends). Raises ValueError for an inter-communicator.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        base = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(base, MPI.Comm):
            raise TypeError(f"comm is {base!r}, expected an mpi4py communicator")
        if base == MPI.COMM_NULL:
            raise ValueError("comm is COMM_NULL: only ranks that belong to a communicator can multiply on it")
        if base.Is_inter():
            raise ValueError("comm is an inter-communicator, expected an intra-communicator")
        abort_on_uncaught()
        end_with_launcher()
        self._comm = base.Dup()
        self.rank = self._comm.Get_rank()
        self.num_devices = self._comm.Get_size()
        self._unfinished: list[list[MPI.Request]] = []
        self._expected: list[MPIReceive] = []
        self._finish = weakref.finalize(self, _wait_for_all, self._unfinished)

    def send(self, src: int, dst: int, data: Any) -> None:
        """Copy ``data`` and let it travel in the background; returns without waiting for ``dst``."""
        array = as_sendable(data)
        if not is_plain(array):
            self.start_send(src, dst, array)
            return
        self._check(src, dst)
        requests = [self._comm.Isend(_encode(array), dst, HEADER_TAG)]
        requests += [self._comm.Isend([piece.copy(), MPI.BYTE], dst, DATA_TAG) for piece in _pieces(array)]
        self._remember(requests)

    def recv(self, dst: int) -> tuple[int, Array]:
        """The oldest waiting message as ``(src, data)``; waits until there is one."""
        self._check_own("dst", dst)
        status = MPI.Status()
        self.wait_until(lambda: self._comm.Iprobe(MPI.ANY_SOURCE, HEADER_TAG, status))
        src = status.Get_source()
        return src, self.start_recv(src, dst).wait()

    def start_send(self, src: int, dst: int, data: Array) -> MPISend:
        """Send without a copy, if the bytes can go as they lie; ``data`` must not change before wait()."""
        self._check(src, dst)
        array = as_sendable(data)
        plain = array if is_plain(array) else snapshot(array)
        requests = [self._comm.Isend(_encode(plain), dst, HEADER_TAG)]
        requests += [self._comm.Isend([piece, MPI.BYTE], dst, DATA_TAG) for piece in _pieces(plain)]
        self._remember(requests)
        return MPISend(self, data, requests)

    def start_recv(self, src: int, dst: int, out: Array | None = None) -> MPIReceive:
        """Receive the next message from ``src``, into ``out`` (same shape and dtype) if it is given."""
        self._check_own("dst", dst)
        receive = MPIReceive(self, self._comm, rank_in_world("src", src, self.num_devices), out)
        self._expected.append(receive)
        self._advance()
        return receive

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Poll ``done``, and meanwhile open the way for whatever else was started.

        Without that, ranks that all wait for their sends would never take what is sent to them.
        """

        def advance_and_ask() -> bool:
            self._advance()
            return done()

        _wait_until(advance_and_ask)

    def _advance(self) -> None:
        _retire(self._unfinished)
        still, behind = [], set()
        for receive in self._expected:
            # Arrays from one rank come in order: a later one must not take the place of an earlier one.
            if receive.src in behind or not receive.advance():
                behind.add(receive.src)
                still.append(receive)
        self._expected = still

    def __enter__(self) -> MPICommunicator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def abort(self, rank: int, error: BaseException) -> None:
        """This rank has failed: show why and end the job, so that nobody waits (a world of one goes on)."""
        if MPI.COMM_WORLD.Get_size() > 1:
            abort_job(error)

    def close(self) -> None:
        """Wait until every send is finished, then give the duplicate back."""
        if self._finish.detach() is not None:
            _wait_for_all(self._unfinished)
            self._comm.Free()

    def gather_on_host(self, fact: T) -> list[T]:
        """A small fact of every rank on this host."""
        host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        facts = host.allgather(fact)
        host.Free()
        return facts

    def _check(self, src: int, dst: int) -> None:
        self._check_own("src", src)
        rank_in_world("dst", dst, self.num_devices)

    def _check_own(self, name: str, rank: int) -> None:
        if rank_in_world(name, rank, self.num_devices) != self.rank:
            raise ValueError(f"{name} is {rank}, expected {self.rank}: on MPI a rank speaks for itself only")

    def _remember(self, requests: list[MPI.Request]) -> None:
        # Only the oldest: to test all of them at each send would be quadratic.
        while self._unfinished and _all_done(self._unfinished[0]):
            self._unfinished.pop(0)
        self._unfinished.append(requests)


class MPISend:
    """A send that was started."""

    def __init__(self, owner: MPICommunicator, data: Array, requests: list[MPI.Request]) -> None:
        self._owner, self._data, self._requests = owner, data, requests

    def wait(self) -> Array:
        self._owner.wait_until(lambda: _all_done(self._requests))
        return self._data


class MPIReceive:
    """A receive that was started: at once when it is known where the data goes, else with its header."""

    def __init__(self, owner: MPICommunicator, comm: MPI.Intracomm, src: int, out: Array | None) -> None:
        self._owner, self._comm, self.src, self._out = owner, comm, src, out
        self._header = np.zeros(_HEADER_WORDS, np.int64)
        self._header_request = comm.Irecv(self._header, src, HEADER_TAG)
        self._target: Array | None = None
        self._requests: list[MPI.Request] = []

    def advance(self) -> bool:
        """Let the data in, if its size is known by now (only after all earlier arrays from ``src``)."""
        if self._target is None:
            if self._out is not None:
                self._receive_into(self._out if is_plain(self._out) else snapshot(self._out))
            elif self._header_request.Test():
                self._receive_into(np.empty(*_decode(self._header)))
        return self._target is not None

    def wait(self) -> Array:
        self._owner.wait_until(lambda: self._target is not None and self._header_request.Test())
        assert self._target is not None
        check_expected(self._target, *_decode(self._header), self.src)
        self._owner.wait_until(lambda: _all_done(self._requests))
        if self._out is None or self._out is self._target:
            return self._target
        self._out[...] = self._target
        return self._out

    def _receive_into(self, target: Array) -> None:
        self._target = target
        self._requests = [
            self._comm.Irecv([piece, MPI.BYTE], self.src, DATA_TAG) for piece in _pieces(target)
        ]


def _pieces(array: Array) -> Iterator[Array]:
    """The bytes of a C-contiguous array, cut where both sides cut them."""
    if array.nbytes:
        octets = array.reshape(-1).view(np.uint8)
        for start in range(0, octets.size, PIECE_BYTES):
            yield octets[start : start + PIECE_BYTES]


def _encode(array: Array) -> Array:
    name = array.dtype.str.encode().ljust(_DTYPE_BYTES)
    return np.array([array.ndim, *np.frombuffer(name, np.int64), *array.shape], np.int64)


def _decode(header: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    words = _DTYPE_BYTES // 8
    name = header[1 : 1 + words].tobytes().decode().strip()
    shape = header[1 + words : 1 + words + int(header[0])]
    return tuple(int(length) for length in shape), np.dtype(name)


def _all_done(requests: list[MPI.Request]) -> bool:
    """Whether all are finished; every one is asked."""
    return all([request.Test() for request in requests])


def _wait_until(done: Callable[[], bool]) -> None:
    """Poll: eagerly at first, then sleeping a twentieth of the time waited so far.

    MPI's own waits keep a core busy, which another rank on this host may need for its product.
    """
    start = time.perf_counter()
    while not done():
        waited = time.perf_counter() - start
        if waited < 1e-3:
            os.sched_yield()
        else:
            time.sleep(min(waited / 20, 2e-4))


def _wait_for_all(unfinished: list[list[MPI.Request]]) -> None:
    if not MPI.Is_finalized():
        _wait_until(lambda: _retire(unfinished))


def _retire(unfinished: list[list[MPI.Request]]) -> bool:
    """Forget the sends that are finished; whether all are.

    Every one is asked: with MPICH 5.0, asking for one of many again and again does not move the others.
    """
    unfinished[:] = [requests for requests in unfinished if not _all_done(requests)]
    return not unfinished


def is_finalized() -> bool:
    return MPI.Is_finalized()


def world_size() -> int:
    return MPI.COMM_WORLD.Get_size()


def library_version() -> str:
    """Maker and version of the MPI library, such as ``Open MPI v5.0.11``."""
    first_line = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return " ".join(first_line.split(",")[0].replace("Version:", "").split())


def abort_job(error: BaseException, show: Callable[[], None] | None = None) -> None:
    """Show what happened on this rank and end the whole job; returns only when MPI is not running.

    The traceback (or what ``show`` prints) and status 1; but Ctrl-C and a lack of memory are no mistakes of
    a program: one line, status 130 or 2.
    """
    if MPI.Is_finalized():
        return
    rank = MPI.COMM_WORLD.Get_rank()
    # When the same mistake stops every rank at once, the first one ends the job before the others print.
    time.sleep(min(rank, 8) * 0.6)
    status = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, MemoryError) else 1
    with suppress(Exception):  # a stream may be closed or full; the job ends all the same
        sys.stdout.flush()
    with suppress(Exception):
        _show(error, rank, show)
        sys.stderr.flush()
    time.sleep(0.3)  # the launcher may drop what it has not read when the job ends
    MPI.COMM_WORLD.Abort(status)
    os._exit(status)  # with some MPI libraries Abort returns; nothing of the program may go on


def _show(error: BaseException, rank: int, show: Callable[[], None] | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        print(f"mpi_matmul: rank {rank}: interrupted", file=sys.stderr)
    elif isinstance(error, MemoryError):
        print(f"mpi_matmul: rank {rank}: not enough memory: {error}", file=sys.stderr)
    else:
        print(f"rank {rank} of {MPI.COMM_WORLD.Get_size()} failed, which ends the job:", file=sys.stderr)
        (show or (lambda: traceback.print_exception(error)))()


def abort_on_uncaught() -> None:
    """From now on an exception that ends this process ends the whole job: nobody waits for a dead rank.

    The hook that was there before still shows the exception.
    """
    interactive = hasattr(sys, "ps1")
    if MPI.COMM_WORLD.Get_size() == 1 or interactive or getattr(sys.excepthook, "ends_mpi_job", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        abort_job(error, show=lambda: previous(kind, error, trace))
        previous(kind, error, trace)

    hook.ends_mpi_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook


@functools.cache
def end_with_launcher() -> None:
    """From now on this rank ends when the process that started it has gone: nobody else would end it.

    Open MPI's mpirun leaves ranks behind when it has lost a host, and they may be anywhere: in a product,
    waiting for a message, or for ever inside MPI.
    """
    if MPI.COMM_WORLD.Get_size() > 1:
        rank = MPI.COMM_WORLD.Get_rank()
        threading.Thread(target=_follow_launcher, args=(rank,), name="launcher", daemon=True).start()


def _follow_launcher(rank: int) -> None:
    while os.getppid() == _LAUNCHER:
        time.sleep(1)
    with suppress(Exception):  # nobody may be listening any more
        print(f"mpi_matmul: rank {rank}: the launcher has gone, this rank ends", file=sys.stderr, flush=True)
    os._exit(1)
