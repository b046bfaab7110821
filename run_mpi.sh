#!/usr/bin/env bash
# Run the program, or its tests, on MPI ranks, with everything that takes: see usage() below.
# Written for bash 3.2 and later.
set -u

usage() {
    cat <<'END'
usage: ./run_mpi.sh [-n RANKS] [arguments of the program]
       ./run_mpi.sh cluster [-n RANKS] [--hosts H] [arguments of the program]
       ./run_mpi.sh test [-n "RANKS ..."] [--serial | --mpi | --cluster] [arguments of pytest]

The first form runs `mpirun -n RANKS python -m mpi_matmul` (4 ranks unless told otherwise).

The second does the same across H hosts that are containers of a Docker engine, and takes them down in the end. Operands
are copied to the first host, and what is written is fetched from there. -n and --hosts may stand anywhere; H is 2 (1 for
one rank, 16 at most) and RANKS is 2 * H unless told otherwise. The image mpi_matmul is made anew when files have changed.

The third runs the test suite: the tests for one process, those for MPI at 1, 2, 3, 4 and 5 ranks, and those that need
Docker (left out without it).

Paths given to the program are relative to your folder, paths given to pytest to the repository.

The first use makes a private environment with Python packages and Open MPI in .venv of this repository.

environment variables:
  MPIRUN              the mpirun to use, with the MPI that belongs to it, in place of the private Open MPI
  PYTHON              the Python to make the environment with (3.11 or later)
  MPI_MATMUL_ENV      the folder for the environment
  MPI_MATMUL_TEST_RANKS
                      the same as -n of the third form
  MPI_MATMUL_IMAGE    the image for the cluster's hosts, in place of the one that is made from this repository
  MPI_MATMUL_COMPOSE  a compose file to lay over tests/cluster/compose.yaml: other networks, limits, folders
  OMP_NUM_THREADS     (or OPENBLAS_, MKL_, BLIS_NUM_THREADS) threads of one rank; default: cores / ranks
END
}

die() {
    echo "run_mpi.sh: $*" >&2
    exit 2
}

# ---------------------------------------------------------------- where things are

