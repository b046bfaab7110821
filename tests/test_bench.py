"""The bench: what it measures, says and refuses. Real MPI jobs; no time is asserted."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from launcher import (
    REPOSITORY,
    end_job,
    eventually,
    find_mpirun,
    job_environment,
    process_table,
    run_command,
    run_ranks,
)

from mpi_matmul.kernels import KERNELS
from mpi_matmul.layout import COLUMNS, REPLICATED, ROWS
from mpi_matmul.measure import SilentMailbox, hidden_share
from mpi_matmul.mesh import Mesh

BENCH = [sys.executable, "-m", "mpi_matmul.bench"]
SLOW_LINK = REPOSITORY / "tests" / "bench" / "slow_link.sh"
ROOM = 64 << 20  # what Python and MPI may take beside what is predicted

SMALL, UNEVEN, IN_BLOCKS = (60, 40, 50), (33, 17, 29), (40, 700, 900)  # b of the last travels in two blocks
NUMBERS = {
    "seconds_min",
    "seconds_median",
    "compute_only_seconds",
    "of_limit",
    "gflops",
    "predicted_seconds",
    "sent_bytes",
    "predicted_sent_bytes",
    "ranks",
    "repeat",
}
NUMBERS_OR_NONE = {"transfer_only_seconds", "copies_seconds", "numpy_seconds", "hidden"}
PER_RANK = {
    "peak_memory_bytes",
    "predicted_memory_bytes",
    "baseline_memory_bytes",
    "hosts",
    "blas_threads",
}
OTHERS = {"strategy", "mesh", "asked", "shape", "dtype", "mpi_library"}


def bench(num_ranks, *arguments, **options):
    return run_ranks(num_ranks, [*BENCH, *map(str, arguments)], **options)


def shapes(*which):
    return [word for shape in which for word in ("--shape", *map(str, shape))]


def measured(num_ranks, *arguments):
    """The cases of a small run."""
    if "--strategy" not in arguments:
        arguments = (*arguments, "--strategy", "dp", "fsdp")
    job = bench(num_ranks, "--repeat", 2, "--json", "-", *arguments)
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    assert set(report) == {"cases"}
    return report["cases"]


def refused(job, *parts):
    """Status 2, and one line of ours that says all of this."""
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpi_matmul:")]
    assert job.returncode == 2, (job.returncode, job.stdout, job.stderr)
    assert len(lines) == 1, job.stderr
    assert "Traceback" not in job.stderr
    for part in parts:
        assert str(part) in lines[0]
    return True


# ---- good runs ----


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_cases_for_programs(num_ranks):
    cases = measured(num_ranks, *shapes(SMALL, UNEVEN, IN_BLOCKS))
    wanted = [(shape, name) for shape in (SMALL, UNEVEN, IN_BLOCKS) for name in ("dp", "fsdp")]
    assert [(tuple(case["shape"]), case["strategy"]) for case in cases] == wanted
    for case in cases:
        assert set(case) == NUMBERS | NUMBERS_OR_NONE | PER_RANK | OTHERS
        assert all(type(case[key]) in (int, float) and case[key] >= 0 for key in NUMBERS)
        assert all(case[key] is None or case[key] > 0 for key in NUMBERS_OR_NONE - {"hidden"})
        assert all(len(case[key]) == num_ranks for key in PER_RANK)
        assert (case["dtype"], case["ranks"], case["repeat"]) == ("float64", num_ranks, 2)
        assert case["seconds_min"] <= case["seconds_median"]
        assert case["of_limit"] == case["compute_only_seconds"] / case["seconds_median"]
        assert case["numpy_seconds"] is not None


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_bytes_and_memory_are_those_of_the_formulas(num_ranks):
    for case in measured(num_ranks, *shapes(UNEVEN, IN_BLOCKS), "--dtype", "float32"):
        m, k, n = case["shape"]
        sent = 4 * (num_ranks - 1) * k * n if case["strategy"] == "fsdp" else 0
        assert case["sent_bytes"] == case["predicted_sent_bytes"] == sent
        assert (case["transfer_only_seconds"] is None) == (case["hidden"] is None) == (sent == 0)
        assert case["hidden"] is None or 0 <= case["hidden"] <= 1
        b = COLUMNS if case["strategy"] == "fsdp" else REPLICATED
        for rank in range(num_ranks):
            parts = ((ROWS, (m, k)), (b, (k, n)), (ROWS, (m, n)))
            shards = 4 * sum(
                math.prod(p.on(Mesh(num_ranks, 1, 1)).shard_shape(shape, rank)) for p, shape in parts
            )
            peak, predicted = case["peak_memory_bytes"][rank], case["predicted_memory_bytes"][rank]
            assert shards <= predicted - case["baseline_memory_bytes"][rank]
            assert shards <= peak <= predicted + ROOM


def test_several_dtypes_and_one_strategy():
    dtypes = ["float16", "float32", "complex128", "int32", "bool"]
    cases = measured(2, *shapes(UNEVEN), "--strategy", "fsdp", "--dtype", *dtypes)
    assert [(case["strategy"], case["dtype"]) for case in cases] == [("fsdp", name) for name in dtypes]
    assert [case["sent_bytes"] / (17 * 29) for case in cases] == [2, 4, 16, 4, 1]


def test_the_byte_order_of_the_operands_is_this_machines():
    (case,) = measured(2, *shapes(UNEVEN), "--strategy", "fsdp", "--dtype", ">f8")
    assert case["dtype"] == "float64"


def test_ranks_that_own_nothing_and_more_ranks_than_cores():
    cases = measured(5, *shapes((3, 4, 2)))
    assert [case["sent_bytes"] for case in cases] == [0, 4 * 4 * 2 * 8]
    assert cases[0]["copies_seconds"] > 0


def test_one_rank_needs_no_launcher(tmp_path):
    command = [*BENCH, *shapes(SMALL), "--repeat", "1", "--json", "R.json"]
    job = run_command(command, 60, job_environment(), cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert [case["ranks"] for case in json.loads((tmp_path / "R.json").read_text())["cases"]] == [1] * len(
        KERNELS
    )
    assert [path.name for path in tmp_path.iterdir()] == ["R.json"]


def test_the_table_has_a_row_a_case():
    job = bench(2, *shapes(SMALL, UNEVEN), "--strategy", "dp", "fsdp", "--repeat", 1)
    assert job.returncode == 0, job.stderr
    title, heads, *rows = job.stdout.splitlines()
    assert "ranks: 2" in title
    assert heads.split()[0] == "strategy"
    assert [row.split()[:5] for row in rows] == [
        [name, "2x1x1", "x".join(map(str, shape)), "float64", "2"]
        for shape in (SMALL, UNEVEN)
        for name in ("dp", "fsdp")
    ]
    assert {len(row) for row in rows} == {len(heads)}


def test_rows_come_through_a_pipe_while_the_run_goes_on():
    """The products after the first ones would take longer than any test may."""
    products = shapes((20, 20, 20), *[(1500, 1500, 1500)] * 100)
    command = [find_mpirun(), "-n", "2", *BENCH, *products]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=job_environment(), start_new_session=True
    )
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[2].split()[:3] == ["dp", "2x1x1", "20x20x20"]
        assert process.poll() is None
    finally:
        end_job(process)
        process.stdout.close()


def test_help_is_printed_once():
    job = bench(3, "--help")
    assert job.returncode == 0
    assert job.stdout.count("usage:") == 1
    assert "REPORT.json" in job.stdout


# ---- what is computed ----


def test_the_share_of_the_transfers_that_is_hidden():
    assert hidden_share(taken=3.0, limit=2.0, transfer=1.0) == 0  # one after the other
    assert hidden_share(taken=2.0, limit=2.0, transfer=1.0) == 1  # the longer alone
    assert hidden_share(taken=2.5, limit=1.0, transfer=2.0) == 0.5
    assert hidden_share(taken=9.0, limit=2.0, transfer=1.0) == 0
    assert hidden_share(taken=0.5, limit=2.0, transfer=1.0) == 1


def test_what_a_silent_mailbox_gives_is_of_the_right_shape():
    class Noting:
        rank, world_size = 0, 2
        came = {1: [((2, 3), np.dtype("f8")), ((1, 1), np.dtype("i4"))]}  # noqa: RUF012

    mailbox = SilentMailbox(Noting(), np.arange(4.0).reshape(2, 2) + 1)
    out = np.zeros((3, 2), np.float32)
    mailbox.send(1, out)
    assert mailbox.start_send(1, out).wait() is out
    into = mailbox.start_recv(1, out).wait()
    assert (into.shape, into.dtype, into.all()) == ((3, 2), np.float32, True)
    arrays = [mailbox.recv(1) for _ in range(3)]
    assert [(array.shape, array.dtype.str[1:]) for array in arrays] == [
        ((2, 3), "f8"),
        ((1, 1), "i4"),
        ((2, 3), "f8"),
    ]


def test_all_strategies_are_compared_in_turn(tmp_path):
    job = bench(4, "--compare", *shapes(SMALL, UNEVEN), "--repeat", 2, "--json", tmp_path / "R.json")
    assert job.returncode == 0, job.stderr
    rows = json.loads((tmp_path / "R.json").read_text())["compared"]
    for shape in (SMALL, UNEVEN):
        mine = [row for row in rows if tuple(row["shape"]) == shape]
        assert {row["strategy"] for row in mine} == set(KERNELS)
        assert [row["auto"] for row in mine].count(True) == 1
        assert min(row["of_best"] for row in mine) == 1
        assert all(row["seconds"] > 0 < row["predicted_seconds"] for row in mine)
        moved = {row["strategy"]: row["moved_bytes"] for row in mine}
        assert moved["dp"] == moved["fsdp"] == 3 * shape[1] * shape[2] * 8
    assert sum(f"{row['strategy']}*" in job.stdout for row in rows if row["auto"]) == 2


def test_a_wrong_product_ends_the_comparison(tmp_path):
    wrong = "original(work, a, b, c); c[-1:, -1:] *= 1.01 if mailbox.rank == 2 else 1"
    job = bench_with(tmp_path, wrong, "--compare")
    assert job.returncode == 1, job.stderr
    assert "fsdp 3x1x1 (60 x 40) @ (40 x 50) float64: wrong product" in job.stderr


@pytest.mark.parametrize("name", KERNELS)
def test_the_memory_of_every_kernel_is_as_predicted(name):
    cases = measured(4, *shapes((900, 1100, 700), (2000, 300, 1500)), "--strategy", name)
    for case in cases:
        pairs = zip(case["peak_memory_bytes"], case["predicted_memory_bytes"], strict=True)
        assert all(abs(peak - predicted) <= ROOM for peak, predicted in pairs)
        assert case["sent_bytes"] == case["predicted_sent_bytes"]


# ---- what is wrong ----

OTHER_KERNEL = """
import os, sys
from dataclasses import replace
import numpy as np
from mpi_matmul.bench import main
from mpi_matmul.kernels import KERNELS

