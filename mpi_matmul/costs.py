"""What a product costs by formula, before anything is done: memory, bytes, messages and seconds of a
strategy.

**Bytes.** On a mesh of pm x pk x pn ranks every item of a is needed by pn ranks, every item of b by pm, and
every item of c is the sum of pk. Whatever the kernel, (pn - 1) m k + (pm - 1) k n + (pk - 1) m n items move:
inside the product what is sharded, before it the copies of what is replicated. Costs are counted from one
copy of a and of b, spread over the ranks: a strategy that wants copies pays for them.

**The bound.** A rank that makes mnk / p of the products must touch x items of a, y of b and z of c with
x y z >= (mnk / p)^2 (Loomis-Whitney), and together the ranks must touch each item. With the sizes of the
three matrices in descending order that is at least, for dimensions d1 >= d2 >= d3,

    d1 d2 / p + d1 d3 / p + d2 d3        while p <= d1 / d2
    d1 d2 / p + 2 d3 sqrt(d1 d2 / p)     while p <= d1 d2 / d3^2
    3 (mnk / p)^(2/3)                    beyond

items on some rank, own ones included (Al Daas, Ballard, Grigori, Kumar, Rouse, Tight Memory-Independent
Parallel Matrix Multiplication Communication Lower Bounds, SPAA 2022, pages 445-448; the last line is also
COSMA's, Kwasniewski et al., SC 2019). With memory for S items, fewer than that, it is 2 mnk / (p
sqrt(S)) + S (COSMA; up to constants Irony, Toledo, Tiskin, J. Parallel Distrib. Comput. 64(9), 2004, pages
1017-1026).

**Seconds.** Products take the operations of the largest brick at the speed of a rank, more if k is cut into
shorter parts than BLAS itself would take, as each part reads and writes c. Messages take their bytes at the
speed of the hosts (those between hosts at that of the network, where it is known which ranks are on which),
and their number at the latency of one. Both go on at the same time, but copies come before, and after all has
come, what came last is multiplied. Where sums of c travel, they do so between the first piece of the products
and the last one, and all of b comes during the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np

from mpi_matmul.kernels import KERNELS, Strategy
from mpi_matmul.kernels.fsdp_tp import mesh_of_nodes
from mpi_matmul.machine import INSIDE_A_HOST, Machine
from mpi_matmul.mesh import AXES, Mesh
from mpi_matmul.operands import Problem, operations
from mpi_matmul.report import size
from mpi_matmul.tiles import traits_of
from mpi_matmul.work import Formula, Formulas, Outline

TEMPORARY_BYTES = 32 << 20
# To read and write an item of c takes as long as so many multiplications (measured: 5 to 22, with OpenBLAS on
# cores of 80 GFLOP/s). BLAS does so itself once for about GOOD_ROWS of b.
PASS, GOOD_ROWS = 16, 256
LOOKED_AT = 1000  # so many ranks one by one
AS_GOOD = 1.05  # seconds that differ by less than the model can know are equal


@dataclass(frozen=True)
class Cost:
    """One strategy for one product, by formula."""

    strategy: Strategy
    problem: Problem
    machine: Machine
    hosts: int = 1
    placed: bool = True  # hosts are filled up in rank order; else nobody knows who is near to whom

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @cached_property
    def sent_bytes(self) -> int:
        """Inside the product, all ranks together."""
        return sum(moved for moved, copied, _ in self._moves if not copied)

    @cached_property
    def copied_bytes(self) -> int:
        """Before it, to make the copies of what is replicated out of one copy spread over the ranks."""
        return sum(moved for moved, copied, _ in self._moves if copied)

    @cached_property
    def memory_bytes(self) -> int:
        """Of the rank that needs most, its shards and what is on its way (without the baseline)."""
        kinds = (
            _first_of_each_length(*axis) for axis in zip(self.problem.sizes, self.mesh.shape, strict=True)
        )
        return max(self._memory_at(*place) for place in product(*kinds))

    @cached_property
    def memory_about(self) -> int:
        """Of the rank that owns most: little less, and sooner known."""
        return self._memory_at(0, 0, 0)

    @cached_property
    def most_sent_bytes(self) -> int:
        """Inside the product, by the rank that sends most."""
        of_mesh, of_rank = self._formulas.most_bytes, self._formulas.sent_bytes
        return of_mesh(self.problem, self.mesh) if of_mesh else self._most(of_rank)

    @cached_property
    def sent_messages(self) -> int:
        """Inside the product, by the rank that sends most."""
        of_mesh, of_rank = self._formulas.most_messages, self._formulas.sent_messages
        return of_mesh(self.problem, self.mesh) if of_mesh else self._most(of_rank)

    @cached_property
    def touched_items(self) -> float:
        """Items of a, b and c that a rank touches on average: its own, what comes, sums that it passes on."""
        (m, k, n), mesh = self.problem.sizes, self.mesh
        return (m * k * mesh.n + k * n * mesh.m + m * n * mesh.k) / self.ranks

    @cached_property
    def seconds(self) -> float:
        """From one copy of a and b, spread over the ranks, to c."""
        return self.copy_seconds + self.multiply_seconds

    @property
    def copy_seconds(self) -> float:
        return sum(self._seconds_of(moved, axis) for moved, copied, axis in self._moves if copied)

    @cached_property
    def multiply_seconds(self) -> float:
        """Inside the product."""
        of_a, of_b, of_c = (
            0 if copied else self._seconds_of(moved, axis) for moved, copied, axis in self._moves
        )
        products, piece = self._compute_seconds(), 1 / self._outline.pieces
        waiting = self._outline.messages * self.machine.latency
        if not self._outline.gathers_b:
            return max(products, of_a + of_b + products * piece) + waiting
        at_first = max(products * piece, of_b + of_a * piece)
        if self.mesh.k == 1:
            return at_first + max(products, of_a) * (1 - piece) + waiting
        between = max(products * (1 - 2 * piece), of_a * (1 - piece) + of_c)
        return at_first + between + products * piece + waiting

    @cached_property
    def _outline(self) -> Outline:
        if self._formulas.outline is not None:
            return self._formulas.outline(self.problem, self.mesh)
        return Outline(self.strategy.sent_messages(self.problem, self.mesh.rank_at((0, 0, 0))))

    @property
    def _formulas(self) -> Formulas:
        return self.strategy.kernel.costs

    def _most(self, formula: Formula) -> int:
        """By the rank that sends most; of a large mesh, of those at its edges."""
        ranks: Iterable[int] = range(self.ranks)
        if self.ranks > LOOKED_AT:
            places = [sorted({0, max(size - 2, 0), size - 1}) for size in self.mesh.shape]
            ranks = (self.mesh.rank_at((i, j, k)) for i, j, k in product(*places))
        return max(formula(self.problem, self.mesh, rank) for rank in ranks)

    def _seconds_of(self, moved: int, axis: str) -> float:
        """For bytes that go round the lines along ``axis``, all at once: between hosts, or inside them."""
        if self.hosts == 1:
            return moved / self.machine.bandwidth
        between = moved * self._crossing(axis)
        return max(between / self.machine.bandwidth, (moved - between) / INSIDE_A_HOST[1]) / self.hosts

    def _crossing(self, axis: str) -> float:
        """The share of the hops round a line along ``axis`` that go to another host."""
        if not self.placed:
            return 1.0
        along, on_a_host = self.mesh.along(axis), self.ranks / self.hosts
        hop = math.prod(self.mesh.shape[AXES.index(axis) + 1 :])
        forward, back = min(1, hop / on_a_host), min(1, (along - 1) * hop / on_a_host)
        return ((along - 1) * forward + back) / along

    @cached_property
    def _moves(self) -> list[tuple[int, bool, str]]:
        """For a, b and c: bytes that move, whether as copies before the product, and along which axis."""
        (m, k, n), mesh, kernel = self.problem.sizes, self.mesh, self.strategy.kernel
        of_a, of_b, of_c, _ = self._traits
        a_copied = "n" not in kernel.a.rows + kernel.a.columns
        b_copied = "m" not in kernel.b.rows + kernel.b.columns
        return [
            ((mesh.n - 1) * m * k * of_a, a_copied, "n"),
            ((mesh.m - 1) * k * n * of_b, b_copied, "m"),
            ((mesh.k - 1) * m * n * of_c, False, "k"),
        ]

    @property
    def _traits(self) -> tuple[int, int, int, bool]:
        return traits_of(self.problem.a_dtype, self.problem.b_dtype, self.problem.dtype)

    def _compute_seconds(self) -> float:
        """Of the largest brick, by one rank."""
        rows, inner, columns = map(_most, self.problem.sizes, self.mesh.shape)
        as_if = inner + PASS * max(self._outline.passes - inner / GOOD_ROWS, 0)  # long ones BLAS cuts itself
        of_rank = self.machine.flops * self.hosts / self.ranks
        return _float64_operations(self.problem.dtype) * rows * as_if * columns / of_rank

    def _memory_at(self, *place: int) -> int:
        i, l, j = place  # noqa: E741
        return rank_memory(self.strategy, self.problem, self.mesh.rank_at((i, l, j)))


def _first_of_each_length(length: int, parts: int) -> list[int]:
    """The first of the owners of longer blocks, and of shorter ones: later ones own no more of anything."""
    return [0, length % parts] if length % parts else [0]


def _most(length: int, parts: int) -> int:
    return -(-length // parts)


@lru_cache(16)
def _float64_operations(dtype: str) -> float:
    """So many of float64 take as long as one multiplication and addition of ``dtype``."""
    return operations(Problem(1, 1, 1, dtype, dtype, dtype, (1, 1))) / speed_of(np.dtype(dtype))


def speed_of(dtype: np.dtype[np.generic]) -> float:
    """How fast a type is multiplied, beside float64: BLAS knows four types, numpy's own loops are slow."""
    return {"f": 2.0, "d": 1.0, "F": 2.0, "D": 1.0}.get(dtype.char, 0.02)


