"""Measure one product: check it, then time it against the time that it would take at best.

Operands are made where they lie, each rank its own shards; nothing is whole anywhere, and what the kernel
takes is its own memory. Timed in turn, so that a machine whose speed changes does the same to all of them:

* the kernel;
* its limit, compute-only: the same ranks make the same products at the same time, without any message;
* transfer-only: the same messages without any product.

After them numpy's own product of the whole operands, on rank 0, with all cores, while the others sleep: it
tells whether the limit is one. Where it would take too much memory or time (see `_can_have_numpys`), there is
none. A time is that of the slowest rank, from when all have come. With the medians of these times

    share of the limit    compute-only / kernel (1 is perfect)
    hidden transfers      (compute-only + transfer-only - kernel) / the smaller of the two, from 0 to 1
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from mpi_matmul import costs, memory
from mpi_matmul.accumulate import multiply_into
from mpi_matmul.blocks import BLOCK_BYTES, WINDOW
from mpi_matmul.comm.collectives import barrier, broadcast_facts, gather_facts
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.comm.protocol import Transfer
from mpi_matmul.comm.ring import ring_all_gather
from mpi_matmul.cores import blas_threads_in_use, processors, threads_per_rank
from mpi_matmul.kernels import Strategy
from mpi_matmul.layout import Array, Shape, block_range, length
from mpi_matmul.machine import load_machine
from mpi_matmul.operands import Problem, RandomMatrix, operations
from mpi_matmul.options import BAD_INPUT, CHECK_FAILED
from mpi_matmul.verify import exact_check
from mpi_matmul.work import MultiplyInto, Work

CHECKED_COLUMNS = 512  # of c at a time, so that b is nowhere whole
NUMPY_BYTES, NUMPY_SECONDS = 4e9, 60.0
SPINNING_SECONDS = 0.05  # for so long do threads of BLAS look out for work after a product

Row = dict[str, Any]


class Stopped(Exception):
    """What ends the bench, on every rank alike."""

    def __init__(self, text: str, status: int) -> None:
        self.text, self.status = text, status


def stop_if(mailbox: Mailbox, complaint: str, status: int) -> None:
    """Stopped, everywhere, if any rank complains; every rank calls this."""
    complaints = broadcast_facts(mailbox, gather_facts(mailbox, complaint, 0), 0)
    for first in filter(None, complaints):
        raise Stopped(first, status)


@dataclass(frozen=True)
class Case:
    """One product: a (m, k) @ b (k, n) by one kernel."""

    strategy: Strategy
    problem: Problem
    a: RandomMatrix
    b: RandomMatrix
    asked: str = ""

    def work(self, mailbox: Mailbox, multiply_into: MultiplyInto = multiply_into) -> Work:
        """What the kernel gets on the rank of this mailbox."""
        return Work(mailbox, self.strategy.mesh, self.problem, multiply_into=multiply_into)

    def __str__(self) -> str:
        return f"{self.strategy} ({_times(self.a.shape)}) @ ({_times(self.b.shape)}) {self.a.dtype}"


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


class World:
    """The ranks, and what they run on. Lists are in rank order."""

    def __init__(self, mailbox: Mailbox, mpi_library: str) -> None:
        self.mailbox, self.mpi_library = mailbox, mpi_library
        place = [platform.node(), memory.resident(), memory.available()]
        mine = {"place": place, "threads": blas_threads_in_use(), "processors": processors()}
        ranks = broadcast_facts(mailbox, gather_facts(mailbox, mine, 0), 0)
        self._places = [costs.Place(*one["place"]) for one in ranks]
        self.hosts = [place.host for place in self._places]
        self.blas_threads: list[int] = [one["threads"] for one in ranks]
        on_first_host = [one["processors"] for one in ranks if one["place"][0] == self.hosts[0]]
        self.processors: list[int] = sorted(set().union(*on_first_host))  # where numpy may take their place

    def refuse(self, cases: Sequence[Case]) -> None:
        """ValueError with the amounts for a case that needs more memory than a host has."""
        for case in cases:
            costs.refuse_beyond(None, case.strategy, case.problem, "none", self._places)

    def cost(self, case: Case) -> costs.Cost:
        """What is predicted of a case."""
        hosts = len(set(self.hosts))
        machine = load_machine(hosts, len(self.processors))
        return costs.Cost(case.strategy, case.problem, machine, hosts)

    def title(self) -> str:
        hosts, threads = sorted(set(self.hosts)), sorted(set(self.blas_threads))
        return (
            f"{self.mpi_library}, numpy {np.__version__}, ranks: {len(self.hosts)}, "
            f"BLAS threads of a rank: {', '.join(map(str, threads))}, hosts: {', '.join(hosts)}"
        )


def measure(world: World, case: Case, repeat: int) -> list[Row]:
    """Check and time one product: its row, on rank 0 (nothing elsewhere). Stopped if it is wrong."""
    mailbox, rank, problem = world.mailbox, world.mailbox.rank, case.problem
    _settle(problem)
    baseline = memory.resident()
    shards = shards_of(mailbox, case)
    noting = NotingMailbox(mailbox)
    barrier(mailbox)
    memory.reset_peak()
    case.strategy.kernel.multiply(case.work(noting), *shards)
    peak = memory.peak()
    wrong = wrong_product(mailbox, case, shards[2])
    stop_if(mailbox, f"{case}: wrong product: {wrong}" if wrong else "", CHECK_FAILED)
    sent = case.strategy.sent_bytes(problem, rank)
    differ = f"{case}: rank {rank} sent {noting.sent_bytes} bytes, {sent} by the formula"
    stop_if(mailbox, differ if noting.sent_bytes != sent else "", CHECK_FAILED)
    seconds = _time_in_turn(world, case, shards, noting, repeat)
    numpys = _time_numpys(world, case, seconds["compute_only"], repeat)
    facts = gather_facts(mailbox, [noting.sent_bytes, peak, baseline, seconds], 0)
    return [] if facts is None else [_row(world, case, facts, numpys)]


def _settle(problem: Problem) -> None:
    """Leave to the kernel's memory what is the kernel's.

    Not what BLAS keeps for itself from its first product of such operands on, nor what earlier cases have
    freed and the allocator has kept (glibc gives it back; else the kernel uses it, and seems to need less).
    """
    m, k, n = min(problem.m, 64), min(problem.k, 256), min(problem.n, 8192)
    np.matmul(np.ones((m, k), problem.a_dtype), np.ones((k, n), problem.b_dtype))
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def shards_of(mailbox: Mailbox, case: Case) -> tuple[Array, Array, Array]:
    """This rank's a, b and c (unfilled). Stopped, everywhere, if they have no room."""
    rank, strategy, complaint = mailbox.rank, case.strategy, ""
    try:
        c = np.empty(strategy.c.shard_shape(case.problem.c_shape, rank), case.problem.dtype)
        a = _part(case.a, *strategy.a.slices(case.a.shape, rank))
        b = _part(case.b, *strategy.b.slices(case.b.shape, rank))
    except (MemoryError, ValueError) as error:  # numpy says "array is too big" with a ValueError
        complaint = f"{case}: not enough memory on rank {mailbox.rank} ({error})"
    stop_if(mailbox, complaint, BAD_INPUT)
    return a, b, c


