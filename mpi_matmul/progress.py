"""What a long run says while it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Every ``interval`` seconds a line on ``stream``; on a terminal the line is written over.

    Use as a context manager; a run shorter than the interval says nothing.
    """

    def __init__(self, stream: TextIO | None, interval: float = 5.0) -> None:
        self._stream, self._interval = stream, interval
        self._activity: Callable[[], str] = lambda: "starting"
        self._start = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._on_terminal = stream is not None and stream.isatty()
        self._said = False

    def now(self, activity: Callable[[], str]) -> None:
        """From now on the run is doing ``activity()``."""
        self._activity = activity

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._said and self._on_terminal:
            self._write("\r\033[K")

    def _tell(self) -> None:
        while not self._done.wait(self._interval):
            text = f"mpi_matmul: {time.monotonic() - self._start:.0f} s, {self._activity()}"
            self._said = True
            self._write(f"\r\033[K{text}" if self._on_terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:  # a program may run without standard error
            self._stream.write(text)
            self._stream.flush()
