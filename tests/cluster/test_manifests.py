"""The files for schedulers, without one: what they say fits the image, the program, and each other."""

import itertools
import re
import subprocess

import docker_engine
import pytest
from launcher import REPOSITORY
from manifests import FOLDER, MPIJOB, load, pod

from mpi_matmul.options import parse

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
USER, UID = re.search(r"useradd .*--uid (\d+) (\w+)", DOCKERFILE).group(2, 1)
ROLES = ("Launcher", "Worker")

# All that the operator knows: another name would be dropped without a word.
SPEC_FIELDS = {
    "launcherCreationPolicy",
    "mpiImplementation",
    "mpiReplicaSpecs",
    "runLauncherAsWorker",
    "runPolicy",
    "slotsPerWorker",
    "sshAuthMountPath",
}
POLICY_FIELDS = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "cleanPodPolicy",
    "managedBy",
    "schedulingPolicy",
    "suspend",
    "ttlSecondsAfterFinished",
}


@pytest.fixture(scope="module")
def job():
    return load(MPIJOB)


@pytest.fixture(scope="module")
def services():
    return load(FOLDER / "compose.yaml")["services"]


def setting(file, name):
    """The value of a setting of ssh or of its server."""
    return re.search(rf"^\s*{name}\s+(\S+)", (FOLDER / file).read_text(), re.MULTILINE)[1]


def scripts():
    """The shell scripts here, by their names or by their first lines."""
    shebang = re.compile(rb"#!.*\b(ba)?sh\b")
    files = [path for path in sorted(FOLDER.rglob("*")) if path.is_file()]
    return [path for path in files if path.suffix == ".sh" or shebang.match(path.read_bytes())]


# ---------------------------------------------------------------- the MPIJob


def test_the_mpijob_is_one_that_the_operator_takes(job):
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec, policy = job["spec"], job["spec"]["runPolicy"]
    assert spec.keys() <= SPEC_FIELDS
    assert policy.keys() <= POLICY_FIELDS
    assert spec["mpiImplementation"] == "OpenMPI"
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert policy["cleanPodPolicy"] in ("None", "Running", "All")
    replicas = spec["mpiReplicaSpecs"]
    assert replicas.keys() == set(ROLES)
    assert replicas["Launcher"]["replicas"] == 1
    for role in ROLES:
        assert replicas[role].keys() == {"replicas", "restartPolicy", "template"}
        assert replicas[role]["restartPolicy"] in ("Never", "OnFailure")
        # The operator overrides one that stands here.
        assert "restartPolicy" not in pod(job, role)[0]


def test_the_pods_names_are_names_of_hosts(job):
    last = f"{job['metadata']['name']}-worker-{job['spec']['mpiReplicaSpecs']['Worker']['replicas'] - 1}"
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", last)


def test_the_mpijob_starts_a_rank_for_each_slot(job):
    _, container = pod(job, "Launcher")
    assert container["command"] == ["mpirun"]
    words = container["args"]
    assert all(isinstance(word, str) for word in words), "Kubernetes refuses numbers"
    start = words.index("python")
    # Where the operator puts it.
    assert words[:start][:3] == ["--hostfile", "/etc/mpi/hostfile", "-n"]
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert words[3:start] == [str(workers * job["spec"]["slotsPerWorker"])]


def test_the_mpijob_calls_the_program_as_it_wants_to_be_called(job):
    _, container = pod(job, "Launcher")
    words = container["args"]
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "mpi_matmul"]
    options = parse(words[start + 3 :])
    assert not options.simulate
    assert not options.operands, "no volume is mounted"


@pytest.mark.parametrize("role", ROLES)
def test_the_pods_run_our_image_as_its_user(job, role):
    _, container = pod(job, role)
    assert container["image"] == docker_engine.PROGRAM_IMAGE
    # An image without a registry cannot be pulled, and the default for one without a tag is to pull it.
    assert container["imagePullPolicy"] == "IfNotPresent"
    context = container["securityContext"]
    assert context["runAsUser"] == context["runAsGroup"] == int(UID)
    assert context["runAsNonRoot"] is True
    assert context["allowPrivilegeEscalation"] is False


def test_the_image_has_what_the_pods_start(job):
    for package in ("openmpi-bin", "openssh-client", "openssh-server"):
        assert re.search(rf"apt-get install .*\b{package}\b", DOCKERFILE)
    _, container = pod(job, "Worker")
    assert container["command"] == ["/usr/sbin/sshd"]
    settings = container["args"][container["args"].index("-f") + 1]
    folder, name = settings.rsplit("/", 1)
    assert re.search(rf"^COPY tests/cluster/{name} {folder}/$", DOCKERFILE, re.MULTILINE)


