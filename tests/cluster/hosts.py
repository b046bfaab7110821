"""The hosts of tests/cluster/compose.yaml, for tests: up, run something on one of them, break one, down."""

import os
import subprocess
import uuid
from pathlib import Path

from docker_engine import compose, docker

FOLDER = Path(__file__).parent


class Cluster:
    """A launcher and workers, as a context manager: ``with Cluster(3) as cluster`` has three hosts in all.

    ``image`` is what they run, ``extra`` are compose files to be laid over the cluster's own.
    """

    def __init__(self, hosts, image="mpi_matmul", extra=()):
        self.names = ["launcher", *(f"worker{number}" for number in range(1, hosts))]
        self.image, self.extra = image, [str(FOLDER / name) for name in extra]
        self.project = f"mpi_matmul_test_{uuid.uuid4().hex[:8]}"

    def __enter__(self):
        self._compose("up", "--detach", *self.names)
        return self

    def __exit__(self, *_):
        self._compose("down", "--timeout", "0", "--volumes")

    def run(self, host, *command, user="mpi", folder="/home/mpi", env=(), stdin=None, timeout=60):
        """Run ``command`` on ``host``; its status and what it wrote, as text."""
        # The limit holds inside: what is left running in a container would slow down all that follows.
        limited = ["timeout", "--kill-after=5", str(timeout), *command]
        settings = [word for setting in env for word in ("--env", setting)]
        where = ["--user", user, "--workdir", folder, *settings, self.container(host)]
        return subprocess.run(
            ["docker", "exec", "--interactive", *where, *limited],
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout + 20,
        )

    def mpirun(self, *command, hosts=None, ranks_per_host=1, **options):
        """``command`` by ``mpirun`` on the launcher, on all hosts (or the first ones)."""
        names = self.names[:hosts]
        slots = ",".join(f"{name}:{ranks_per_host}" for name in names)
        ranks = str(ranks_per_host * len(names))
        return self.run("launcher", "mpirun", "--host", slots, "-n", ranks, *command, **options)

    def container(self, host):
        """The id of the container that is ``host``."""
        return self._compose("ps", "--quiet", host).strip()

    def kill(self, host):
        """Let ``host`` lose its power."""
        docker("kill", self.container(host))

    def cut_off(self, host):
        """Pull the network cable of ``host``."""
        docker("network", "disconnect", f"{self.project}_cluster", self.container(host))

    def _compose(self, *arguments):
        files = [word for name in [FOLDER / "compose.yaml", *self.extra] for word in ("--file", str(name))]
        command = [*compose(), "--project-name", self.project, *files, *arguments]
        # With their profile all hosts are the project's, also for `down`.
        env = {**os.environ, "MPI_MATMUL_IMAGE": self.image, "COMPOSE_PROFILES": "more"}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=120, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout
