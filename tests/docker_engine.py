"""Is there a Docker engine with all that the tests need, and its images."""

import functools
import os
import re
import shutil
import subprocess

import pytest
from launcher import REPOSITORY

# Set where containers are required (in the gate): what is missing is a failure then, and no reason to skip.
REQUIRED = "MPI_MATMUL_NEED_DOCKER"

PROGRAM_IMAGE = "mpi_matmul"
TEST_IMAGE = "mpi_matmul_test"


def docker(*arguments, timeout=120):
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


@functools.cache
def missing():
    """What containers lack on this machine; empty when they can be had."""
    if shutil.which("docker") is None:
        return "no docker command"
    if docker("info").returncode:
        return "no Docker engine answers"
    if compose() is None:
        return "neither `docker compose` nor docker-compose"
    base = re.search(r"^FROM (\S+)", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)[1]
    if docker("image", "inspect", base).returncode and docker("pull", base).returncode:
        return f"the base image {base} is not there and cannot be pulled"
    return ""


@functools.cache
def compose():
    """The command of Docker Compose, by its new name or its old one; None without either."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    return None


def need_docker():
    """Skip the test, with the reason, where there are no containers (or fail, where they are required)."""
    if missing() and os.environ.get(REQUIRED):
        pytest.fail(f"{missing()}, but {REQUIRED} is set")
    elif missing():
        pytest.skip(missing())


@functools.cache
def program_image():
    """The image of the program, made from the files as they are now."""
    return _build(PROGRAM_IMAGE, "Dockerfile")


@functools.cache
def test_image():
    """The image of the program with the tests and Slurm."""
    program_image()
    return _build(TEST_IMAGE, "tests/cluster/Dockerfile")


test_image.__test__ = False


def _build(tag, dockerfile):
    path = str(REPOSITORY / dockerfile)
    built = docker("build", "--network=host", "--tag", tag, "--file", path, str(REPOSITORY), timeout=900)
    assert built.returncode == 0, built.stdout + built.stderr
    return tag
