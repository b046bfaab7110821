"""The container image: its main job works as it stands, for any user, with few cores and no network."""

import pytest
from docker_engine import docker, need_docker, program_image
from launcher import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PROGRAM = ["python", "-m", "mpi_matmul", "--shape", "1000", "1000", "1000"]


@pytest.fixture(scope="module")
def image():
    need_docker()
    return program_image()


CASES = {
    "the image's own command": ([], []),
    "as root": (["--user", "0"], ["mpirun", "-n", "4", *PROGRAM]),
    "as uid 1000": (["--user", "1000"], ["mpirun", "-n", "4", *PROGRAM]),
    "as a user without a name": (["--user", "12345"], ["mpirun", "-n", "4", *PROGRAM]),
    "two cores": (["--cpus", "2"], ["mpirun", "-n", "4", *PROGRAM]),
    "no network": (["--network", "none"], ["mpirun", "-n", "4", *PROGRAM]),
    "eight ranks in 64 MB of shared memory": (["--shm-size", "64m"], ["mpirun", "-n", "8", *PROGRAM]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_good_run_says_nothing_but_its_report(image, case):
    options, command = CASES[case]
    job = docker("run", "--rm", *options, image, *command)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.splitlines()[-1] == "done"
    assert "fsdp: correct" in job.stdout
    assert job.stderr == ""


def test_the_image_is_small(image):
    size = docker("image", "inspect", "--format", "{{.Size}}", image)
    assert int(size.stdout) < 600e6


def test_a_folder_that_the_user_may_not_enter_is_named(image):
    job = docker("run", "--rm", "--workdir", "/root", image, "mpirun", "-n", "2", *PROGRAM)
    assert (job.returncode, job.stdout) == (1, "")
    assert job.stderr.startswith("mpirun: the working folder /root is closed to this user")


def test_ctrl_c_ends_a_container(image):
    """Docker passes it to the first process alone."""
    command = [*PROGRAM[:3], "--shape", "9000", "9000", "9000", "--check", "none"]
    container = docker("run", "--detach", image, "mpirun", "-n", "2", *command).stdout.strip()
    try:
        eventually(lambda: docker("exec", container, "pgrep", "-f", "^python").returncode == 0)
        docker("kill", "--signal", "INT", container)
        ended = docker("wait", container, timeout=20)
        assert ended.stdout.strip() not in ("", "0")
    finally:
        docker("rm", "--force", container)