# The folder of this script, also when it is called through symbolic links.
script_folder() {
    local path="${BASH_SOURCE[0]}" target
    while [ -L "$path" ]; do
        target=$(readlink "$path")
        case $target in
            /*) path=$target ;;
            *) path=$(dirname "$path")/$target ;;
        esac
    done
    (CDPATH='' cd -P -- "$(dirname "$path")" && pwd)
}

absolute() {
    case $1 in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s\n' "$PWD/$1" ;;
    esac
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11 or later"
    done
    die "needs Python 3.11 or later (found: $(python3 --version 2>&1 || true)); name one in PYTHON"
}

# ---------------------------------------------------------------- the private environment

# What an environment is made from; it is made anew when this changes.
recipe() {
    echo "$root, $extras"
    cat "$root/setup.cfg"
}

is_ready() {
    # -x: the Python that an environment was made from may be gone.
    [ -x "$environment/bin/python" ] && [ -f "$environment/recipe" ] &&
        [ "$(recipe)" = "$(cat "$environment/recipe")" ]
}

prepare_environment() {
    python=$(find_python) || exit 2
    is_ready && return
    mkdir -p "$(dirname "$environment")" || die "cannot make a folder for $environment; name another in MPI_MATMUL_ENV"
    # One at a time. The lock belongs to the open file, which this shell keeps when the small program has ended.
    { exec 9>"$environment.lock"; } 2>/dev/null ||
        die "cannot write $environment.lock; name another folder in MPI_MATMUL_ENV"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    is_ready || make_environment
    exec 9>&-
}

make_environment() {
    local log=$environment.log
    clear_environment
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python lacks the venv module (on Debian and Ubuntu: apt install python3-venv)"
    echo "run_mpi.sh: making a private environment in $environment (first use or changed setup.cfg, about a minute)" >&2
    if ! install_into_environment >"$log" 2>&1 9>&-; then
        cat "$log" >&2
        echo "run_mpi.sh: the installation failed; the lines above are also in $log" >&2
        exit 1
    fi
    # Last of all: an installation that was interrupted has no recipe, and is made anew.
    recipe >"$environment/recipe"
}

# Only what this script has made is removed: a folder of the user's own is not touched.
clear_environment() {
    if [ -e "$environment" ] && [ -n "$(ls -A "$environment")" ] && [ ! -f "$environment/made_by_run_mpi" ]; then
        die "$environment exists and was not made by this script; name another folder in MPI_MATMUL_ENV"
    fi
    rm -rf "$environment" 2>/dev/null
    { mkdir -p "$environment" && : >"$environment/made_by_run_mpi"; } 2>/dev/null ||
        die "cannot write $environment; name another folder in MPI_MATMUL_ENV"
}

install_into_environment() {
    "$python" -m venv "$environment" &&
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
            --editable "${root}[$extras]"
}

# ---------------------------------------------------------------- MPI

# Sets mpirun, and the environment whose mpi4py loads the MPI that belongs to it.
choose_mpi() {
    if [ -n "${MPIRUN:-}" ]; then
        mpirun=$(absolute "$(command -v -- "$MPIRUN")")
        if [ ! -x "$mpirun" ] || [ -d "$mpirun" ]; then
            die "MPIRUN=$MPIRUN cannot be executed"
        fi
        environment=$(absolute "${MPI_MATMUL_ENV:-$root/.venv/system}")
        extras="test"
        choose_library
    else
        environment=$(absolute "${MPI_MATMUL_ENV:-$root/.venv/openmpi}")
        extras="openmpi,test"
        mpirun=$environment/bin/mpirun
        # Another MPI that is named here does not belong to this mpirun.
        unset MPI4PY_LIBMPI MPI4PY_MPIABI
    fi
    # for tests that start ranks themselves
    export MPIRUN="$mpirun"
}

# mpi4py loads the first MPI that the system finds; name the one that belongs to mpirun.
choose_library() {
    local name folder
    [ -z "${MPI4PY_LIBMPI:-}" ] || return 0
    for folder in lib lib64 lib/release; do
        folder=$(dirname "$mpirun")/../$folder
        for name in libmpi.so libmpi.so.40 libmpi.so.12 libmpi.dylib; do
            # mpi4py tries these names itself; the shortest need not be a library.
            [ ! -e "$folder/$name" ] || { export MPI4PY_LIBMPI="$folder" && return; }
        done
    done
    # In a system folder: there, only the number in the name tells the two makers apart.
    [ "$(uname)" = Linux ] || return 0
    case $("$mpirun" --version 2>/dev/null) in
        *"Open MPI"* | *OpenRTE*) export MPI4PY_LIBMPI=libmpi.so.40 ;;
        *HYDRA* | *MPICH* | *Intel*) export MPI4PY_LIBMPI=libmpi.so.12:libmpich.so.12 ;;
    esac
}

# Settings that let mpirun start, whoever calls it and however few cores there are; the user's own are kept.
set_mpi_environment() {
    # Open MPI refuses root.
    export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"
    # It refuses more ranks than cores (4.x and 5.x in turn) ...
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-slot:oversubscribe}"
    # ... and pins two ranks to one core each, with all their threads.
    export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
    export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
}

count_cores() {
    nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1
}

# The ranks share the cores: with more threads than cores everything slows down.
set_threads() {
    local ranks=$1 threads
    [ -z "${OMP_NUM_THREADS:-}${OPENBLAS_NUM_THREADS:-}${MKL_NUM_THREADS:-}${BLIS_NUM_THREADS:-}" ] || return 0
    threads=$(($(count_cores) / ranks))
    [ "$threads" -ge 1 ] || threads=1
    export OMP_NUM_THREADS=$threads OPENBLAS_NUM_THREADS=$threads
}

# check_number OPTION WHAT VALUE
check_number() {
    case $3 in
        '' | *[!0-9]* | 0*) die "$1 takes a number of $2, got '$3'" ;;
        ?????*) die "$1 takes a number of $2 up to 9999, got '$3'" ;;
    esac
}

# ---------------------------------------------------------------- the program

run_program() {
    local ranks=4
    case ${1:-} in
        -h | --help)
            usage
            echo
            echo "The program's own options:"
            echo
            ranks=1
            ;;
        -n | -np | --np)
            check_number -n ranks "${2:-}"
            ranks=$2
            shift 2
            ;;
        -n[0-9]*)
            ranks=${1#-n}
            check_number -n ranks "$ranks"
            shift
            ;;
    esac
    prepare_environment
    set_threads "$ranks"
    # -P: modules in the caller's folder do not hide those of Python.
    exec "$mpirun" -n "$ranks" "$environment/bin/python" -P -m mpi_matmul "$@"
}

# ---------------------------------------------------------------- the tests

run_tests() {
    local rank_list=${MPI_MATMUL_TEST_RANKS:-1 2 3 4 5} parts="serial mpi cluster" ranks
    while :; do
        case ${1:-} in
            -h | --help) usage && exit 0 ;;
            -n) [ $# -ge 2 ] || die "-n takes a list of rank counts" ; rank_list=$2 && shift 2 ;;
            --serial) parts=serial && shift ;;
            --mpi) parts=mpi && shift ;;
            --cluster) parts=cluster && shift ;;
            *) break ;;
        esac
    done
    selected=no
    [ $# -eq 0 ] || selected=yes
    rank_list=${rank_list//,/ }
    for ranks in $rank_list; do check_number -n ranks "$ranks"; done
    [ -n "${rank_list// /}" ] || die "-n takes a list of rank counts, got an empty one"
    prepare_environment
    # Here pytest finds its settings and the tests.
    cd -- "$root" || exit 2
    work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
    # Ctrl-C ends the suite and not only the part that runs.
    trap 'exit 130' INT
    case $parts in *serial*) run_part "serial" 0 -m "not mpi and not cluster" "$@" ;; esac
    case $parts in *mpi*) for ranks in $rank_list; do run_mpi_part "$ranks" "$@"; done ;; esac
    case $parts in *cluster*) run_part "cluster" 0 -m cluster -rs "$@" ;; esac
    print_summary
}

run_mpi_part() {
    local ranks=$1 name="$1 ranks"
    [ "$ranks" -gt 1 ] || name="1 rank"
    shift
    # In a subshell: the settings are for this part.
    (
        set_threads "$ranks"
        export MPI_MATMUL_EXPECTED_RANKS=$ranks
        run_part "$name" "$ranks" --with-mpi -m mpi "$@"
    )
}

# Run pytest once, on some ranks or (0) without mpirun; show all it says, and note how it ended and its closing line.
run_part() {
    local name=$1 ranks=$2 status color=no output=$work/output launcher
    shift 2
    launcher=()
    [ "$ranks" -eq 0 ] || launcher=("$mpirun" -n "$ranks")
    [ ! -t 1 ] || color=yes
    echo
    echo "##### $name: pytest $*"
    # tee stays when Ctrl-C ends the others, so that mpirun can speak its last words.
    with_limit ${launcher[@]+"${launcher[@]}"} "$environment/bin/python" -m pytest --color="$color" "$@" 2>&1 </dev/null |
        (trap '' INT && exec tee "$output")
    status=${PIPESTATUS[0]}
    # Without a selection of the caller's, a part that has no tests is a mistake.
    [ "$status" -ne 5 ] || [ "$selected" = yes ] || status="5: no tests"
    printf '%s|%s|%s\n' "$status" "$name" "$(closing_line "$output")" >>"$work/parts"
}

# Run a command that must not hang, whatever happens outside of a test; Ctrl-C reaches it directly, and only it.
# (Not every system has the command `timeout`.)
with_limit() {
    "$python" -c '
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: None)
child = subprocess.Popen(sys.argv[2:])
try:
    status = child.wait(float(sys.argv[1]))
except subprocess.TimeoutExpired:
    status = 124
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
sys.exit(status if status >= 0 else 128 - status)' "$part_seconds" "$@"
}

# The line of pytest that counts, like "3 passed, 1 skipped in 0.12s", without colours and frame.
closing_line() {
    local escape
    escape=$(printf '\033')
    tr -d '\r' <"$1" | sed -e "s/$escape\[[0-9;]*m//g" |
        sed -n -E 's/^=+ (.* in [0-9.]+s( \([0-9:]+\))?) =+ *$/\1/p' | tail -n 1
}

print_summary() {
    local status name line passed=0 failed=0 verdict
    echo
    echo "##### summary ($(mpi_version))"
    while IFS='|' read -r status name line; do
        case $status,$line in
            0,*" passed"*) verdict=passed && passed=$((passed + 1)) ;;
            0,*) verdict=skipped ;;
            5,*) verdict="nothing selected" ;;
            124,*) verdict="FAILED (ended after $part_seconds s)" && failed=$((failed + 1)) ;;
            *) verdict="FAILED (status $status)" && failed=$((failed + 1)) ;;
        esac
        printf '%-8s %s: %s\n' "$name" "$verdict" "${line:-no closing line}"
    done <"$work/parts"
    printf 'ran %d parts of the test suite: %d passed, %d failed; ' $((passed + failed)) "$passed" "$failed"
    echo "tests: $(total passed) passed, $(total failed) failed, $(total 'errors?') errors, $(total skipped) skipped"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}

# The MPI that the tests have used, in its own words.
mpi_version() {
    "$environment/bin/python" -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().replace("\n", ",").split(",")[0])' 2>/dev/null || echo "no MPI library"
}

# The sum of one kind of result over all parts.
total() {
    sed -n -E "s/.*[^0-9]([0-9]+) $1[, ].*/\1/p" "$work/parts" | awk '{ sum += $1 } END { print sum + 0 }'
}

main() {
    root=$(script_folder) || exit 2
    part_seconds=1800
    if [ "${1:-}" = cluster ]; then
        shift
        . "$root/tests/cluster/run.sh"
        run_cluster "$@"
    fi
    choose_mpi
    set_mpi_environment
    if [ "${1:-}" = test ]; then
        shift
        run_tests "$@"
    else
        run_program "$@"
    fi
}

main "$@"
