#!/usr/bin/env bash
# The bench on ranks that share one slow link: see usage() below. Written for bash 3.2 and later.
set -u

usage() {
    cat <<'END'
usage: tests/bench/slow_link.sh [-n RANKS] [arguments of the bench]

Runs `mpirun -n RANKS python -m mpi_matmul.bench` (2 ranks unless told otherwise) where every message goes over one
link: the loopback of a network namespace that is made for this run and removed at its end, slowed down to RATE. Ranks
talk over TCP only, and all share the rate, as hosts share a slow switch. Needs Linux, root, the commands ip and tc
(Debian's iproute2), and Open MPI.

environment variables:
  RATE    of the link, as tc writes it (default 1gbit)
  PYTHON  the Python to run the bench with (default: that of run_mpi.sh's private environment, else python3)
  MPIRUN  the mpirun of its Open MPI (default: beside that Python, else the one on the PATH)
END
}

die() {
    echo "slow_link.sh: $*" >&2
    exit 2
}

find_programs() {
    local private=$root/.venv/openmpi/bin/python tool
    [ "$(id -u)" = 0 ] || die "needs root, to make a network namespace and slow it down"
    for tool in ip tc; do
        command -v "$tool" >/dev/null || die "needs the command $tool (on Debian and Ubuntu: apt install iproute2)"
    done
    python=${PYTHON:-python3}
    [ -n "${PYTHON:-}" ] || [ ! -x "$private" ] || python=$private
    python=$(command -v -- "$python") || die "needs Python; name one in PYTHON"
    mpirun=${MPIRUN:-$(dirname "$python")/mpirun}
    [ -n "${MPIRUN:-}" ] || [ -x "$mpirun" ] || mpirun=mpirun
    mpirun=$(command -v -- "$mpirun") || die "needs mpirun; name one in MPIRUN"
    case $("$mpirun" --version 2>&1) in
        *"Open MPI"* | *OpenRTE*) ;;
        *) die "needs Open MPI, which can be told to use TCP only; $mpirun is another" ;;
    esac
}

make_link() {
    local complaint
    namespace=mpi_matmul_slow_$$
    complaint=$(ip netns add "$namespace" 2>&1) || die "cannot make a network namespace: $complaint"
    trap remove_link EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    complaint=$(ip netns exec "$namespace" ip link set lo up 2>&1 &&
        ip netns exec "$namespace" tc qdisc add dev lo root tbf rate "$rate" burst 1mb latency 200ms 2>&1) ||
        die "cannot slow a link down to $rate: $(echo "$complaint" | head -n 1)"
}

# mpirun ends its ranks; what it leaves behind all the same goes with the namespace.
remove_link() {
    local pid
    trap '' INT TERM HUP
    if [ -n "$job" ] && kill -TERM "$job" 2>/dev/null; then
        wait "$job" 2>/dev/null
    fi
    for pid in $(ip netns pids "$namespace" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null; done
    ip netns del "$namespace"
}

set_mpi_environment() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # More ranks than cores, for 4.x and 5.x in turn.
    export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

say_link() {
    local line="link: one loopback slowed down to $rate (tbf, burst 1mb, latency 200ms), shared by $ranks ranks, TCP only"
    case " $* " in
        *" --json - "* | *" --json=- "*) echo "$line" >&2 ;;
        *) echo "$line" ;;
    esac
}

main() {
    root=$(CDPATH='' cd -P -- "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit 2
    ranks=2 rate=${RATE:-1gbit} job=''
    case ${1:-} in
        -h | --help) usage && exit 0 ;;
        -n) [ $# -ge 2 ] || die "-n takes a number of ranks" ; ranks=$2 && shift 2 ;;
    esac
    case $ranks in '' | *[!0-9]* | 0*) die "-n takes a number of ranks, got '$ranks'" ;; esac
    find_programs
    make_link
    set_mpi_environment
    say_link "$@"
    # In the background: a shell hears of a signal only when it does not wait for a command in the foreground.
    ip netns exec "$namespace" "$mpirun" --mca btl tcp,self --mca pml ob1 --mca btl_tcp_if_include lo --bind-to none \
        -n "$ranks" "$python" -m mpi_matmul.bench "$@" &
    job=$!
    wait "$job"
    status=$?
    job=''
    exit "$status"
}

main "$@"
