#!/usr/bin/env bash
# Trains on clouds that start this command on every node and set WORLD_SIZE (number of nodes), RANK
# (of this node), MASTER_ADDR and MASTER_PORT.
#
#   launch/platform.sh --config h100_16 --output-dir /shared/run1 [flags] [--section.field value ...]
#   launch/platform.sh --doctor --config ...     on every node: only check them
#
# One process per node uses all its GPUs. Every node needs the same DIR, on shared storage. Each node
# restarts its own process; they meet again at the same address.
#
# RESTARTS, if it is set, is how often the platform has started this command before.
# Settings (MAX_RESTARTS, PYTHON, ...): jaxtrain/supervisor.py; of NCCL: nccl.sh.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"
nccl_settings "${WORLD_SIZE:-1}"
supervise platform "$@"