def test_the_ssh_server_uses_the_keys_that_the_operator_mounts(job):
    folder = job["spec"]["sshAuthMountPath"]
    assert folder == f"/home/{USER}/.ssh"
    assert setting("sshd_config", "AuthorizedKeysFile") == f"{folder}/authorized_keys"
    words = pod(job, "Worker")[1]["args"]
    options = [value for option, value in itertools.pairwise(words) if option == "-o"]
    # The names that the operator gives: the folder is root's, and everybody may write there.
    assert sorted(options) == [f"HostKey={folder}/id_rsa", "StrictModes=no"]
    assert "-D" in words, "else the pod ends at once"


def test_every_port_of_ssh_is_the_same(job):
    port = int(setting("sshd_config", "Port"))
    _, container = pod(job, "Worker")
    assert port == int(setting("ssh_config", "Port"))
    assert [each["containerPort"] for each in container["ports"]] == [port]
    assert container["readinessProbe"]["tcpSocket"]["port"] == port
    assert set(re.findall(r"-p (\d+)", (FOLDER / "host").read_text())) == {str(port)}
    assert port > 1023, "others belong to root"


def test_a_worker_has_a_core_for_each_rank(job):
    for role in ROLES:
        resources = pod(job, role)[1]["resources"]
        assert resources.keys() == {"requests", "limits"}
        assert all(part.keys() == {"cpu", "memory"} for part in resources.values())
        assert all(isinstance(part["cpu"], str) for part in resources.values())
    assert int(pod(job, "Worker")[1]["resources"]["requests"]["cpu"]) >= job["spec"]["slotsPerWorker"]


# ---------------------------------------------------------------- compose


def test_the_services_are_the_hosts(services):
    workers = [f"worker{number}" for number in range(1, len(services))]
    assert list(services) == ["launcher", *workers]
    assert [service["hostname"] for service in services.values()] == list(services)
    by_default = [name for name, service in services.items() if "profiles" not in service]
    assert by_default == ["launcher", "worker1", "worker2"]


def test_every_host_is_the_image_with_a_health_check_and_shared_memory(services):
    assert "COPY tests/cluster/host /usr/local/bin/cluster-host" in DOCKERFILE
    for service in services.values():
        assert service["image"] == f"${{MPI_MATMUL_IMAGE:-{docker_engine.PROGRAM_IMAGE}}}"
        assert service["command"] == ["cluster-host"]
        assert re.fullmatch(r"\d+m", service["shm_size"])
        assert service["healthcheck"]["test"][:2] == ["CMD", "ssh"]
        assert service["healthcheck"]["retries"] > 1
        # They share the network and nothing else.
        assert service["networks"] == ["cluster"]
        assert not service.keys() & {"volumes", "volumes_from", "network_mode", "ipc", "pid", "privileged"}


def test_what_is_laid_over_the_cluster_names_its_hosts(services):
    for path in FOLDER.glob("*.yaml"):
        assert load(path)["services"].keys() <= services.keys(), path


# ---------------------------------------------------------------- Slurm, scripts, keys


def test_the_batch_script_asks_for_what_it_needs_before_it_begins():
    """Slurm reads no request below the first command."""
    lines = (FOLDER / "slurm/job.sbatch").read_text().splitlines()
    asked = [index for index, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [index for index, line in enumerate(lines) if line and not line.startswith("#")]
    assert asked[-1] < commands[0]
    names = {re.match(r"#SBATCH --([a-z-]+)=\S+$", lines[index])[1] for index in asked}
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= names
    assert re.fullmatch(r'exec srun --mpi=pmix .*python -m mpi_matmul "\$@"', lines[commands[-1]])


def test_there_are_scripts():
    assert {path.name for path in scripts()} >= {"host", "job.sbatch", "start"}


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_the_syntax_of_a_script(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


FORBIDDEN = r"BEGIN [A-Z ]*KEY-{5}|ssh-ed25519 A{4}|(password|token|secret)\s*[:=]\s*\S"


def test_no_key_and_no_password_lies_here(job):
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    named = [path.name for path in files if re.search(r"\.(key|pem)$|^id_|^authorized_keys$", path.name)]
    within = [path.name for path in files if re.search(FORBIDDEN, path.read_text(), re.IGNORECASE)]
    assert (named, within) == ([], [])
    for role in ROLES:
        spec, container = pod(job, role)
        # What the operator mounts is enough.
        assert "volumes" not in spec
        assert "env" not in container
