"""The three numbers by which a plan predicts seconds, and the file in which a calibration leaves them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpi_matmul.storage import FileError, OutputFile

VARIABLE = "MPI_MATMUL_MACHINE"


@dataclass(frozen=True)
class Machine:
    """What one host does, all of its ranks together.

    ``latency`` seconds that a message costs a rank, ``bandwidth`` bytes a second that the ranks of a host
    send, ``flops`` float64 operations a second of their products. ``measured`` with ``ranks`` ranks on each
    of ``hosts``: one host knows nothing of the network.
    """

    latency: float
    bandwidth: float
    flops: float
    ranks: int = 0
    hosts: int = 1
    measured: bool = False

    def __str__(self) -> str:
        return (
            f"a host with {self.flops / 1e9:.3g} GFLOP/s, {self.bandwidth / 1e9:.3g} GB/s, "
            f"{self.latency * 1e6:.3g} us a message"
        )


# Where none was calibrated: cores of 40 GFLOP/s; 10 Gbit/s Ethernet between hosts, or the memory of one host.
CORE_FLOPS, CORES = 40e9, 16
BETWEEN_HOSTS = (50e-6, 1.25e9)
INSIDE_A_HOST = (20e-6, 4e9)


def default_machine(hosts: int, cores: int = CORES) -> Machine:
    """What is taken for granted of a host with so many cores."""
    latency, bandwidth = INSIDE_A_HOST if hosts == 1 else BETWEEN_HOSTS
    return Machine(latency, bandwidth, CORE_FLOPS * cores)


def default_path() -> Path:
    """Where a calibration is kept: what MPI_MATMUL_MACHINE names, or a file in the user's configuration."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "mpi_matmul" / "machine.json"


def load_machine(hosts: int, cores: int = CORES, path: str | os.PathLike[str] | None = None) -> Machine:
    """The calibrated machine of ``path`` (default: `default_path`), or `default_machine` if there is none.

    For several hosts, what was calibrated on one has the default network.

    FileError when the file cannot be read, is not a calibration, or was named and is not there.
    """
    named = path is not None or bool(os.environ.get(VARIABLE))
    file = Path(path) if path is not None else default_path()
    try:
        machine = _machine_of(json.loads(file.read_text()))
    except OSError as error:
        if not named:  # there is none, or it is somebody else's
            return default_machine(hosts, cores)
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file (bench --calibrate makes it)" if missing else str(error.strerror).lower()
        raise FileError(file, reason) from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise FileError(file, "is not a calibration (bench --calibrate makes one)") from None
    if hosts > 1 and machine.hosts == 1:
        latency, bandwidth = BETWEEN_HOSTS
        return replace(machine, latency=latency, bandwidth=bandwidth)
    return machine


def _machine_of(facts: Any) -> Machine:
    """ValueError or TypeError when these are not those of a machine."""
    machine = Machine(**facts, measured=True)
    numbers = ((machine.latency, 1e-12, 1e6), (machine.bandwidth, 1.0, 1e18), (machine.flops, 1.0, 1e24))
    counts = (machine.ranks, machine.hosts)
    if any(type(x) not in (int, float) or not least <= x <= most for x, least, most in numbers):
        raise ValueError("a number is not what any machine has")
    if any(type(x) is not int or not 0 <= x <= 10**9 for x in counts) or not machine.hosts:
        raise ValueError("a count is not what any machine has")
    return machine


def save_machine(machine: Machine, path: str | os.PathLike[str] | None = None) -> Path:
    """Keep a calibration; its file. FileError when it cannot be written."""
    file = machine_file(path)
    facts = {name: value for name, value in asdict(machine).items() if name != "measured"}
    file.write_text(json.dumps(facts, indent=2) + "\n")
    return Path(file.path)


def machine_file(path: str | os.PathLike[str] | None = None) -> OutputFile:
    """Where a calibration is to go, in its folder; FileError when it could not be written."""
    file = Path(path) if path is not None else default_path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(file, str(error.strerror).lower()) from error
    return OutputFile(file)
