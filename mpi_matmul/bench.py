"""python -m mpi_matmul.bench: check products, then time them (see `measure`), and say each as it is done."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TextIO

import numpy as np

from mpi_matmul import compare, measure_collectives, plot
from mpi_matmul.calibrate import calibrate
from mpi_matmul.choose import AUTO, NAMES, choose, from_facts, to_facts
from mpi_matmul.comm.collectives import broadcast_facts
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint
from mpi_matmul.costs import Ranks
from mpi_matmul.ending import end, status_of
from mpi_matmul.kernels import KERNELS
from mpi_matmul.launch import launched_processes, on_mpi, start_mpi
from mpi_matmul.machine import VARIABLE, load_machine
from mpi_matmul.measure import Case, Row, Stopped, World, measure, stop_if
from mpi_matmul.operands import Problem, RandomMatrix, pose, random_operands
from mpi_matmul.options import BAD_INPUT, OK, Parser, at_least, dtype_named, mesh_of, wrong
from mpi_matmul.outputs import complain, say
from mpi_matmul.storage import FileError, OutputFile

SEED = 42


def main(argv: Sequence[str]) -> int:
    """Run the program of this process; the exit status. Rank 0 speaks for all."""
    return status_of(lambda: _start(argv))


def _start(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.reports:
        return _draw_reports(options)
    if options.calibrate:
        return on_mpi(lambda comm, rank: calibrate(mailbox_of(comm, rank), options.machine))
    library = start_mpi().library_version()
    return on_mpi(lambda comm, rank: run(options, comm, rank, library))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, complete: what was not given has its default. Raises Said."""
    options = _parser().parse_intermixed_args(argv)
    defaults = {
        "shape": [[1024] * 3, [4096] * 3],
        "dtype": [np.dtype("float64")],
        "strategy": [*KERNELS, AUTO] if options.compare else list(KERNELS),
        "repeat": 5,
    }
    for name in [*defaults, "json"]:
        if options.reports and getattr(options, name) is not None:
            raise wrong(f"--{name} is for measuring, but reports to be drawn are given")
    if options.calibrate and any(getattr(options, name) is not None for name in [*_OTHERS, *defaults]):
        raise wrong("--calibrate measures the machine: it goes with no option but --machine FILE")
    if options.machine is not None and not options.calibrate:
        raise wrong(f"--machine is where --calibrate writes; the one that is used is named in {VARIABLE}")
    if options.reports and options.plot is None:
        raise wrong("reports are given, but no --plot FILE.png to draw them in")
    for name, given in (("collectives", options.collectives is not None), ("compare", options.compare)):
        if given and (options.reports or options.plot is not None):
            raise wrong(f"--{name} measures, and is not drawn: give no reports and no --plot")
    if options.reports and launched_processes() > 1:
        raise wrong("reports are drawn by one process: start it without mpirun")
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    try:
        options.products = list(_products(options)) if options.collectives is None else []
    except ValueError as error:
        raise wrong(str(error)) from None
    return options


