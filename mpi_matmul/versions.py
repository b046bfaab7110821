"""What a rank runs: the versions that must be the same on all of them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("numpy", "mpi4py", "mpi_matmul")


def versions() -> dict[str, str | None]:
    """Python and packages of this process; None for what is not installed."""
    return {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