def _part(matrix: RandomMatrix, rows: slice, columns: slice) -> Array:
    part = np.empty((length(rows), length(columns)), matrix.dtype)
    matrix.read(rows, columns, part)
    return part


def wrong_product(mailbox: Mailbox, case: Case, c_shard: Array) -> str:
    """How this rank's part of c differs from numpy's product of these rows of a and columns of b."""
    rows, columns = case.strategy.c.slices(case.problem.c_shape, mailbox.rank)
    whole = slice(0, case.problem.k)
    a_rows = _part(case.a, rows, whole)
    for start in range(columns.start, columns.stop, CHECKED_COLUMNS):
        some = slice(start, min(start + CHECKED_COLUMNS, columns.stop))
        c_part = c_shard[:, some.start - columns.start : some.stop - columns.start]
        check = exact_check(a_rows, _part(case.b, whole, some), c_part)
        if not check.passed:
            return f"rank {mailbox.rank}, counted from row {rows.start} and column {start}: {check.detail}"
    return ""


# ---- time ----


def _time_in_turn(
    world: World, case: Case, shards: tuple[Array, Array, Array], noting: NotingMailbox, repeat: int
) -> dict[str, list[float]]:
    """Seconds on this rank of the kernel, of products alone and of transfers alone, if there are any."""
    mailbox, multiply = world.mailbox, case.strategy.kernel.multiply
    silent = SilentMailbox(noting, shards[1])
    copies = [line for line in copied(case, mailbox, shards) if line[0].world_size > 1]
    turns: dict[str, Callable[[], object]] = {}
    if _has_transfers(world, case):
        turns["transfer_only"] = lambda: multiply(case.work(mailbox, no_product), *shards)
    if copies:
        turns["copies"] = lambda: make_copies(copies)
    turns["kernel"] = lambda: multiply(case.work(mailbox), *shards)
    turns["compute_only"] = lambda: multiply(case.work(silent), *shards)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(repeat + 1):
        for name, turn in turns.items():
            seconds[name].append(together(mailbox, turn))
        # The two that are compared change places: what goes before leaves the caches as it likes.
        first = next(name for name in turns if name in ("kernel", "compute_only"))
        turns[first] = turns.pop(first)
    return {name: times[1:] for name, times in seconds.items()}  # the first were for warming up