original = KERNELS["fsdp"].multiply

def multiply(work, a, b, c):
    mailbox = work.mailbox
    {multiply}

KERNELS["fsdp"] = replace(KERNELS["fsdp"], multiply=multiply)
sys.exit(main(sys.argv[1:]))
"""

WITHOUT_PLACES = """
    others = [rank for rank in range(mailbox.world_size) if rank != mailbox.rank]
    sends = [mailbox.start_send(rank, b) for rank in others]
    coming = {rank: mailbox.start_recv(rank) for rank in others}
    parts = [b if rank == mailbox.rank else coming[rank].wait() for rank in range(mailbox.world_size)]
    np.matmul(a, np.concatenate(parts, axis=1), out=c)
    for send in sends: send.wait()"""


def bench_with(tmp_path, multiply, *arguments, num_ranks=3):
    """The bench with another function in the place of fsdp's kernel."""
    script = tmp_path / "other.py"
    script.write_text(OTHER_KERNEL.replace("{multiply}", multiply.strip()))
    some = ["--repeat", "1", "--strategy", "dp", "fsdp"]
    command = [sys.executable, script, *shapes(SMALL), *some, *arguments]
    return run_ranks(num_ranks, list(map(str, command)), timeout=30)


def test_a_kernel_that_receives_without_places(tmp_path):
    job = bench_with(tmp_path, WITHOUT_PLACES, "--json", "-", num_ranks=2)
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout)["cases"][1]["sent_bytes"] == 40 * 50 * 8


