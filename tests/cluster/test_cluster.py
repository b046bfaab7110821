"""The program across hosts that share nothing but a network: containers, each with a name and an address."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from docker_engine import docker, need_docker, test_image
from hosts import FOLDER, Cluster
from launcher import REPOSITORY, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

UNEVEN = ["--shape", "301", "203", "107"]
# Long enough to be in the middle of it after SECONDS_TO_GET_GOING.
LONG = ["--shape", "9000", "9000", "9000", "--strategy", "fsdp", "--check", "none"]
SECONDS_TO_GET_GOING = 6
HOSTS = ["launcher", *(f"worker{number}" for number in range(1, 16))]


@pytest.fixture(scope="module")
def cluster(image):
    with Cluster(5, image) as five_hosts:
        yield five_hosts


def report_of(job):
    assert job.returncode == 0, job.stdout + job.stderr
    return json.loads(job.stdout)


def start_cluster(*arguments, folder, script=REPOSITORY / "run_mpi.sh", **changes):
    """``./run_mpi.sh cluster``, in a group of processes of its own as from a terminal."""
    return subprocess.Popen(
        [str(script), "cluster", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **changes},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def run_cluster(*arguments, timeout=120, **options):
    """How ``./run_mpi.sh cluster`` ends; nothing of it may be left behind."""
    with start_cluster(*arguments, **options) as job:
        try:
            stdout, stderr = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            pytest.fail(f"still running after {timeout} s: {job.args}\n{job.communicate()}")
    assert left_behind(job) == []
    return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)


def project_of(job):
    """The name that Compose knows the cluster of a ``start_cluster`` by, once it is there; None before."""
    names = docker("network", "ls", "--format", "{{.Name}}").stdout
    found = re.search(rf"^(mpi_matmul_cluster_{job.pid}_\d+)_cluster$", names, re.MULTILINE)
    return found and found[1]


def left_behind(job):
    """Containers and networks of a ``start_cluster`` that are still there."""
    names = docker("ps", "--all", "--format", "{{.Names}}").stdout.split()
    names += docker("network", "ls", "--format", "{{.Name}}").stdout.split()
    return [name for name in names if name.startswith(f"mpi_matmul_cluster_{job.pid}_")]


# ---- right across hosts ----


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3])
@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
def test_both_strategies_are_right_on_all_hosts(cluster, hosts, ranks_per_host):
    job = cluster.mpirun(
        "python", "-m", "mpi_matmul", *UNEVEN, "--json", "-", hosts=hosts, ranks_per_host=ranks_per_host
    )
    report = report_of(job)
    assert [(run["strategy"], run["check"]["passed"]) for run in report["runs"]] == [
        ("dp", True),
        ("fsdp", True),
    ]
    assert report["hosts"] == [name for name in cluster.names[:hosts] for _ in range(ranks_per_host)]


def test_every_kernel_is_right_and_a_host_is_a_node(cluster):
    kernels = ["auto", "tp_column", "tp_row", "fsdp_tp", "summa", "grid3d"]
    arguments = [*UNEVEN, "--strategy", *kernels, "--json", "-"]
    runs = report_of(cluster.mpirun("python", "-m", "mpi_matmul", *arguments, hosts=3, ranks_per_host=2))[
        "runs"
    ]
    assert all(run["check"]["passed"] for run in runs)
    assert [run["strategy"] for run in runs[1:]] == kernels[1:]
    assert runs[0]["chosen_because"]
    assert {run["strategy"]: run["mesh"] for run in runs[1:]}["fsdp_tp"] == "3x1x2"


def test_every_rank_has_the_same_software_and_threads(cluster):
    report = report_of(cluster.mpirun("python", "-m", "mpi_matmul", *UNEVEN, "--json", "-", ranks_per_host=2))
    assert all(report["versions"][0].values())
    assert report["versions"] == [report["versions"][0]] * 10
    assert report["blas_threads"] == [report["blas_threads"][0]] * 10


def test_a_hostfile_is_followed(cluster):
    cluster.run("launcher", "sh", "-c", "printf 'launcher slots=2\\nworker1 slots=2\\n' >hosts")
    job = cluster.run(
        *["launcher", "mpirun", "--hostfile", "hosts", "-n", "4", "python", "-m", "mpi_matmul", *UNEVEN],
        *["--json", "-"],
    )
    assert report_of(job)["hosts"] == ["launcher"] * 2 + ["worker1"] * 2


def test_the_files_of_a_host_are_its_own(cluster):
    """What the tests below rely on."""
    cluster.run("launcher", "touch", "mine")
    assert cluster.run("launcher", "test", "-e", "mine").returncode == 0
    assert cluster.run("worker1", "test", "-e", "mine").returncode == 1


def test_no_key_is_in_the_image_and_each_host_makes_its_own(cluster):
    search = ["sh", "-c", "find / -xdev -name 'id_*' -path '*ssh*' -o -xdev -name 'ssh_host_*' 2>/dev/null"]
    assert docker("run", "--rm", "--user", "0", cluster.image, *search).stdout == ""
    keys = {cluster.run(name, "cat", ".ssh/id_ed25519.pub").stdout.split()[1] for name in cluster.names}
    assert len(keys) == len(cluster.names)


@pytest.mark.timeout(620)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_the_suite_for_ranks_passes_across_two_hosts(image, ranks_per_host):
    """Of the kernels what hosts may change: who owns and sends what; blocks of all sizes are tried on one."""
    files = [f"tests/test_{name}.py" for name in ("communicator", "matmul", "ring", "kernels")]
    suite = ["python", "-m", "pytest", "--with-mpi", "-m", "mpi", *files]
    some = ["-k", "not mpi-in-small-pieces and not blocks and not dtypes and not root_are_sent and not every"]
    with Cluster(2, test_image()) as cluster:
        job = cluster.mpirun(*suite, *some, ranks_per_host=ranks_per_host, folder="/source", timeout=580)
    assert job.returncode == 0, job.stdout + job.stderr
    # Some need more ranks, some fewer.
    passed, skipped = (int(re.search(rf"(\d+) {word}", job.stdout)[1]) for word in ("passed", "skipped"))
    assert passed > 10 * skipped


# ---- when hosts start, and when they go ----


@pytest.mark.parametrize("attempt", range(10))
def test_a_run_at_once_after_up(image, attempt):
    """No wait between the two, and none inside the tests' own helper."""
    with Cluster(4 if attempt % 2 else 6, image) as cluster:
        report = report_of(cluster.mpirun("python", "-m", "mpi_matmul", *UNEVEN, "--json", "-"))
    assert report["hosts"] == cluster.names


