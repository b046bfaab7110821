"""The tools that the other tests stand on, each seen to catch what it is there to catch.

Sessions of pytest on MPI ranks are run on small test files of their own; run_mpi.sh is run with stand-ins for
mpirun and for the private environment, because what it starts is what matters.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from launcher import REPOSITORY, descendants, job_environment, process_table, run_command, run_ranks

TESTS = Path(__file__).parent

# What `run_session` writes in front of each test file.
PROLOGUE = "import os, time, pytest\npytestmark = pytest.mark.mpi\n"


def run_session(folder, source, *arguments, num_ranks=3, timeout=40, with_mpi=True, env=None):
    """Run pytest with the plugin on a test file: on MPI ranks, or (num_ranks=0) without mpirun."""
    (folder / "pytest.ini").write_text("[pytest]\nmpi_grace = 2\n")
    (folder / "test_inner.py").write_text(PROLOGUE + source)
    pytest_command = [sys.executable, "-m", "pytest", "-p", "mpi_session", "--color=no", *arguments]
    if with_mpi:
        pytest_command.append("--with-mpi")
    changes = {"PYTHONPATH": str(TESTS), **(env or {})}
    if num_ranks == 0:
        return run_command(pytest_command, timeout=timeout, env=job_environment(changes), cwd=folder)
    return run_ranks(num_ranks, pytest_command, timeout=timeout, env=changes, cwd=folder)


def all_of(done):
    """Everything that a job has printed."""
    return done.stdout + done.stderr


# ---------------------------------------------------------------- launching ranks


def test_run_ranks_returns_output_and_status():
    source = "import sys; from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank, 'here'); sys.exit(3)"
    done = run_ranks(3, [sys.executable, "-c", source])
    assert done.returncode != 0
    for rank in range(3):
        assert f"rank {rank} here" in done.stdout


def test_run_ranks_ends_a_job_that_hangs_and_shows_what_it_printed(tmp_path):
    # the ranks do not listen to polite requests either
    source = f"""
import os, pathlib, signal, time
from mpi4py import MPI
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
print("seen", flush=True)
time.sleep(600)
"""
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)still running after 4 s.*seen"):
        run_ranks(3, [sys.executable, "-c", source], timeout=4)
    assert time.monotonic() - start < 20
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not set(pids) & dict(process_table()).keys()


def test_descendants_are_found_to_the_last():
    parent = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo started; wait"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "started\n"
    try:
        assert len(descendants(parent.pid)) == 1
        assert set(descendants(parent.pid)) < set(descendants(os.getpid()))
    finally:
        for pid in [*descendants(parent.pid), parent.pid]:
            os.kill(pid, 9)
        parent.wait()


# ---------------------------------------------------------------- a test that fails on one rank


def test_failure_on_one_rank_while_others_wait_ends_the_job(tmp_path):
    source = """
def test_inner(mpi_comm):
    if mpi_comm.rank == 2:
        assert 6 * 7 == 43, "rank two is wrong"
    mpi_comm.Barrier()
"""
    start = time.monotonic()
    done = run_session(tmp_path, source)
    assert time.monotonic() - start < 20
    assert done.returncode != 0
    assert "rank two is wrong" in all_of(done)
    assert "rank 2 of 3" in all_of(done)


def test_failure_in_a_fixture_of_one_rank_while_others_wait_ends_the_job(tmp_path):
    source = """
@pytest.fixture
def broken(mpi_comm):
    if mpi_comm.rank == 1:
        raise ValueError("this fixture broke")
def test_inner(broken, mpi_comm):
    mpi_comm.Barrier()
"""
    done = run_session(tmp_path, source)
    assert done.returncode != 0
    assert "this fixture broke" in all_of(done)


def test_failure_is_told_even_when_the_time_limit_comes_first(tmp_path):
    source = """
def test_inner(mpi_comm):
    assert mpi_comm.rank != 2, "rank two is wrong"
    mpi_comm.Barrier()
"""
    done = run_session(tmp_path, source, "--timeout=2", "-o", "mpi_grace=30")
    assert done.returncode != 0
    assert "rank two is wrong" in all_of(done)


ONE_RANK_FAILS = """
def test_first(mpi_comm):
    assert mpi_comm.allreduce(1) == mpi_comm.size
def test_one_rank_fails(mpi_comm):
    print("output of rank", mpi_comm.rank)
    assert mpi_comm.rank != 2, "rank two is wrong"
