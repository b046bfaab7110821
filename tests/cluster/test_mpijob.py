"""The pods of the MPIJob, started as the MPI operator starts them, with Docker in the place of Kubernetes.

What the operator adds to the manifest is made here as its source does it: a folder of keys that belongs to
root, a list of the workers by their full names, settings of Open MPI. Kubernetes' part (probes, restarts) is
not here.
"""

import re
import uuid

import docker_engine
import pytest
from docker_engine import docker
from manifests import MPIJOB, load, pod

# The image may have to be built.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# A key of the kind, the names and the rights that the operator gives; Kubernetes shows files through links.
MAKE_KEYS = """
set -e
cd /keys
mkdir ..data
ssh-keygen -q -t ecdsa -b 521 -m PEM -N '' -f ..data/id_rsa
cp ..data/id_rsa.pub ..data/authorized_keys
chmod 644 ..data/*
ln -s ..data/* .
chmod 1777 . ..data
"""
SETTINGS = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "2",
}

# On a busy machine the program says how far it is.
HARMLESS = r"^mpi_matmul: \d+ s, "


class Operator:
    """Volumes, a network and pods of one job, as a context manager that leaves none of them behind."""

    def __init__(self, job):
        self.job, self.name = job, job["metadata"]["name"]
        self.prefix = f"mpi_matmul_test_{uuid.uuid4().hex[:8]}"
        self.label = f"mpi_matmul.test={self.prefix}"
        self.workers = [
            f"{self.name}-worker-{number}"
            for number in range(job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"])
        ]

    def __enter__(self):
        succeed("network", "create", "--label", self.label, self.prefix)
        hosts = [f"{self.full(worker)} slots={self.job['spec']['slotsPerWorker']}" for worker in self.workers]
        self._fill("keys", MAKE_KEYS)
        self._fill("hosts", f"echo '{chr(10).join(hosts)}' >/hosts/hostfile")
        return self

    def __exit__(self, *_):
        containers = docker("ps", "--all", "--quiet", "--filter", f"label={self.label}").stdout.split()
        if containers:
            docker("rm", "--force", *containers)
        docker("network", "rm", self.prefix)
        docker("volume", "rm", f"{self.prefix}_keys", f"{self.prefix}_hosts")

    def full(self, worker):
        return f"{worker}.{self.name}.default.svc"

    def start(self, worker):
        return succeed("run", "--detach", "--network-alias", self.full(worker), *self._pod("Worker", worker))

    def launch(self):
        """Run the launcher's pod: its status and what it wrote."""
        settings = [word for name, value in SETTINGS.items() for word in ("--env", f"{name}={value}")]
        hosts = ["--volume", f"{self.prefix}_hosts:/etc/mpi:ro"]
        return docker("run", *settings, *hosts, *self._pod("Launcher", f"{self.name}-launcher"), timeout=120)

    def _pod(self, role, name):
        """The part of `docker run` that the manifest says."""
        _, container = pod(self.job, role)
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        memory = container["resources"]["limits"]["memory"].removesuffix("i")
        options = ["--network", self.prefix, "--hostname", name, "--label", self.label, "--memory", memory]
        rights = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        user = ["--user", f"{context['runAsUser']}:{context['runAsGroup']}"]
        keys = ["--volume", f"{self.prefix}_keys:{self.job['spec']['sshAuthMountPath']}:ro"]
        (program,) = container["command"]
        entry = ["--entrypoint", program, container["image"], *container["args"]]
        return [*options, *rights, *user, *keys, *entry]

    def _fill(self, volume, script):
        mount = ["--volume", f"{self.prefix}_{volume}:/{volume}"]
        shell = [docker_engine.PROGRAM_IMAGE, "sh", "-c", script]
        succeed("run", "--rm", "--user", "0", "--label", self.label, *mount, *shell)


def succeed(*arguments):
    done = docker(*arguments)
    assert done.returncode == 0, f"docker {arguments}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def test_the_launcher_multiplies_on_the_workers():
    docker_engine.need_docker()
    docker_engine.program_image()
    with Operator(load(MPIJOB)) as operator:
        workers = [operator.start(worker) for worker in operator.workers]
        done = operator.launch()
        logs = [docker("logs", worker) for worker in workers]
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    assert not [line for line in done.stderr.splitlines() if not re.search(HARMLESS, line)]
    first = done.stdout.splitlines()[0]
    assert "on 4 ranks" in first
    assert all(worker in first for worker in operator.workers)
    assert done.stdout.splitlines()[-1] == "done"
