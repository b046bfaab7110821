"""The image's mpirun, with scripts in the place of Open MPI's."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WRAPPER = Path(__file__).parent / "mpirun"
LOST = "PRTE has lost communication with a remote daemon."


@pytest.fixture
def start(tmp_path):
    """Start the wrapper around a shell script; what it is started with are the script's arguments."""

    def start(script, *arguments):
        inner = tmp_path / "inner"
        inner.write_text(f"#!/bin/sh\n{script}\n")
        inner.chmod(0o755)
        outer = tmp_path / "mpirun"
        outer.write_text(WRAPPER.read_text().replace('"/usr/bin/mpirun"', repr(str(inner))))
        return subprocess.Popen(
            [sys.executable, outer, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        (f"echo '{LOST}' >&2; exit 0", 1),
        (f"echo '{LOST}' >&2; exit 213", 213),
        (f"printf 'before\\n\\n{LOST}' >&2", 1),
        (f"echo '{LOST}'", 0),
        ("kill -9 $$", 137),
    ],
)
def test_the_status(start, script, status):
    job = start(script)
    job.communicate(timeout=20)
    assert job.returncode == status


def test_words_and_streams_pass_through(start):
    job = start('echo "$# $2"; echo err >&2; printf half >&2', "-n", "two words")
    assert job.communicate(timeout=20) == ("2 two words\n", "err\nhalf")


def test_a_warning_that_says_nothing_is_left_out(start):
    job = start("echo '[h:1] plm:ssh: Warning: setpgid(2,2) failed in parent' >&2; echo another >&2")
    assert job.communicate(timeout=20)[1] == "another\n"


def test_what_mpirun_leaves_behind_is_not_waited_for(start):
    job = start("sleep 30 & echo $!")
    left_behind = job.stdout.readline()
    try:
        assert job.wait(10) == 0
    finally:
        subprocess.run(["kill", left_behind.strip()], check=False)
        job.communicate(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_mpirun(start, number):
    """Without a terminal, as in a container: there Docker sends Ctrl-C to the first process alone."""
    job = start(f"trap 'echo caught; exit 9' {number.value}; echo ready; while :; do sleep 0.1; done")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    assert job.communicate(timeout=20)[0] == "caught\n"
    assert job.returncode == 9


def test_ctrl_c_on_a_terminal_reaches_mpirun_once(start, tmp_path):
    """It comes to both; a second one would make mpirun end without its last words."""
    count = "n=0; trap 'n=$((n + 1))' INT; echo ready; sleep 1; sleep 1; echo $n; exit 5"
    job = start(count)
    job.kill()
    job.communicate()
    master, slave = os.openpty()
    child = os.fork()
    if child == 0:
        os.login_tty(slave)
        os.execv(sys.executable, [sys.executable, str(tmp_path / "mpirun")])
    os.close(slave)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(master, 100)
    os.write(master, b"\x03")
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 100):
            shown += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    # The terminal echoes ^C.
    assert shown.split()[-1] == b"^C1"
