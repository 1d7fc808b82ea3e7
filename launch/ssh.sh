#!/usr/bin/env bash
# Trains on machines that ssh can reach: one process on each, with all its GPUs.
#
#   launch/ssh.sh hosts.txt --config h100_16 --output-dir /shared/run1 [flags] [--section.field ...]
#   launch/ssh.sh hosts.txt --doctor --config ...     only check the hosts
#
# hosts.txt: one host per line, as ssh accepts it (gpu1, me@10.0.0.2, a name in ~/.ssh/config); the
# first is process 0. Empty lines and text after # are ignored. Every host is checked first. Each line
# of output begins with the host's name. If one process or its connection fails, all are ended, and
# the run restarts with --resume latest. Ctrl-C and SIGTERM are forwarded to all: they save and exit.
# Credentials for a bucket are not sent: each host needs its own, for example in /etc/environment.
# Settings, from the environment (others: supervise.sh, nccl.sh):
#   REMOTE_DIR         folder to run in, on every host (default: the current folder)
#   PYTHON             the interpreter, on every host (default: see supervise.sh)
#   COORDINATOR_HOST   address of the first host for the others (default: as ssh connects to it)
#   COORDINATOR_PORT   port on that host that the others can reach (default: a new one each time)
#   SSH_OPTIONS        options of ssh, for example "-p 2222 -i key"
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"

BEAT_S=${BEAT_S:-10}       # seconds between heartbeats to each host
SILENCE_S=${SILENCE_S:-60} # seconds without a heartbeat after which a host ends its process
REMOTE_DIR=${REMOTE_DIR:-$PWD}
read -ra ssh_command <<<"ssh ${SSH_OPTIONS:-}"
ssh_command+=(-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15)

# --- Functions that run on a host; sent there as text.

# Only the host can see which folders are new, so it prints a line "made PATH" for each.
remote_check() { # remote_check DIR PYTHON OUTPUT_DIR: prints the problem as its last line
    local reason
    cd -- "$1" 2>/dev/null || { echo "the folder $1 does not exist: set REMOTE_DIR" && return 1; }
    command -v "$2" >/dev/null || { echo "'$2' was not found: set PYTHON" && return 1; }
    if ! reason=$("$2" -c 'import jaxtrain.main, jax' 2>&1); then
        echo "$2 cannot import jaxtrain ($(tail -n 1 <<<"$reason")): install it there"
        return 1
    fi
    set -- "$1" "$2" "$(with_cache "$3")"
    missing_directories "$3" | sed 's/^/made /'
    if ! reason=$(mkdir -p -- "$3" 2>&1); then
        echo "cannot create the run directory ($reason): pass another --output-dir"
        return 1
    fi
}

remote_run() { # remote_run NAME SILENCE_S SAVE_S KILL_S DIR COMMAND...: reads orders
    local name=$1 silence_s=$2 save_s=$3 kill_s=$4 pid code=0 order='' silent_s=0 status lost='' file
    end_group() { # end_group PID SECONDS: SIGTERM, and SIGKILL to the group if that is not enough
        local left
        kill -s TERM -- "$1" 2>/dev/null
        for ((left = $2; left > 0; left--)); do
            kill -0 -- "-$1" 2>/dev/null || return 0
            sleep 1
        done
        kill -s KILL -- "-$1" 2>/dev/null
        return 0
    }
    started_at() { # started_at PID: prints its start in ticks since boot, to detect a reused PID
        local stat fields
        stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
        read -ra fields <<<"${stat##*) }" # after the name, which may contain spaces
        echo "${fields[19]}"
    }
    note_file() { # prints the path of the process record, in a folder that only this user can write
        local folder=${HOME:-~}/.cache/jaxtrain
        if [[ -n ${XDG_RUNTIME_DIR:-} && -d $XDG_RUNTIME_DIR && -O $XDG_RUNTIME_DIR ]]; then
            folder=$XDG_RUNTIME_DIR/jaxtrain
        fi
        (umask 077 && mkdir -p -- "$folder") && [[ -O $folder && -w $folder ]] &&
            echo "$folder/$name.$HOSTNAME" # hosts may share a home
    }
    left_here() { # left_here FILE: prints the recorded process if it is still running
        local noted began
        [[ -f $1 && ! -L $1 && -O $1 ]] && read -r noted began <"$1" &&
            [[ $noted =~ ^[0-9]+$ && -O /proc/$noted && $(started_at "$noted") == "$began" ]] &&
            echo "$noted"
    }
    cd -- "$5" || return 2
    shift 5
    file=$(note_file 2>&1) || {
        echo "cannot record this process (${file:-no folder}): the next start will not find it" >&2
        file=''
    }
    # A process left by a broken connection would write into the same directory.
    if [[ -n $file ]] && pid=$(left_here "$file"); then
        end_group "$pid" "$kill_s"
    fi
    set -m # in its own process group
    # After the connection is lost, the process must still save, and not end because of its output.
    "$@" </dev/null > >(cat || exec cat >/dev/null) 2>&1 &
    pid=$!
    set +m
    # By renaming, which replaces an existing file and does not follow a link.
    [[ -z $file ]] || (umask 077 && noted=$(mktemp -- "$file.XXXXXX") &&
        echo "$pid $(started_at "$pid")" >"$noted" && mv -fT -- "$noted" "$file") ||
        echo "cannot write $file: the next start will not find this process" >&2
    while kill -0 "$pid" 2>/dev/null; do
        status=0
        read -r -t 1 order || status=$?
        if ((status == 0)); then
            silent_s=0
            case $order in
                TERM | INT) kill -s "$order" -- "$pid" 2>/dev/null ;;
                KILL) kill -s KILL -- "-$pid" 2>/dev/null ;;
            esac
        elif ((status > 128)); then
            silent_s=$((silent_s + 1))
        fi
        if ((silent_s >= silence_s || status == 1)); then # the launcher is gone, or the connection
            lost=yes
            end_group "$pid" "$save_s"
        fi
    done
    wait "$pid" 2>/dev/null || code=$?
    end_group "$pid" 5
    [[ -z $file ]] || rm -f -- "$file"
    [[ -z $lost ]] || code=75
    return "$code"
}

