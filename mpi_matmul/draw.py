"""Draw the kernels: who owns what of a, b and c, and what moves to and from one rank.

python -m mpi_matmul.draw FOLDER

writes NAME.svg for every kernel of the table. b stands above c and a to its left, so that each number of c is
where a row of a and a column of b meet. Nothing is drawn that the table does not say: who owns what are its
placements on a mesh, and what moves follows from them. A rank needs what its line along n owns of a, and what
its line along m owns of b; its line along k adds up c. What a rank there owns that is not one's own moves.

>>> moves(example("fsdp"), PROBLEM, 1)[0]
Move(matrix='b', other=0, part=(0, 7, 0, 3))
>>> [(move.matrix, move.other) for move in moves(example("grid3d"), PROBLEM, 1)]
[('a', 0), ('b', 5), ('c', 3)]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpi_matmul.kernels import KERNELS, Strategy
from mpi_matmul.layout import Distribution, Shape
from mpi_matmul.operands import Problem
from mpi_matmul.svg import CHIP_RADIUS, Box, Svg

PROBLEM = Problem(10, 7, 9, "float64", "float64", "float64", (10, 9))  # nothing divides
RANKS = {"summa": 6, "grid3d": 8}
USUAL_RANKS = 4
RANK = 1
COLOURS = ("#f0a742", "#6bb8ee", "#5cc19a", "#f2e36b", "#a5a8f5", "#f28b72", "#e29bc9", "#b9bec5")
LINES = {"a": "n", "b": "m", "c": "k"}  # along which line of the mesh each is shared or added up

UNIT = 18
HEADING = 92
GAP = 28
MARGIN = 24
TOP = 154
PITCH = 22
OUTSIDE = 36  # from a matrix to the disc of a rank that sends or gets a part of it

Part = tuple[int, int, int, int]  # first and last row, first and last column


@dataclass(frozen=True)
class Move:
    """A part of a or b that arrives from its owner ``other``, or sums of c that leave for theirs."""

    matrix: str
    other: int
    part: Part


def example(name: str) -> Strategy:
    """A kernel on the mesh on which it is drawn: of some ranks that which has no long line."""
    kernel = KERNELS[name]
    return kernel.on(min(kernel.meshes(RANKS.get(name, USUAL_RANKS)), key=lambda mesh: max(mesh.shape)))


def matrices(strategy: Strategy, problem: Problem) -> dict[str, tuple[Distribution, Shape]]:
    """a, b and c: where each lies, and its shape."""
    return {
        "a": (strategy.a, problem.a_shape),
        "b": (strategy.b, problem.b_shape),
        "c": (strategy.c, problem.c_shape),
    }


def part_of(distribution: Distribution, shape: Shape, rank: int) -> Part:
    """What ``rank`` owns."""
    rows, columns = distribution.slices(shape, rank)
    return rows.start, rows.stop, columns.start, columns.stop


def owners(distribution: Distribution, shape: Shape) -> dict[Part, list[int]]:
    """Each part with the ranks that own it; more than one if they have copies."""
    found: dict[Part, list[int]] = {}
    for rank in range(distribution.mesh.size):
        found.setdefault(part_of(distribution, shape, rank), []).append(rank)
    return found


def partners(distribution: Distribution, axis: str, rank: int) -> list[int]:
    """The others on the line along ``axis``, if what they own differs from what ``rank`` owns."""
    if axis not in distribution.placement.rows + distribution.placement.columns:
        return []
    return [other for other in distribution.mesh.line(axis, rank) if other != rank]


def moves(strategy: Strategy, problem: Problem, rank: int) -> list[Move]:
    """What arrives at ``rank`` of a and b, and what it adds to the sums of others."""
    return [
        Move(name, other, part_of(distribution, shape, other))
        for name, (distribution, shape) in matrices(strategy, problem).items()
        for other in partners(distribution, LINES[name], rank)
    ]


# ---- the picture ----


def draw(strategy: Strategy, problem: Problem, rank: int) -> str:
    """The picture of one kernel, as SVG."""
    panel = (problem.k + problem.n) * UNIT + GAP
    low = TOP + (problem.k + problem.m) * UNIT + GAP
    second = MARGIN + panel + 76
    title = f"{strategy.name} on a mesh of {_times(strategy.mesh.shape)} ranks"
    svg = Svg(second + panel + 108 + MARGIN, low + 164, title)
    svg.box(Box(0.5, 0.5, svg.width - 1, svg.height - 1), "card", corner=8)
    svg.text(MARGIN, 36, title, "title")
    shapes = f"a ({_times(problem.a_shape)}) by b ({_times(problem.b_shape)}), {problem.dtype}"
    svg.text(MARGIN, 57, f"{shapes}; the mesh is {_times('mkn')}")
    svg.text(MARGIN, HEADING, "Who owns what", "heading")
    _draw_mesh(svg, strategy)
    _draw_owners(svg, strategy, problem)
    _draw_moves(svg, strategy, problem, rank, second)
    for number, line in enumerate(notes(strategy, problem, rank)):
        svg.text(MARGIN, low + 50 + 20 * number, line)
    _draw_legend(svg, strategy, problem, rank, low + 143)
    return str(svg)


def _places(problem: Problem, x: float) -> dict[str, Box]:
    """Where a, b and c stand, from ``x`` on."""
    right, below = x + problem.k * UNIT + GAP, TOP + problem.k * UNIT + GAP
    return {
        "a": Box(x, below, problem.k * UNIT, problem.m * UNIT),
        "b": Box(right, TOP, problem.n * UNIT, problem.k * UNIT),
        "c": Box(right, below, problem.n * UNIT, problem.m * UNIT),
    }


def _within(matrix: Box, part: Part) -> Box:
    first, last, left, right = (UNIT * edge for edge in part)
    return Box(matrix.x + left, matrix.y + first, right - left, last - first)


def _colours(ranks: Iterable[int]) -> list[str]:
    return [COLOURS[rank % len(COLOURS)] for rank in ranks]


def _draw_names(svg: Svg, places: dict[str, Box]) -> None:
    for name, box in places.items():
        if name == "b":
            svg.text(box.x - 14, box.middle[1] + 5, name, "name middle")
        else:
            svg.text(box.middle[0], box.bottom + 19, name, "name middle")


def _draw_mesh(svg: Svg, strategy: Strategy) -> None:
    """The ranks as they stand: m downwards, n to the right, and k in layers beside each other."""
    mesh, layer = strategy.mesh, strategy.mesh.n * PITCH + 12
    x, y = MARGIN + (40 if mesh.m > 1 else 10), TOP + 26
    for rank in range(mesh.size):
        i, l, j = mesh.coordinates(rank)  # noqa: E741
        svg.chip(x + l * layer + j * PITCH, y + i * PITCH, str(rank), *_colours([rank]))
    if mesh.m > 1:
        svg.text(MARGIN, y + (mesh.m - 1) * PITCH / 2 + 4, "m ↓")
    if mesh.n > 1:
        svg.text(x - CHIP_RADIUS, y - 17, "n →")
    if mesh.k > 1:
        svg.text(x - CHIP_RADIUS, y + (mesh.m - 1) * PITCH + 27, "k →")


def _draw_owners(svg: Svg, strategy: Strategy, problem: Problem) -> None:
    places = _places(problem, MARGIN)
    for name, (distribution, shape) in matrices(strategy, problem).items():
        parts = owners(distribution, shape).items()
        for part, ranks in parts:
            svg.box(_within(places[name], part), "part", _colours(ranks))
        svg.items(places[name], UNIT)
        for part, ranks in parts:
            svg.label(_within(places[name], part), " ".join(map(str, ranks)))
    _draw_names(svg, places)


def _draw_moves(svg: Svg, strategy: Strategy, problem: Problem, rank: int, x: float) -> None:
    """What ``rank`` has to do with: its own parts, those that arrive, and those that it adds to."""
    places, found = _places(problem, x), moves(strategy, problem, rank)
    heading = f"What rank {rank} multiplies" + (", and what moves" if found else "; nothing moves")
    svg.text(x, HEADING, heading, "heading")
    for name, (distribution, shape) in matrices(strategy, problem).items():
        own, matrix = part_of(distribution, shape, rank), places[name]
        others = [move for move in found if move.matrix == name]
        svg.box(matrix, "empty")
        for part, owner in [(own, rank), *((move.part, move.other) for move in others)]:
            svg.box(_within(matrix, part), "part", _colours([owner]))
        svg.items(matrix, UNIT)
        svg.box(_within(matrix, own), "own")
        svg.label(_within(matrix, own), str(rank))
        if name == "c":
            _draw_sums(svg, matrix, own, others, rank)
        else:
            _draw_arrivals(svg, matrix, own, others)
    _draw_names(svg, places)


def _draw_arrivals(svg: Svg, matrix: Box, own: Part, arriving: Sequence[Move]) -> None:
    """Arrows from the owners to the parts: from above if these are side by side, else from the right."""
    from_above = any(move.part[2:] != own[2:] for move in arriving)
    for move in arriving:
        box, colours = _within(matrix, move.part), _colours([move.other])
        x, y = box.middle
        svg.label(box, str(move.other))
        if from_above:
            svg.arrow((x, matrix.y - OUTSIDE + CHIP_RADIUS + 2), (x, box.y + 6), colours)
            svg.chip(x, matrix.y - OUTSIDE, str(move.other), *colours)
        else:
            svg.arrow((matrix.right + OUTSIDE - CHIP_RADIUS - 2, y), (box.right - 6, y), colours)
            svg.chip(matrix.right + OUTSIDE, y, str(move.other), *colours)


def _draw_sums(svg: Svg, matrix: Box, own: Part, leaving: Sequence[Move], rank: int) -> None:
    """Arrows to the owners of the parts of c that ``rank`` adds to, and from them to its own."""
    inner, outer = matrix.right - 6, matrix.right + OUTSIDE - CHIP_RADIUS - 2
    for move in leaving:
        box = _within(matrix, move.part)
        y = box.middle[1]
        svg.label(box, str(move.other))
        svg.arrow((box.right - 6, y), (outer, y), _colours([rank]))
        svg.chip(matrix.right + OUTSIDE, y, str(move.other), *_colours([move.other]))
    if leaving:
        others, y = [move.other for move in leaving], _within(matrix, own).middle[1]
        svg.arrow((outer, y), (inner, y), _colours(others))
        for number, other in enumerate(others):
            svg.chip(matrix.right + OUTSIDE + PITCH * number, y, str(other), *_colours([other]))


def _draw_legend(svg: Svg, strategy: Strategy, problem: Problem, rank: int, y: float) -> None:
    """Only of what is on this picture."""
    x: float = MARGIN
    found = moves(strategy, problem, rank)
    sample = Box(x, y - 11, 44, 14)
    for one, _ in matrices(strategy, problem).values():
        if one.copies > 1:
            first = one.first_owner(rank)
            same = (other for other in range(one.mesh.size) if one.first_owner(other) == first)
            svg.box(sample, "part", _colours(same))
            svg.text(x + 52, y, "each of these ranks has a copy")
            sample = Box(sample.x + 272, sample.y, 44, 14)
    svg.box(sample, "part", _colours([rank]))
    svg.box(sample, "own")
    svg.text(sample.x + 52, y, f"rank {rank} owns it")
    x = sample.x + 168
    arriving = [move.other for move in found if move.matrix != "c"]
    if arriving:
        svg.arrow((x, y - 4), (x + 28, y - 4), _colours(arriving[:1]))
        svg.text(x + 36, y, "arrives from its owner")
        x += 202
    if len(arriving) < len(found):
        svg.arrow((x, y - 4), (x + 28, y - 4), _colours([rank]))
        svg.text(x + 36, y, f"sums of c, with what rank {rank} adds, for their owner")


# ---- in words ----


def notes(strategy: Strategy, problem: Problem, rank: int) -> list[str]:
    """A line for each of a, b and c, and one for the bytes."""
    lines = []
    for name, (distribution, _) in matrices(strategy, problem).items():
        others = partners(distribution, LINES[name], rank)
        lines.append(f"{name}: {_split(distribution)}; {_moved(name, others, rank)}.")
    sent = sum(strategy.sent_bytes(problem, one) for one in range(strategy.mesh.size))
    copied = copied_bytes(strategy, problem)
    before = f" Copies made before it: {copied} bytes." if copied else ""
    return [*lines, f"Sent inside the product, all ranks together: {sent} bytes.{before}"]


def copied_bytes(strategy: Strategy, problem: Problem) -> int:
    """What it takes to make the copies of a and b, all ranks together."""
    dtypes = {"a": problem.a_dtype, "b": problem.b_dtype}
    every = matrices(strategy, problem)
    return sum(
        (every[name][0].copies - 1) * math.prod(every[name][1]) * np.dtype(dtype).itemsize
        for name, dtype in dtypes.items()
    )


def _split(distribution: Distribution) -> str:
    """``rows split over m, columns over k and n``, of the axes on which there is more than one rank."""
    placement, mesh = distribution.placement, distribution.mesh
    sides = {"rows": placement.rows, "columns": placement.columns}
    split = {
        side: " and then ".join(axis for axis in axes if mesh.along(axis) > 1) for side, axes in sides.items()
    }
    words = ", ".join(f"{side} split over {axes}" for side, axes in split.items() if axes)
    if distribution.copies == mesh.size:
        return "whole on every rank"
    return words + (f", a copy on each of {distribution.copies} ranks" if distribution.copies > 1 else "")


def _moved(name: str, others: Sequence[int], rank: int) -> str:
    listed = " and ".join(", ".join(map(str, others)).rsplit(", ", 1))
    if not others:
        return "stays where it is" if name != "c" else "each rank makes its own"
    if name == "c":
        return f"sums travel along k, rank {rank} adds to those for {listed}"
    return f"parts travel along {LINES[name]}, to rank {rank} those of {listed}"


def _times(sizes: Sequence[object]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, sizes))


def write(folder: Path) -> None:
    """A picture of every kernel into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in KERNELS:
        (folder / f"{name}.svg").write_text(draw(example(name), PROBLEM, RANK), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """``python -m mpi_matmul.draw FOLDER``"""
    parser = argparse.ArgumentParser(
        prog="python -m mpi_matmul.draw",
        description="Draw who owns what of a, b and c, and what moves: NAME.svg for every kernel.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="is made if it is not there")
    folder = parser.parse_args(argv).folder
    try:
        write(folder)
    except OSError as error:
        parser.error(f"{error.filename}: {str(error.strerror).lower()}")


if __name__ == "__main__":
    main()
