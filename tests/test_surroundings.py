"""What a run takes from its surroundings and tells them: cores, memory, progress, report."""

import io
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from launcher import job_environment, run_ranks

from mpi_matmul import cores
from mpi_matmul.cores import USER_SETTINGS, blas_threads, processors, threads_per_rank
from mpi_matmul.launch import on_threads
from mpi_matmul.operands import Problem
from mpi_matmul.progress import Progress
from mpi_matmul.report import Prediction, Report, Run, operations, to_json, to_table
from mpi_matmul.verify import Check


def blas_in_use():
    np.ones((2, 2)) @ np.ones((2, 2))
    return {
        library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"
    }


# ---- cores ----


@pytest.mark.parametrize(
    ("processors_of_ranks", "threads"),
    [
        ([range(8)], 8),
        ([range(8)] * 2, 4),
        ([range(8)] * 3, 2),
        ([range(2)] * 4, 1),
        ([[0], [1]], 1),
        ([[0, 1], [2, 3]], 2),
        ([[]], 1),
    ],
)
def test_cores_are_shared_out(processors_of_ranks, threads, monkeypatch):
    monkeypatch.setattr("mpi_matmul.cores._container_quota", lambda: None)
    assert threads_per_rank(processors_of_ranks) == threads


def test_a_container_may_have_less_than_it_sees(monkeypatch):
    monkeypatch.setattr(cores, "_container_quota", lambda: 2.5)
    assert threads_per_rank([range(16)]) == 2
    assert threads_per_rank([range(16)] * 4) == 1


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
    ids=["no cgroups", "v2", "v2 without limit", "v1", "v1 without limit"],
)
def test_the_quota_of_a_container(files, quota, tmp_path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert cores._container_quota(tmp_path) == quota


def test_the_limit_holds_inside_and_ends_outside(monkeypatch):
    for name in USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    before = blas_in_use()
    with blas_threads(1):
        assert blas_in_use() == {1}
    assert blas_in_use() == before


@pytest.mark.parametrize("number", ["2", None])
def test_a_number_that_the_user_has_set_is_kept(number):
    """In a real job of more ranks than cores: 2 threads when the user says so, 1 by default."""
    script = (
        "from mpi_matmul.launch import on_mpi; import numpy, threadpoolctl;"
        "look = lambda comm, rank: max(x['num_threads'] for x in threadpoolctl.threadpool_info());"
        "print('threads', on_mpi(look), flush=True)"
    )
    changes = {**dict.fromkeys(USER_SETTINGS), "OPENBLAS_NUM_THREADS": number}
    num_ranks = len(processors()) + 1
    job = run_ranks(num_ranks, [sys.executable, "-c", script], env=changes)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["threads", number or "1"] * num_ranks


def test_devices_of_the_simulator_share_the_cores(monkeypatch):
    for name in USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    many = len(processors()) + 1
    assert on_threads(many, lambda comm, rank: blas_in_use()) == [{1}] * many


# ---- memory ----


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc: only a mark for life")
def test_the_peak_is_that_of_the_part_that_is_measured():
    """In a process of its own: threads that other tests have left behind come and go with memory, too."""
    script = """
import numpy as np
from mpi_matmul import memory
large = np.ones(40_000_000 // 8)
del large
memory.reset_peak()
base = memory.peak()
assert abs(base - memory.resident()) < 5_000_000, (base, memory.resident())
larger = np.ones(30_000_000 // 8)
assert 25_000_000 < memory.peak() - base < 40_000_000, (base, memory.peak())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=job_environment())


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_run_says_lines_that_a_pipe_can_carry():
    stream = io.StringIO()
    with Progress(stream, interval=0.02) as progress:
        progress.now(lambda: "fsdp: multiply, block 1")
        time.sleep(0.2)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(line.endswith(" s, fsdp: multiply, block 1") for line in lines)
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_written_over():
    stream = Terminal()
    with Progress(stream, interval=0.02):
        time.sleep(0.1)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\033[K")


def test_a_short_run_says_nothing():
    stream = io.StringIO()
    with Progress(stream):
        pass
    assert stream.getvalue() == ""


def test_a_long_job_shows_progress_while_it_goes_on():
    """Output through a pipe: the lines are there before the result."""
    script = (
        "import sys, functools, mpi_matmul.cli as cli;"
        "cli.Progress = functools.partial(cli.Progress, interval=0.05);"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "--simulate", "3", "--shape", "2", "40000", "2000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=job_environment()
    )
    output, _ = process.communicate(timeout=100)
    lines = output.splitlines()
    assert lines[0].startswith("mpi_matmul: ")
    assert lines[-1] == "done"


# ---- report ----

PROBLEM = Problem(4, 3, 2, "float64", "float64", "float64", (4, 2))


def example(check):
    seconds = {"distribute": 1.0, "multiply": 2.0, "collect": 3.0, "check": 4.0}
    slower = {**seconds, "multiply": 2.5}
    facts = [[seconds, 1, 100, 5_000_000], [slower, 2, 200, 7_000_000]]
    versions = [{"python": "3.13.5", "numpy": number, "mpi4py": None} for number in ("2.4.0", "2.5.0")]
    report = Report(2, "mpi", "Some MPI 1.0", ["h1", "h2"], versions, [4, 4], [4, 3, 2], "float64")
    report.runs.append(Run.of("fsdp", "2x1x1", PROBLEM, facts, check))
    return report


def test_a_run_is_as_slow_as_its_slowest_rank():
    run = example(Check("exact", True, 0.5, 1.0)).runs[0]
    assert run.seconds["multiply"] == 2.5
    assert run.gflops == pytest.approx(2 * 4 * 3 * 2 / 2.5 / 1e9)
    assert run.kernel_sent_bytes == [100, 200]


def test_the_table_says_what_people_want_to_know():
    table = to_table(example(Check("exact", True, 0.5, 1.0)))
    for part in (
        "(4 x 3) @ (3 x 2) float64 on 2 ranks, Some MPI 1.0, 2 hosts: h1 (rank 0), h2 (rank 1)\n",
        "\npython 3.13.5; numpy 2.4.0 (rank 0), 2.5.0 (rank 1); BLAS threads of a rank: 4\n",
        "300 B",
        "5.0 MB to 7.0 MB",
    ):
        assert part in table
    assert "fsdp: correct against numpy's product (nearest to its bound: error 0.5, allowed 1)" in table
    assert "WRONG" in to_table(example(Check("exact", False, 2.0, 1.0, "c[0, 1] is 3")))
    assert "c[0, 1] is 3" in to_table(example(Check("exact", False, 2.0, 1.0, "c[0, 1] is 3")))
    assert "not checked" in to_table(example(Check("none", True, 0.0, 0.0)))


def test_the_table_says_what_was_predicted_and_why():
    report = example(Check("exact", True, 0.5, 1.0))
    predicted = Prediction(multiply_seconds=1.25, copy_seconds=0, sent_bytes=300, memory_bytes=9)
    report.runs[0] = replace(
        report.runs[0], predicted=predicted, chosen_because="it is good", remark="1 rank is enough"
    )
    lines = to_table(report).splitlines()
    assert "1.2500 s" in lines[3]
    assert lines[3].split()[:2] == ["fsdp", "2x1x1"]
    assert lines[4:6] == ["auto: it is good", "1 rank is enough"]
    assert json.loads(to_json(report))["runs"][0]["predicted"]["sent_bytes"] == 300


def test_json_has_no_numbers_that_json_does_not_have():
    report = example(Check("exact", False, math.inf, math.nan))
    parsed = json.loads(to_json(report), parse_constant=lambda name: pytest.fail(name))
    assert parsed["runs"][0]["check"]["max_error"] is None


def test_a_complex_product_counts_real_operations():
    assert operations(PROBLEM) == 48
    assert operations(Problem(4, 3, 2, "complex64", "complex64", "complex64", (4, 2))) == 192
