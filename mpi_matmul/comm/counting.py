"""Count what one rank sends."""

from __future__ import annotations

from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.layout import Array


class CountingMailbox(Mailbox):
    """A mailbox that passes everything on and counts messages and bytes sent (array bytes, no headers)."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.rank, self.world_size, self._mailbox = mailbox.rank, mailbox.world_size, mailbox
        self.sent_messages = 0
        self.sent_bytes = 0

    def send(self, dst: int, data: Array) -> None:
        self._count(data)
        self._mailbox.send(dst, data)

    def start_send(self, dst: int, data: Array) -> Transfer:
        self._count(data)
        return self._mailbox.start_send(dst, data)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        return self._mailbox.start_recv(src, out)

    def _count(self, data: Array) -> None:
        self.sent_messages += 1
        self.sent_bytes += data.nbytes
