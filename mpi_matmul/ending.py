"""How a program of ours ends: what is said once, whatever the number of ranks, and its exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from mpi_matmul.comm.collectives import barrier, broadcast_facts
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.launch import LaunchError, launched_processes, launched_rank, on_mpi
from mpi_matmul.options import BAD_INPUT, INTERRUPTED, Said
from mpi_matmul.outputs import complain, say
from mpi_matmul.storage import FileError


def status_of(program: Callable[[], int]) -> int:
    """The exit status of ``program()`` in this process, also when it could not be run as asked."""
    try:
        return program()
    except Said as said:
        return _say_once(said)
    except LaunchError as error:
        if launched_rank() == 0:
            complain(f"mpi_matmul: {error}", sys.stderr)
        return BAD_INPUT
    except MemoryError as error:
        complain(f"mpi_matmul: not enough memory: {error}", sys.stderr)
        return BAD_INPUT
    except FileError as error:  # which was good when the work began
        complain(f"mpi_matmul: {error}", sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        complain("mpi_matmul: interrupted", sys.stderr)
        return INTERRUPTED


def end(mailbox: Mailbox, status: int, message: str) -> int:
    """Say ``message`` once and agree on rank 0's exit status; no rank leaves before it is said."""
    if message and mailbox.rank == 0:
        complain(f"mpi_matmul: {message}", sys.stderr)
    agreed: int = broadcast_facts(mailbox, status, 0)
    barrier(mailbox)
    return agreed


def _say_once(said: Said) -> int:
    status = said.status
    if launched_processes() == 1 or launched_rank() == 0:
        try:
            say(said.text.rstrip("\n"), sys.stderr if said.status else sys.stdout)
        except FileError:
            status = BAD_INPUT
    if launched_processes() > 1:
        with suppress(LaunchError):  # a launcher may end the job when the first rank leaves: leave together
            on_mpi(lambda comm, rank: barrier(mailbox_of(comm, rank)))
    return status
