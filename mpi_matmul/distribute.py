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
from mpi_matmul.layout import Array, Distribution, Shape, length
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


def scatter(
    mailbox: Mailbox, operand: Operand, distribution: Distribution, root: int, arrivals: Arrivals
) -> Array:
    """This rank's shard of ``operand``, in native byte order; parts of it may still be among ``arrivals``.

    On a rank with the whole array it is a read-only view of that. Ranks without a source that own the same
    part get it down a tree, the first of which is the root.
    """
    if mailbox.rank == root:
        assert operand.source is not None
        _send_panels(mailbox, operand, operand.source, distribution, arrivals)
    if operand.source is not None:
        return operand.source.part(*distribution.slices(operand.shape, mailbox.rank))
    shard = _empty(distribution.shard_shape(operand.shape, mailbox.rank), operand.dtype)
    members = _without_source(operand, distribution)[distribution.first_owner(mailbox.rank)]
    for rows in row_panels(shard.shape[0], shard.strides[0]):
        if len(members) == 1:
            arrivals.coming.append((rows, mailbox.start_recv(root, shard[rows])))
        else:
            arrivals.leaving += pass_down(mailbox, shard[rows], [root, *members])[1]
    return shard


def _without_source(operand: Operand, distribution: Distribution) -> dict[int, list[int]]:
    """The ranks without a source, by the part that they own (its first owner)."""
    members: dict[int, list[int]] = {}
    for rank, has_source in enumerate(operand.readers):
        if not has_source:
            members.setdefault(distribution.first_owner(rank), []).append(rank)
    return members


def _send_panels(
    mailbox: Mailbox, operand: Operand, source: Source, distribution: Distribution, arrivals: Arrivals
) -> None:
    """To the ranks without a source the panels of their shards, the first ones of all shards first."""
    is_view = isinstance(source, WholeArray)
    waiting = deque(
        (ranks, panels)
        for ranks in _without_source(operand, distribution).values()
        if (panels := _panels_of(operand, distribution, ranks[0]))
    )
    while waiting:
        ranks, panels = waiting.popleft()
        arrivals.leaving += pass_down(mailbox, source.part(*panels.popleft()), [mailbox.rank, *ranks])[1]
        if panels:
            waiting.append((ranks, panels))
        while not is_view and len(arrivals.leaving) > READ_AHEAD:
            arrivals.leaving.popleft().wait()


def _panels_of(operand: Operand, distribution: Distribution, rank: int) -> deque[tuple[slice, slice]]:
    """The panels of a rank's shard, as parts of the whole matrix."""
    rows, columns = distribution.slices(operand.shape, rank)
    row_bytes = length(columns) * operand.dtype.itemsize
    return deque(
        (slice(rows.start + panel.start, rows.start + panel.stop), columns)
        for panel in row_panels(length(rows), row_bytes)
    )


def _empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    return np.empty(shape, dtype.newbyteorder("="))


def empty_result(
    shape: Shape, dtype: np.dtype[Any], distribution: Distribution, mailbox: Mailbox, root: int, whole: bool
) -> tuple[Array | None, Array]:
    """``(c, c_shard)``, unfilled. With ``whole``, the shard on ``root`` is a view of the whole c."""
    if whole and mailbox.rank == root:
        c = np.empty(shape, dtype)
        return c, c[distribution.slices(shape, root)]
    return None, np.empty(distribution.shard_shape(shape, mailbox.rank), dtype)


class Returns:
    """c_shards on their way to the whole ``c`` on ``root``, each panel straight into its place."""

    def __init__(
        self, mailbox: Mailbox, c: Array | None, c_shard: Array, distribution: Distribution, root: int
    ) -> None:
        self._mailbox, self._root = mailbox, root
        self._c, self._c_shard, self._distribution = c, c_shard, distribution
        self.panels = deque(row_panels(*_rows_of(c_shard)) if mailbox.rank != root else ())
        self._way = Arrivals()

    def start(self) -> None:
        """On the root all panels may come: no other message is expected from anybody meanwhile."""
        parts = self._distribution.split(self._c) if self._c is not None else ()
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
