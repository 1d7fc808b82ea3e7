#!/usr/bin/env bash
# Runs one pod of k8s-jobset.yaml once: JobSet restarts all pods whenever one has failed.
#
# JobSet cannot see progress, so it restarts without a limit. Pod 0 counts restarts, and if too many
# produce no new checkpoint, it ends with 2, which ends the run.
# With --doctor among its arguments, a pod runs doctor instead of training. If doctor finds problems,
# the pod ends with 2, because JobSet would run doctor again after 1.
# Settings, from the environment: PYTHON, MAX_RESTARTS and RESTART_DELAY_S (supervise.sh); of NCCL:
# nccl.sh; RESTARTS: how often JobSet has restarted this run (default: 0).
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"

LONGEST_DELAY_S=120 # the other pods wait for process 0 for little more than twice as long

read_arguments "$@"
set -- "${arguments[@]}"
check_settings
directory=$(output_dir "$@") || exit
restarts=${RESTARTS:-0}
[[ $restarts =~ ^[0-9]+$ ]] || refuse "RESTARTS is '$restarts': set it to a whole number"
nccl_settings "${JAX_NUM_PROCESSES:-1}"
trap 'exit 75' TERM INT # process 1 of a container receives only signals that it handles
[[ ${JAX_NUM_PROCESSES:-1} != 1 ]] || trap leave EXIT
await_directory "$restarts" "$directory" || exit 2

if [[ -n $doctor ]]; then
    code=0
    "$PYTHON" -m jaxtrain.main "$@" & # in the background, so that a signal ends the wait
    wait "$!" || code=$?
    case $code in 0 | 130) exit "$code" ;; *) exit 2 ;; esac
fi

count_restart() { # fails with a message after too many restarts without a new checkpoint
    local file=$directory/.pod-restarts before=none in_vain=0 newest delay_s
    newest=$(newest_checkpoint "$directory")
    if ((restarts)); then
        [[ ! -e $file ]] || read_restarts "$file"
        ! is_newer "$newest" "$before" || in_vain=0
        in_vain=$((in_vain + 1))
        if ((in_vain > MAX_RESTARTS)); then
            say "$MAX_RESTARTS restarts in a row produced no new checkpoint (newest: $newest):" \
                "giving up"
            return 1
        fi
        say "restart $in_vain of at most $MAX_RESTARTS without a new checkpoint (newest: $newest)"
    fi
    # Before the start, because a pod that is evicted or out of memory can no longer count.
    printf '%s %s\n' "$newest" "$in_vain" >"$file" ||
        say "restart $in_vain is not counted: $file cannot be written"
    ((in_vain)) || return 0
    delay_s=$(restart_delay_s "$in_vain")
    await_restart $((delay_s < LONGEST_DELAY_S ? delay_s : LONGEST_DELAY_S))
}

if ((${JOB_COMPLETION_INDEX:-0} == 0)); then
    count_restart || exit 2
fi

resume=(--resume latest)
if ((restarts == 0)) && option --resume "$@" >/dev/null; then
    resume=() # the first start uses the user's --resume
fi
exec "$PYTHON" -m jaxtrain.main "$@" "${resume[@]}"
