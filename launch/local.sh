#!/usr/bin/env bash
# Trains with N processes on this machine, and restarts them after a crash or a preemption.
#
#   launch/local.sh N --config NAME --output-dir DIR [flags] [--section.field value ...]
#   launch/local.sh N --doctor --config NAME ...     only check this machine
#
# One process (N=1) uses all GPUs; several share them evenly. The output of process 0 is shown, that
# of process i is in DIR/log.<i>.txt. Ctrl-C and SIGTERM are forwarded to all: they save and exit.
# Settings (MAX_RESTARTS, PYTHON, ...): jaxtrain/supervisor.py.
set -euo pipefail
# shellcheck source=launch/supervise.sh
source "$(dirname "${BASH_SOURCE[0]}")/supervise.sh"
supervise local "$@"
