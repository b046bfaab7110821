"""Rows whose parts lie on several ranks: added up on one rank each, and what that rank finds told back.

Every rank calls the same method in the same order. p is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.layout import Array, block_range, length


class RowSums:
    """``rows[r]`` are those of range(m) of which rank r holds a part; rank r adds up ``block`` r of p.

    A rank exchanges messages with those whose block and rows overlap, at most one each way: none if every
    rank holds its own block. What goes out and comes in is a number of rows each time, of any length.
    """

    def __init__(self, mailbox: Mailbox, m: int, rows: Sequence[slice]) -> None:
        self._mailbox, self._rows = mailbox, rows[mailbox.rank]
        blocks = [slice(*block_range(m, mailbox.world_size, rank)) for rank in range(mailbox.world_size)]
        self.block = blocks[mailbox.rank]
        self._of_rows = _overlaps(self._rows, blocks)
        self._of_block = _overlaps(self.block, rows)

    def add_up(self, part: Array) -> Array:
        """The sums (block, ...) of every rank's ``part`` (rows, ...), in rank order; of bool the "or"."""
        total = np.zeros((length(self.block), *part.shape[1:]), part.dtype)
        for place, addend in self._exchange(part, self._of_rows, self._of_block):
            total[place] += addend
        return total

    def tell(self, found: Array) -> Array:
        """What the ranks have ``found`` (block, ...) of the rows of which this rank holds a part."""
        answer = np.empty((length(self._rows), *found.shape[1:]), found.dtype)
        for place, told in self._exchange(found, self._of_block, self._of_rows):
            answer[place] = told
        return answer

    def _exchange(
        self, data: Array, outgoing: dict[int, slice], incoming: dict[int, slice]
    ) -> Iterator[tuple[slice, Array]]:
        rank = self._mailbox.rank
        sends = [self._mailbox.start_send(dst, data[outgoing[dst]]) for dst in outgoing if dst != rank]
        for src, place in incoming.items():
            yield place, data[outgoing[src]] if src == rank else self._mailbox.recv(src)
        for send in sends:
            send.wait()


def _overlaps(own: slice, others: Sequence[slice]) -> dict[int, slice]:
    """Which of the own rows each rank has, counted from the first own row; without those that have none."""
    ends = ((max(own.start, other.start), min(own.stop, other.stop)) for other in others)
    return {
        rank: slice(start - own.start, stop - own.start)
        for rank, (start, stop) in enumerate(ends)
        if start < stop
    }
