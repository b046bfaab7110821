"""Measure our collectives beside those of the MPI library: check what they give, then time both in turn.

The arrays are float64. `broadcast`, `reduce`, `all_reduce` and `reduce_scatter` take an array of the size
on each rank; of `all_gather`, `gather` and `scatter` it is the size of all parts together. Root is rank 0.
A time is that of the slowest rank, from when all have come.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from mpi_matmul.comm.collectives import (
    Topology,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    gather_facts,
    reduce,
    reduce_scatter,
    scatter,
)
from mpi_matmul.comm.counting import CountingMailbox
from mpi_matmul.comm.mailbox import Mailbox
from mpi_matmul.layout import Array, block_range
from mpi_matmul.measure import Row, World, stop_if
from mpi_matmul.options import CHECK_FAILED

SIZES = (1 << 10, 1 << 20, 64 << 20)
ROOT = 0
ITEM = np.dtype(np.float64)
NAMES = ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "gather", "scatter")
TOPOLOGIES: tuple[Topology, ...] = ("tree", "direct", "ring")
ONE_SIDED = ("gather", "scatter")  # always direct
FROM_OR_TO_ONE = ("broadcast", "reduce")  # never

Library = Callable[..., None]  # the name of an MPI collective and its arguments, as mpi4py takes them


@dataclass(frozen=True)
class Case:
    """One collective; "direct" is the only way of those that know no topology."""

    name: str
    topology: Topology | None
    nbytes: int

    @property
    def way(self) -> str:
        return self.topology or "direct"

    def __str__(self) -> str:
        return f"{self.name} ({self.way}) of {self.nbytes} bytes"


def cases(sizes: Sequence[int]) -> Iterator[Case]:
    """Each collective by each topology, of these sizes (rounded to whole items) in bytes."""
    for name in NAMES:
        topologies = (None,) if name in ONE_SIDED else TOPOLOGIES
        for topology, nbytes in product(topologies, sizes or SIZES):
            if topology == "direct" and name in FROM_OR_TO_ONE:
                continue
            yield Case(name, topology, max(1, nbytes // ITEM.itemsize) * ITEM.itemsize)


def measure(world: World, library: Library, case: Case, repeat: int) -> list[Row]:
    """Check and time one collective: its row, on rank 0 (nothing elsewhere). Stopped if it is wrong."""
    mailbox, counting = world.mailbox, CountingMailbox(world.mailbox)
    arrays = _Arrays(case, mailbox)
    ours = partial(_ours, counting, case, arrays)
    librarys = partial(_librarys, library, case, arrays)
    for name, call in {"the library's": librarys, "ours": ours}.items():
        arrays.out[...] = -1
        call()
        wrong = f"{case}: {name} is wrong" if not arrays.are_right() else ""
        stop_if(mailbox, wrong, CHECK_FAILED)
    sent, predicted = counting.sent_bytes, sent_bytes(case, arrays.part_bytes, mailbox.rank)
    differ = f"{case}: rank {mailbox.rank} sent {sent} bytes, {predicted} by the formula"
    stop_if(mailbox, differ if sent != predicted else "", CHECK_FAILED)
    seconds = [[_seconds(mailbox, call) for call in (ours, librarys)] for _ in range(repeat)]
    facts = gather_facts(mailbox, [sent, predicted, seconds], ROOT)
    return [] if facts is None else [_row(world, case, facts)]


class _Arrays:
    """What a rank gives (``own``, or parts of it) and what it gets (``out``, or parts of it)."""

    def __init__(self, case: Case, mailbox: Mailbox) -> None:
        self._name, self._size = case.name, case.nbytes // ITEM.itemsize
        self.rank, self.world_size = mailbox.rank, mailbox.world_size
        self.own, self.out = self._of(self.rank), np.full(self._size, -1.0)
        self.parts, self.places = self._split(self.own), self._split(self.out)
        self._others = [rank for rank in range(self.world_size) if rank != ROOT]
        self.counts = [part.size for part in self.parts]
        self.part_bytes = [part.nbytes for part in self.parts]

    def are_right(self) -> bool:
        """Whether ``out`` holds what it should, by numpy; and ``own`` what it did."""
        if not np.array_equal(self.own, self._of(self.rank)):
            return False
        nothing_on = {"broadcast": [ROOT], "reduce": self._others, "gather": self._others}
        if self.rank in nothing_on.get(self._name, []):
            return True
        got = self.places[self.rank] if "scatter" in self._name else self.out
        return np.array_equal(got, self._expected())

    def _expected(self) -> Array:
        ranks = range(self.world_size)
        if self._name in ("broadcast", "scatter"):
            whole = self._of(ROOT)
        elif self._name in ("gather", "all_gather"):
            whole = np.concatenate([self._split(self._of(rank))[rank] for rank in ranks])
        else:
            whole = self._of(0)
            for rank in ranks[1:]:
                whole += self._of(rank)
        return self._split(whole)[self.rank] if "scatter" in self._name else whole

    def _of(self, rank: int) -> Array:
        """Small whole numbers: their sum is the same in any order."""
        return np.resize(np.arange(rank, 997 + rank, dtype=ITEM), self._size)

    def _split(self, array: Array) -> list[Array]:
        number = self.world_size
        return [array[slice(*block_range(self._size, number, index))] for index in range(number)]


def _ours(mailbox: Mailbox, case: Case, arrays: _Arrays) -> None:
    on_root, rank = mailbox.rank == ROOT, mailbox.rank
    own, parts, out, places = arrays.own, arrays.parts, arrays.out, arrays.places
    topology = case.topology
    if case.name == "broadcast":
        broadcast(mailbox, own if on_root else None, ROOT, out=out, topology=topology)
    elif case.name == "reduce":
        reduce(mailbox, own, ROOT, out=out, topology=topology)
    elif case.name == "all_reduce":
        all_reduce(mailbox, own, out=out, topology=topology)
    elif case.name == "all_gather":
        all_gather(mailbox, parts[rank], out=places, topology=topology)
    elif case.name == "reduce_scatter":
        reduce_scatter(mailbox, parts, out=places[rank], topology=topology)
    elif case.name == "gather":
        gather(mailbox, parts[rank], ROOT, out=places)
    else:
        scatter(mailbox, parts if on_root else None, ROOT, out=places[rank])


def _librarys(library: Library, case: Case, arrays: _Arrays) -> None:
    on_root, rank = arrays.rank == ROOT, arrays.rank
    own, out, counts = arrays.own, arrays.out, arrays.counts
    part, place = arrays.parts[rank], arrays.places[rank]
    arguments: dict[str, tuple[Any, ...]] = {
        "broadcast": ("Bcast", own if on_root else out),
        "reduce": ("Reduce", own, out if on_root else None),
        "all_reduce": ("Allreduce", own, out),
        "all_gather": ("Allgatherv", part, [out, counts]),
        "reduce_scatter": ("Reduce_scatter", own, place, counts),
        "gather": ("Gatherv", part, [out, counts] if on_root else None),
        "scatter": ("Scatterv", [own, counts] if on_root else None, place),
    }
    library(*arguments[case.name])


def sent_bytes(case: Case, part_bytes: Sequence[int], rank: int) -> int:
    """The bytes that ``rank`` sends, by the formulas of `collectives`, when the parts have these sizes."""
    world_size, whole, own = len(part_bytes), sum(part_bytes), part_bytes[rank]
    ahead = part_bytes[(rank + 1) % world_size]
    core = 1 << (world_size.bit_length() - 1)
    exchanges = 1 if rank >= core else core.bit_length() - 1 + (rank + core < world_size)
    bits = range(rank.bit_length(), world_size.bit_length())
    passed_on = [
        part_bytes[(rank + i) % world_size]
        for bit in range((world_size - 1).bit_length())
        for i in range(min(1 << bit, world_size - (1 << bit)))
    ]
    return {
        "broadcast tree": whole * sum(rank + (1 << bit) < world_size for bit in bits),
        "broadcast ring": whole * (rank < world_size - 1),
        "reduce tree": whole * (rank != ROOT),
        "reduce ring": whole * (rank != ROOT),
        "all_reduce tree": whole * exchanges,
        "all_reduce direct": whole + (world_size - 2) * own,
        "all_reduce ring": 2 * whole - own - ahead,
        "all_gather tree": sum(passed_on),
        "all_gather direct": (world_size - 1) * own,
        "all_gather ring": whole - ahead,
        "reduce_scatter tree": whole * exchanges,
        "reduce_scatter direct": whole - own,
        "reduce_scatter ring": whole - own,
        "gather direct": own * (rank != ROOT),
        "scatter direct": (whole - own) * (rank == ROOT),
    }[f"{case.name} {case.way}"]


def _seconds(mailbox: Mailbox, call: Callable[[], None]) -> float:
    barrier(mailbox)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _row(world: World, case: Case, facts: Sequence[Any]) -> Row:
    """From what every rank says: [bytes sent, bytes predicted, seconds of each turn: ours, the library's]."""
    sent, predicted, seconds = zip(*facts, strict=True)
    slowest = np.max(seconds, axis=0)
    ours, librarys = (statistics.median(times) for times in slowest.T.tolist())
    return {
        "collective": case.name,
        "topology": case.way,
        "bytes": case.nbytes,
        "ranks": len(facts),
        "seconds_median": ours,
        "library_seconds_median": librarys,
        "of_library": ours / librarys,
        "sent_bytes": list(sent),
        "predicted_sent_bytes": list(predicted),
        "repeat": len(slowest),
        "mpi_library": world.mpi_library,
        "hosts": world.hosts,
    }


# ---- the table ----

_COLUMNS = {
    "collective": 14,
    "topology": 8,
    "bytes": 10,
    "ranks": 5,
    "median s": 10,
    "library s": 10,
    "ratio": 6,
    "most sent": 10,
    "formula": 10,
}


def title() -> str:
    return _line(list(_COLUMNS))


def line(row: Row) -> str:
    """Bytes sent are those of the rank that sends most."""
    worst = int(np.argmax(row["sent_bytes"]))
    return _line(
        [
            *(str(row[name]) for name in ("collective", "topology", "bytes", "ranks")),
            f"{row['seconds_median']:.6f}",
            f"{row['library_seconds_median']:.6f}",
            f"{row['of_library']:.2f}",
            *(str(row[name][worst]) for name in ("sent_bytes", "predicted_sent_bytes")),
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True))