remote_address() { # remote_address NAME: prints its addresses as this host sees them
    getent ahosts "$1"
}

remote_remove() { # remote_remove REMOTE_DIR DIR...
    cd -- "$1" && shift && remove_empty "$@"
}

remote_newest() { # remote_newest REMOTE_DIR DIR
    cd -- "$1" && newest_checkpoint "$(with_cache "$2")"
}

with_cache() { # with_cache DIR: prints it with this host's cache folder in place of {cache}
    local cache=${JAXTRAIN_CACHE:-~/.cache/jaxtrain}
    [[ $1 != '{cache}/'* ]] || set -- "$cache/${1#*/}"
    printf '%s\n' "$1"
}

# --- Functions that run here.

remotely() { # remotely FUNCTION ARGUMENT...: prints a command for any login shell
    local text used=(local_newest_checkpoint missing_directories remove_empty with_cache)
    text="launcher=ssh.sh; $(declare -f "$1" "${used[@]}")
        newest_checkpoint() { local_newest_checkpoint \"\$@\"; }; $(printf '%q ' "$@")"
    # Base64 has no character that is special to a shell.
    printf "exec bash -c 'eval \"\$(echo %s | base64 -d)\"'" "$(base64 <<<"$text" | tr -d '\n')"
}

read_hosts() { # read_hosts FILE: sets `hosts`
    local line
    hosts=()
    [[ -f $1 && -r $1 ]] || refuse "cannot read the hosts file '$1': launch/ssh.sh hosts.txt ..."
    while read -r line || [[ -n $line ]]; do
        line=${line%%#*}
        read -r line <<<"${line//$'\r'/}"
        [[ -n $line ]] || continue
        [[ $line != *[[:space:]]* && $line != -* ]] ||
            refuse "$1: '$line' is not a host name: write one host per line"
        [[ " ${hosts[*]-} " != *" $line "* ]] || refuse "$1: $line is listed twice: remove one"
        hosts+=("$line")
    done <"$1"
    ((${#hosts[@]})) || refuse "$1 lists no hosts: write one host per line"
}

check_hosts() { # checks all hosts in parallel; prints a line for each failed one and exits
    local index failed='' checks=()
    for index in "${!hosts[@]}"; do
        "${ssh_command[@]}" -n "${hosts[index]}" \
            "$(remotely remote_check "$REMOTE_DIR" "$PYTHON" "$directory")" \
            >"$workplace/check.$index" 2>&1 &
        checks[index]=$!
    done
    for index in "${!hosts[@]}"; do
        wait "${checks[index]}" && continue
        printf 'error: %s: %s\n' "${hosts[index]}" "$(tail -n 1 "$workplace/check.$index")" >&2
        failed=yes
    done
    [[ -z $failed ]] || exit 2
}

find_coordinator() { # sets COORDINATOR_HOST to an address that the last host can reach
    local name found last=${hosts[${#hosts[@]} - 1]}
    if ((${#hosts[@]} == 1)); then
        COORDINATOR_HOST=127.0.0.1
        return
    fi
    name=$("${ssh_command[@]}" -T -G "${hosts[0]}" | sed -n 's/^hostname //p') || true
    name=${name:-${hosts[0]##*@}}
    # A numeric address: on the first host itself its name may resolve to 127.0.1.1.
    found=$("${ssh_command[@]}" -n "$last" "$(remotely remote_address "$name")") || true
    COORDINATOR_HOST=$(head -n 1 <<<"${found:-$name}" | cut -d ' ' -f 1)
    [[ $COORDINATOR_HOST != *:* ]] || COORDINATOR_HOST="[$COORDINATOR_HOST]"
}

start_process() {
    local index=$1 host=${hosts[$1]} variables name control
    shift
    ((index)) || port=${COORDINATOR_PORT:-$((61440 + RANDOM % 4096))}
    variables=(
        JAX_COORDINATOR_ADDRESS="$COORDINATOR_HOST:$port"
        JAX_NUM_PROCESSES="${#hosts[@]}" JAX_PROCESS_ID="$index"
    )
    for name in "${!NCCL_@}" "${!XLA_@}" JAXTRAIN_CONNECT_S JAX_PLATFORMS; do
        [[ -z ${!name+set} ]] || variables+=("$name=${!name}")
    done
    name=ssh-$(cksum <<<"$REMOTE_DIR $directory" | cut -d ' ' -f 1).$index
    # The host obeys the orders written to this pipe. It is also open for writing here, or it
    # would be closed with the first writer.
    rm -f "$workplace/control.$index"
    mkfifo -m 600 "$workplace/control.$index"
    exec {control}<>"$workplace/control.$index"
    set -m
    "${ssh_command[@]}" "$host" "$(remotely remote_run "$name" "$SILENCE_S" "$SAVE_S" "$KILL_S" \
        "$REMOTE_DIR" env "${variables[@]}" "$PYTHON" -m jaxtrain.main "$@")" \
        0<&"$control" {control}>&- > >(trap '' INT TERM && prefix "[$host] ") 2>&1 &
    started_pid=$!
    set +m
    exec {control}>&-
}

prefix() { # prefix TEXT: prints each line of its input after TEXT, unchanged
    local line
    while IFS= read -r line || [[ -n $line ]]; do
        printf '%s%s\n' "$1" "$line"
    done
}

signal_process() { # signal_process PID SIGNAL: through the host, to the process there
    local index
    for index in "${!pids[@]}"; do
        [[ ${pids[index]} == "$1" ]] || continue
        send_order "$workplace/control.$index" "$2"
        # For a host that does not respond: without its connection the process there ends itself.
        [[ $2 != KILL ]] || { sleep 5 && kill -s KILL -- "$1"; } 2>/dev/null &
    done
}

send_order() { # send_order CONTROL ORDER: sends it to a host
    [[ ! -p $1 ]] || echo "$2" 1<>"$1" || true
}

beat() { # beat PID: sends heartbeats to every host while the launcher is running
    local control
    while kill -0 "$1" 2>/dev/null && sleep "$BEAT_S"; do
        for control in "$workplace"/control.*; do
            send_order "$control" beat
        done
    done
}

remove_made() { # removes the empty folders that check_hosts has created, on all hosts in parallel
    local index folders removals=()
    for index in "${!hosts[@]}"; do
        [[ -f $workplace/check.$index ]] || continue
        mapfile -t folders < <(sed -n 's/^made //p' "$workplace/check.$index")
        ((${#folders[@]})) || continue
        "${ssh_command[@]}" -n "${hosts[index]}" \
            "$(remotely remote_remove "$REMOTE_DIR" "${folders[@]}")" >/dev/null 2>&1 &
        removals+=("$!")
    done
    ((!${#removals[@]})) || wait "${removals[@]}" || true
}

clean_up() { # on exit
    local status=$?
    abandon
    [[ -z ${beating:-} ]] || kill "$beating" 2>/dev/null || true
    if ((status == 2)) || [[ -n $doctor ]]; then
        remove_made
    fi
    rm -rf "$workplace"
}

newest_checkpoint() { # asks the first host, as this machine may not see the directory
    local status=0
    "${ssh_command[@]}" -n "${hosts[0]}" "$(remotely remote_newest "$REMOTE_DIR" "$1")" || status=$?
    case $status in
        0) ;;
        255) echo unreachable ;; # ssh itself has failed, not the command
        *) echo nothing ;;
    esac
}

checkpoint_host() { echo "${hosts[0]}"; }

default_cache() { echo '{cache}'; } # a host's may differ from this machine's: see with_cache

(($#)) || refuse "which hosts? launch/ssh.sh hosts.txt --config NAME --output-dir DIR ..."
read_hosts "$1"
shift
read_arguments "$@"
set -- "${arguments[@]}"
check_numbers
directory=$(output_dir "$@") || exit
port=''
workplace=$(mktemp -d)
trap clean_up EXIT
check_hosts
[[ -n ${COORDINATOR_HOST:-} ]] || find_coordinator
nccl_settings "${#hosts[@]}"
say "${#hosts[@]} hosts; process 0 is on ${hosts[0]}, found at $COORDINATOR_HOST"
beat "$$" &
beating=$!
run_until_done "${#hosts[@]}" "$directory" "$@"