def test_last(mpi_comm):
    assert mpi_comm.allreduce(1) == mpi_comm.size
"""


def test_failure_on_one_rank_is_in_the_report_of_rank_0(tmp_path):
    done = run_session(tmp_path, ONE_RANK_FAILS)
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "failed on rank 2: AssertionError: rank two is wrong" in done.stdout
    assert "output of rank 2" in done.stdout


def test_failure_on_all_ranks_shows_each_different_one_once(tmp_path):
    source = """
def test_inner(mpi_comm):
    assert mpi_comm is None, f"rank {mpi_comm.rank // 2} of pairs is wrong"
"""
    done = run_session(tmp_path, source, "--tb=line", num_ranks=4)
    assert "1 failed" in done.stdout
    assert (
        "failed on rank 1: AssertionError: rank 0 of pairs" not in done.stdout.split("short test summary")[1]
    )


def test_failures_in_setup_and_teardown_of_one_rank_are_reported(tmp_path):
    source = """
@pytest.fixture
def broken(mpi_comm):
    if mpi_comm.rank == 1:
        raise ValueError("setup broke")
    yield
    if mpi_comm.rank == 2:
        raise ValueError("teardown broke")
def test_fixture(broken):
    pass
def test_last(mpi_comm):
    assert mpi_comm.allreduce(1) == mpi_comm.size
"""
    done = run_session(tmp_path, source)
    assert done.returncode == 1
    assert "failed on rank 1: ValueError: setup broke" in done.stdout
    assert "failed on rank 2: ValueError: teardown broke" in done.stdout
    assert "1 failed, 1 passed, 1 error" in done.stdout


def test_a_communicator_can_be_asked_for_late_and_by_some_ranks(tmp_path):
    source = """
from mpi4py import MPI
def test_late(request):
    if MPI.COMM_WORLD.rank != 1:
        assert request.getfixturevalue("mpi_comm").size == 3
def test_last(mpi_comm):
    assert mpi_comm.allreduce(1) == 3
"""
    done = run_session(tmp_path, source)
    assert done.returncode == 0, all_of(done)


def test_skips_and_expected_failures_on_one_rank_keep_the_ranks_in_step(tmp_path):
    source = """
from mpi4py import MPI
RANK = MPI.COMM_WORLD.rank
@pytest.mark.skipif(RANK == 1, reason="not on rank 1")
def test_marked(mpi_comm):
    pass
def test_in_the_body(mpi_comm):
    if mpi_comm.rank == 0:
        pytest.skip("not on rank 0")
@pytest.mark.xfail(reason="known", strict=True)
def test_known(mpi_comm):
    assert False
@pytest.mark.xfail(RANK == 0, reason="only rank 0 expects it")
def test_unexpected_elsewhere(mpi_comm):
    assert mpi_comm.rank == 1
def test_last(mpi_comm):
    assert mpi_comm.allreduce(1) == mpi_comm.size
"""
    done = run_session(tmp_path, source)
    assert done.returncode == 1
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed" in done.stdout
    assert "failed on rank 2" in done.stdout


def test_stop_at_the_first_failure_stops_every_rank(tmp_path):
    done = run_session(tmp_path, ONE_RANK_FAILS, "-x")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout


def test_ranks_that_do_not_run_the_same_tests_are_stopped(tmp_path):
    source = """
from mpi4py import MPI
@pytest.mark.parametrize("n", range(1 + MPI.COMM_WORLD.rank))
def test_inner(n):
    pass
"""
    done = run_session(tmp_path, source)
    assert done.returncode != 0
    assert "the ranks do not run the same tests" in all_of(done)


def test_a_file_that_one_rank_cannot_collect_is_told(tmp_path):
    source = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ImportError("missing on rank one")
def test_inner():
    pass
"""
    done = run_session(tmp_path, source)
    assert done.returncode != 0
    assert "missing on rank one" in all_of(done)


# ---------------------------------------------------------------- one report


def test_only_rank_0_reports(tmp_path):
    source = """
def test_one(mpi_comm):
    pass
def test_two(mpi_comm):
    pass
"""
    done = run_session(tmp_path, source, "-v", num_ranks=4)
    assert done.returncode == 0, all_of(done)
    assert done.stdout.count("test session starts") == 1
    assert done.stdout.count("test_one PASSED") == 1
    assert done.stdout.count("2 passed") == 1


