"""The contract: what a kernel may ask of a communicator, and the two checks that every one makes.

* ``send(src, dst, data)`` hands ``data`` over and returns without waiting for the receiver, who gets the
  value that ``data`` had at the call.
* ``recv(dst) -> (src, data)`` waits for the oldest message to ``dst``, whoever sent it.
* Messages from one ``src`` to one ``dst`` arrive in order; nothing is promised between senders.
* A received array is the receiver's own: C-contiguous, writable, in native byte order.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from mpi_matmul.layout import Array

# bool, integers, floats, complex
_KINDS = "biufc"


class PointToPoint(Protocol):
    """The two methods that are enough to run every kernel."""

    num_devices: int

    def send(self, src: int, dst: int, data: Any) -> None: ...

    def recv(self, dst: int) -> tuple[int, Array]: ...


class Transfer(Protocol):
    """A message on its way."""

    def wait(self) -> Array:
        """Return when it is finished: the array that was sent (now free again), or the one that came."""
        ...


class Matching(ABC):
    """A communicator that offers more: it matches senders itself, and transfers go on while others start."""

    num_devices: int

    @abstractmethod
    def send(self, src: int, dst: int, data: Any) -> None: ...

    @abstractmethod
    def recv(self, dst: int) -> tuple[int, Array]: ...

    @abstractmethod
    def start_send(self, src: int, dst: int, data: Array) -> Transfer:
        """Send without a copy: ``data`` must not change before ``wait()``."""

    @abstractmethod
    def start_recv(self, src: int, dst: int, out: Array | None = None) -> Transfer:
        """Receive the next message from ``src`` to ``dst``, into ``out`` if it is given."""


def rank_in_world(name: str, rank: int, num_devices: int) -> int:
    """``rank`` as an int; ValueError with the numbers when it is outside the world."""
    number = operator.index(rank)
    if not 0 <= number < num_devices:
        raise ValueError(f"{name} is {number}, expected a rank from 0 to {num_devices - 1}")
    return number


@contextmanager
def failing_stops_all(comm: PointToPoint, rank: int) -> Iterator[None]:
    """Tell ``comm`` of a failure inside, if it has ``abort(rank, error)``: none waits for a dead device."""
    try:
        yield
    except BaseException as error:
        abort = getattr(comm, "abort", None)
        if abort is not None:
            abort(rank, error)
        raise


def as_sendable(data: Any) -> Array:
    """``data`` as a plain array; TypeError when its elements are not plain numbers in memory."""
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError("data is a masked array, whose mask would be lost; expected numbers or bool")
    array = np.asarray(data)
    if array.dtype.kind not in _KINDS or array.dtype.hasobject:
        raise TypeError(
            f"data has dtype {array.dtype}, expected numbers or bool: it cannot be sent as a buffer"
        )
    return array


def is_plain(array: Array) -> bool:
    """Whether the bytes in memory are already those that the receiver is to have."""
    return array.flags.c_contiguous and array.dtype.isnative


def snapshot(array: Array) -> Array:
    """A private copy: C-contiguous, writable, native byte order, shape kept (0-d stays 0-d)."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)


def misfit(out: Array, came: tuple[int, ...], dtype: np.dtype[Any], src: int) -> RuntimeError | None:
    """What to raise when a message does not fit the array that waits for it."""
    if out.shape == came and out.dtype.newbyteorder("=") == dtype.newbyteorder("="):
        return None
    return RuntimeError(
        f"a message from rank {src} is {came} {dtype}, expected {out.shape} {out.dtype}: "
        "sender and receiver disagree about the layout"
    )
