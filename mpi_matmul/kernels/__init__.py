"""The one table of kernels: name -> where a, b and c lie on which meshes, what it costs, and the function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

import mpi_matmul.kernels.data_parallel as data_parallel
import mpi_matmul.kernels.fsdp as fsdp
import mpi_matmul.kernels.grid3d as grid3d
import mpi_matmul.kernels.summa as summa
import mpi_matmul.kernels.tp_column as tp_column
import mpi_matmul.kernels.tp_row as tp_row
from mpi_matmul import tile_costs
from mpi_matmul.accumulate import can_be_cut
from mpi_matmul.layout import COLUMNS, REPLICATED, ROWS, Array, Distribution, Placement
from mpi_matmul.mesh import Mesh, all_meshes, divisors
from mpi_matmul.operands import Problem
from mpi_matmul.work import Formulas, Work

Multiply = Callable[[Work, Array, Array, Array], None]


@dataclass(frozen=True)
class Kernel:
    """``multiply(work, a_shard, b_shard, c_shard)`` fills this rank's ``c_shard``; see `Work`.

    ``meshes(p)`` are all meshes of p ranks on which it is this kernel. A kernel that ``streams`` computes c
    row by row of a and sends nothing itself: rows of a may still arrive, and rows of c leave, while it runs.
    """

    name: str
    a: Placement
    b: Placement
    c: Placement
    meshes: Callable[[int], Iterable[Mesh]]
    multiply: Multiply
    costs: Formulas = Formulas()  # noqa: RUF009 (frozen)
    streams: bool = False

    def on(self, mesh: Mesh) -> Strategy:
        """This kernel on one mesh."""
        return Strategy(self, mesh)


@dataclass(frozen=True)
class Strategy:
    """How to multiply: a kernel on the ranks of a mesh."""

    kernel: Kernel
    mesh: Mesh

    def __str__(self) -> str:
        return f"{self.kernel.name} {self.mesh}"

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def a(self) -> Distribution:
        return self.kernel.a.on(self.mesh)

    @property
    def b(self) -> Distribution:
        return self.kernel.b.on(self.mesh)

    @property
    def c(self) -> Distribution:
        return self.kernel.c.on(self.mesh)

    def sent_bytes(self, problem: Problem, rank: int) -> int:
        return self.kernel.costs.sent_bytes(problem, self.mesh, rank)

    def sent_messages(self, problem: Problem, rank: int) -> int:
        return self.kernel.costs.sent_messages(problem, self.mesh, rank)

    def extra_bytes(self, problem: Problem, rank: int) -> int:
        return self.kernel.costs.extra_bytes(problem, self.mesh, rank)


def on_grid(work: Work, a_shard: Array, b_shard: Array, c_shard: Array) -> None:
    """c stays where k is not split (and may be added up in parts); else its sums travel."""
    stays = work.mesh.k == 1 and can_be_cut(np.dtype(work.problem.dtype))
    (summa.summa if stays else grid3d.grid3d)(work, a_shard, b_shard, c_shard)


def line_of(axis: str) -> Callable[[int], list[Mesh]]:
    """All ranks on one line."""
    return lambda size: [mesh for mesh in all_meshes(size) if mesh.along(axis) == size]


def grids(size: int) -> list[Mesh]:
    """c stays, or a, or b: that one is in blocks, neither dimension in one piece if there is a choice."""
    flat = [(r, size // r) for r in divisors(size)]
    flat = [pair for pair in flat if 1 not in pair] or flat
    shapes = [shape for r, s in flat for shape in ((r, 1, s), (r, s, 1), (1, r, s))]
    return [Mesh(*shape) for shape in dict.fromkeys(shapes)]


def nodes(size: int) -> list[Mesh]:
    """Every number of nodes."""
    return [Mesh(size // t, 1, t) for t in divisors(size)]


BLOCKS_OF_A = Placement("blocks", rows=("m",), columns=("k", "n"))
BLOCKS_OF_B = Placement("blocks", rows=("k", "m"), columns=("n",))
BLOCKS_OF_C = Placement("blocks", rows=("m", "k"), columns=("n",))
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("dp", ROWS, REPLICATED, ROWS, line_of("m"), data_parallel.data_parallel, streams=True),
        Kernel("fsdp", ROWS, COLUMNS, ROWS, line_of("m"), fsdp.fsdp, fsdp.FORMULAS),
        Kernel(
            "tp_column",
            a=REPLICATED,
            b=Placement("columns", columns=("n",)),
            c=Placement("columns", columns=("n",)),
            meshes=line_of("n"),
            multiply=tp_column.tp_column,
        ),
        Kernel(
            "tp_row",
            a=Placement("columns", columns=("k",)),
            b=Placement("rows", rows=("k",)),
            c=Placement("rows", rows=("k",)),
            meshes=line_of("k"),
            multiply=tp_row.tp_row,
            costs=tile_costs.FORMULAS,
        ),
        Kernel(
            "fsdp_tp",
            a=Placement("rows, copies in a node", rows=("m",)),
            b=Placement("columns", columns=("n", "m")),
            c=Placement("blocks", rows=("m",), columns=("n",)),
            meshes=nodes,
            multiply=fsdp.fsdp,
            costs=fsdp.FORMULAS,
        ),
        Kernel("summa", BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_C, grids, on_grid, tile_costs.FORMULAS),
        Kernel("grid3d", BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_C, all_meshes, on_grid, tile_costs.FORMULAS),
    )
}


def kernel_named(name: str) -> Kernel:
    """The kernel of that name; ValueError that lists the names when there is none."""
    if name not in KERNELS:
        raise ValueError(f"strategy is {name!r}, expected one of {', '.join(KERNELS)}")
    return KERNELS[name]