def test_unmarked_tests_are_left_to_the_session_of_one_process(tmp_path):
    source = "def test_marked(mpi_comm): pass\n"
    (tmp_path / "test_serial.py").write_text("def test_serial(): raise RuntimeError\n")
    done = run_session(tmp_path, source)
    assert done.returncode == 0, all_of(done)
    assert "1 passed, 1 deselected" in done.stdout


def test_junit_report_of_four_ranks_is_one_valid_file_ten_times(tmp_path):
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        run_session(folder, ONE_RANK_FAILS, "--junitxml", "report.xml", num_ranks=4)
        suite = ElementTree.parse(folder / "report.xml").getroot().find("testsuite")
        assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
        assert "rank two is wrong" in suite.find("testcase/failure").text


def test_junit_report_is_written_by_rank_0_alone(tmp_path):
    source = """
def test_inner(mpi_comm, request):
    assert (request.config.option.xmlpath is None) == (mpi_comm.rank > 0)
"""
    done = run_session(tmp_path, source, "--junitxml", "report.xml")
    assert done.returncode == 0, all_of(done)


def test_no_junit_report_of_an_earlier_session_survives_a_job_that_is_ended(tmp_path):
    (tmp_path / "report.xml").write_text("<testsuites/>")
    source = """
def test_inner(mpi_comm):
    assert mpi_comm.rank != 2
    mpi_comm.Barrier()
"""
    run_session(tmp_path, source, "--junitxml", "report.xml")
    assert not (tmp_path / "report.xml").exists()


# ---------------------------------------------------------------- nothing ran

NEEDS_SIX = """
@pytest.mark.mpi(min_size=6)
def test_needs_six(mpi_comm):
    pass
"""


def test_marked_tests_without_the_option_are_not_green(tmp_path):
    done = run_session(tmp_path, NEEDS_SIX, num_ranks=0, with_mpi=False)
    assert done.returncode == 1
    assert "1 tests marked mpi were selected and none ran" in done.stdout.splitlines()[-1]
    assert "--with-mpi" in done.stdout.splitlines()[-1]


def test_marked_tests_that_are_deselected_do_no_harm(tmp_path):
    (tmp_path / "test_serial.py").write_text("def test_serial(): pass\n")
    done = run_session(tmp_path, NEEDS_SIX, "-m", "not mpi", num_ranks=0, with_mpi=False)
    assert done.returncode == 0, all_of(done)


def test_too_few_ranks_for_every_test_are_not_green(tmp_path):
    done = run_session(tmp_path, NEEDS_SIX)
    assert done.returncode == 1
    assert "none ran on 3 rank(s)" in done.stdout


def test_too_few_ranks_for_some_tests_are_green(tmp_path):
    done = run_session(tmp_path, NEEDS_SIX + "\ndef test_any(mpi_comm): pass\n")
    assert done.returncode == 0, all_of(done)
    assert "1 passed, 1 skipped" in done.stdout


def test_a_world_of_another_size_than_was_started_is_refused(tmp_path):
    source = "def test_inner(mpi_comm): pass\n"
    done = run_session(tmp_path, source, env={"MPI_MATMUL_EXPECTED_RANKS": "4"})
    assert done.returncode != 0
    assert "mpirun starts 4 ranks, but MPI here knows of 3" in all_of(done)


def test_without_the_option_mpi_is_not_imported(tmp_path):
    source = "pytestmark = []\nimport sys\ndef test_inner(): assert 'mpi4py' not in sys.modules\n"
    done = run_session(tmp_path, source, num_ranks=0, with_mpi=False)
    assert done.returncode == 0, all_of(done)


# ---------------------------------------------------------------- time limit


def test_a_hang_ends_with_the_stack_of_every_rank(tmp_path):
    source = """
def waits_for_ever(): time.sleep(600)
def test_inner(mpi_comm):
    if mpi_comm.rank == 1:
        waits_for_ever()
    mpi_comm.Barrier()
"""
    start = time.monotonic()
    done = run_session(tmp_path, source, "--timeout=3")
    assert time.monotonic() - start < 20
    assert done.returncode != 0
    assert "in waits_for_ever" in all_of(done)
    assert all_of(done).count("still runs after 3 s") == 3


