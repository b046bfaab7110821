"""A product that lies over the ranks into one file: in place by every rank, or streamed through rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mpi_matmul.comm.collectives import broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.distribute import row_panels
from mpi_matmul.layout import Array, Distribution, length
from mpi_matmul.operands import Problem
from mpi_matmul.storage import FileError, MatrixPart, OutputFile, StagedMatrix, open_part

ROOT = 0
ON_THE_WAY = 2  # panels of one rank


@contextmanager
def delivered(
    mailbox: Mailbox, output: OutputFile | None, c_shard: Array, distribution: Distribution, problem: Problem
) -> Iterator[Callable[[], None]]:
    """Write the product beside the target of ``output``, which is rank 0's; every rank calls this.

    On rank 0, calling what the context gives renames it to the target; without that all is as it was. Rank 0
    gets a FileError when any rank could not write its part.
    """
    with ExitStack() as stack:
        staged, reason = _stage(stack, output, problem)
        offer = [staged.name, staged.offset, str(staged.target)] if staged is not None else None
        offer = broadcast_facts(mailbox, offer, ROOT)
        if offer is not None:
            part = staged or _join(stack, problem, *offer)
            reason = _write_all(mailbox, part, c_shard, distribution, problem)
        if output is not None and reason:
            raise FileError(output.path, reason)
        yield staged.commit if staged is not None else lambda: None


def _stage(
    stack: ExitStack, output: OutputFile | None, problem: Problem
) -> tuple[StagedMatrix | None, str | None]:
    """On rank 0 the file, or why there is none."""
    if output is None:
        return None, None
    try:
        staged = output.staged_matrix(problem.c_shape, problem.dtype, problem.result_shape)
        return stack.enter_context(staged), None
    except FileError as error:
        return None, error.reason


def _join(stack: ExitStack, problem: Problem, name: str, offset: int, target: str) -> MatrixPart | None:
    """The file that rank 0 has made, or None on a host where it cannot be written."""
    try:
        part = open_part(name, offset, problem.c_shape, problem.dtype, target)
    except FileError:
        return None
    stack.callback(part.stream.close)
    return part


def _write_all(
    mailbox: Mailbox, part: MatrixPart | None, c_shard: Array, distribution: Distribution, problem: Problem
) -> str | None:
    """Every rank's shard into the file; on rank 0 the first reason why one could not be written."""
    able = broadcast_facts(mailbox, gather_facts(mailbox, part is not None, ROOT), ROOT)
    whole = distribution.slices(problem.c_shape, mailbox.rank)
    reason = None if part is None else _reason(part, *whole, c_shard)
    if part is None:
        _stream(mailbox, c_shard)
    elif mailbox.rank == ROOT:
        for rank in (rank for rank, writes in enumerate(able) if not writes):
            rows, columns = distribution.slices(problem.c_shape, rank)
            row_bytes = length(columns) * c_shard.itemsize
            for panel in row_panels(length(rows), row_bytes):
                block = mailbox.recv(rank)  # also when the disk is full: the sender must come to an end
                place = slice(rows.start + panel.start, rows.start + panel.stop)
                reason = reason or _reason(part, place, columns, block)
    if part is not None:
        reason = reason or _reason_of(part.sync)
    reasons = gather_facts(mailbox, reason, ROOT) or []
    return next(filter(None, reasons), None)


def _stream(mailbox: Mailbox, c_shard: Array) -> None:
    """Send the shard to rank 0, which writes it, panel by panel."""
    leaving: deque[Transfer] = deque()
    for rows in row_panels(c_shard.shape[0], c_shard.shape[1] * c_shard.itemsize):
        if len(leaving) == ON_THE_WAY:
            leaving.popleft().wait()
        leaving.append(mailbox.start_send(ROOT, c_shard[rows]))
    for transfer in leaving:
        transfer.wait()


def _reason(part: MatrixPart, rows: slice, columns: slice, block: Array) -> str | None:
    return _reason_of(lambda: part.write(rows, columns, block))


def _reason_of(act: Callable[[], None]) -> str | None:
    """Why it cannot be done, or None if it is done."""
    try:
        act()
    except FileError as error:
        return error.reason
    return None
