"""Where product and report go: files checked at the door and written together, and what is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TextIO

import numpy as np

from mpi_matmul.operands import Problem
from mpi_matmul.options import CHECK_FAILED, OK
from mpi_matmul.report import Report, to_json, to_table
from mpi_matmul.storage import FileError, OutputFile, shown


class Outputs:
    """The product to ``output`` and the report to ``json`` ("-": standard output), where these are given."""

    def __init__(self, output: str | None, json: str | None) -> None:
        self._names = [name for name in (output, json) if name not in (None, "-")]
        self._output, self._json = output, json
        self._product: OutputFile | None = None
        self._report: OutputFile | None = None

    def check(self, problem: Problem, inputs: Sequence[str]) -> None:
        """Before any work: FileError when an output could not be written."""
        if self._output is not None:
            self._product = OutputFile(self._output, inputs)
            self._product.check_space(problem.m * problem.n * np.dtype(problem.dtype).itemsize)
        if self._json is not None and self._json != "-":
            self._report = OutputFile(self._json, inputs)
            if self._output is not None and os.path.realpath(self._json) == os.path.realpath(self._output):
                raise FileError(self._json, "is the name of the product and of the report")

    @property
    def product(self) -> OutputFile | None:
        """Where the product goes (known after `check`)."""
        return self._product

    def publish(self, report: Report, commit_product: Callable[[], None] = lambda: None) -> int:
        """Write and print everything; the exit status. FileError when something cannot be written.

        Then no file is changed: all are written beside their targets, and renamed after the printing. The
        product already is; ``commit_product`` renames it.
        """
        people = self._people
        with ExitStack() as stack:
            commits = [commit_product]
            if self._report is not None:
                try:
                    commits.append(stack.enter_context(self._report.staged_text(to_json(report))))
                except FileError:
                    self.show(report)
                    raise
            say(to_table(report), people)
            if self._json == "-":
                if sys.stdout is None:
                    raise FileError("standard output", "is closed")
                say(to_json(report).rstrip(), sys.stdout)
            for commit in commits:
                commit()
        if self._json != "-":  # mpirun (Open MPI 5.0.7) may mix up two streams that are written at once
            complain(self._closing_line(report), people)
        return OK if report.passed else CHECK_FAILED

    def show(self, report: Report) -> None:
        """Print what was measured, also when something cannot be written."""
        complain(to_table(report), self._people)

    @property
    def _people(self) -> TextIO | None:
        return sys.stderr if self._json == "-" else sys.stdout

    def _closing_line(self, report: Report) -> str:
        if not report.passed:
            return "WRONG PRODUCT" + (f", {shown(self._output)} is not written" if self._output else "")
        return "done" + (f", wrote {' and '.join(map(shown, self._names))}" if self._names else "")


def say(text: str, stream: TextIO | None) -> None:
    """Print, whatever characters the stream can carry. FileError when it is full; no reader is no error."""
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        # One write: launchers may mix up what comes in parts.
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python tries again at its end
        if not isinstance(error, BrokenPipeError):
            name = "standard error" if stream is sys.stderr else "standard output"
            raise FileError(name, str(error.strerror).lower()) from error


def complain(text: str, stream: TextIO | None) -> None:
    """Print what must not fail for want of a stream: the status says it too."""
    with suppress(FileError):
        say(text, stream)
