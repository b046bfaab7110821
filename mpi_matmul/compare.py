"""bench --compare: all strategies for a product in turn, and how near the choice of "auto" comes to the best.

Seconds are those of the slowest rank, from one copy of a and of b spread over the ranks: the copies that a
strategy wants, and the product. Round after round every strategy has its turn, in changing order, so that a
machine whose speed changes does the same to all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mpi_matmul.comm.collectives import gather_facts
from mpi_matmul.layout import Array
from mpi_matmul.measure import (
    Case,
    Row,
    World,
    copied,
    make_copies,
    shards_of,
    stop_if,
    together,
    wrong_product,
)
from mpi_matmul.options import CHECK_FAILED

TITLES = ("strategy", "mesh", "m x k x n", "dtype", "ranks", "seconds", "predicted", "moved MB", "of best")
WIDTHS = (9, 8, 17, 10, 5, 9, 9, 9, 8)


def compare(world: World, cases: Sequence[Case], repeat: int) -> list[Row]:
    """All cases of one product: their rows, on rank 0 (nothing elsewhere). Stopped if a product is wrong."""
    mailbox = world.mailbox
    shards = [shards_of(mailbox, case) for case in cases]
    for case, own in zip(cases, shards, strict=True):
        case.strategy.kernel.multiply(case.work(mailbox), *own)
        wrong = wrong_product(mailbox, case, own[2])
        stop_if(mailbox, f"{case}: wrong product: {wrong}" if wrong else "", CHECK_FAILED)
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(repeat + 1):
        for number in range(len(cases)) if turn % 2 else reversed(range(len(cases))):
            times[number].append(_turn(world, cases[number], shards[number]))
    of_ranks = gather_facts(mailbox, [of_case[1:] for of_case in times], 0)  # the first warmed up
    return [] if of_ranks is None else _rows(world, cases, of_ranks)


def _turn(world: World, case: Case, shards: tuple[Array, Array, Array]) -> float:
    mailbox = world.mailbox
    copies = [line for line in copied(case, mailbox, shards) if line[0].world_size > 1]
    seconds = together(mailbox, lambda: make_copies(copies)) if copies else 0.0
    work = case.work(mailbox)
    return seconds + together(mailbox, lambda: case.strategy.kernel.multiply(work, *shards))


def _rows(world: World, cases: Sequence[Case], of_ranks: list[list[list[float]]]) -> list[Row]:
    medians = [
        statistics.median(map(max, zip(*(ranks[number] for ranks in of_ranks), strict=True)))
        for number in range(len(cases))
    ]
    return [
        {
            "strategy": case.strategy.name,
            "mesh": str(case.strategy.mesh),
            "auto": case.asked == "auto",
            "shape": list(case.problem.sizes),
            "dtype": str(case.a.dtype),
            "ranks": world.mailbox.world_size,
            "seconds": seconds,
            "predicted_seconds": (cost := world.cost(case)).seconds,
            "moved_bytes": cost.sent_bytes + cost.copied_bytes,
            "of_best": seconds / min(medians),
        }
        for case, seconds in zip(cases, medians, strict=True)
    ]


def cells(row: Row) -> tuple[str, ...]:
    """A row, for people; auto's choice has a star."""
    return (
        row["strategy"] + "*" * row["auto"],
        row["mesh"],
        "x".join(map(str, row["shape"])),
        row["dtype"],
        str(row["ranks"]),
        f"{row['seconds']:.5f}",
        f"{row['predicted_seconds']:.5f}",
        f"{row['moved_bytes'] / 1e6:.1f}",
        f"{row['of_best']:.2f}",
    )
