#!/usr/bin/env bash
# Trains on clouds that start this same command on every node and give it WORLD_SIZE (nodes), RANK
# (of this node), MASTER_ADDR and MASTER_PORT.
#
#   launch/platform.sh --config h100_16 --output-dir /shared/run1 [flags] [--section.field value ...]
#   launch/platform.sh --doctor --config ...     on every node: check them first, train nothing
#
# One process a node uses all its GPUs. Every node needs the same DIR, on storage that all see. Each
# node starts its own process again; they find each other again at the same address.
#
# The nodes share nothing before they meet, so no secret can be made here. Set JAXTRAIN_RUN_TOKEN to
# the same random text on all nodes, as a secret of the platform (supervise.sh).
# Settings (MAX_RESTARTS, PYTHON, ...): supervise.sh. NCCL's: nccl.sh.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"

read_arguments "$@"
set -- "${arguments[@]}"
check_settings
directory=$(output_dir "$@") || exit
hosts=${WORLD_SIZE:-1}
is_count "$hosts" || refuse "WORLD_SIZE is '$hosts'; it has to be the number of nodes"
((hosts > 1)) || trap leave EXIT
make_directory "$directory"
nccl_settings "$hosts"

start_process() {
    shift
    in_background "$PYTHON" -m jaxtrain.main "$@"
}

run_until_done 1 "$directory" "$@"
