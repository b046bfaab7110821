"""Is there a Docker engine, and the base image of ours?"""

import functools
import re
import shutil
import subprocess

import pytest
from launcher import REPOSITORY


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
    base = re.search(r"^FROM (\S+)", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)[1]
    if docker("image", "inspect", base).returncode and docker("pull", base).returncode:
        return f"the base image {base} is not there and cannot be pulled"
    return ""


def need_docker():
    """Skip the test, with the reason, where there are no containers."""
    if missing():
        pytest.skip(missing())
