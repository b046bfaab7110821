"""The image's mpirun, with scripts in the place of Open MPI's."""

import signal
import subprocess
import sys
import time
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
            [sys.executable, outer, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_mpirun(start, number):
    job = start(f"trap 'echo caught; exit 9' {number.value}; echo ready; while :; do sleep 0.1; done")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    assert job.communicate(timeout=20)[0] == "caught\n"
    assert job.returncode == 9


def test_ctrl_c_is_left_to_mpirun(start):
    """Both get it, and the wrapper stays to tell how mpirun ends."""
    job = start("echo ready; sleep 1; exit 5")
    assert job.stdout.readline() == "ready\n"
    time.sleep(0.2)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=20)
    assert job.returncode == 5
