# shellcheck shell=bash
# `run_mpi.sh cluster`: the program across the hosts of compose.yaml. Read by run_mpi.sh, which has die() and the like.
#
# Only the launcher gets files: those that the program's arguments name, at the same paths as here, so that the
# arguments and what the program says of them hold in both places. What the program writes is fetched from there.

run_cluster() {
    # Not what the environment may have under these names.
    work='' project='' starter='' launcher='' parts=()
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
    [ "$status" -eq 0 ] || docker exec "$launcher" true 2>/dev/null ||
        echo "run_mpi.sh: the host launcher has gone" >&2
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
    [ ${#parts[@]} -eq 0 ] || rm -f "${parts[@]}"
    if [ -n "$project" ]; then
        [ -z "$starter" ] || wait "$starter" 2>/dev/null
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
files += [('product', options.output), ('report', options.json)]
files = [(kind, name) for kind, name in files if name not in (None, '-')]
if any('\ufffd' in name for _, name in files):
    print('run_mpi.sh: the name of a file is not UTF-8: Docker cannot pass it on', file=sys.stderr)
    sys.exit(102)
os.write(3, b''.join(os.fsencode(word) + b'\0' for pair in files for word in pair))"
    operands=() product='' report=''
    docker run --rm --network none "$image" sh -c 'python -c "$@" 3>&1 >&2' sh "$parser" ${program[@]+"${program[@]}"} \
        >"$work/files" 2>"$work/said" </dev/null
    case $? in
        0) ;;
        100) cat "$work/said" && exit 0 ;;
        10[1-9]) cat "$work/said" >&2 && exit 2 ;;
        *) die "the image $image does not run: $(grep . "$work/said" | grep -v "docker run --help" | tail -n 1)" ;;
    esac
    # Without $(...), which would cut a newline off the end of a name.
    while IFS= read -r -d '' kind && IFS= read -r -d '' name; do
        case $name in /*) ;; *) name=$PWD/$name ;; esac
        case $kind in
            operand) operands+=("$name") ;;
            product) product=$name ;;
            report) report=$name ;;
        esac
    done <"$work/files"
}

# Sets `folder` to that of an absolute path.
folder_of() {
    folder=${1%/*}
    folder=${folder:-/}
}

# What the program could not see on the launcher, which gets copies: kinds of files, links, rights.
check_files() {
    local path operand folder
    for path in ${operands[@]+"${operands[@]}"}; do
        [ -e "$path" ] || die "$path: no such file or folder"
        [ -f "$path" ] || die "$path is not a regular file"
        [ -r "$path" ] || die "$path cannot be read: it is closed to you"
    done
    for path in ${product:+"$product"} ${report:+"$report"}; do
        folder_of "$path"
        [ -d "$folder" ] || die "$path: no such folder: $folder"
        [ -w "$folder" ] || die "$path cannot be written: its folder is closed to you"
        [ ! -L "$path" ] || [ -e "$path" ] || die "$path is a link to nothing"
        [ ! -e "$path" ] || [ -f "$path" ] || die "$path is not a regular file"
        [ ! -e "$path" ] || [ -w "$path" ] || die "$path cannot be written: it is closed to you"
        for operand in ${operands[@]+"${operands[@]}"}; do
            [ ! "$path" -ef "$operand" ] || die "$path is also an input ($operand), which is never overwritten"
        done
    done
    [ ! "$product" -ef "$report" ] || die "$product is the name of the product and of the report"
}

copy_operands() {
    local path folder
    make_folder "$PWD"
    for path in ${product:+"$product"} ${report:+"$report"}; do
        folder_of "$path"
        make_folder "$folder"
    done
    for path in ${operands[@]+"${operands[@]}"}; do
        folder_of "$path"
        make_folder "$folder"
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

# All beside their targets first: a copy that fails, or is interrupted, leaves what was there.
fetch_outputs() {
    local path target index targets=()
    for path in ${product:+"$product"} ${report:+"$report"}; do
        was_written "$path" || continue
        target=$path
        # A link stays one.
        [ ! -L "$path" ] || target=$(readlink -f "$path")
        targets+=("$target") parts+=("$target.part$$")
        { docker exec "$launcher" cat "$path" >"$target.part$$"; } 2>"$work/log" ||
            say_log "$path could not be fetched from the launcher"
        keep_mode "$target" "$target.part$$"
    done
    for ((index = 0; index < ${#targets[@]}; index++)); do
        mv -f "${parts[index]}" "${targets[index]}" || die "${targets[index]} could not be replaced"
    done
}

# Everything, if the run has succeeded; no product, but a report of that, if a check has failed.
was_written() {
    [ "$status" -ne 0 ] || return 0
    [ "$status" -eq 1 ] && [ "$1" = "$report" ] && docker exec "$launcher" test -f "$1" 2>/dev/null
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