@pytest.mark.parametrize(
    ("host", "accident", "limit"),
    [("worker1", "kill", 30), ("worker1", "cut off", 60), ("launcher", "kill", 30)],
)
def test_a_lost_host_ends_the_run(image, tmp_path, host, accident, limit):
    """By the way a user goes; a host without power, and one without network, which says nothing any more."""
    (tmp_path / "C.npy").write_text("older")
    with start_cluster("--hosts", 3, "-n", 3, *LONG, "-o", "C.npy", folder=tmp_path) as job:
        project = eventually(lambda: project_of(job))
        lost = eventually(lambda: container_of(project, host))
        eventually(lambda: docker("exec", lost, "pgrep", "-f", "^python.* mpi_matmul").returncode == 0)
        time.sleep(SECONDS_TO_GET_GOING)
        assert job.poll() is None, "it was over before the accident"
        start = time.monotonic()
        if accident == "kill":
            docker("kill", lost)
        else:
            docker("network", "disconnect", f"{project}_cluster", lost)
        stdout, stderr = job.communicate(timeout=limit + 30)
    assert time.monotonic() - start < limit
    assert job.returncode != 0, stderr
    assert host in stderr
    assert "done" not in stdout
    assert (tmp_path / "C.npy").read_text() == "older"
    assert left_behind(job) == []


def test_mpirun_fails_and_no_rank_outlives_it_when_it_has_lost_a_host(image):
    with Cluster(3, image) as cluster:
        ranks = ["--host", "launcher,worker1,worker2", "-n", "3", "python", "-m", "mpi_matmul", *LONG]
        command = ["docker", "exec", cluster.container("launcher"), "mpirun", *ranks]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            time.sleep(SECONDS_TO_GET_GOING)
            cluster.kill("worker1")
            assert job.wait(30) != 0
        for name in ("launcher", "worker2"):
            eventually(lambda name=name: cluster.run(name, "pgrep", "python").returncode == 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_takes_the_cluster_down(image, tmp_path, number):
    with start_cluster(*LONG, "-o", "C.npy", folder=tmp_path) as job:
        project = eventually(lambda: project_of(job))
        eventually(lambda: container_of(project, "worker1"))
        time.sleep(2)
        # Ctrl-C comes to the whole group.
        os.killpg(job.pid, number)
        job.communicate(timeout=60)
    assert job.returncode == 128 + number
    assert left_behind(job) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.7, 1.0, 1.4, 1.8, 2.2, 2.6])
