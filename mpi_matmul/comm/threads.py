"""Simulated devices: threads of one process, one inbox a device."""

from __future__ import annotations

import operator
import queue
import threading
import traceback
from collections.abc import Iterable
from typing import Any

from mpi_matmul.comm.protocol import as_sendable, rank_in_world, snapshot
from mpi_matmul.layout import Array


class DeviceFailed(RuntimeError):
    """Raised in the devices that still run when another device has failed."""


class Deadlock(RuntimeError):
    """Raised in devices that wait for messages which nobody is left to send."""


class Communicator:
    """Messages between ``num_devices`` simulated devices; any thread may speak for any device.

    ``inboxes`` holds one queue a device, of ``(src, data)``. Raises ValueError when ``num_devices`` is
    not at least 1, or when a rank is outside the world; TypeError when data cannot be a buffer.

    >>> comm = Communicator(2)
    >>> comm.send(0, 1, [1, 2, 3])
    >>> comm.recv(1)
    (0, array([1, 2, 3]))
    """

    def __init__(self, num_devices: int) -> None:
        try:
            self.num_devices = operator.index(num_devices)
        except TypeError:
            raise TypeError(f"num_devices is {num_devices!r}, expected a whole number") from None
        if self.num_devices < 1:
            raise ValueError(f"num_devices is {num_devices}, expected at least 1")
        self.inboxes: list[queue.Queue[tuple[int, Array]]] = [queue.Queue() for _ in range(self.num_devices)]
        self._lock = threading.Lock()
        self._arrival = [threading.Condition(self._lock) for _ in range(self.num_devices)]
        self._running: set[int] = set()  # known only when a launcher starts the devices
        self._waiting: set[int] = set()
        self._failure: Exception | None = None

    def send(self, src: int, dst: int, data: Any) -> None:
        """Put a private copy of ``data`` into the inbox of ``dst``; never waits."""
        src = rank_in_world("src", src, self.num_devices)
        dst = rank_in_world("dst", dst, self.num_devices)
        message = snapshot(as_sendable(data))
        with self._lock:
            self._stop_if_failed()
            self.inboxes[dst].put((src, message))
            self._arrival[dst].notify()

    def recv(self, dst: int) -> tuple[int, Array]:
        """The oldest message for ``dst`` as ``(src, data)``; waits until there is one.

        Raises DeviceFailed (which names the device) when a device fails meanwhile.
        """
        dst = rank_in_world("dst", dst, self.num_devices)
        with self._lock:
            self._waiting.add(dst)
            self._stop_if_deadlocked()
            while self._failure is None and self.inboxes[dst].empty():
                # The limit serves whoever puts a message straight into the inbox.
                self._arrival[dst].wait(timeout=0.1)
            self._waiting.discard(dst)
            self._stop_if_failed()
            return self.inboxes[dst].get_nowait()

    def abort(self, rank: int, error: BaseException) -> None:
        """Device ``rank`` has failed: wake every waiting ``recv`` with an error that names it."""
        with self._lock:
            what = "".join(traceback.format_exception_only(error)).strip()
            self._fail(DeviceFailed(f"device {rank} failed: {what}"))

    def stop(self, error: BaseException) -> None:
        """The launcher gives up: wake every waiting ``recv``."""
        with self._lock:
            self._fail(DeviceFailed(f"stopped by {type(error).__name__}"))

    def started(self, ranks: Iterable[int]) -> None:
        """These devices run from now on: when all of them wait, it is a deadlock."""
        with self._lock:
            self._running.update(ranks)

    def finished(self, rank: int) -> None:
        """Device ``rank`` will send nothing more."""
        with self._lock:
            self._running.discard(rank)
            self._stop_if_deadlocked()

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            for arrival in self._arrival:
                arrival.notify_all()

    def _stop_if_failed(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _stop_if_deadlocked(self) -> None:
        if len(self._waiting) < len(self._running) or not self._running:
            return  # as nearly always, and then without a look at every device
        if self._running <= self._waiting and all(self.inboxes[rank].empty() for rank in self._running):
            ranks = ", ".join(map(str, sorted(self._running)))
            self._fail(
                Deadlock(
                    f"every device that still runs ({ranks}) waits for a message, and none is on its way"
                )
            )
