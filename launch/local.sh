#!/usr/bin/env bash
# Trains with N processes on this machine, and restarts them after a crash or a preemption.
#
#   launch/local.sh N --config NAME --output-dir DIR [flags] [--section.field value ...]
#   launch/local.sh N --doctor --config NAME ...     only check this machine
#
# One process (N=1) uses all GPUs; several share them evenly. The output of process 0 is shown, that
# of process i is in DIR/log.<i>.txt. Ctrl-C and SIGTERM are forwarded to all: they save and exit.
# Settings (MAX_RESTARTS, PYTHON, ...): supervise.sh.
set -euo pipefail
# shellcheck source=launch/supervise.sh
source "$(dirname "${BASH_SOURCE[0]}")/supervise.sh"

(($#)) || refuse "how many processes? launch/local.sh N --config NAME --output-dir DIR ..."
count=$1
is_count "$count" || refuse "'$count' is not a number of processes: launch/local.sh N --config NAME ..."
shift
read_arguments "$@"
set -- "${arguments[@]}"
check_settings
directory=$(output_dir "$@") || exit
trap leave EXIT
make_directory "$directory"

gpus() { # prints how many GPUs the processes share; 0 for none
    if [[ ${JAX_PLATFORMS:-} == cpu ]] || option --simulate-devices "$@" >/dev/null; then
        echo 0
    elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^$' -e '^-1$' || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

devices=$(gpus "$@")
((devices % count == 0)) ||
    refuse "$devices GPUs cannot be shared by $count processes: use 1 or a divisor of $devices"

start_process() {
    local index=$1 share=$((devices / count)) log=${doctor:+doctor}
    log=${log:-log}
    shift
    # A new port for each start: a process that is still ending may use the last one.
    ((index)) || port=$(free_port)
    local variables=(
        JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES="$count" JAX_PROCESS_ID="$index"
    )
    if ((count > 1 && share)); then
        variables+=(JAX_LOCAL_DEVICE_IDS="$(seq -s, $((index * share)) $((index * share + share - 1)))")
    fi
    if ((index)); then
        in_background env "${variables[@]}" "$PYTHON" -m jaxtrain.main "$@" \
            >>"$directory/$log.$index.txt" 2>&1
    else
        in_background env "${variables[@]}" "$PYTHON" -m jaxtrain.main "$@"
    fi
}

run_until_done "$count" "$directory" "$@"
