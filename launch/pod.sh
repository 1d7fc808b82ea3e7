#!/usr/bin/env bash
# One start of one pod of k8s-jobset.yaml: JobSet starts all pods again whenever one has failed.
#
# JobSet knows no progress, and so restarts without a limit. Pod 0 counts, and where restarts bring no
# new checkpoint it ends with 2, which ends the run.
# With --doctor among its arguments a pod trains nothing and runs doctor instead. It ends with 2 where
# that finds problems, because JobSet would start doctor again after a 1.
# Settings, from the environment: PYTHON, MAX_RESTARTS and RESTART_DELAY_S (supervise.sh); NCCL's:
# nccl.sh; RESTARTS: how often JobSet has started this run again (0). JAXTRAIN_RUN_TOKEN comes from a
# Secret (k8s-jobset.yaml).
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"

LONGEST_DELAY_S=120 # the other pods wait for process 0, but not much longer than twice that

read_arguments "$@"
set -- "${arguments[@]}"
check_settings
directory=$(output_dir "$@") || exit
restarts=${RESTARTS:-0}
[[ $restarts =~ ^[0-9]+$ ]] || refuse "RESTARTS is '$restarts'; it has to be a whole number"
nccl_settings "${JAX_NUM_PROCESSES:-1}"
trap 'exit 75' TERM INT # the first process of a container hears only what it has asked for
[[ ${JAX_NUM_PROCESSES:-1} != 1 ]] || trap leave EXIT
await_directory "$restarts" "$directory" || exit 2

if [[ -n $doctor ]]; then
    code=0
    "$PYTHON" -m jaxtrain.main "$@" & # and a signal ends the waiting
    wait "$!" || code=$?
    case $code in 0 | 130) exit "$code" ;; *) exit 2 ;; esac
fi

count_restart() { # says why and fails where there were too many in vain
    local file=$directory/.pod-restarts before=none in_vain=0 newest delay_s
    newest=$(newest_checkpoint "$directory")
    if ((restarts)); then
        [[ ! -e $file ]] || read -r before in_vain <"$file" || before=none in_vain=0 # a full disk's
        ! is_newer "$newest" "$before" || in_vain=0
        in_vain=$((in_vain + 1))
        if ((in_vain > MAX_RESTARTS)); then
            say "$MAX_RESTARTS restarts in a row brought no new checkpoint (newest: $newest): giving up"
            return 1
        fi
        say "restart $in_vain of at most $MAX_RESTARTS without a new checkpoint (newest: $newest)"
    fi
    # Before the start, as what is evicted or out of memory can count nothing any more.
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
    resume=() # for the first start, what the user says
fi
exec "$PYTHON" -m jaxtrain.main "$@" "${resume[@]}"