def test_a_hang_that_holds_the_lock_of_python_ends_too(tmp_path):
    # PyDLL keeps the lock, so that no other thread of this process can run
    source = """
import ctypes
def test_inner(mpi_comm):
    ctypes.PyDLL(None).sleep(600)
"""
    done = run_session(tmp_path, source, "--timeout=1")
    assert done.returncode != 0
    assert "in test_inner" in all_of(done)


def test_a_test_within_its_limit_is_left_alone(tmp_path):
    source = """
@pytest.mark.parametrize("n", range(4))
def test_inner(mpi_comm, n):
    time.sleep(1)
"""
    done = run_session(tmp_path, source, "--timeout=3")
    assert done.returncode == 0, all_of(done)


# ---------------------------------------------------------------- run_mpi.sh

# Prints each argument in brackets, and the settings that the ranks would see.
FAKE_MPIRUN = """#!/bin/sh
for argument in "$@"; do printf '[%s]' "$argument"; done
echo
echo "folder $PWD"
echo "threads ${OMP_NUM_THREADS:-unset} ${OPENBLAS_NUM_THREADS:-unset} ${MKL_NUM_THREADS:-unset}"
exit "${FAKE_STATUS:-0}"
"""
NO_THREADS = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"])


@pytest.fixture
def checkout(tmp_path):
    """What run_mpi.sh needs, under a path with spaces; its environment is made without a network."""
    folder = tmp_path / "a check out"
    folder.mkdir()
    for name in ["run_mpi.sh", "setup.cfg", "pyproject.toml"]:
        shutil.copy(REPOSITORY / name, folder)
    fake = folder / "fake mpirun"
    fake.write_text(FAKE_MPIRUN)
    fake.chmod(0o755)
    # In the place of Python: its module venv makes an environment whose python does nothing.
    python = folder / "fake python"
    python.write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\necho "$@" >>"%s/installed"\\nsleep 0.3\\n' "$(dirname "$0")" >"$3/bin/python"
    chmod +x "$3/bin/python"
else
    exec {shlex.quote(sys.executable)} "$@"
