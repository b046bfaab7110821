"""Every command and program of the README, and of the page on the kernels, is run as it stands there."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from docker_engine import need_docker
from launcher import REPOSITORY, job_environment, run_command

README = (REPOSITORY / "README.md").read_text()
KERNELS_PAGE = (REPOSITORY / "mpi_matmul" / "kernels" / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README + KERNELS_PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [text for language, text in BLOCKS if language == "sh"]
PROGRAMS = {text.split()[1]: text for language, text in BLOCKS if language == "python"}
SUITE = "./run_mpi.sh test\n"  # this very run: .ci/run begins it
SHAPES = next(text for text in COMMANDS if "--simulate 64" in text)  # what it prints is in a table


def needs_docker(text):
    return "docker" in text or "run_mpi.sh cluster" in text


def copy_repository(target, *paths):
    """The files that git knows (of these paths) into a folder."""
    listing = ["git", "ls-files", "-z", "--", *(paths or ["."])]
    listed = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0")[:-1]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target / name)


@pytest.fixture
def folder(tmp_path):
    """A folder as the README assumes it: the repository's files, A.npy and B.npy, the programs shown."""
    (tmp_path / "run_mpi.sh").symlink_to(REPOSITORY / "run_mpi.sh")
    copy_repository(tmp_path, "Dockerfile", ".dockerignore", "README.md", "LICENSE", "setup.cfg")
    copy_repository(tmp_path, "pyproject.toml", "constraints.txt", "mpi_matmul", "tests")
    rng = np.random.default_rng(1)
    np.save(tmp_path / "A.npy", rng.standard_normal((70, 50)))
    np.save(tmp_path / "B.npy", rng.standard_normal((50, 40)))
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def environment():
    """With this Python's neighbours first, and the private MPI (if it is that) left to run_mpi.sh to find."""
    env = job_environment({"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    if env.get("MPIRUN", "").startswith(sys.prefix):
        del env["MPIRUN"]
    return env


def run_block(text, folder, env, timeout=400):
    job = run_command(["bash", "-euo", "pipefail", "-c", text], timeout, env, cwd=folder)
    assert job.returncode == 0, (text, job.stdout, job.stderr)
    return job


def test_the_readme_has_commands_and_programs():
    assert SUITE in COMMANDS
    assert len(COMMANDS) > 6
    assert PROGRAMS


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=text[:40], marks=[pytest.mark.cluster] if needs_docker(text) else [])
        for text in COMMANDS
        if text not in (SUITE, SHAPES) and "pip install" not in text
    ],
)
def test_commands(text, folder):
    if needs_docker(text):
        need_docker()
    run_block(text, folder, environment())
    if "-o C.npy" in text:
        product = np.load(folder / "C.npy")
        np.testing.assert_allclose(product, np.load(folder / "A.npy") @ np.load(folder / "B.npy"), atol=1e-12)


def test_the_bytes_in_the_table_are_those_that_the_commands_print(folder):
    printed = run_block(SHAPES, folder, environment()).stdout
    sent = re.findall(r"^ +(?:fsdp|tp_row|summa|grid3d) .* (\S+ [kM]?B)  .*$", printed, re.MULTILINE)
    rows = re.findall(r"^\| (?:square|tall a|long k|large c): [^|]*\|(.*)\|$", KERNELS_PAGE, re.MULTILINE)
    assert [cell.strip() for row in rows for cell in row.split("|")] == sent
    assert len(sent) == 16


@pytest.mark.parametrize("page", ["README.md", "mpi_matmul/kernels/README.md"])
def test_what_a_page_links_to_is_there(page):
    text, folder = (REPOSITORY / page).read_text(), (REPOSITORY / page).parent
    links = re.findall(r"\]\(([^()\s#:]+)\)", text)
    assert len(links) > 10
    assert not [link for link in links if not (folder / link).exists()]


def test_the_suite_is_what_the_gate_runs():
    assert SUITE.strip() in (REPOSITORY / ".ci" / "run").read_text()


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "text", [text for text in COMMANDS if "pip install" in text], ids=lambda text: text[:40]
)
def test_installing_into_an_environment_of_ones_own(text, tmp_path):
    """From a copy of the repository, as a package that no longer needs it."""
    copy_repository(tmp_path / "copy")
    venv.create(tmp_path / "venv", with_pip=True)
    env = job_environment({"MPIRUN": None, "PYTHONPATH": None})
    env["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{env['PATH']}"
    job = run_block(text, tmp_path / "copy", env)
    assert "fsdp: correct" in job.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, folder):
    """Each program shown says beside its last line what it prints."""
    job = run_command([sys.executable, name], 60, job_environment(), cwd=folder)
    assert job.returncode == 0, job.stderr
    expected = re.findall(r"# prints (.*)$", PROGRAMS[name], re.MULTILINE)
    assert job.stdout.splitlines() == expected