def _parser() -> Parser:
    parser = Parser(
        prog="mpirun -n P python -m mpi_matmul.bench",
        description="Check products of random matrices sharded over MPI ranks, then time them and their\n"
        "limit: the same products by the same ranks without messages.",
        usage="mpirun -n P python -m mpi_matmul.bench [options]\n"
        "       mpirun -n P python -m mpi_matmul.bench --calibrate [--machine FILE]\n"
        "       python -m mpi_matmul.bench --plot FILE.png REPORT.json [REPORT.json ...]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("reports", nargs="*", metavar="REPORT.json", help="measure nothing, draw these (with --plot)")
    _add_products(add)
    add(
        "--collectives",
        nargs="*",
        type=at_least(1),
        metavar="BYTES",
        help="time our collectives, beside the MPI library's (default 1 KiB, 1 MiB and 64 MiB)",
    )
    add(
        "--compare",
        action="store_true",
        help="time all strategies in turn, from one copy of the operands: how near is auto to the best?",
    )
    add("--json", metavar="FILE", help="write the cases for programs (- for stdout)")
    add("--plot", metavar="FILE.png", help="draw time as product and as transfer (needs matplotlib)")
    add("--calibrate", action="store_true", help="measure the machine instead, for forecasts and auto")
    add("--machine", metavar="FILE", help="where --calibrate writes (default: among your configuration)")
    return parser


def _add_products(add: Callable[..., Any]) -> None:
    size, names = at_least(1), NAMES
    add(
        "--shape",
        nargs=3,
        type=size,
        action="append",
        metavar=("M", "K", "N"),
        help="may be given several times (default 1024 each, and 4096 each)",
    )
    add("--dtype", nargs="+", type=dtype_named, metavar="D", help="numpy dtypes (default float64)")
    add(
        "--strategy",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"of {', '.join(names)} (default: all but auto)",
    )
    add("--mesh", type=mesh_of, metavar="RxS", help="of the ranks, as for the program (default: the best)")
    add("--repeat", type=size, metavar="R", help="how often each is timed (default 5)")


_OTHERS = ("mesh", "json", "plot", "collectives")
_EPILOG = """\
columns: copies: making the copies of what is replicated, out of one copy spread over the ranks; predicted:
the product and these copies, by the numbers of --calibrate (or defaults); of limit: the time of the same
products without messages, by the time taken; hidden: how much of the shorter of products and transfers goes
on behind the other; numpy: the time of the products without messages, by that of numpy's product on rank 0
with all cores; sent: of all ranks, in the product; peak, formula, baseline: memory of the rank that took
most, predicted, and of that what it had before. Of --compare: seconds with the copies; a star marks what
auto takes; of best: seconds by those of the fastest.

Exit status: 0 measured; 1 a product is wrong, or the bytes sent are not those of the formula; 2 bad usage."""


def _draw_reports(options: argparse.Namespace) -> int:
    try:
        plot.check(options.plot, options.reports)
        plot.draw([case for name in options.reports for case in plot.read_cases(name)], options.plot)
    except (ValueError, ImportError) as error:
        complain(f"mpi_matmul: {error}", sys.stderr)
        return BAD_INPUT
    return OK


def run(options: argparse.Namespace, comm: PointToPoint, rank: int, mpi_library: str) -> int:
    """The program of one rank; the same exit status on every rank."""
    mailbox = mailbox_of(comm, rank)
    people = sys.stderr if options.json == "-" else sys.stdout
    rows: list[Row] = []
    report: list[OutputFile] = []
    try:
        _on_root(mailbox, lambda: report.extend(_door(options)))
        world = World(mailbox, mpi_library)
        chosen: list[Any] = []
        _on_root(mailbox, lambda: chosen.extend(_choose(options, world)))
        cases = list(_cases(options, broadcast_facts(mailbox, chosen, 0)))
        _on_root(mailbox, lambda: world.refuse(cases))
        mode = _mode(options, world, comm, cases)
        _on_root(mailbox, lambda: say("\n".join([world.title(), mode.titles]), people))
        for new in mode.measured:
            _on_root(mailbox, partial(_say_rows, mode, new, people))
            rows += new
        _on_root(mailbox, lambda: _publish(options, rows, report))
    except Stopped as stopped:
        return end(mailbox, stopped.status, stopped.text)
    return end(mailbox, OK, "")


@dataclass(frozen=True)
class Mode:
    """What is measured: the titles of its table, a line of it, and the rows, as they come."""

    titles: str
    line: Callable[[Row], str]
    measured: Iterable[list[Row]]


def _mode(options: argparse.Namespace, world: World, comm: Any, cases: list[Case]) -> Mode:
    if options.collectives is not None:
        sizes = measure_collectives.cases(options.collectives)
        library, repeat = comm.library_collective, options.repeat
        rows = (list(measure_collectives.measure(world, library, size, repeat)) for size in sizes)
        return Mode(measure_collectives.title(), measure_collectives.line, rows)
    if options.compare:
        products = (list(group) for _, group in groupby(cases, key=lambda case: case.problem))
        of_products = (compare.compare(world, group, options.repeat) for group in products)
        titles = _line(compare.TITLES, compare.WIDTHS)
        return Mode(titles, lambda row: _line(compare.cells(row), compare.WIDTHS), of_products)
    of_cases = (measure(world, case, options.repeat) for case in cases)
    return Mode(_line(TITLES, _WIDTHS), lambda row: _line(_cells(row), _WIDTHS), of_cases)


def _say_rows(mode: Mode, rows: list[Row], stream: TextIO | None) -> None:
    for row in rows:
        say(mode.line(row), stream)


def _door(options: argparse.Namespace) -> list[OutputFile]:
    """The file for the cases, if one is wanted; ValueError or ImportError for what could not be written."""
    if options.plot is not None:
        plot.check(options.plot)
        if options.json is not None and os.path.realpath(options.json) == os.path.realpath(options.plot):
            raise FileError(options.json, "is the name of the report and of the picture")
    return [] if options.json in (None, "-") else [OutputFile(options.json)]


def _publish(options: argparse.Namespace, rows: list[Row], report: list[OutputFile]) -> None:
    name = "collectives" if options.collectives is not None else "compared" if options.compare else "cases"
    text = json.dumps({name: rows}, indent=2, allow_nan=False)
    if options.plot is not None:
        plot.draw(rows, options.plot)
    if options.json == "-":
        if sys.stdout is None:
            raise FileError("standard output", "is closed")
        say(text, sys.stdout)
    for file in report:
        file.write_text(text + "\n")


def _on_root(mailbox: Mailbox, work: Callable[[], None]) -> None:
    """Do it on rank 0. Stopped, everywhere, if it cannot be done."""
    complaint = ""
    if mailbox.rank == 0:
        try:
            work()
        except (ValueError, ImportError) as error:
            complaint = str(error)
    stop_if(mailbox, complaint, BAD_INPUT)


def _choose(options: argparse.Namespace, world: World) -> Iterator[list[Any]]:
    """For each product and each strategy: number of the product, what was asked for, and what is taken."""
    ranks = Ranks.on(world.hosts)
    machine = load_machine(ranks.hosts, len(world.processors))
    for number, (problem, _, _) in enumerate(options.products):
        for name in options.strategy:
            cost = choose(name, problem, ranks, machine, options.mesh or ())
            yield [number, name, to_facts(cost.strategy)]


def _cases(options: argparse.Namespace, chosen: list[Any]) -> Iterator[Case]:
    """In a comparison what "auto" takes is there once."""
    taken = [(number, on) for number, asked, on in chosen if asked == AUTO]
    for number, asked, on in chosen:
        if not options.compare or asked == AUTO or (number, on) not in taken:
            problem, a, b = options.products[number]
            yield Case(from_facts(on), problem, a, b, asked)


def _products(options: argparse.Namespace) -> Iterator[tuple[Problem, RandomMatrix, RandomMatrix]]:
    for m, k, n in options.shape:
        for dtype in options.dtype:
            a, b = random_operands(SEED, m, k, n, dtype.newbyteorder("="))
            yield pose(a, b), a, b


TITLES = (
    *("strategy", "mesh", "m x k x n", "dtype", "ranks", "min s", "median s", "copies s", "predicted"),
    *("GFLOP/s", "of limit", "hidden", "numpy", "sent MB", "formula", "peak MB", "formula", "baseline"),
)
_WIDTHS = (9, 7, 17, 10, 5, 9, 9, 9, 9, 8, 8, 6, 5, 9, 9, 8, 8, 8)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Of fixed widths: a row is printed before the next is known."""
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _cells(row: Row) -> tuple[str, ...]:
    worst = max(range(row["ranks"]), key=lambda rank: row["peak_memory_bytes"][rank])
    sizes = [row["sent_bytes"], row["predicted_sent_bytes"]]
    sizes += [row[f"{name}_memory_bytes"][worst] for name in ("peak", "predicted", "baseline")]
    numpys = row["numpy_seconds"] and row["compute_only_seconds"] / row["numpy_seconds"]
    return (
        row["strategy"],
        row["mesh"],
        "x".join(map(str, row["shape"])),
        row["dtype"],
        str(row["ranks"]),
        f"{row['seconds_min']:.5f}",
        f"{row['seconds_median']:.5f}",
        "-" if row["copies_seconds"] is None else f"{row['copies_seconds']:.5f}",
        f"{row['predicted_seconds']:.5f}",
        f"{row['gflops']:.1f}",
        f"{row['of_limit']:.3f}",
        *("-" if share is None else f"{share:.2f}" for share in (row["hidden"], numpys)),
        *(f"{size / 1e6:.1f}" for size in sizes),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
