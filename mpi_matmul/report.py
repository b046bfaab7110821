"""What a run says: a table for people, JSON for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from mpi_matmul.operands import Problem, operations
from mpi_matmul.verify import Check

PHASES = ("distribute", "multiply", "collect", "check")


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a product: seconds inside it and for copies before it; bytes sent by all ranks
    inside it; and the memory that a rank needs at most besides its baseline."""

    multiply_seconds: float
    copy_seconds: float
    sent_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Run:
    """One product by one kernel. Seconds are those of the slowest rank; lists are in rank order.

    ``chosen_because`` is why, if the kernel was chosen by the program, and ``remark`` what else it has to say
    then.
    """

    strategy: str
    mesh: str
    seconds: dict[str, float]
    gflops: float
    kernel_sent_messages: list[int]
    kernel_sent_bytes: list[int]
    peak_memory_bytes: list[int]
    check: Check
    baseline_memory_bytes: list[int] = field(default_factory=list)
    predicted: Prediction | None = None
    chosen_because: str | None = None
    remark: str | None = None

    @classmethod
    def of(cls, strategy: str, mesh: str, problem: Problem, facts: list[Any], check: Check) -> Run:
        """From what every rank says: [seconds, messages, bytes, peak]."""
        all_seconds, messages, sent, peak = (list(column) for column in zip(*facts, strict=True))
        seconds = {phase: max(of_rank[phase] for of_rank in all_seconds) for phase in PHASES}
        gflops = operations(problem) / max(seconds["multiply"], 1e-9) / 1e9
        return cls(strategy, mesh, seconds, gflops, messages, sent, peak, check)


@dataclass(frozen=True)
class Report:
    """All runs of one program. Lists are in rank order."""

    world_size: int
    backend: str
    mpi_library: str | None
    hosts: list[str]
    versions: list[dict[str, str | None]]
    blas_threads: list[int]
    shape: list[int]
    dtype: str
    runs: list[Run] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(run.check.passed for run in self.runs)


def to_json(report: Report) -> str:
    """The report as a JSON object; numbers that JSON does not have (nan, inf) are null."""
    return json.dumps(_finite(asdict(report)), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_table(report: Report) -> str:
    """A heading (the product, what ran it, and where), and one line a strategy."""
    rows = [_TITLES, *(_row(run) for run in report.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    remarks = [text for run in report.runs for text in _remarks(run)]
    verdicts = [f"{run.strategy}: {_verdict(run.check)}" for run in report.runs]
    return "\n".join([*_heading(report), *lines, *remarks, *verdicts])


def _heading(report: Report) -> list[str]:
    m, k, n = report.shape
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks"
    where = "threads of one process" if report.backend == "threads" else report.mpi_library
    number = len(set(report.hosts))
    names = [name for name in report.versions[0] if any(one[name] for one in report.versions)]
    software = [
        f"{name} {_of_ranks([one[name] or 'not installed' for one in report.versions])}" for name in names
    ]
    threads = f"BLAS threads of a rank: {_of_ranks([str(number) for number in report.blas_threads])}"
    return [
        f"({m} x {k}) @ ({k} x {n}) {report.dtype} on {ranks}, {where}, "
        f"{number} {'host' if number == 1 else 'hosts'}: {_of_ranks(report.hosts)}",
        "; ".join([*software, threads]),
    ]


def _of_ranks(values: list[str]) -> str:
    """A value that is the same on all ranks; else each value with its ranks.

    >>> _of_ranks(["h1", "h1"]), _of_ranks(["h1", "h1", "h2", "h1"])
    ('h1', 'h1 (ranks 0-1, 3), h2 (rank 2)')
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    if len(ranks_of) == 1:
        return values[0]
    return ", ".join(f"{value} ({_spans(ranks)})" for value, ranks in ranks_of.items())


def _spans(ranks: list[int]) -> str:
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(spans)}"


_TITLES = (
    *("strategy", "mesh", "distribute", "multiply", "predicted", "collect", "check"),
    *("GFLOP/s", "sent in product", "peak memory of a rank"),
)


def _row(run: Run) -> tuple[str, ...]:
    phases = [f"{run.seconds[phase]:.4f} s" for phase in PHASES]
    predicted = "-" if run.predicted is None else f"{run.predicted.multiply_seconds:.4f} s"
    phases.insert(PHASES.index("multiply") + 1, predicted)
    memory = f"{size(min(run.peak_memory_bytes))} to {size(max(run.peak_memory_bytes))}"
    sent = size(sum(run.kernel_sent_bytes))
    return (run.strategy, run.mesh, *phases, f"{run.gflops:.1f}", sent, memory)


def _remarks(run: Run) -> list[str]:
    chosen = f"auto: {run.chosen_because}" if run.chosen_because else None
    return [text for text in (chosen, run.remark) if text]


def _verdict(check: Check) -> str:
    if check.kind == "none":
        return "not checked"
    how = {"exact": "against numpy's product", "probe": "by random vectors (Freivalds)"}[check.kind]
    if not check.passed:
        return f"WRONG {how}: {check.detail}"
    worst = f"nearest to its bound: error {check.max_error:.3g}, allowed {check.error_bound:.3g}"
    return f"correct {how} ({'; '.join(filter(None, [worst, check.detail]))})"


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
