"""What a kernel gets to do its work with, and in which form it says what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mpi_matmul.accumulate import multiply_into
from mpi_matmul.comm.group import GroupMailbox
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.layout import Array
from mpi_matmul.mesh import Mesh
from mpi_matmul.operands import Problem
from mpi_matmul.stream import ALL_HERE, Stream

Formula = Callable[[Problem, Mesh, int], int]
OfMesh = Callable[[Problem, Mesh], int]
MultiplyInto = Callable[[Array, Array, Array, bool], Array]


@dataclass(frozen=True)
class Work:
    """One rank's work on a (m, k) @ b (k, n).

    ``multiply_into`` is how parts are multiplied (see `mpi_matmul.accumulate`); whoever wants the messages
    alone passes in something that does nothing. ``stream`` is for kernels that stream.
    """

    mailbox: Mailbox
    mesh: Mesh
    problem: Problem
    stream: Stream = ALL_HERE
    multiply_into: MultiplyInto = multiply_into

    def along(self, axis: str) -> Mailbox:
        """This rank's line along ``axis`` of the mesh, as a world of its own."""
        return GroupMailbox(self.mailbox, self.mesh.line(axis, self.mailbox.rank))

    @property
    def here(self) -> tuple[int, int, int]:
        """Where this rank stands on the mesh."""
        return self.mesh.coordinates(self.mailbox.rank)


def nothing(problem: Problem, mesh: Mesh, rank: int) -> int:
    """The formula of what sends nothing, or needs no memory besides its shards."""
    return 0


class Outline(NamedTuple):
    """About what a rank does, quickly known.

    So many messages it sends; in so many pieces it makes its products while they travel, and so often it goes
    over its part of c in doing so. ``gathers_b``: all of b comes while the first piece is made, and sums of c
    travel.
    """

    messages: int = 0
    pieces: int = 1
    passes: int = 1
    gathers_b: bool = False


@dataclass(frozen=True)
class Formulas:
    """What one rank of a mesh sends inside the product, and the most memory that it needs besides its shards.

    Where these take long to find for each rank of a large mesh, also what the rank sends that sends most, and
    what a rank does in outline.
    """

    sent_bytes: Formula = nothing
    sent_messages: Formula = nothing
    extra_bytes: Formula = nothing
    most_bytes: OfMesh | None = None
    most_messages: OfMesh | None = None
    outline: Callable[[Problem, Mesh], Outline] | None = None
