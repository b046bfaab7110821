"""argv -> one run -> report -> exit status."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import version
from typing import Any, NoReturn, TextIO

import numpy as np

from mpi_matmul import memory
from mpi_matmul.comm.collectives import barrier, broadcast_facts, gather_facts
from mpi_matmul.comm.mailbox import Mailbox, mailbox_of
from mpi_matmul.comm.protocol import PointToPoint
from mpi_matmul.comm.threads import Communicator
from mpi_matmul.kernels import KERNELS, kernel_named
from mpi_matmul.launch import LaunchError, launched_processes, launched_rank, on_mpi, on_threads, start_mpi
from mpi_matmul.layout import Array
from mpi_matmul.multiply import multiply, pass_door
from mpi_matmul.operands import Problem, admit, random_matrix
from mpi_matmul.progress import Progress
from mpi_matmul.report import Report, to_json, to_table
from mpi_matmul.storage import FileError, OutputFile, open_matrix

OK, CHECK_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str]) -> int:
    """Run the program of this process; the exit status. Rank 0 speaks for all."""
    try:
        options = parse(argv)
        if options.simulate is None:
            return on_mpi(lambda comm, rank: run(options, comm, rank))
        if launched_processes() > 1:
            raise _Said(
                "mpi_matmul: --simulate runs all ranks in one process: start it without mpirun\n", BAD_INPUT
            )
        return on_threads(options.simulate, lambda comm, rank: run(options, comm, rank))[0]
    except _Said as said:
        return _say_once(said)
    except LaunchError as error:
        if launched_rank() == 0:
            print(f"mpi_matmul: {error}", file=sys.stderr)
        return BAD_INPUT
    except MemoryError as error:
        print(f"mpi_matmul: not enough memory: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def run(options: argparse.Namespace, comm: PointToPoint, rank: int) -> int:
    """The program of one rank; the same exit status on every rank."""
    baseline = memory.resident()
    mailbox = mailbox_of(comm, rank)
    outputs = _Outputs(options)
    admitted = pass_door(mailbox, lambda: _door(options, outputs), root=0)
    if isinstance(admitted, Exception):
        return _end(mailbox, BAD_INPUT, str(admitted))
    a, b, problem = admitted
    report = _new_report(comm, mailbox, problem, baseline)
    c = _run_all(options, mailbox, problem, a, b, report)
    status, message = OK, ""
    if rank == 0:
        try:
            status = outputs.publish(report, None if c is None else c.reshape(problem.result_shape))
        except FileError as error:
            status, message = BAD_INPUT, str(error)
    return _end(mailbox, status, message)


def _door(options: argparse.Namespace, outputs: _Outputs) -> tuple[Array, Array, Problem]:
    """On rank 0: operands read or made, outputs possible. Raises ValueError or TypeError with one line."""
    if options.operands:
        a_name, b_name = options.operands
        a, b, problem = admit(open_matrix(a_name), open_matrix(b_name), a_name, b_name)
    else:
        a, b, problem = admit(*_random_operands(options))
    outputs.check(problem)
    return a, b, problem


def _random_operands(options: argparse.Namespace) -> tuple[Array, Array]:
    m, k, n = options.shape
    rng = np.random.default_rng(options.seed)
    try:
        return random_matrix(rng, (m, k), options.dtype), random_matrix(rng, (k, n), options.dtype)
    except (MemoryError, ValueError) as error:  # numpy says "array is too big" with a ValueError
        raise ValueError(f"--shape {m} {k} {n}: not enough memory on rank 0 ({error})") from None


def _new_report(comm: PointToPoint, mailbox: Mailbox, problem: Problem, baseline: int) -> Report:
    facts = gather_facts(mailbox, [platform.node(), baseline], 0) or []
    threads = isinstance(comm, Communicator)
    return Report(
        world_size=mailbox.world_size,
        backend="threads" if threads else "mpi",
        mpi_library=None if threads else start_mpi().library_version(),
        hosts=[host for host, _ in facts],
        shape=[problem.m, problem.k, problem.n],
        dtype=problem.dtype,
        baseline_memory_bytes=[bytes_used for _, bytes_used in facts],
    )


def _run_all(
    options: argparse.Namespace, mailbox: Mailbox, problem: Problem, a: Any, b: Any, report: Report
) -> Array | None:
    """Every strategy in turn, into ``report``; the last product (on rank 0)."""
    c: Array | None = None
    with Progress(sys.stderr) if mailbox.rank == 0 else nullcontext() as progress:
        for name in options.strategy:
            c = None  # the previous product makes room
            c, run_of_kernel = multiply(
                mailbox,
                kernel_named(name),
                problem,
                a,
                b,
                check=options.check,
                seed=options.seed,
                say=progress.now if progress else lambda activity: None,
            )
            if run_of_kernel is not None:
                report.add(run_of_kernel)
    return c


class _Outputs:
    """Where the product and the report go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._product: OutputFile | None = None
        self._report: OutputFile | None = None

    def check(self, problem: Problem) -> None:
        """Before any work: FileError when an output could not be written."""
        inputs = list(self._options.operands)
        if self._options.output is not None:
            self._product = OutputFile(self._options.output, inputs=inputs)
            self._product.check_space(problem.m * problem.n * np.dtype(problem.dtype).itemsize)
            if self._options.json is not None and os.path.realpath(self._options.json) == os.path.realpath(
                self._options.output
            ):
                raise FileError(self._options.json, "is the name of the product and of the report")
        if self._options.json not in (None, "-"):
            self._report = OutputFile(self._options.json, inputs=inputs)

    def publish(self, report: Report, c: Array | None) -> int:
        """Write and print everything; the exit status. Raises FileError when a file cannot be written."""
        people = sys.stderr if self._options.json == "-" else sys.stdout
        _print(to_table(report), people)
        if self._product is not None and c is not None and report.passed:
            self._product.write_array(c)
        if self._report is not None:
            self._report.write_text(to_json(report))
        if self._options.json == "-":
            _print(to_json(report).rstrip(), sys.stdout)
        _print(self._closing_line(report), people)
        return OK if report.passed else CHECK_FAILED

    def _closing_line(self, report: Report) -> str:
        if not report.passed:
            return "WRONG PRODUCT" + (f", {self._options.output} is not written" if self._product else "")
        files = [name for name in (self._options.output, self._options.json) if name not in (None, "-")]
        return "done" + (f", wrote {' and '.join(files)}" if files else "")


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:  # the reader has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end(mailbox: Mailbox, status: int, message: str) -> int:
    """Say ``message`` once and agree on rank 0's exit status; no rank leaves before it is said."""
    if message and mailbox.rank == 0:
        _print(f"mpi_matmul: {message}", sys.stderr)
    agreed: int = broadcast_facts(mailbox, status, 0)
    barrier(mailbox)
    return agreed


