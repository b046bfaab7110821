# The program with Open MPI:   docker build --tag mpi_matmul .   docker run --rm mpi_matmul
# Also one host of a cluster, with the command `cluster-host`: see tests/cluster.
FROM debian:trixie-slim AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY mpi_matmul mpi_matmul
# The environment needs no pip once it is made.
RUN python3 -m venv /opt/mpi_matmul \
 && PIP_CONSTRAINT=constraints.txt /opt/mpi_matmul/bin/python -m pip install --no-cache-dir . \
 && /opt/mpi_matmul/bin/python -m pip uninstall --yes pip

FROM debian:trixie-slim
# Open MPI's UCX can use AMD accelerators and brings their compiler, half of the image; numpy cannot use it. Its files
# go, the packages stay on apt's list, so that other images can be built on this one.
# The ssh server's keys are made when it starts: an image is no place for keys.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 openmpi-bin openssh-client openssh-server \
 && dpkg --listfiles libamdhip64-5 libamd-comgr2 libllvm17t64 libz3-4 | grep '\.so' | xargs rm \
 && rm -rf /etc/ssh/ssh_host_* /var/lib/apt/lists/* /var/cache/debconf/* /usr/share/doc /usr/share/man
COPY tests/cluster/host /usr/local/bin/cluster-host
COPY tests/cluster/mpirun /usr/local/bin/mpirun
COPY tests/cluster/sshd_config /etc/mpi_matmul/
COPY tests/cluster/ssh_config /etc/ssh/ssh_config.d/mpi_matmul.conf
COPY --from=build /opt/mpi_matmul /opt/mpi_matmul
# More ranks than cores, and root, are welcome in a container. A host that the network has lost is noticed within
# 20 seconds. ("slot": with another mapping Open MPI puts all ranks on the first host when it may oversubscribe.)
ENV PATH=/opt/mpi_matmul/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe \
    PRTE_MCA_hwloc_default_binding_policy=none \
    PRTE_MCA_oob_tcp_keepalive_time=5 \
    PRTE_MCA_oob_tcp_keepalive_intvl=3 \
    PRTE_MCA_oob_tcp_keepalive_probes=5
# mpirun crashes in a folder that it may not enter, as another user's (`docker run --user 1234`) home is.
RUN useradd --create-home --uid 1000 mpi && chmod 755 /home/mpi
USER mpi
WORKDIR /home/mpi
CMD ["mpirun", "-n", "4", "python", "-m", "mpi_matmul"]
