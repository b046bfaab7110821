# shellcheck shell=bash
# `run_mpi.sh cluster`: the program across the hosts of compose.yaml. Read by run_mpi.sh, which has die() and the like.
#
# Only the launcher gets files: those that the program's arguments name, at the same paths as here, so that the
# arguments and what the program says of them hold in both places. What the program writes is fetched from there.

run_cluster() {
    work=''
    # From here on, whatever happens.
    trap 'stop_cluster' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    cluster_options "$@"
    need_engine
    choose_image
    find_files
    check_files
    start_cluster
    copy_operands
    # In the background: a signal must find this shell waiting, and not a command that waits for the ranks.
    run_on_hosts &
    wait $!
    status=$?
    fetch_outputs
    exit "$status"
}

# ---------------------------------------------------------------- what is asked for

# Ours may stand anywhere among the program's, which has none of these names.
cluster_options() {
    local most
    ranks='' hosts='' program=()
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) usage && echo && echo "./run_mpi.sh --help shows the program's own options, too." && exit 0 ;;
            -n | -np | --np) check_number "$1" ranks "${2:-}" && ranks=$2 && shift ;;
            -n[0-9]*) ranks=${1#-n} && check_number -n ranks "$ranks" ;;
            --hosts) check_number --hosts hosts "${2:-}" && hosts=$2 && shift ;;
            --hosts=*) hosts=${1#*=} && check_number --hosts hosts "$hosts" ;;
            *) program+=("$1") ;;
        esac
        shift
    done
    most=$(grep -cE '^  (launcher|worker[0-9]+):' "$root/tests/cluster/compose.yaml")
    # Two hosts, two ranks each; a number that is given decides about the other one.
    hosts=${hosts:-$((${ranks:-2} < 2 ? 1 : 2))}
    ranks=${ranks:-$((2 * hosts))}
    [ "$hosts" -le "$most" ] || die "--hosts is $hosts, but tests/cluster/compose.yaml has $most hosts"
    [ "$hosts" -le "$ranks" ] || die "--hosts is $hosts and -n is $ranks: every host must have a rank"
}

# ---------------------------------------------------------------- Docker

need_engine() {
    local reason
    command -v docker >/dev/null || die "cluster needs Docker, and there is no docker command"
    reason=$(docker info --format '{{.NCPU}}' 2>&1) ||
        die "cluster needs a running Docker engine: $(printf '%s' "$reason" | grep . | tail -n 1)"
    cores=$(printf '%s\n' "$reason" | tail -n 1)
    if docker compose version >/dev/null 2>&1; then
        compose=(docker compose)
    elif command -v docker-compose >/dev/null; then
        compose=(docker-compose)
    else
        die "cluster needs Docker Compose, and there is neither \`docker compose\` nor docker-compose"
    fi
    [ -z "${MPI_MATMUL_COMPOSE:-}" ] || [ -f "$MPI_MATMUL_COMPOSE" ] ||
        die "MPI_MATMUL_COMPOSE is $MPI_MATMUL_COMPOSE, and there is no such file"
    work=$(mktemp -d) || die "no folder for temporary files"
}

# quietly WHAT COMMAND ...: run a command whose output matters only if it fails.
quietly() {
    local what=$1
    shift
    "$@" >"$work/log" 2>&1 </dev/null || say_log "$what"
}

say_log() {
    grep . "$work/log" | tail -n 10 | sed 's/^/    /' >&2
    die "$1 (above: the last words about it)"
}

# Made anew whenever a file of it has changed: what has not is remembered by the engine.
choose_image() {
    image=${MPI_MATMUL_IMAGE:-}
    [ -z "$image" ] || return 0
    image=mpi_matmul
    docker image inspect "$image" >/dev/null 2>&1 ||
        echo "run_mpi.sh: making the image $image (first use, some minutes)" >&2
    quietly "the image does not build" docker build --network=host --tag "$image" "$root"
}

# ---------------------------------------------------------------- the hosts

in_project() {
    local files=(--file "$root/tests/cluster/compose.yaml")
    [ -z "${MPI_MATMUL_COMPOSE:-}" ] || files+=(--file "$MPI_MATMUL_COMPOSE")
    # With their profile all hosts count as the project's, so that `down` takes down whichever are up.
    COMPOSE_PROFILES=more MPI_MATMUL_IMAGE=$image \
        "${compose[@]}" --project-name "$project" "${files[@]}" "$@" </dev/null
}

start_cluster() {
    local number
    host_list=launcher:$(ranks_on 0)
    names=(launcher)
    for ((number = 1; number < hosts; number++)); do
        names+=("worker$number")
        host_list+=,worker$number:$(ranks_on "$number")
    done
    # Engines may be shared by machines whose processes have the same numbers.
    project=mpi_matmul_cluster_$$_$RANDOM$RANDOM
    # In a group of its own, out of the reach of Ctrl-C: what is half up cannot be taken down.
    set -m
    in_project up --detach "${names[@]}" >"$work/log" 2>&1 &
    starter=$!
    set +m
    wait "$starter" || say_log "the cluster does not start"
    launcher=$(in_project ps --quiet launcher 2>/dev/null)
}

# Ranks of one host: the first ones get one more.
ranks_on() {
    echo $((ranks / hosts + ($1 < ranks % hosts)))
}

stop_cluster() {
    local tries
    trap '' INT TERM HUP
    [ -z "${part:-}" ] || rm -f "$part"
    if [ -n "${project:-}" ]; then
        wait "${starter:-}" 2>/dev/null
        for tries in 1 2 3 4 5; do
            in_project down --volumes --timeout 0 >"$work/log" 2>&1 && [ -z "$(still_there)" ] && break
            [ "$tries" -lt 5 ] || echo "run_mpi.sh: these may still be there: $(still_there)" >&2
            sleep 1
        done
    fi
    [ -z "$work" ] || rm -rf "$work"
}