def test_ctrl_c_at_any_moment(image, tmp_path, seconds):
    """Also while the image is made, the arguments are looked at, and hosts are half up."""
    with start_cluster("--hosts", 9, *LONG, "-o", "C.npy", folder=tmp_path) as job:
        time.sleep(seconds)
        os.killpg(job.pid, signal.SIGINT)
        stdout, stderr = job.communicate(timeout=60)
    assert (job.returncode, stdout, stderr) == (130, "", "")
    assert left_behind(job) == []
    assert list(tmp_path.iterdir()) == []


def container_of(project, service):
    labels = (f"com.docker.compose.{name}" for name in (f"project={project}", f"service={service}"))
    filters = (word for label in labels for word in ("--filter", f"label={label}"))
    return docker("ps", "--quiet", *filters).stdout.strip()


# ---- two networks ----


def test_only_the_network_that_joins_the_hosts_is_used(image):
    """All hosts are in a second network, too, in which no packet arrives."""
    with Cluster(3, image, extra=["two_networks.yaml"]) as cluster:
        before = received(cluster)
        job = cluster.mpirun("python", "-m", "mpi_matmul", "--shape", "900", "800", "700", "--json", "-")
        report = report_of(job)
        after = received(cluster)
    # Between hosts, b goes round but for one step of each shard.
    assert sum(after["cluster"]) - sum(before["cluster"]) > sum(report["runs"][1]["kernel_sent_bytes"])
    assert sum(after["isolated"]) - sum(before["isolated"]) < 100_000


def test_the_second_network_is_dead(image):
    """The test above would prove nothing if it were alive."""
    with Cluster(2, image, extra=["two_networks.yaml"]) as cluster:
        address = networks_of(cluster, "worker1")["isolated"]["IPAddress"]
        probe = f"import socket; socket.create_connection(('{address}', 2222), timeout=3)"
        job = cluster.run("launcher", "python", "-c", probe)
    assert "TimeoutError" in job.stderr


def test_two_networks_and_the_command(image, tmp_path):
    extra = str(FOLDER / "two_networks.yaml")
    job = run_cluster("--hosts", 3, *UNEVEN, folder=tmp_path, MPI_MATMUL_COMPOSE=extra)
    assert job.returncode == 0, job.stderr
    assert "fsdp: correct" in job.stdout


def networks_of(cluster, host):
    described = docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", cluster.container(host))
    networks = json.loads(described.stdout)
    return {name.removeprefix(f"{cluster.project}_"): network for name, network in networks.items()}


def received(cluster):
    """Bytes that came to each host, by network."""
    counts = {"cluster": [], "isolated": []}
    for host in cluster.names:
        interfaces = "cd /sys/class/net && for i in eth*; do cat $i/address $i/statistics/rx_bytes; done"
        words = cluster.run(host, "sh", "-c", interfaces).stdout.split()
        bytes_at = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        for name, network in networks_of(cluster, host).items():
            counts[name].append(bytes_at[network["MacAddress"]])
    return counts


# ---- the command ----


@pytest.fixture
def folder(tmp_path):
    """A folder with operands, whose name needs care."""
    folder = tmp_path / "my data"
    folder.mkdir()
    rng = np.random.default_rng(5)
    np.save(folder / "A.npy", rng.standard_normal((71, 53)))
    np.save(tmp_path / "B.npy", rng.standard_normal((53, 37)))
    return folder


def test_operands_are_needed_here_only_and_the_product_comes_here(image, folder):
    job = run_cluster(
        *["--hosts", 3, "A.npy", "../B.npy", "-n", 5, "-o", folder.parent / "C.npy", "--json", "r.json"],
        folder=folder,
    )
    assert job.returncode == 0, job.stderr
    assert job.stderr == ""
    expected = np.load(folder / "A.npy") @ np.load(folder.parent / "B.npy")
    np.testing.assert_allclose(np.load(folder.parent / "C.npy"), expected, rtol=1e-12, atol=1e-12)
    hosts = json.loads((folder / "r.json").read_text())["hosts"]
    assert hosts == ["launcher", "launcher", "worker1", "worker1", "worker2"]
    assert "3 hosts: launcher (ranks 0-1), worker1 (ranks 2-3), worker2 (rank 4)" in job.stdout
    assert sorted(os.listdir(folder)) == ["A.npy", "r.json"]


