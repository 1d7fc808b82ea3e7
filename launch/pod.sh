#!/usr/bin/env bash
# Runs one pod of k8s-jobset.yaml once: JobSet restarts all pods whenever one has failed.
#
# JobSet cannot see progress, so it restarts without a limit. Pod 0 counts restarts, and if too many
# produce no new checkpoint, it ends with 2, which ends the run.
# With --doctor among its arguments, a pod runs doctor instead of training. If doctor finds problems,
# the pod ends with 2, because JobSet would run doctor again after 1.
# Settings, from the environment: PYTHON, MAX_RESTARTS and RESTART_DELAY_S (jaxtrain/supervisor.py);
# of NCCL: nccl.sh; RESTARTS: how often JobSet has restarted this run (default: 0); JOBSET_UID: its uid.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"
nccl_settings "${JAX_NUM_PROCESSES:-1}"
supervise pod "$@"
