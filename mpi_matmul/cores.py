"""How many BLAS threads a rank should use: the cores of its host, shared out."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import threadpoolctl

USER_SETTINGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def processors() -> list[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads_per_rank(processors_of_ranks: Sequence[Collection[int]]) -> int:
    """BLAS threads for each of the ranks of one host, given the processors that each may run on.

    >>> threads_per_rank([[0, 1, 2, 3]] * 2)
    2
    >>> threads_per_rank([[0], [1]])
    1
    """
    return max(1, _cores(processors_of_ranks) // len(processors_of_ranks))


def share_cores(processors_of_ranks: Sequence[Collection[int]]) -> bool:
    """Whether there are more of these ranks of one host than cores that they may run on.

    >>> share_cores([[0, 1]] * 3), share_cores([[0, 1]] * 2)
    (True, False)
    """
    return len(processors_of_ranks) > _cores(processors_of_ranks)


def _cores(processors_of_ranks: Sequence[Collection[int]]) -> int:
    cores, quota = len(set().union(*processors_of_ranks)), _container_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def blas_threads(limit: int) -> AbstractContextManager[Any]:
    """Inside, numpy's BLAS uses at most ``limit`` threads, unless the user has set a number."""
    if any(os.environ.get(name) for name in USER_SETTINGS):
        return nullcontext()
    if blas_threads_in_use() <= limit:
        return nullcontext()
    limited: AbstractContextManager[Any] = _blas().limit(limits=limit)
    return limited


def blas_threads_in_use() -> int:
    """How many threads numpy's BLAS uses for a product in this process."""
    return max((library.num_threads for library in _blas().lib_controllers), default=1)


def blas_libraries() -> list[ctypes.CDLL]:
    """The BLAS libraries that numpy (or another package, after it) has loaded."""
    return [ctypes.CDLL(library.filepath) for library in _blas().lib_controllers]


@functools.cache
def _blas() -> Any:
    """The BLAS that numpy has loaded; to find it takes tens of milliseconds."""
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def _container_quota(cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that a container may use (cgroup v2 or v1), or None when there is no limit."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((cgroups / name).read_text() for name in names).split()
            return int(quota) / int(period) if quota not in ("max", "-1") else None
        except (OSError, ValueError):
            continue
    return None
