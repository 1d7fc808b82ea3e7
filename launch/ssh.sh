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
# Settings, from the environment (others: jaxtrain/supervisor.py, nccl.sh):
#   REMOTE_DIR         folder to run in, on every host (default: the current folder)
#   PYTHON             the interpreter, on every host (default: .venv/bin/python if it exists here,
#                      else python); this machine needs only a Python from 3.11, without packages
#   COORDINATOR_HOST   address of the first host for the others (default: as ssh connects to it)
#   COORDINATOR_PORT   port on that host that the others can reach (default: a new one each time)
#   SSH_OPTIONS        options of ssh, for example "-p 2222 -i key"
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/supervise.sh
source "$here/supervise.sh"
# shellcheck source=launch/nccl.sh
source "$here/nccl.sh"
nccl_settings "$(grep -c '^[[:space:]]*[^#[:space:]]' "${1:-/dev/null}" 2>/dev/null || true)"
own=python3
[[ ! -x .venv/bin/python ]] || own=.venv/bin/python
export PYTHONPATH=${here%/*}${PYTHONPATH:+:$PYTHONPATH}
start "$own" "to start runs, this machine needs Python 3.11 or newer" ssh "$@"
