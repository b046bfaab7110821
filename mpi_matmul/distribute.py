"""The two doors: whole matrices <-> shards on every rank, along a placement.

A rank that has a source reads its own part. To the others the root sends theirs in panels of rows. If the
kernel streams, a may still be arriving while it runs, and rows of c that are final may leave (`Door`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mpi_matmul.comm.collectives import pass_down
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.layout import Array, Placement, Shape, length
from mpi_matmul.sources import Operand, Source, WholeArray
from mpi_matmul.stream import Stream

PANEL_BYTES = 8 << 20
LEAST_ROWS = 256  # of a that are multiplied at once: with fewer BLAS is slower
READ_AHEAD = 2  # panels that were read for others and have not left


def row_panels(rows: int, row_bytes: int) -> Iterator[slice]:
    """``rows`` rows in panels of PANEL_BYTES, or of one row; none, if there are no rows."""
    step = max(1, PANEL_BYTES // max(1, row_bytes))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class Arrivals:
    """Panels of rows on their way: to this rank's shard, and from this rank to others."""

    def __init__(self) -> None:
        self.coming: deque[tuple[slice, Transfer]] = deque()
        self.leaving: deque[Transfer] = deque()

    def panels(self) -> Iterator[slice]:
        """The rows of each panel that was coming, as soon as it is there."""
        while self.coming:
            rows, transfer = self.coming.popleft()
            transfer.wait()
            yield rows

    def finish(self) -> None:
        """Return when everything is where it belongs."""
        for _ in self.panels():
            pass
        while self.leaving:
            self.leaving.popleft().wait()


def scatter(mailbox: Mailbox, operand: Operand, placement: Placement, root: int, arrivals: Arrivals) -> Array:
    """This rank's shard of ``operand``, in native byte order; parts of it may still be among ``arrivals``.

    On a rank with the whole array it is a read-only view of that.
    """
    if placement.axis is None:
        return _replicate(mailbox, operand, root)
    if mailbox.rank == root:
        assert operand.source is not None
        _send_panels(mailbox, operand, operand.source, placement, arrivals)
    if operand.source is not None:
        return operand.source.part(*placement.slices(operand.shape, mailbox.world_size, mailbox.rank))
    shard = _empty(placement.shard_shape(operand.shape, mailbox.world_size, mailbox.rank), operand.dtype)
    for rows in row_panels(shard.shape[0], shard.strides[0]):
        arrivals.coming.append((rows, mailbox.start_recv(root, shard[rows])))
    return shard


def _send_panels(
    mailbox: Mailbox, operand: Operand, source: Source, placement: Placement, arrivals: Arrivals
) -> None:
    """To each rank without a source the panels of its shard, the first ones of all ranks first."""
    is_view = isinstance(source, WholeArray)
    waiting = deque(
        (rank, panels)
        for rank, has_source in enumerate(operand.readers)
        if not has_source and (panels := _panels_of(operand, placement, mailbox.world_size, rank))
    )
    while waiting:
        rank, panels = waiting.popleft()
        arrivals.leaving.append(mailbox.start_send(rank, source.part(*panels.popleft())))
        if panels:
            waiting.append((rank, panels))
        while not is_view and len(arrivals.leaving) > READ_AHEAD:
            arrivals.leaving.popleft().wait()


def _panels_of(
    operand: Operand, placement: Placement, world_size: int, rank: int
) -> deque[tuple[slice, slice]]:
    """The panels of a rank's shard, as parts of the whole matrix."""
    rows, columns = placement.slices(operand.shape, world_size, rank)
    row_bytes = length(columns) * operand.dtype.itemsize
    return deque(
        (slice(rows.start + panel.start, rows.start + panel.stop), columns)
        for panel in row_panels(length(rows), row_bytes)
    )


def _replicate(mailbox: Mailbox, operand: Operand, root: int) -> Array:
    """The whole matrix on every rank; to those without a source it goes down a tree, in panels."""
    whole = slice(0, operand.shape[0]), slice(0, operand.shape[1])
    without = [rank for rank, has_source in enumerate(operand.readers) if not has_source]
    matrix = _empty(operand.shape, operand.dtype) if operand.source is None else operand.source.part(*whole)
    members = [root, *without]
    if without and mailbox.rank in members:
        sends = [
            send
            for rows in row_panels(operand.shape[0], operand.shape[1] * operand.dtype.itemsize)
            for send in pass_down(mailbox, matrix[rows], members)[1]
        ]
        for send in sends:
            send.wait()
    return matrix


def _empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    return np.empty(shape, dtype.newbyteorder("="))


def empty_result(
    shape: Shape, dtype: np.dtype[Any], placement: Placement, mailbox: Mailbox, root: int, whole: bool
) -> tuple[Array | None, Array]:
    """``(c, c_shard)``, unfilled. With ``whole``, the shard on ``root`` is a view of the whole c."""
    if whole and mailbox.rank == root:
        c = np.empty(shape, dtype)
        return c, c[placement.slices(shape, mailbox.world_size, root)]
    return None, np.empty(placement.shard_shape(shape, mailbox.world_size, mailbox.rank), dtype)


class Returns:
    """c_shards on their way to the whole ``c`` on ``root``, each panel straight into its place."""

    def __init__(
        self, mailbox: Mailbox, c: Array | None, c_shard: Array, placement: Placement, root: int
    ) -> None:
        self._mailbox, self._root = mailbox, root
        self._c, self._c_shard, self._placement = c, c_shard, placement
        self.panels = deque(row_panels(*_rows_of(c_shard)) if mailbox.rank != root else ())
        self._way = Arrivals()

    def start(self) -> None:
        """On the root all panels may come: no other message is expected from anybody meanwhile."""
        parts = self._placement.split(self._c, self._mailbox.world_size) if self._c is not None else ()
        for rank, part in enumerate(parts):
            for rows in row_panels(*_rows_of(part)) if rank != self._root else ():
                self._way.coming.append((rows, self._mailbox.start_recv(rank, part[rows])))
        self._c = None

    def finished(self, stop: int) -> None:
        """The rows of c_shard before ``stop`` are final."""
        while self.panels and self.panels[0].stop <= stop:
            rows = self.panels.popleft()
            self._way.leaving.append(self._mailbox.start_send(self._root, self._c_shard[rows]))

    def finish(self) -> None:
        """All rows are final; return when they are in c."""
        self.start()
        self.finished(self._c_shard.shape[0])
        self._way.finish()


class Door(Stream):
    """Rows of a on their way in, and of c on their way out, if anybody wants it whole."""

    def __init__(self, arrivals: Arrivals, returns: Returns | None) -> None:
        self._arrivals, self._returns = arrivals, returns

    def panels(self, rows: int) -> Iterator[slice]:
        panels: Iterable[slice] = [slice(0, rows)]
        if self._returns is not None:
            self._returns.start()
            panels = list(self._returns.panels) or panels
        if self._arrivals.coming:
            panels = self._arrivals.panels()
        return _at_least(LEAST_ROWS, panels, rows)

    def finished(self, stop: int) -> None:
        if self._returns is not None:
            self._returns.finished(stop)


def _at_least(least: int, panels: Iterable[slice], rows: int) -> Iterator[slice]:
    """The same rows in panels of at least so many, but for the last."""
    start = 0
    for panel in panels:
        if panel.stop - start >= least or panel.stop == rows:
            yield slice(start, panel.stop)
            start = panel.stop


def _rows_of(matrix: Array) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1] * matrix.itemsize
