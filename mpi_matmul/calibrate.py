"""bench --calibrate: the three numbers of a machine, measured by the ranks that are there.

* Latency: small messages round the ring of all ranks, a few on their way at once, as in the kernels.
* Bandwidth: the same with blocks of BLOCK_BYTES, all ranks at once. Where there are several hosts, neighbours
  on the ring are on different ones: what a host's network carries is what is wanted.
* Operations: products as large as the kernels', added in place, on all ranks at once.

Each is repeated until it takes a while, then measured REPEAT times. The slowest rank counts, and of the
times the shortest: what else runs makes them longer, and passes.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpi_matmul.accumulate import multiply_into
from mpi_matmul.blocks import BLOCK_BYTES, WINDOW
from mpi_matmul.comm.collectives import barrier, broadcast_facts, gather_facts
from mpi_matmul.comm.group import GroupMailbox
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.cores import processors
from mpi_matmul.ending import end
from mpi_matmul.machine import Machine, default_machine, machine_file, save_machine
from mpi_matmul.options import BAD_INPUT, OK
from mpi_matmul.outputs import say
from mpi_matmul.storage import FileError, shown

REPEAT, LEAST_SECONDS = 5, 0.2
SMALL_BYTES = 1024
PRODUCT = (1024, 512, 1024)  # m, k, n


def calibrate(mailbox: Mailbox, path: str | None) -> int:
    """Measure, keep, and say the numbers; the same exit status on every rank."""
    complaint = broadcast_facts(mailbox, _complaint(path) if mailbox.rank == 0 else "", 0)
    if complaint:
        return end(mailbox, BAD_INPUT, complaint)
    machine = measured(mailbox)
    try:
        if mailbox.rank == 0:
            file = save_machine(machine, path)
            say(f"{_numbers(machine)}\nwrote {shown(file)}", sys.stdout)
    except FileError as error:
        return end(mailbox, BAD_INPUT, str(error))
    return end(mailbox, OK, "")


def _complaint(path: str | None) -> str:
    try:
        machine_file(path)
    except FileError as error:
        return str(error)
    return ""


def _numbers(machine: Machine) -> str:
    if machine.ranks > 1:
        return str(machine)
    return f"{machine}; one rank sends nothing, so what is said of messages is a default"


def measured(mailbox: Mailbox) -> Machine:
    """The machine that these ranks are on; without messages, on one rank, the default but for operations."""
    facts = gather_facts(mailbox, [platform.node(), processors()], 0)
    host_of, processors_of = zip(*broadcast_facts(mailbox, facts, 0), strict=True)
    hosts = len(set(host_of))
    a_product = seconds_of_one(mailbox, products)
    flops = 2 * math.prod(PRODUCT) * mailbox.world_size / hosts / a_product
    ranks = -(-mailbox.world_size // hosts)
    if mailbox.world_size == 1:
        return replace(default_machine(1, len(processors_of[0])), flops=flops, ranks=1)
    ring = GroupMailbox(mailbox, hosts_in_turn(host_of))
    latency = seconds_of_one(mailbox, lambda number: exchange(ring, SMALL_BYTES, number))
    a_block = seconds_of_one(mailbox, lambda number: exchange(ring, BLOCK_BYTES, number))
    return Machine(latency, BLOCK_BYTES * mailbox.world_size / hosts / a_block, flops, ranks, hosts)


def hosts_in_turn(host_of: Sequence[str]) -> list[int]:
    """The ranks in an order in which neighbours are on different hosts, as far as there are enough.

    >>> hosts_in_turn(["h1", "h1", "h2", "h2"])
    [0, 2, 1, 3]
    """
    number_on_host = [host_of[:rank].count(host) for rank, host in enumerate(host_of)]
    return sorted(range(len(host_of)), key=lambda rank: (number_on_host[rank], host_of.index(host_of[rank])))


def products(number: int) -> None:
    """So many products of this rank, added to one another."""
    m, k, n = PRODUCT
    a, b, c = np.ones((m, k)), np.ones((k, n)), np.zeros((m, n))
    for _ in range(number):
        multiply_into(a, b, c, True)


def exchange(mailbox: Mailbox, nbytes: int, number: int) -> None:
    """So many messages from every rank to the next one, with a window of them on their way."""
    ahead, behind = (mailbox.rank + 1) % mailbox.world_size, (mailbox.rank - 1) % mailbox.world_size
    block = np.zeros(nbytes, np.uint8)
    places = [np.empty(nbytes, np.uint8) for _ in range(WINDOW + 1)]
    arriving: deque[Transfer] = deque()
    leaving: deque[Transfer] = deque()
    for i in range(number):
        leaving.append(mailbox.start_send(ahead, block))
        arriving.append(mailbox.start_recv(behind, places[i % len(places)]))
        if len(arriving) > WINDOW:
            arriving.popleft().wait()
            leaving.popleft().wait()
    for transfer in [*arriving, *leaving]:
        transfer.wait()


def seconds_of_one(mailbox: Mailbox, work: Callable[[int], None]) -> float:
    """Seconds of one of those of which ``work`` does a number; of the slowest rank, all at once."""
    number, taken = 1, _slowest(mailbox, work, 1)
    while taken < LEAST_SECONDS:
        number = math.ceil(number * min(10, max(2, 1.2 * LEAST_SECONDS / max(taken, 1e-9))))
        taken = _slowest(mailbox, work, number)
    return min(_slowest(mailbox, work, number) for _ in range(REPEAT)) / number


def _slowest(mailbox: Mailbox, work: Callable[[int], None], number: int) -> float:
    """The same on every rank."""
    barrier(mailbox)
    start = time.perf_counter()
    work(number)
    seconds = gather_facts(mailbox, time.perf_counter() - start, 0)
    slowest: float = broadcast_facts(mailbox, max(seconds or [0.0]), 0)
    return slowest
