"""The command line: what may be asked for, and what is said when it is asked wrongly."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from mpi_matmul.choose import AUTO, NAMES
from mpi_matmul.kernels import KERNELS
from mpi_matmul.versions import installed

OK, CHECK_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Said(Exception):
    """Help, or what is wrong with the command line: to be said once, whatever the number of ranks."""

    def __init__(self, text: str, status: int) -> None:
        self.text, self.status = text, status


class Parser(argparse.ArgumentParser):
    """Raises Said where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise wrong(message)

    def print_help(self, file: Any = None) -> None:
        raise Said(self.format_help(), OK)


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        number = installed("mpi_matmul") or "(not installed, run from its folder)"
        raise Said(f"mpi_matmul {number}", OK)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, complete: what was not given has its default. Raises Said."""
    options = _parser().parse_intermixed_args(argv)
    _sort_out_strategies(options)
    if options.mesh and AUTO in (options.strategy or [AUTO]):
        raise wrong("--mesh is for strategies that are named, such as --strategy summa")
    if len(options.operands) not in (0, 2):
        raise wrong(f"expected two operands A.npy B.npy, got {len(options.operands)}")
    for name in ("shape", "dtype"):
        if options.operands and getattr(options, name) is not None:
            raise wrong(f"--{name} is for random operands, but files are given")
    defaults = {
        "shape": [1024, 1024, 1024],
        "dtype": np.dtype("float64"),
        "strategy": [AUTO] if options.operands else ["dp", "fsdp"],
    }
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def _sort_out_strategies(options: argparse.Namespace) -> None:
    """``--strategy dp A.npy B.npy``: the names end where the files begin."""
    names = options.strategy or []
    others = list(itertools.dropwhile(lambda name: name in NAMES, names))
    if others and not options.operands and all(map(_looks_like_a_file, others)) and others != names:
        options.strategy, options.operands = names[: -len(others)], others
    elif others:
        raise wrong(f"strategy is {others[0]!r}, expected one of {', '.join(NAMES)}")


def _looks_like_a_file(name: str) -> bool:
    return name.endswith(".npy") or os.path.exists(name)


def wrong(text: str) -> Said:
    return Said(f"mpi_matmul: {text} (--help tells more)", BAD_INPUT)


def _parser() -> Parser:
    parser = Parser(
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
    _add_strategies(add)
    add(
        "--shape",
        nargs=3,
        type=at_least(0),
        metavar=("M", "K", "N"),
        help="random operands (default 1024 each)",
    )
    add("--dtype", type=dtype_named, metavar="D", help="their numpy dtype (default float64)")
    add("--seed", type=at_least(0), metavar="S", default=42, help="of random operands and of the probe (42)")
    add("--check", choices=("auto", "exact", "probe", "none"), default="auto", help=_CHECK_HELP)
    add(
        "--max-memory",
        type=byte_size,
        metavar="SIZE",
        help="refuse what needs more on any rank (such as 8GB)",
    )
    add("--json", metavar="FILE", help="write the report for programs (- for stdout)")
    add(
        "--simulate",
        type=at_least(1, 10_000),
        metavar="P",
        help="run on P threads of this process, without MPI",
    )
    add("--version", action=_Version, nargs=0, help="print the version")
    return parser


def _add_strategies(add: Callable[..., Any]) -> None:
    add(
        "--strategy",
        nargs="+",
        metavar="NAME",
        help=f"kernels to run: {', '.join(KERNELS)}; auto is the one predicted to be fastest "
        "(default: dp fsdp for random operands, auto for files)",
    )
    add(
        "--mesh",
        type=mesh_of,
        metavar="RxS",
        help="of the ranks: fsdp_tp nodes x ranks of a node, summa rows x columns, or three for m, k, n "
        "(default: the best, for fsdp_tp the hosts)",
    )


_CHECK_HELP = (
    "exact: against numpy's product; probe: by random vectors, for products too large to compute again; "
    "auto (default): exact while it costs seconds"
)


def at_least(least: int, most: int = sys.maxsize) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            to = "on" if most == sys.maxsize else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} {to}")
        return int(text)

    return number


def mesh_of(text: str) -> tuple[int, ...]:
    """``2x4`` or ``2x2x2``."""
    sizes = text.lower().split("x")
    if len(sizes) not in (2, 3) or not all(one.isascii() and one.isdigit() and int(one) for one in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh such as 2x4 or 2x2x2")
    return tuple(map(int, sizes))


_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def byte_size(text: str) -> int:
    """Bytes: a number with a unit such as MB or GiB, or without."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) *([kmgt]i?|)b?", text.lower(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB, 8GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def dtype_named(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" or dtype.names:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype of numbers")
    return dtype