fi
"""
    )
    python.chmod(0o755)
    return folder


def script(checkout, *arguments, cwd=None, command=None, **changes):
    env = job_environment(
        {"MPIRUN": str(checkout / "fake mpirun"), "PYTHON": str(checkout / "fake python"), **changes}
    )
    command = [str(command or checkout / "run_mpi.sh"), *arguments]
    return run_command(command, timeout=60, env=env, cwd=cwd or checkout)


def ranks_and_arguments(done):
    """What mpirun was given: the rank count, and what follows the name of the program."""
    assert done.returncode == 0, all_of(done)
    given = done.stdout.splitlines()[0][1:-1].split("][")
    assert given[0] == "-n"
    assert given[3:6] == ["-P", "-m", "mpi_matmul"]
    return int(given[1]), given[6:]


@pytest.mark.parametrize(
    ("given", "ranks", "passed_on"),
    [
        ([], 4, []),
        (["A.npy", "B.npy", "-o", "C.npy"], 4, ["A.npy", "B.npy", "-o", "C.npy"]),
        (["-n", "2"], 2, []),
        (["-np", "3", "with space.npy", "*"], 3, ["with space.npy", "*"]),
        (["-n", "2", "-n", "5", "--help"], 2, ["-n", "5", "--help"]),
        (["--shape", "1", "2", "3", "-n", "2"], 4, ["--shape", "1", "2", "3", "-n", "2"]),
        (["-n", "2", "test"], 2, ["test"]),
    ],
)
def test_script_passes_arguments_on(checkout, given, ranks, passed_on):
    assert ranks_and_arguments(script(checkout, *given)) == (ranks, passed_on)


def test_script_help_is_its_own_and_that_of_the_program(checkout):
    done = script(checkout, "--help")
    assert done.stdout.startswith("usage: ./run_mpi.sh")
    assert "[-n][1]" in done.stdout
    assert "[mpi_matmul][--help]" in done.stdout


def test_script_stays_in_the_folder_of_the_caller(checkout, tmp_path):
    caller = tmp_path / "some where"
    caller.mkdir()
    (caller / "link").symlink_to("../a check out/run_mpi.sh")
    for command in ["../a check out/run_mpi.sh", "./link"]:
        done = script(checkout, "A.npy", cwd=caller, command=command)
        assert ranks_and_arguments(done) == (4, ["A.npy"])
        assert f"folder {caller}" in done.stdout


def test_script_returns_the_status_of_mpirun(checkout):
    assert script(checkout, FAKE_STATUS="37").returncode == 37


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "", "1 2"])
def test_script_refuses_a_number_of_ranks_that_is_none(checkout, ranks):
    done = script(checkout, "-n", ranks)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"'{ranks}'" in done.stderr


@pytest.mark.parametrize("mpirun", ["/no/such/mpirun", "/", "no-such-mpirun", "setup.cfg"])
def test_script_refuses_an_mpirun_that_cannot_be_executed(checkout, mpirun):
    done = script(checkout, MPIRUN=mpirun)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert mpirun in done.stderr


def test_script_refuses_an_old_python(checkout):
    (checkout / "fake python").write_text("#!/bin/sh\nexit 1\n")
    done = script(checkout)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "3.11" in done.stderr


def test_script_refuses_a_python_without_venv(checkout):
    python = checkout / "fake python"
    python.write_text(
        python.read_text().replace("else\n", 'elif [ "$2" = "import venv, ensurepip" ]; then exit 1; else\n')
    )
    done = script(checkout)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "venv" in done.stderr


def test_script_shares_the_cores_out(checkout):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for ranks in (1, 2, 64 * cores):
        done = script(checkout, "-n", str(ranks), **NO_THREADS)
        share = max(1, cores // ranks)
        assert f"threads {share} {share} unset" in done.stdout


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("OMP_NUM_THREADS", "threads 7 unset unset"),
        ("OPENBLAS_NUM_THREADS", "threads unset 7 unset"),
        ("MKL_NUM_THREADS", "threads unset unset 7"),
        ("BLIS_NUM_THREADS", "threads unset unset unset"),
    ],
)
def test_script_keeps_a_number_of_threads_that_the_user_has_set(checkout, name, seen):
    done = script(checkout, **{**NO_THREADS, name: "7"})
    assert seen in done.stdout


def installations(checkout):
    return len((checkout / "installed").read_text().splitlines())


def test_script_installs_once_and_again_when_the_recipe_changes(checkout):
    first, second = script(checkout), script(checkout)
    assert "making a private environment" in first.stderr
    assert second.stderr == ""
    assert installations(checkout) == 1
    with (checkout / "setup.cfg").open("a") as settings:
        settings.write("# changed\n")
    assert "making a private environment" in script(checkout).stderr
    assert installations(checkout) == 2


def test_script_repairs_an_installation_that_was_interrupted(checkout):
    script(checkout)
    (checkout / ".venv" / "system" / "recipe").unlink()
    assert "making a private environment" in script(checkout).stderr


def test_script_installs_once_for_two_first_runs_at_once(checkout):
    command = [str(checkout / "run_mpi.sh")]
    env = job_environment({"MPIRUN": str(checkout / "fake mpirun"), "PYTHON": str(checkout / "fake python")})
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert installations(checkout) == 1


def test_script_shows_why_an_installation_failed(checkout):
    python = checkout / "fake python"
    python.write_text(python.read_text().replace("sleep 0.3", "echo no network here; exit 1"))
    done = script(checkout)
    assert done.returncode not in (0, 2)
    assert "no network here" in done.stderr
    # and the next try starts anew
    python.write_text(python.read_text().replace("echo no network here; exit 1", "true"))
    assert script(checkout).returncode == 0


def test_script_does_not_touch_a_folder_that_it_has_not_made(checkout, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    done = script(checkout, MPI_MATMUL_ENV=str(precious))
    assert done.returncode == 2
    assert list(precious.iterdir()) == [precious / "file"]


# ---------------------------------------------------------------- run_mpi.sh test

# Stands for python -m pytest: fails at the parts in FAIL_AT ("serial", a number of ranks, "cluster").
FAKE_PYTEST = """#!/bin/sh
[ "$2" = pytest ] || exit 0
echo "pytest $* in $PWD"
case "$*" in *"-m cluster"*) part=cluster ;; *) part=${MPI_MATMUL_EXPECTED_RANKS:-serial} ;; esac
case " $SKIP_AT " in *" $part "*) echo "======== 3 skipped in 0.12s ========" && exit 0 ;; esac
echo "======== 2 passed, 1 skipped in 0.12s ========"
case " $FAIL_AT " in *" $part "*) exit 1 ;; esac
case " $EMPTY_AT " in *" $part "*) exit 5 ;; esac
"""


def run_suite(checkout, *arguments, fail_at="", empty_at="", skip_at="", **changes):
    """`run_mpi.sh test` with a pytest that only says how it was called."""
    script(checkout)
    (checkout / ".venv" / "system" / "bin" / "python").write_text(FAKE_PYTEST)
    (checkout / "fake mpirun").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    at = {"FAIL_AT": fail_at, "EMPTY_AT": empty_at, "SKIP_AT": skip_at}
    return script(checkout, "test", *arguments, **at, **changes)


def test_suite_runs_every_part_and_counts(checkout, tmp_path):
    done = run_suite(checkout, "-k", "some thing", cwd=tmp_path)
    assert done.returncode == 0, all_of(done)
    calls = [line for line in done.stdout.splitlines() if line.startswith("pytest ")]
    assert len(calls) == 7
    assert all(call.endswith(f"-k some thing in {checkout}") for call in calls)
    assert [("--with-mpi" in call) for call in calls] == [False, *5 * [True], False]
    assert done.stdout.splitlines()[-1] == (
        "ran 7 parts of the test suite: 7 passed, 0 failed; tests: 14 passed, 0 failed, 0 errors, 7 skipped"
    )


@pytest.mark.parametrize("fail_at", ["serial", "1", "3", "5", "serial 2", "cluster"])
def test_suite_fails_when_any_part_fails_and_runs_the_others(checkout, fail_at):
    done = run_suite(checkout, fail_at=fail_at)
    assert done.returncode == 1
    failed = len(fail_at.split())
    assert done.stdout.splitlines()[-1].startswith(
        f"ran 7 parts of the test suite: {7 - failed} passed, {failed} failed"
    )


def test_a_part_whose_tests_were_all_skipped_has_not_passed(checkout):
    """Without Docker, the one across hosts: no failure, and no success."""
    done = run_suite(checkout, skip_at="cluster")
    assert done.returncode == 0
    assert "cluster  skipped: 3 skipped in 0.12s" in done.stdout
    assert "ran 6 parts of the test suite: 6 passed, 0 failed" in done.stdout
    assert run_suite(checkout, "--cluster", skip_at="cluster").returncode == 1


def test_a_part_without_tests_is_a_failure_unless_the_caller_has_selected(checkout):
    done = run_suite(checkout, empty_at="1 2 3 4 5")
    assert done.returncode == 1
    assert "2 passed, 5 failed" in done.stdout.splitlines()[-1]
    selected = run_suite(checkout, "tests/test_layout.py", empty_at="1 2 3 4 5")
    assert selected.returncode == 0, all_of(selected)
    assert "1 rank   nothing selected" in selected.stdout
    nothing = run_suite(checkout, "-k", "no such test", empty_at="serial 1 2 3 4 5 cluster")
    assert nothing.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "changes", "parts"),
    [
        (["--serial"], {}, ["serial"]),
        (["--mpi", "-n", "3 4"], {}, ["3 ranks", "4 ranks"]),
        (["--cluster"], {}, ["cluster"]),
        (["-n", "2,1"], {}, ["serial", "2 ranks", "1 rank", "cluster"]),
        (["--mpi"], {"MPI_MATMUL_TEST_RANKS": "3"}, ["3 ranks"]),
    ],
)
def test_suite_runs_the_parts_that_are_asked_for(checkout, arguments, changes, parts):
    done = run_suite(checkout, *arguments, **changes)
    assert done.returncode == 0, all_of(done)
    titles = [line for line in done.stdout.splitlines() if line.startswith("##### ")][:-1]
    assert [title.removeprefix("##### ").partition(":")[0] for title in titles] == parts


@pytest.mark.parametrize("ranks", ["", "two", "3 0"])
def test_suite_refuses_a_list_of_ranks_that_is_none(checkout, ranks):
    done = run_suite(checkout, "-n", ranks)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (1, 0), (2, 213)])
def test_a_launcher_that_cannot_start_is_asked_once_more(tmp_path, monkeypatch, failures, status):
    """Before any rank has run; and no other failure is hidden by that."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f"#!/bin/sh\ncd {tmp_path}\nls runs* | wc -l >last\ntouch runs$(cat last)\n"
        f"[ $(cat last) -ge {failures} ] && exit 0\n"
        "echo 'The listener thread failed to start' >&2\nexit 213\n"
    )
    mpirun.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(mpirun))
    assert run_ranks(2, ["true"]).returncode == status
    assert len(list(tmp_path.glob("runs*"))) == min(failures, 1) + 1