def test_many_hosts_go_as_they_came(image, tmp_path):
    """With the compose file's profile, too."""
    job = run_cluster("--hosts", 7, *UNEVEN, "--json", "-", folder=tmp_path)
    assert report_of(job)["hosts"] == [host for host in HOSTS[:7] for _ in range(2)]


def test_an_output_keeps_its_rights_and_a_link_its_place(image, folder):
    (folder / "sub").mkdir()
    older = folder / "sub" / "C.npy"
    older.write_text("older")
    older.chmod(0o640)
    (folder / "link.npy").symlink_to("sub/C.npy")
    job = run_cluster("A.npy", "../B.npy", "-o", "link.npy", folder=folder)
    assert job.returncode == 0, job.stderr
    assert (folder / "link.npy").readlink().as_posix() == "sub/C.npy"
    assert np.load(older).shape == (71, 37)
    assert older.stat().st_mode & 0o777 == 0o640
    assert os.listdir(folder / "sub") == ["C.npy"]


def test_a_name_may_end_in_a_newline(image, folder):
    job = run_cluster("A.npy", "../B.npy", "-o", "C.npy\n", folder=folder)
    assert job.returncode == 0, job.stderr
    assert np.load(folder / "C.npy\n").shape == (71, 37)


def test_a_name_that_docker_would_change_is_refused(image, folder):
    job = run_cluster("A.npy", "../B.npy", "-o", os.fsdecode(b"C\xff.npy"), folder=folder)
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr == "run_mpi.sh: the name of a file is not UTF-8: Docker cannot pass it on\n"


def test_names_of_the_environment_are_not_taken_for_the_scripts_own(image, folder):
    names = ("part", "parts", "product", "report", "work", "project", "starter", "launcher", "hosts", "ranks")
    job = run_cluster(*UNEVEN, folder=folder, **dict.fromkeys(names, str(folder / "A.npy")))
    assert job.returncode == 0, job.stderr
    assert os.listdir(folder) == ["A.npy"]


def test_a_run_that_cannot_print_leaves_an_older_product(image, folder):
    (folder / "C.npy").write_text("older")
    command = [REPOSITORY / "run_mpi.sh", "cluster", "A.npy", "../B.npy", "-o", "C.npy"]
    with open("/dev/full", "w") as full:
        job = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert job.returncode != 0
    assert (folder / "C.npy").read_text() == "older"
    assert sorted(os.listdir(folder)) == ["A.npy", "C.npy"]


@pytest.mark.parametrize("output", ["-o", "--json"])
@pytest.mark.parametrize("way", ["itself", "a link", "by a linked folder", "a second name"])
def test_an_operand_is_never_overwritten(image, folder, output, way):
    """The launcher has copies, in which links and second names are not to be seen."""
    before = (folder / "A.npy").read_bytes()
    names = {"itself": "../my data/A.npy", "a link": "L.npy", "by a linked folder": "same/A.npy"}
    (folder / "L.npy").symlink_to("A.npy")
    (folder / "same").symlink_to(".")
    (folder / "second.npy").hardlink_to(folder / "A.npy")
    job = run_cluster("A.npy", "../B.npy", output, names.get(way, "second.npy"), folder=folder)
    assert (job.returncode, job.stdout) == (2, "")
    assert "is also an input" in job.stderr
    assert (folder / "A.npy").read_bytes() == before