def test_a_wrong_product_ends_the_bench(tmp_path):
    wrong = "original(work, a, b, c); c[-1:, -1:] *= 1.01 if mailbox.rank == 2 else 1"
    job = bench_with(tmp_path, wrong, "--json", tmp_path / "R.json")
    assert job.returncode == 1, job.stderr
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpi_matmul:")]
    assert len(lines) == 1
    assert "fsdp 3x1x1 (60 x 40) @ (40 x 50) float64: wrong product" in lines[0]
    assert "rank 2" in lines[0]
    assert not (tmp_path / "R.json").exists()
    assert job.stdout.splitlines()[-1].split()[0] == "dp"


def test_bytes_that_are_not_those_of_the_formula_end_the_bench(tmp_path):
    more = "original(work, a, b, c); mailbox.send(mailbox.rank, b[:1]); mailbox.recv(mailbox.rank)"
    job = bench_with(tmp_path, more)
    assert job.returncode == 1, job.stderr
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpi_matmul:")]
    assert len(lines) == 1
    assert re.search(r"fsdp .* rank 0 sent \d+ bytes, \d+ by the formula", lines[0])


@pytest.mark.parametrize("strike", ["raise KeyError('struck')", "os._exit(3)"])
def test_a_rank_that_fails_ends_the_job(tmp_path, strike):
    job = bench_with(tmp_path, f"if mailbox.rank == 1: {strike}\n    original(work, a, b, c)")
    assert job.returncode != 0
    assert job.stderr.count("Traceback") == ("raise" in strike)


