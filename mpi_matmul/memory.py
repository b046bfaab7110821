"""Memory of this process, in bytes (where there is no /proc: always the high-water mark of its life)."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident() -> int:
    """Memory in use now."""
    return _read("VmRSS")


def peak() -> int:
    """The largest memory in use since ``reset_peak``."""
    return _read("VmHWM")


def reset_peak() -> None:
    """Start a new high-water mark at the present use."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def _read(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    units = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units
