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

from mpi_matmul.comm.engine import Engine, Outgoing, Piece
from mpi_matmul.comm.protocol import (
    Matching,
    as_sendable,
    is_plain,
    misfit,
    rank_in_world,
    snapshot,
)
from mpi_matmul.layout import Array
from mpi_matmul.storage import FileError

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
PIECE_BYTES = 4 * 2**20
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
        self._engine = Engine(in_background=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self._finish = weakref.finalize(self, _finish, self._engine)

    def send(self, src: int, dst: int, data: Any) -> None:
        """Copy ``data`` and let it travel in the background; returns without waiting for ``dst``."""
        array = as_sendable(data)
        if not is_plain(array):
            self.start_send(src, dst, snapshot(array))
            return
        self._check_route(src, dst)
        self._engine.start_send(dst, Outgoing([_header_piece(self._comm, dst, array)]))
        for piece in _pieces(array):  # each leaves while the next is copied
            copy = piece.copy()
            self._engine.start_send(dst, Outgoing([_data_piece(self._comm, dst, copy.nbytes, copy.view)]))

    def recv(self, dst: int) -> tuple[int, Array]:
        """The oldest waiting message as ``(src, data)``; waits until there is one."""
        self._check_own("dst", dst)
        status = MPI.Status()
        self._engine.wait(lambda: self._comm.Iprobe(MPI.ANY_SOURCE, HEADER_TAG, status))
        src = status.Get_source()
        return src, self.start_recv(src, dst).wait()

    def start_send(self, src: int, dst: int, data: Array) -> MPISend:
        """Send without a copy of the whole: bytes that cannot go as they lie are packed a piece at a time.

        ``data`` must not change before wait().
        """
        self._check_route(src, dst)
        send = MPISend(self._engine, self._comm, dst, data)
        self._engine.start_send(dst, send)
        return send

    def start_recv(self, src: int, dst: int, out: Array | None = None) -> MPIReceive:
        """Receive the next message from ``src``, into ``out`` (same shape and dtype) if it is given."""
        self._check_own("dst", dst)
        receive = MPIReceive(self._engine, self._comm, rank_in_world("src", src, self.num_devices), out)
        self._engine.start_receive(receive.src, receive)
        return receive

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
            _finish(self._engine)
            self._comm.Free()

    def share_cores(self) -> None:
        """There are more ranks on this host than cores: who waits makes room for another rank at once."""
        self._engine.spin = 0.0

    def gather_on_host(self, fact: T) -> list[T]:
        """A small fact of every rank on this host."""
        host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        facts = host.allgather(fact)
        host.Free()
        return facts

    def library_collective(self, name: str, *arguments: Any) -> None:
        """One of the MPI library's own collectives, such as ``Bcast``, to compare ours with (see mpi4py)."""
        getattr(self._comm, name)(*arguments)

    def _check_route(self, src: int, dst: int) -> None:
        self._check_own("src", src)
        rank_in_world("dst", dst, self.num_devices)

    def _check_own(self, name: str, rank: int) -> None:
        if rank_in_world(name, rank, self.num_devices) != self.rank:
            raise ValueError(f"{name} is {rank}, expected {self.rank}: on MPI a rank speaks for itself only")


class MPISend(Outgoing):
    """A send that was started: a header, then the pieces."""

    def __init__(self, engine: Engine, comm: MPI.Intracomm, dst: int, data: Array) -> None:
        self._engine, self._data = engine, data
        array = as_sendable(data)
        if not is_plain(array) and array.ndim != 2:
            array = snapshot(array)
        super().__init__([_header_piece(comm, dst, array), *_data_pieces(comm, dst, array)])

    def wait(self) -> Array:
        self._engine.wait(self.finished)
        return self._data


class MPIReceive:
    """A receive that was started; the data is let in when its header says that it fits."""

    def __init__(self, engine: Engine, comm: MPI.Intracomm, src: int, out: Array | None) -> None:
        self._engine, self._comm, self.src, self._out = engine, comm, src, out
        self._header = np.empty(_HEADER_WORDS, np.int64)
        self._header_request: MPI.Request = comm.Irecv(self._header, src, HEADER_TAG)
        self._target: Array | None = None
        self._requests: list[MPI.Request] = []
        self._misfit: RuntimeError | None = None
        self.nbytes = self._header.nbytes if out is None else out.nbytes

    def let_in(self) -> bool:
        """Receive the data, if its header has come (only after all earlier arrays from ``src``)."""
        if self._target is None and self._header_request.Test():
            shape, dtype = _decode(self._header)
            if self._out is not None:
                self._misfit = misfit(self._out, shape, dtype, self.src)
            # What does not fit is received all the same: it must not be taken for the next one's data.
            fits = self._out is not None and self._misfit is None
            self._receive_into(_plain_place(self._out) if fits else np.empty(shape, dtype))
        return self._target is not None

    def finished(self) -> bool:
        if self._target is None:
            return False
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests

    def wait(self) -> Array:
        self._engine.wait(self.finished)
        if self._misfit is not None:
            raise self._misfit
        assert self._target is not None
        if self._out is None or self._out is self._target:
            return self._target
        self._out[...] = self._target
        return self._out

    def _receive_into(self, target: Array) -> None:
        self._target = target
        self._requests = [
            self._comm.Irecv([piece, MPI.BYTE], self.src, DATA_TAG) for piece in _pieces(target)
        ]


def _header_piece(comm: MPI.Intracomm, dst: int, array: Array) -> Piece:
    header = _encode(array)
    return header.nbytes, lambda: comm.Isend(header, dst, HEADER_TAG)


def _data_pieces(comm: MPI.Intracomm, dst: int, array: Array) -> Iterator[Piece]:
    if is_plain(array):
        for piece in _pieces(array):
            yield _data_piece(comm, dst, piece.nbytes, piece.view)
        return
    for start in range(0, array.nbytes, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, array.nbytes)
        yield _data_piece(comm, dst, stop - start, functools.partial(_packed, array, start, stop))


def _data_piece(comm: MPI.Intracomm, dst: int, size: int, data: Callable[[], Array]) -> Piece:
    return size, lambda: comm.Isend([data(), MPI.BYTE], dst, DATA_TAG)


def _pieces(array: Array) -> Iterator[Array]:
    """The bytes of a C-contiguous array, cut where both sides cut them."""
    if array.nbytes:
        octets = array.reshape(-1).view(np.uint8)
        for start in range(0, octets.size, PIECE_BYTES):
            yield octets[start : start + PIECE_BYTES]


def _packed(matrix: Array, start: int, stop: int) -> Array:
    """The bytes from ``start`` to ``stop`` of what ``matrix`` would be in C order and native byte order."""
    row_bytes = matrix.shape[1] * matrix.itemsize
    first, last = start // row_bytes, -(-stop // row_bytes)
    octets = snapshot(matrix[first:last]).reshape(-1).view(np.uint8)
    return octets[start - first * row_bytes : stop - first * row_bytes]


def _plain_place(out: Array | None) -> Array:
    """``out`` if bytes can be received into it as they come, else an array like it."""
    assert out is not None
    return out if is_plain(out) else np.empty(out.shape, out.dtype.newbyteorder("="))


def _encode(array: Array) -> Array:
    name = array.dtype.str.encode().ljust(_DTYPE_BYTES)
    return np.array([array.ndim, *np.frombuffer(name, np.int64), *array.shape], np.int64)


def _decode(header: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    words = _DTYPE_BYTES // 8
    name = header[1 : 1 + words].tobytes().decode().strip()
    shape = header[1 + words : 1 + words + int(header[0])]
    return tuple(int(length) for length in shape), np.dtype(name)


def _finish(engine: Engine) -> None:
    if not MPI.Is_finalized():
        engine.finish()


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

    The traceback (or what ``show`` prints) and status 1; but Ctrl-C, a lack of memory and a file that has
    changed are no mistakes of a program: one line, status 130 or 2.
    """
    if MPI.Is_finalized():
        return
    rank = MPI.COMM_WORLD.Get_rank()
    # When the same mistake stops every rank at once, the first one ends the job before the others print.
    time.sleep(min(rank, 8) * 0.6)
    status = (
        130
        if isinstance(error, KeyboardInterrupt)
        else 2
        if isinstance(error, MemoryError | FileError)
        else 1
    )
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
    elif isinstance(error, FileError):
        print(f"mpi_matmul: rank {rank}: {error}", file=sys.stderr)
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