USAGE = {
    "an unknown option": (["--no-such-flag"], "--no-such-flag"),
    "an unknown strategy": (["--strategy", "magic"], "magic"),
    "an unknown dtype": (["--dtype", "float63"], "float63"),
    "half a shape": (["--shape", "3", "4"], "--shape"),
    "an empty shape": (["--shape", "0", "4", "5"], "--shape"),
    "no repetition": (["--repeat", "0"], "--repeat"),
    "a product beyond all memory": (["--shape", *["4000000000"] * 3], "no memory can hold"),
    "shards beyond all memory": (["--shape", "100000000", "100000000", "1"], "of memory on"),
    "a report in no folder": (["--json", "no/such/folder/R.json"], "no/such/folder/R.json"),
    "reports without a plot": (["R.json"], "--plot"),
    "a shape beside reports": (["--plot", "F.png", "R.json", "--shape", "1", "2", "3"], "--shape"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_usage_is_said_once(case):
    arguments, part = USAGE[case]
    assert refused(bench(3, *arguments), part)


def test_reports_are_not_drawn_under_mpirun(tmp_path):
    assert refused(bench(2, "--plot", tmp_path / "F.png", "R.json"), "without mpirun")


# ---- plots ----


def without_matplotlib(tmp_path):
    script = tmp_path / "without.py"
    script.write_text(
        "import sys; sys.modules['matplotlib'] = None\n"
        "from mpi_matmul.bench import main; sys.exit(main(sys.argv[1:]))\n"
    )
    return [sys.executable, str(script)]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_without_matplotlib_is_refused_before_any_work(tmp_path):
    job = run_ranks(2, [*without_matplotlib(tmp_path), "--plot", str(tmp_path / "F.png")])
    assert refused(job, "matplotlib")
    assert job.stdout == ""
    (tmp_path / "R.json").write_text('{"cases": []}')
    command = [*without_matplotlib(tmp_path), "--plot", "F.png", "R.json"]
    assert refused(run_command(command, 60, job_environment(), cwd=tmp_path), "matplotlib")


def test_a_run_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    job = bench(2, *shapes(SMALL), "--repeat", 1, "--plot", tmp_path / "F.png")
    assert job.returncode == 0, job.stderr
    assert is_png(tmp_path / "F.png")


def test_reports_of_several_runs_are_drawn_together(tmp_path):
    pytest.importorskip("matplotlib")
    for ranks in (1, 2):
        job = bench(ranks, *shapes(SMALL, UNEVEN), "--repeat", 1, "--json", tmp_path / f"report-{ranks}.json")
        assert job.returncode == 0, job.stderr
    command = [*BENCH, "--plot", "F.png", "report-1.json", "report-2.json"]
    job = run_command(command, 60, job_environment(), cwd=tmp_path)
    assert (job.returncode, job.stdout) == (0, ""), job.stderr
    assert is_png(tmp_path / "F.png")


@pytest.mark.parametrize("text", ["", "[]", '{"cases": 3}', '{"cases": [{"strategy": "dp"}]}', None])
def test_a_report_that_is_none(tmp_path, text):
    pytest.importorskip("matplotlib")
    if text is not None:
        (tmp_path / "R.json").write_text(text)
    command = [*BENCH, "--plot", "F.png", "R.json"]
    assert refused(run_command(command, 60, job_environment(), cwd=tmp_path), "R.json")
    assert not (tmp_path / "F.png").exists()


@pytest.mark.parametrize("name", ["F.svg", "no/such/folder/F.png"])
def test_a_plot_that_cannot_be_written(tmp_path, name):
    pytest.importorskip("matplotlib")
    job = bench(2, *shapes(SMALL), "--plot", name, cwd=tmp_path)
    assert refused(job, name)
    assert job.stdout == ""


# ---- on a slow link ----


def slow_link_environment():
    return job_environment({"PYTHON": sys.executable, "MPIRUN": find_mpirun()})


@pytest.fixture
def slow_link():
    """Skips where the script cannot work: it needs Linux, root, ip, tc and Open MPI."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            pytest.skip(f"no command {command} (Debian's iproute2)")
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        pytest.skip("mpirun is not Open MPI's")
    name = f"mpi_matmul_probe_{os.getpid()}"
    slow = f"ip netns exec {name} tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 200ms"
    probe = f"ip netns add {name} && {{ {slow}; status=$?; ip netns del {name}; exit $status; }}"
    job = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=False)
    if job.returncode:
        pytest.skip(f"no slow link can be made here: {job.stderr.strip()}")


def namespaces():
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listing.stdout.splitlines() if line.startswith("mpi_matmul_slow_")}


def test_the_bench_on_a_slow_link(slow_link, tmp_path):
    before = namespaces()
    command = [SLOW_LINK, "-n", "2", *shapes(SMALL), "--repeat", "1", "--json", str(tmp_path / "R.json")]
    job = run_command(list(map(str, command)), 60, slow_link_environment())
    assert job.returncode == 0, job.stderr
    link, title, _, *rows = job.stdout.splitlines()
    assert link.startswith("link: ")
    assert "1gbit" in link
    assert "ranks: 2" in title
    assert len(rows) == len(json.loads((tmp_path / "R.json").read_text())["cases"]) == len(KERNELS)
    assert namespaces() <= before


def test_cases_from_a_slow_link_on_standard_output_are_nothing_but_json(slow_link):
    command = [SLOW_LINK, *shapes(SMALL), "--repeat", "1", "--json", "-"]
    job = run_command(list(map(str, command)), 60, slow_link_environment())
    assert len(json.loads(job.stdout)["cases"]) == len(KERNELS)
    assert "link: " in job.stderr


def test_a_slow_link_goes_with_a_failure(slow_link):
    before = namespaces()
    job = run_command([str(SLOW_LINK), "--no-such-flag"], 60, slow_link_environment())
    assert refused(job, "--no-such-flag")
    job = run_command([str(SLOW_LINK)], 60, {**slow_link_environment(), "RATE": "fast"})
    assert job.returncode == 2
    assert re.fullmatch(r"slow_link.sh: cannot slow a link down to fast: .*\n", job.stderr)
    assert namespaces() <= before


def test_a_slow_link_goes_when_its_user_does_not_wait(slow_link):
    command = [str(SLOW_LINK), *shapes((1000, 1000, 1000)), "--repeat", "10000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=slow_link_environment(), start_new_session=True
    )
    try:
        assert process.stdout.readline().startswith("link: ")
        name = f"mpi_matmul_slow_{process.pid}"
        assert name in namespaces()
        ranks = eventually(lambda: {int(pid) for pid in pids_in(name)})
        process.terminate()
        assert process.wait(30) == 143
        assert name not in namespaces()
        eventually(lambda: not ranks & {pid for pid, _ in process_table()})
    finally:
        end_job(process)
        process.stdout.close()


def pids_in(namespace):
    return subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
    ).stdout.split()


def test_a_slow_link_needs_root():
    command = [str(SLOW_LINK), "-n", "2"]
    if os.geteuid() == 0:
        other = ["setpriv", "--reuid=65534", "--clear-groups"]
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv, to be another user")
        if subprocess.run([*other, "test", "-x", str(SLOW_LINK)], check=False).returncode:
            pytest.skip("another user cannot read this checkout")
        command = [*other, *command]
    job = run_command(command, 60, slow_link_environment())
    assert (job.returncode, job.stdout) == (2, "")
    assert re.fullmatch(r"slow_link.sh: needs root.*\n", job.stderr)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets that far")
@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_slow_link_says_what_is_missing(tmp_path, missing):
    for name in {"bash", "dirname", "id", "ip", "tc"} - {missing}:
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    job = run_command([str(tmp_path / "bash"), str(SLOW_LINK)], 60, {"PATH": str(tmp_path)})
    assert (job.returncode, job.stdout) == (2, "")
    assert re.fullmatch(rf"slow_link.sh: needs the command {missing} .*\n", job.stderr)


@pytest.mark.parametrize("arguments", [["-n"], ["-n", "two"], ["-n", "0"]])
def test_a_slow_link_takes_a_number_of_ranks(arguments):
    job = run_command([str(SLOW_LINK), *arguments], 60, slow_link_environment())
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr.startswith("slow_link.sh: -n takes a number of ranks")


def test_a_slow_link_tells_how_it_is_used():
    job = run_command([str(SLOW_LINK), "--help"], 60, slow_link_environment())
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("usage: tests/bench/slow_link.sh")


def test_a_picture_never_takes_the_place_of_another_file(tmp_path):
    pytest.importorskip("matplotlib")
    job = bench(1, *shapes(SMALL), "--repeat", 1, "--json", tmp_path / "R.json")
    assert job.returncode == 0, job.stderr
    report = (tmp_path / "R.json").read_bytes()
    (tmp_path / "link.png").symlink_to("R.json")
    command = [*BENCH, "--plot", "link.png", "R.json"]
    assert refused(run_command(command, 60, job_environment(), cwd=tmp_path), "is also an input")
    assert (tmp_path / "R.json").read_bytes() == report
    both = ["--json", tmp_path / "same.png", "--plot", tmp_path / "same.png"]
    assert refused(bench(2, *shapes(SMALL), "--repeat", 1, *both), "report and of the picture")


@pytest.mark.parametrize(
    "changes",
    [{"ranks": float("inf")}, {"strategy": 3}, {"dtype": "$\\frac$"}, {"seconds_median": float("nan")}],
    ids=str,
)
def test_a_report_with_odd_entries_is_none(tmp_path, changes):
    pytest.importorskip("matplotlib")
    case = {
        "strategy": "dp",
        "shape": [1, 2, 3],
        "dtype": "float64",
        "ranks": 1,
        "seconds_median": 1.0,
        "compute_only_seconds": 1.0,
        "sent_bytes": 0,
    }
    (tmp_path / "R.json").write_text(json.dumps({"cases": [{**case, **changes}]}))
    command = [*BENCH, "--plot", "F.png", "R.json"]
    assert refused(run_command(command, 60, job_environment(), cwd=tmp_path), "is not a report of the bench")
    assert not (tmp_path / "F.png").exists()