class _Said(Exception):
    """Help, or what is wrong with the command line: to be said once, whatever the number of ranks."""

    def __init__(self, text: str, status: int) -> None:
        self.text, self.status = text, status


def _say_once(said: _Said) -> int:
    if launched_processes() == 1 or launched_rank() == 0:
        _print(said.text.rstrip("\n"), sys.stderr if said.status else sys.stdout)
    if launched_processes() > 1:
        with suppress(LaunchError):  # a launcher may end the job when the first rank leaves: leave together
            on_mpi(lambda comm, rank: barrier(mailbox_of(comm, rank)))
    return said.status


class _Parser(argparse.ArgumentParser):
    """Raises _Said where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise _Said(f"mpi_matmul: {message} (--help tells more)", BAD_INPUT)

    def print_help(self, file: Any = None) -> None:
        raise _Said(self.format_help(), OK)


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        raise _Said(f"mpi_matmul {version('mpi_matmul')}", OK)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, complete: what was not given has its default."""
    options = _parser().parse_intermixed_args(argv)
    if len(options.operands) not in (0, 2):
        raise _Said(f"mpi_matmul: expected two operands A.npy B.npy, got {len(options.operands)}", BAD_INPUT)
    for name, default in {"shape": [1024] * 3, "dtype": np.dtype("float64"), "seed": 42}.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.operands and name != "seed":
            raise _Said(f"mpi_matmul: --{name} is for random operands, but files are given", BAD_INPUT)
    if options.strategy is None:
        options.strategy = ["fsdp"] if options.operands else ["dp", "fsdp"]
    return options


def _parser() -> _Parser:
    parser = _Parser(
        prog="mpirun -n P python -m mpi_matmul",
        description="Multiply two matrices sharded over MPI ranks; rank 0 gathers and checks the product.",
        epilog="Exit status: 0 done and checked, 1 a check failed, 2 bad usage or input; else a crash.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("operands", nargs="*", metavar="FILE", help="A.npy and B.npy (default: random matrices)")
    add(
        "-o",
        "--output",
        metavar="C.npy",
        help="write the product (of the last strategy, when all checks pass)",
    )
    add(
        "--strategy",
        nargs="+",
        choices=list(KERNELS),
        metavar="NAME",
        help=f"kernels to run: {', '.join(KERNELS)}",
    )
    add(
        "--shape",
        nargs=3,
        type=_at_least(0),
        metavar=("M", "K", "N"),
        help="random operands (default 1024 each)",
    )
    add("--dtype", type=_dtype, metavar="D", help="their numpy dtype (default float64)")
    add("--seed", type=_at_least(0), metavar="S", help="of random operands and of the probe (default 42)")
    add("--check", choices=("auto", "exact", "probe", "none"), default="auto", help=_CHECK_HELP)
    add("--json", metavar="FILE", help="write the report for programs (- for stdout)")
    add("--simulate", type=_at_least(1), metavar="P", help="run on P threads of this process, without MPI")
    add("--version", action=_Version, nargs=0, help="print the version")
    return parser


_CHECK_HELP = (
    "exact: against numpy's product; probe: by random vectors, for products too large to compute again; "
    "auto (default): exact while it costs seconds"
)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.strip().lstrip("+").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" or dtype.names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype of numbers")
    return dtype
