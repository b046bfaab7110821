"""Some of the ranks as a world of their own: a row or a column of a grid of ranks, the ranks of a host."""

from __future__ import annotations

from collections.abc import Sequence

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer, rank_in_world
from mpi_matmul.layout import Array


class GroupMailbox(Mailbox):
    """The mailbox of a member of a group; ``rank``, src and dst are places in ``ranks``.

    ``ranks`` are those of ``mailbox``, each once, the same list on every member. Messages inside the group
    and outside it share the order of the pair of ranks: two members that exchange messages in both must do
    so in the same order. ValueError when this rank is not a member, or a rank is there twice or not in the
    world.
    """

    def __init__(self, mailbox: Mailbox, ranks: Sequence[int]) -> None:
        self._mailbox, self._ranks = mailbox, list(ranks)
        for rank in self._ranks:
            rank_in_world("rank of a group", rank, mailbox.world_size)
        if len(set(self._ranks)) < len(self._ranks):
            raise ValueError(f"a rank is twice in the group {self._ranks}")
        if mailbox.rank not in self._ranks:
            raise ValueError(f"rank {mailbox.rank} is not in the group {self._ranks}")
        self.rank, self.world_size = self._ranks.index(mailbox.rank), len(self._ranks)

    def send(self, dst: int, data: Array) -> None:
        self._mailbox.send(self._member("dst", dst), data)

    def start_send(self, dst: int, data: Array) -> Transfer:
        return self._mailbox.start_send(self._member("dst", dst), data)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        return self._mailbox.start_recv(self._member("src", src), out)

    def _member(self, name: str, place: int) -> int:
        return self._ranks[rank_in_world(name, place, self.world_size)]