# Containers and networks of the cluster.
still_there() {
    docker ps --all --filter "label=com.docker.compose.project=$project" --format '{{.Names}}'
    docker network ls --filter "label=com.docker.compose.project=$project" --format '{{.Name}}'
}

# ---------------------------------------------------------------- files

# Which arguments are files is known to the program's own parser.
find_files() {
    local kind name parser="
import os, sys
from mpi_matmul.options import Said, parse
try:
    options = parse(sys.argv[1:])
except Said as said:
    print(said.text.rstrip('\n'), file=sys.stderr if said.status else sys.stdout)
    sys.exit(100 + said.status)
if options.simulate:
    print('run_mpi.sh: --simulate runs all ranks in one process: leave out cluster', file=sys.stderr)
    sys.exit(102)
files = [('operand', name) for name in options.operands]
files += [('output', name) for name in (options.output, options.json) if name not in (None, '-')]
os.write(3, b''.join(os.fsencode(word) + b'\0' for pair in files for word in pair))"
    operands=() outputs=()
    docker run --rm --network none "$image" sh -c 'python -c "$@" 3>&1 >&2' sh "$parser" ${program[@]+"${program[@]}"} \
        >"$work/files" 2>"$work/said" </dev/null
    case $? in
        0) ;;
        100) cat "$work/said" && exit 0 ;;
        10[1-9]) cat "$work/said" >&2 && exit 2 ;;
        *) die "the image $image does not run: $(grep . "$work/said" | grep -v "docker run --help" | tail -n 1)" ;;
    esac
    while IFS= read -r -d '' kind && IFS= read -r -d '' name; do
        case $kind in
            operand) operands+=("$(absolute "$name")") ;;
            output) outputs+=("$(absolute "$name")") ;;
        esac
    done <"$work/files"
}

# What the program could not see on the launcher, which gets copies: kinds of files, links, rights.
check_files() {
    local path operand earlier=''
    for path in ${operands[@]+"${operands[@]}"}; do
        [ -e "$path" ] || die "$path: no such file or folder"
        [ -f "$path" ] || die "$path is not a regular file"
        [ -r "$path" ] || die "$path cannot be read: it is closed to you"
    done
    for path in ${outputs[@]+"${outputs[@]}"}; do
        [ -d "$(dirname "$path")" ] || die "$path: no such folder: $(dirname "$path")"
        [ -w "$(dirname "$path")" ] || die "$path cannot be written: its folder is closed to you"
        [ ! -L "$path" ] || [ -e "$path" ] || die "$path is a link to nothing"
        [ ! -e "$path" ] || [ -f "$path" ] || die "$path is not a regular file"
        for operand in ${operands[@]+"${operands[@]}"}; do
            [ ! "$path" -ef "$operand" ] || die "$path is also an input ($operand), which is never overwritten"
        done
        [ -z "$earlier" ] || [ ! "$path" -ef "$earlier" ] || die "$path and $earlier are one file"
        earlier=$path
    done
}

copy_operands() {
    local path
    make_folder "$PWD"
    for path in ${outputs[@]+"${outputs[@]}"}; do
        make_folder "$(dirname "$path")"
    done
    for path in ${operands[@]+"${operands[@]}"}; do
        make_folder "$(dirname "$path")"
        # shellcheck disable=SC2094
        docker exec --interactive "$launcher" sh -c 'cat >"$1"' sh "$path" <"$path" ||
            die "$path could not be copied to the launcher"
    done
}

# A folder of the launcher in which its user may write, below folders that it may enter.
make_folder() {
    docker exec "$launcher" test -w "$1" && return
    # shellcheck disable=SC2016
    quietly "$1 could not be made on the launcher" docker exec --user 0 "$launcher" sh -c '
        mkdir -p "$1" && chmod a+rwx "$1" &&
        while [ "$1" != / ]; do set -- "$(dirname "$1")" && chmod a+x "$1"; done' sh "$1"
}

# Beside its target first: a copy that fails, or is interrupted, leaves what was there.
fetch_outputs() {
    local path target
    for path in ${outputs[@]+"${outputs[@]}"}; do
        docker exec "$launcher" test -f "$path" 2>/dev/null || continue
        # A link stays one.
        target=$(readlink -f "$path" 2>/dev/null || printf '%s\n' "$path")
        part=$target.part$$
        docker exec "$launcher" cat "$path" >"$part" && keep_mode "$target" "$part" && mv -f "$part" "$target" ||
            die "$path could not be fetched from the launcher"
    done
}

keep_mode() {
    [ ! -e "$1" ] || chmod "$(stat -c %a "$1" 2>/dev/null || stat -f %Lp "$1")" "$2"
}

# ---------------------------------------------------------------- the ranks

run_on_hosts() {
    local name settings=()
    for name in OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS BLIS_NUM_THREADS; do
        [ -z "${!name:-}" ] || settings+=(-x "$name=${!name}")
    done
    # The hosts are all on this machine, and each believes to have all of its cores.
    [ "${#settings[@]}" -gt 0 ] || settings=(-x "OMP_NUM_THREADS=$((cores / ranks > 1 ? cores / ranks : 1))")
    docker exec --workdir "$PWD" "$launcher" mpirun --host "$host_list" -n "$ranks" "${settings[@]}" \
        python -P -m mpi_matmul ${program[@]+"${program[@]}"} </dev/null
}
