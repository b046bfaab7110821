"""What a product costs by formula: bytes sent and memory of each rank, before anything is done."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpi_matmul.kernels import Kernel
from mpi_matmul.operands import Problem
from mpi_matmul.report import size

TEMPORARY_BYTES = 32 << 20


def sent_bytes(kernel: Kernel, problem: Problem, world_size: int) -> list[int]:
    """Bytes that each rank sends inside the product."""
    itemsize = np.dtype(problem.b_dtype).itemsize
    sizes = (problem.m, problem.k, problem.n, itemsize, world_size)
    return [kernel.sent_bytes(*sizes, rank) for rank in range(world_size)]


def memory_bytes(kernel: Kernel, problem: Problem, world_size: int) -> list[int]:
    """The most memory that each rank needs for its shards and for blocks on their way (no baseline)."""
    itemsize = np.dtype(problem.b_dtype).itemsize
    extra = kernel.extra_bytes(problem.m, problem.k, problem.n, itemsize, world_size)
    return [shard_bytes(kernel, problem, world_size, rank) + extra for rank in range(world_size)]


def shard_bytes(kernel: Kernel, problem: Problem, world_size: int, rank: int) -> int:
    """The shards of a, b and c of one rank."""
    matrices = (
        (kernel.a, problem.a_shape, problem.a_dtype),
        (kernel.b, problem.b_shape, problem.b_dtype),
        (kernel.c, problem.c_shape, problem.dtype),
    )
    return sum(
        math.prod(placement.shard_shape(shape, world_size, rank)) * np.dtype(dtype).itemsize
        for placement, shape, dtype in matrices
    )


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, what it uses before any work, and what the host has left, if known."""

    host: str
    baseline_bytes: int
    available_bytes: int | None


def refuse_beyond(
    limit: int | None, kernel: Kernel, problem: Problem, check: str, places: list[Place]
) -> None:
    """ValueError with the amounts when a rank needs more than ``limit`` bytes, or a host more than it has.

    Besides shards and blocks a rank needs room for panels that are read, written and checked; rank 0 needs
    the whole a, b and c for an exact check. ``places`` are in rank order.
    """
    needed = [shards + min(TEMPORARY_BYTES, shards) for shards in memory_bytes(kernel, problem, len(places))]
    needed[0] += problem.nbytes if check == "exact" else 0
    totals = [more + place.baseline_bytes for more, place in zip(needed, places, strict=True)]
    rank = max(range(len(places)), key=totals.__getitem__)
    if limit is not None and totals[rank] > limit:
        raise ValueError(
            f"{kernel.name} needs {size(totals[rank])} on rank {rank}, "
            f"{size(totals[rank] - limit)} more than --max-memory {size(limit)}"
        )
    for place in places:
        on_host = sum(more for more, other in zip(needed, places, strict=True) if other.host == place.host)
        if place.available_bytes is not None and on_host > place.available_bytes:
            raise ValueError(
                f"{kernel.name} needs {size(on_host)} of memory on {place.host}, "
                f"{size(on_host - place.available_bytes)} more than there is ({size(place.available_bytes)})"
            )