def test_without_arguments_two_hosts_have_two_ranks_each(image, tmp_path):
    job = run_cluster(folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stderr == ""
    assert "2 hosts: launcher (ranks 0-1), worker1 (ranks 2-3)" in job.stdout
    assert job.stdout.splitlines()[-1] == "done"


def test_a_number_of_threads_is_kept(image, tmp_path):
    cores = int(docker("info", "--format", "{{.NCPU}}").stdout)
    job = run_cluster("--json", "-", *UNEVEN, folder=tmp_path, OPENBLAS_NUM_THREADS=str(cores))
    assert report_of(job)["blas_threads"] == [cores] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["A.npy", "A.npy", "-o", "C.npy"], "do not fit"),
        (["--no-such-option"], "--no-such-option"),
        (["A.npy"], "expected two operands"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said_once(image, folder, arguments, words):
    older = b"an older product"
    (folder / "C.npy").write_bytes(older)
    job = run_cluster(*arguments, folder=folder)
    assert job.returncode == 2
    assert job.stdout == ""
    assert job.stderr.count(words) == 1
    assert "Traceback" not in job.stderr
    assert (folder / "C.npy").read_bytes() == older


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["A.npy", "missing.npy"], "missing.npy: no such file"),
        (["A.npy", "."], "is not a regular file"),
        (["A.npy", "fifo"], "fifo is not a regular file"),
        (["A.npy", "/dev/null"], "/dev/null is not a regular file"),
        (["A.npy", "../B.npy", "-o", "nowhere/C.npy"], "nowhere/C.npy: no such folder"),
        (["A.npy", "../B.npy", "-o", "fifo"], "fifo is not a regular file"),
        (["A.npy", "../B.npy", "-o", "."], "is not a regular file"),
        (["A.npy", "../B.npy", "-o", "dangling"], "dangling is a link to nothing"),
        (["A.npy", "../B.npy", "-o", "r", "--json", "other name of r"], "of the product and of the report"),
        (["--simulate", "3"], "leave out cluster"),
        ([*UNEVEN, "--dtype", "text"], "not a dtype of numbers"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_any_host_starts(image, folder, arguments, words):
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to("nothing")
    (folder / "r").touch()
    (folder / "other name of r").symlink_to("r")
    before = sorted(os.listdir(folder))
    job = run_cluster(*arguments, folder=folder)
    assert (job.returncode, job.stdout) == (2, "")
    assert words in job.stderr
    assert len(job.stderr.splitlines()) == 1
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "0"], "--hosts takes a number of hosts, got '0'"),
        (["--hosts", "two"], "--hosts takes a number of hosts, got 'two'"),
        (["--hosts"], "--hosts takes a number of hosts, got ''"),
        (["--hosts", "17"], "--hosts is 17, but tests/cluster/compose.yaml has 16 hosts"),
        (["--hosts=3", "-n", "2"], "--hosts is 3 and -n is 2"),
        (["-n", "-1"], "-n takes a number of ranks, got '-1'"),
    ],
)
def test_impossible_numbers_are_refused_in_one_line(tmp_path, arguments, words):
    need_docker()
    job = run_cluster(*arguments, folder=tmp_path)
    assert (job.returncode, job.stdout) == (2, "")
    assert words in job.stderr
    assert len(job.stderr.splitlines()) == 1


def test_a_compose_file_that_is_not_there_is_named(tmp_path):
    need_docker()
    job = run_cluster(folder=tmp_path, MPI_MATMUL_COMPOSE="no_such_file.yaml")
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr == "run_mpi.sh: MPI_MATMUL_COMPOSE is no_such_file.yaml, and there is no such file\n"


def test_an_image_that_is_not_there_is_named(tmp_path):
    need_docker()
    job = run_cluster(folder=tmp_path, MPI_MATMUL_IMAGE="localhost:1/no_such_image")
    assert (job.returncode, job.stdout) == (2, "")
    assert len(job.stderr.splitlines()) == 1
    assert "no_such_image" in job.stderr


def test_an_image_that_does_not_build_gives_the_reason(tmp_path):
    """In a copy of the repository, whose Dockerfile asks for something that is not there."""
    need_docker()
    copy = tmp_path / "copy"
    (copy / "tests" / "cluster").mkdir(parents=True)
    for name in ("run_mpi.sh", "tests/cluster/run.sh", "tests/cluster/compose.yaml"):
        shutil.copy(REPOSITORY / name, copy / name)
    (copy / "Dockerfile").write_text("FROM debian:trixie-slim\nCOPY no_such_file /\n")
    job = run_cluster(folder=tmp_path, script=copy / "run_mpi.sh")
    assert (job.returncode, job.stdout) == (2, "")
    assert "no_such_file" in job.stderr
    assert job.stderr.splitlines()[-1].startswith("run_mpi.sh: the image does not build")
    assert len(job.stderr.splitlines()) < 15


def test_compose_says_when_a_host_is_ready(image):
    """The health check, for those who wait by it."""
    with Cluster(2, image) as cluster:
        for name in cluster.names:
            state = ["inspect", "--format", "{{.State.Health.Status}}", cluster.container(name)]
            eventually(lambda state=state: docker(*state).stdout.strip() == "healthy")