def copied(
    case: Case, mailbox: Mailbox, shards: tuple[Array, Array, Array]
) -> Iterator[tuple[Mailbox, Array]]:
    """What is replicated, and the ranks that have the same: operand by operand."""
    for axis, placement, shard in zip(
        "nm", (case.strategy.kernel.a, case.strategy.kernel.b), shards, strict=False
    ):
        if axis not in placement.rows + placement.columns:
            yield case.work(mailbox).along(axis), shard


def make_copies(copies: list[tuple[Mailbox, Array]]) -> None:
    """The messages that copies need: every rank has an equal part of the rows, and gathers the others'."""
    for mailbox, matrix in copies:
        rows = slice(*block_range(matrix.shape[0], mailbox.world_size, mailbox.rank))
        number = max(1, matrix.nbytes // mailbox.world_size // BLOCK_BYTES)
        parts = [slice(*block_range(length(rows), number, i)) for i in range(number)]
        for _ in ring_all_gather(mailbox, (matrix[rows][part] for part in parts), number, WINDOW):
            pass


def no_product(a: Array, b: Array, c: Array, add: bool) -> Array:
    """In place of the product, where the messages alone are wanted."""
    return c


def _has_transfers(world: World, case: Case) -> bool:
    """Whether bytes are sent."""
    return sum(costs.sent_bytes(case.strategy, case.problem)) > 0


def together(mailbox: Mailbox, turn: Callable[[], object]) -> float:
    """The seconds of ``turn()`` on this rank; all ranks begin together."""
    barrier(mailbox)
    barrier(mailbox)  # those who waited long for the first may have slept on
    return _seconds(turn)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- products without messages ----


class NotingMailbox(CountingMailbox):
    """Counts what is sent, and notes shape and dtype of what comes where the kernel has no place for it."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.came: defaultdict[int, list[tuple[tuple[int, ...], np.dtype[Any]]]] = defaultdict(list)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        transfer = super().start_recv(src, out)
        return transfer if out is not None else _Noted(transfer, self.came[src])


class _Noted:
    def __init__(self, transfer: Transfer, notes: list[Any]) -> None:
        self._transfer, self._notes, self._place = transfer, notes, len(notes)
        notes.append(None)

    def wait(self) -> Array:
        array = self._transfer.wait()
        self._notes[self._place] = (array.shape, array.dtype)
        return array


class SilentMailbox(Mailbox):
    """For one rank alone: nothing is sent, and an array like the one that would come is there at once.

    In place of ``out``, whose memory may hold numbers with which a product is slow, comes another array of
    its shape; its numbers are ``numbers``, again and again.
    """

    def __init__(self, noting: NotingMailbox, numbers: Array) -> None:
        self.rank, self.world_size = noting.rank, noting.world_size
        self._came = {src: cycle(notes) for src, notes in noting.came.items()}
        self._numbers = numbers.reshape(-1)
        self._arrays: dict[Any, Array] = {}

    def send(self, dst: int, data: Array) -> None:
        pass

    def start_send(self, dst: int, data: Array) -> Transfer:
        return _There(data)

    def start_recv(self, src: int, out: Array | None = None) -> Transfer:
        return _There(self._like(*next(self._came[src]) if out is None else (out.shape, out.dtype)))

    def _like(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        if (shape, dtype) not in self._arrays:
            some = self._numbers[: math.prod(shape)].astype(dtype)
            self._arrays[shape, dtype] = np.resize(some, shape) if some.size else np.zeros(shape, dtype)
        return self._arrays[shape, dtype]


class _There:
    def __init__(self, array: Array) -> None:
        self._array = array

    def wait(self) -> Array:
        return self._array


# ---- numpy alone ----


def _can_have_numpys(case: Case, seconds: float) -> bool:
    """Whether numpy's own product is affordable.

    a, b and c together take at most NUMPY_BYTES and half of the memory that this host has left, and one core
    would need (which the ranks' ``seconds`` added up tell) at most NUMPY_SECONDS.
    """
    left = memory.available()
    most = NUMPY_BYTES if left is None else min(NUMPY_BYTES, left / 2)
    return case.problem.nbytes <= most and seconds <= NUMPY_SECONDS


def _time_numpys(world: World, case: Case, compute_only: list[float], repeat: int) -> list[float]:
    """Seconds of numpy's product of the whole operands on rank 0, with all cores of its host; [] elsewhere.

    The others sleep for as long as the first one took: who waits for a message looks for it now and then.
    """
    mailbox, seconds = world.mailbox, min(compute_only) * world.mailbox.world_size
    if not broadcast_facts(mailbox, _can_have_numpys(case, seconds), 0):
        return []
    if mailbox.rank:
        time.sleep(repeat * broadcast_facts(mailbox, None, 0))
        barrier(mailbox)
        return []
    a, b = (_part(matrix, *(slice(0, size) for size in matrix.shape)) for matrix in (case.a, case.b))
    c = np.empty(case.problem.c_shape, case.problem.dtype)
    blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
    with _on(world.processors), blas.limit(limits=threads_per_rank([world.processors])):
        product = partial(np.matmul, a, b, out=c)
        broadcast_facts(mailbox, _seconds(product), 0)
        seconds_of_all = [_seconds(product) for _ in range(repeat)]
    time.sleep(SPINNING_SECONDS)
    barrier(mailbox)
    return seconds_of_all


@contextmanager
def _on(processors: list[int]) -> Iterator[None]:
    """Inside, every thread of this process may run on all of them, also where mpirun has bound it to one."""
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.exists() else []
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    try:
        for thread in threads:
            os.sched_setaffinity(thread, processors)
        yield
    finally:
        for thread, own in before.items():
            os.sched_setaffinity(thread, own)


# ---- a row ----


def _row(world: World, case: Case, facts: list[Any], numpys: list[float]) -> Row:
    """From what every rank says: [bytes sent, peak, baseline, seconds of each turn]."""
    sent, peaks, baselines, seconds = (list(column) for column in zip(*facts, strict=True))
    slowest = {
        name: [max(times) for times in zip(*(of_rank[name] for of_rank in seconds), strict=True)]
        for name in seconds[0]
    }
    medians = {name: statistics.median(times) for name, times in slowest.items()}
    taken, limit, transfer = medians["kernel"], medians["compute_only"], medians.get("transfer_only")
    problem, world_size = case.problem, world.mailbox.world_size
    needed = costs.memory_bytes(case.strategy, problem)
    cost = world.cost(case)
    return {
        "strategy": case.strategy.name,
        "mesh": str(case.strategy.mesh),
        "asked": case.asked or case.strategy.name,
        "shape": [problem.m, problem.k, problem.n],
        "dtype": str(case.a.dtype),
        "ranks": world_size,
        "seconds_min": min(slowest["kernel"]),
        "seconds_median": taken,
        "compute_only_seconds": limit,
        "transfer_only_seconds": transfer,
        "copies_seconds": medians.get("copies"),
        "predicted_seconds": cost.seconds,
        "numpy_seconds": statistics.median(numpys) if numpys else None,
        "gflops": operations(problem) / taken / 1e9,
        "of_limit": limit / taken,
        "hidden": None if transfer is None else hidden_share(taken, limit, transfer),
        "sent_bytes": sum(sent),
        "predicted_sent_bytes": sum(costs.sent_bytes(case.strategy, problem)),
        "peak_memory_bytes": peaks,
        "predicted_memory_bytes": [sum(pair) for pair in zip(needed, baselines, strict=True)],
        "baseline_memory_bytes": baselines,
        "repeat": len(slowest["kernel"]),
        "mpi_library": world.mpi_library,
        "hosts": world.hosts,
        "blas_threads": world.blas_threads,
    }


def hidden_share(taken: float, limit: float, transfer: float) -> float:
    """Which part of what could go on at the same time did: 0 is one after the other, 1 the longer alone."""
    return min(1.0, max(0.0, (limit + transfer - taken) / min(limit, transfer)))
