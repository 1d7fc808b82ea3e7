#!/usr/bin/env bash
# Trains on machines that ssh can reach: runs launch/platform.sh on each of them.
#
#   launch/ssh.sh hosts.txt --config h100_16 --output-dir /shared/run1 [flags] [--section.field ...]
#   launch/ssh.sh hosts.txt --doctor --config ...     only check the hosts
#
# hosts.txt: one host per line, as ssh accepts it (gpu1, me@10.0.0.2, a name in ~/.ssh/config); the
# first is process 0. Empty lines and text after # are ignored. Each line of output begins with the
# host's name. Each host restarts its own process, and they meet again. If one gives up, the others
# save and end, too. Ctrl-C and SIGTERM reach all: they save and exit. A lost connection is tried again
# for ten minutes; the process at its other end saves and exits when its host notices the loss.
# Credentials for a bucket are not sent: each host needs its own, for example in /etc/environment.
# Settings, from the environment (those of platform.sh, NCCL_* and XLA_* are passed on):
#   REMOTE_DIR         checkout on every host (default: the current folder)
#   PYTHON             the interpreter, on every host (default: .venv/bin/python there, else python)
#   COORDINATOR_HOST   address of the first host for the others (default: as ssh connects to it)
#   COORDINATOR_PORT   port on that host that the others can reach (default: a new one for each run)
#   SSH_OPTIONS        options of ssh, for example "-p 2222 -i key"
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

quoted() { # quoted WORD...: for the shell of any host
    local word
    for word in "$@"; do printf " '%s'" "${word//\'/\'\\\'\'}"; done
}

prefixed() { # prefixed HOST: prints each line with the name of its host
    local line
    while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "${line%$'\r'}"; done
}

keys() { # types Ctrl-C on a host as often as asked, and if this script was killed
    local number
    for number in 1 2; do
        until [[ -e $work/stop.$number ]]; do
            [[ -e $work/codes ]] || break
            kill -0 "$$" || break
            sleep 0.5
        done
        [[ -e $work/stop.$number ]] || ((number == 1)) || break
        printf '\003'
    done
}

run_on() { # run_on RANK HOST: until its process has ended, also over several connections
    local code began tries=0 restarts=0 reached
    reached="touch$(quoted "$work/reached.$1")"
    while began=$SECONDS code=0; do
        # A terminal, so that what is typed there becomes a signal, and its end becomes SIGHUP.
        "${ssh[@]}" -tt -e none -o PermitLocalCommand=yes -o "LocalCommand=$reached" \
            "$2" "$command RANK=$1 RESTARTS=$restarts $program" < <(keys 2>/dev/null) 2>&1 || code=$?
        # Not of each short connection, or they might never end. 40 s: longer than ConnectTimeout.
        ((restarts)) || [[ ! -e $work/reached.$1 ]] || tries=60
        ((SECONDS - began < 40)) || tries=60
        ((code == 255 && tries-- > 0)) && [[ ! -e $work/stop.1 ]] || break
        echo "ssh.sh: the connection is lost: connecting again"
        restarts=1
        sleep 10
    done
    echo "$code" >>"$work/codes"
}

(($#)) || fail "which hosts? launch/ssh.sh hosts.txt --config NAME --output-dir DIR ..."
[[ -r $1 && ! -d $1 ]] || fail "cannot read the hosts file '$1': launch/ssh.sh hosts.txt ..."
hosts=()
while read -r host more || [[ -n $host ]]; do
    [[ -n $host ]] || continue
    [[ $host != -* && -z $more ]] ||
        fail "$1: '$host${more:+ $more}' is not a host name: write one host per line"
    [[ " ${hosts[*]-} " != *" $host "* ]] || fail "$1: $host is listed twice: remove one"
    hosts+=("$host")
done < <(sed 's/#.*//; s/\r$//' "$1")
((${#hosts[@]})) || fail "$1 lists no hosts: write one host per line"

read -ra ssh <<<"ssh ${SSH_OPTIONS:-}"
ssh+=(-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o LogLevel=ERROR)
address=${COORDINATOR_HOST:-127.0.0.1}
if [[ -z ${COORDINATOR_HOST:-} ]] && ((${#hosts[@]} > 1)); then
    # Asked there, because on the first host its own name may be 127.0.1.1.
    name=$("${ssh[@]}" -G "${hosts[0]}" | sed -n 's/^hostname //p')
    found=$("${ssh[@]}" -n "${hosts[-1]}" "getent ahosts$(quoted "$name") || true") ||
        fail "cannot connect to ${hosts[-1]}"
    address=${found%% *}
fi
variables=("WORLD_SIZE=${#hosts[@]}" "MASTER_ADDR=${address:-$name}")
variables+=("MASTER_PORT=${COORDINATOR_PORT:-$((61440 + RANDOM % 4096))}" TERM=dumb)
variables+=("JAXTRAIN_LAUNCH=${JAXTRAIN_LAUNCH:-ssh.sh-$(date +%s)-$RANDOM}") # of all connections
for name in $(compgen -e); do
    case $name in
        NCCL_* | XLA_* | JAX_PLATFORMS | JAXTRAIN_CONNECT_S | PYTHON | MAX_RESTARTS | \
            RESTART_DELAY_S | SAVE_S | GRACE_S | KILL_S) variables+=("$name=${!name}") ;;
    esac
done
command="cd$(quoted "${REMOTE_DIR:-$PWD}") || exit 2; exec env$(quoted "${variables[@]}")"
program="launch/platform.sh$(quoted "${@:2}")"

work=$(mktemp -d)
touch "$work/codes"
trap 'rm -rf "$work"' EXIT
stopped=''
# shellcheck disable=SC2329 # a trap calls it
stop() { # stop CODE: a second Ctrl-C ends the run without saving, a second SIGTERM changes nothing
    [[ -z $stopped || $1 == 75 ]] || : >"$work/stop.2"
    : >"$work/stop.1"
    stopped=${stopped:-$1}
}
trap '' INT # of a terminal: it would end ssh, too
for rank in "${!hosts[@]}"; do
    run_on "$rank" "${hosts[rank]}" | prefixed "${hosts[rank]}" &
done
trap 'stop 130' INT
trap 'stop 75' TERM HUP
failed_at=''
while [[ -n $(jobs -rp) ]]; do
    sleep 1 || true
    grep -qsvx 0 "$work/codes" || continue
    failed_at=${failed_at:-$SECONDS}
    [[ " $* " == *" --doctor "* ]] || ((SECONDS - failed_at < ${GRACE_S:-10})) || : >"$work/stop.1"
done

code=$(grep -m1 -vx 0 "$work/codes" || echo 0) # of the first host that failed
((code == 0)) || code=${stopped:-$code}
code=$(grep -m1 -x '[24]' "$work/codes" || echo "$code") # a restart cannot help
(($(wc -l <"$work/codes") == ${#hosts[@]} || code)) || code=1
exit "$code"