# ---- the bound ----


def least_touched_items(m: int, k: int, n: int, ranks: int, memory_items: float = math.inf) -> float:
    """So many items of a, b and c some rank must touch, see above; 0 for an empty product."""
    large, middle, small = sorted((m, k, n), reverse=True)
    work = m * k * n / ranks
    if not work:
        return 0.0
    if ranks <= large / middle:
        least = large * (middle + small) / ranks + middle * small
    elif ranks <= large * middle / small**2:
        least = large * middle / ranks + 2 * small * math.sqrt(large * middle / ranks)
    else:
        least = 3 * work ** (2 / 3)
    if memory_items < work ** (2 / 3):
        least = max(least, 2 * work / math.sqrt(memory_items) + memory_items)
    return least


# ---- choosing ----


@dataclass(frozen=True)
class Ranks:
    """The ranks that are there: how many, and on which hosts (in rank order, where that is known)."""

    number: int
    hosts: int = 1
    node_of: tuple[str, ...] = ()
    placed: bool = True

    @property
    def of_a_node(self) -> int:
        """Ranks of a node, all nodes alike, where hosts are filled up one by one: see `mesh_of_nodes`."""
        on_a_host = -(-self.number // self.hosts)
        on_the_last = self.number - on_a_host * (self.hosts - 1)
        return math.gcd(on_a_host, on_the_last) if on_the_last > 0 else 1

    @classmethod
    def on(cls, node_of: Sequence[str]) -> Ranks:
        changes = sum(one != other for one, other in pairwise(node_of))
        hosts = len(set(node_of))
        return cls(len(node_of), hosts, tuple(node_of), placed=changes == hosts - 1)


def strategies(name: str, ranks: Ranks, mesh: Sequence[int] = ()) -> list[Strategy]:
    """All strategies of one name ("auto": of any name) on these ranks, or those on ``mesh``.

    ``mesh`` is r x s: of fsdp_tp nodes x ranks of a node, of summa the grid; or pm x pk x pn. ValueError when
    it does not suit.
    """
    if name == "auto":
        return [strategy for each in KERNELS for strategy in strategies(each, ranks)]
    kernel = KERNELS[name]
    found = list(kernel.meshes(ranks.number))
    if mesh:
        wanted = {(*mesh,)} if len(mesh) == 3 else {(mesh[0], 1, mesh[1])}
        if len(mesh) == 2 and name in ("summa", "grid3d"):
            wanted |= {(mesh[0], mesh[1], 1), (1, mesh[0], mesh[1])}
        # What was asked for by name need not be what would be chosen: any mesh of the right kind will do.
        found = [each for each in _all_of(name, ranks.number) if each.shape in wanted]
        if not found:
            shape = "x".join(map(str, mesh))
            raise ValueError(f"--mesh {shape} does not suit {name} on {ranks.number} ranks")
    elif name == "fsdp_tp" and ranks.node_of:
        found = [mesh_of_nodes(ranks.node_of)]
    elif name == "fsdp_tp":
        found = [Mesh(ranks.number // ranks.of_a_node, 1, ranks.of_a_node)]
    return [kernel.on(each) for each in found]


def _all_of(name: str, number: int) -> Iterable[Mesh]:
    """Also the grids that summa itself would not take, such as a line."""
    meshes = KERNELS["grid3d" if name == "summa" else name].meshes(number)
    return (mesh for mesh in meshes if name != "summa" or 1 in mesh.shape)


def costs_of(
    names: Iterable[str], problem: Problem, ranks: Ranks, machine: Machine, mesh: Sequence[int] = ()
) -> list[Cost]:
    """The costs of all strategies of these names."""
    return [
        Cost(strategy, problem, machine, ranks.hosts, ranks.placed)
        for name in names
        for strategy in strategies(name, ranks, mesh)
    ]


def cheapest(costs: Sequence[Cost], fits: Callable[[Cost], bool] = lambda cost: True) -> Cost | None:
    """The first that fits, of `in_order` of those that are no faster than the fastest that fits. None when
    nothing fits."""
    by_seconds = sorted(costs, key=lambda cost: cost.seconds)
    first = next((number for number, cost in enumerate(by_seconds) if fits(cost)), len(costs))
    return next(filter(fits, in_order(by_seconds[first:])), None)


def in_order(costs: Iterable[Cost]) -> list[Cost]:
    """Those that are predicted to take fewer seconds first; of those that are as good as the fastest, those
    with fewer bytes, then the simpler kernel."""
    order = {name: number for number, name in enumerate(KERNELS)}
    by_seconds = sorted(costs, key=lambda cost: cost.seconds)
    as_good = [cost for cost in by_seconds if cost.seconds <= AS_GOOD * by_seconds[0].seconds]
    others = by_seconds[len(as_good) :]

    def key(cost: Cost) -> tuple[float, ...]:
        return cost.sent_bytes + cost.copied_bytes, order[cost.strategy.name], cost.seconds

    return sorted(as_good, key=key) + others


# ---- memory ----


def sent_bytes(strategy: Strategy, problem: Problem) -> list[int]:
    """Bytes that each rank sends inside the product."""
    return [strategy.sent_bytes(problem, rank) for rank in range(strategy.mesh.size)]


def memory_bytes(strategy: Strategy, problem: Problem) -> list[int]:
    """The most memory that each rank needs for its shards and for blocks on their way (no baseline)."""
    return [rank_memory(strategy, problem, rank) for rank in range(strategy.mesh.size)]


def rank_memory(strategy: Strategy, problem: Problem, rank: int) -> int:
    """The same for one rank."""
    return shard_bytes(strategy, problem, rank) + strategy.extra_bytes(problem, rank)


def shard_bytes(strategy: Strategy, problem: Problem, rank: int) -> int:
    """The shards of a, b and c of one rank."""
    matrices = (
        (strategy.a, problem.a_shape, problem.a_dtype),
        (strategy.b, problem.b_shape, problem.b_dtype),
        (strategy.c, problem.c_shape, problem.dtype),
    )
    return sum(
        math.prod(distribution.shard_shape(shape, rank)) * np.dtype(dtype).itemsize
        for distribution, shape, dtype in matrices
    )


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, what it uses before any work, and what the host has left, if known."""

    host: str
    baseline_bytes: int
    available_bytes: int | None


def refuse_beyond(
    limit: int | None, strategy: Strategy, problem: Problem, check: str, places: list[Place]
) -> None:
    """ValueError with the amounts when a rank needs more than ``limit`` bytes, or a host more than it has.

    Besides shards and blocks a rank needs room for panels that are read, written and checked; rank 0 needs
    the whole a, b and c for an exact check. ``places`` are in rank order.
    """
    needed = [shards + min(TEMPORARY_BYTES, shards) for shards in memory_bytes(strategy, problem)]
    needed[0] += problem.nbytes if check == "exact" else 0
    totals = [more + place.baseline_bytes for more, place in zip(needed, places, strict=True)]
    rank = max(range(len(places)), key=totals.__getitem__)
    if limit is not None and totals[rank] > limit:
        raise ValueError(
            f"{strategy.name} needs {size(totals[rank])} on rank {rank}, "
            f"{size(totals[rank] - limit)} more than --max-memory {size(limit)}"
        )
    for place in places:
        on_host = sum(more for more, other in zip(needed, places, strict=True) if other.host == place.host)
        if place.available_bytes is not None and on_host > place.available_bytes:
            raise ValueError(
                f"{strategy.name} needs {size(on_host)} of memory on {place.host}, "
                f"{size(on_host - place.available_bytes)} more than there is ({size(place.available_bytes)})"
            )
