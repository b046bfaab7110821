# The program with Open MPI:   docker build --tag mpi_matmul .   docker run --rm mpi_matmul
FROM debian:trixie-slim AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY mpi_matmul mpi_matmul
# The environment needs no pip once it is made.
RUN python3 -m venv /opt/mpi_matmul \
 && /opt/mpi_matmul/bin/python -m pip install --no-cache-dir . \
 && /opt/mpi_matmul/bin/python -m pip uninstall --yes pip

FROM debian:trixie-slim
# Open MPI's UCX can use AMD accelerators and brings their compiler, half of the image; numpy cannot use it.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 openmpi-bin openssh-client \
 && dpkg --purge --force-depends libamdhip64-5 libamd-comgr2 libllvm17t64 libz3-4 \
 && rm -rf /var/lib/apt/lists/* /var/cache/debconf/* /usr/share/doc /usr/share/man
COPY --from=build /opt/mpi_matmul /opt/mpi_matmul
# More ranks than cores, and root, are welcome in a container.
ENV PATH=/opt/mpi_matmul/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe \
    PRTE_MCA_hwloc_default_binding_policy=none
# mpirun crashes in a folder that it may not enter, as another user's (`docker run --user 1234`) home is.
RUN useradd --create-home --uid 1000 mpi && chmod 755 /home/mpi
USER mpi
WORKDIR /home/mpi
CMD ["mpirun", "-n", "4", "python", "-m", "mpi_matmul"]
