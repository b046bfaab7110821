"""Memory of this process, in bytes (where there is no /proc: always the high-water mark of its life)."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_HOST = Path("/proc/meminfo")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


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


def available(cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this host, or this container, has left; None where that cannot be known."""
    found = [_left_in_cgroup(cgroups, *names) for names in _CGROUP_FILES]
    with contextlib.suppress(OSError, ValueError, IndexError):
        facts = dict(line.split(":", 1) for line in _HOST.read_text().splitlines())
        found.append(int(facts["MemAvailable"].split()[0]) * 1024)
    return min((number for number in found if number is not None), default=None)


def _left_in_cgroup(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Limit less use; pages of files that can be dropped do not count as used."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        facts = dict(line.split() for line in (folder / cache).read_text().splitlines())
        return (
            int((folder / limit).read_text()) - int((folder / used).read_text()) + int(facts["inactive_file"])
        )
    return None


def _read(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    units = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units
