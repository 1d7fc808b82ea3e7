# shellcheck shell=bash
# Sourced by the launchers of several hosts: sets NCCL's variables by the number of hosts.
#
# It sets only variables that NCCL reads (https://docs.nvidia.com/deeplearning/nccl, "Environment
# Variables"), only where the default does not suit such a run, and never overrides the user's values.
# NCCL detects links, rings and GPUDirect itself, so these stay unset:
# - NCCL_P2P_DISABLE, NCCL_IB_DISABLE, NCCL_NET_GDR_LEVEL: NCCL_IB_DISABLE=1 sends everything over TCP.
# - NCCL_ALGO, NCCL_PROTO: they restrict NCCL's choice; Ring alone is slow over many hosts.
# - NCCL_BUFFSIZE: more than the default 4 MiB costs memory per GPU, channel and peer.
# NCCL has no time limit for collectives: --loop.hang_timeout_s is that limit.

nccl_settings() { # nccl_settings HOSTS
    local hosts=$1
    # By default NCCL prints nothing, even when it fails; WARN prints only the reason.
    export NCCL_DEBUG=${NCCL_DEBUG-WARN}
    [[ $hosts =~ ^[0-9]+$ ]] && ((hosts > 1)) || return 0 # one node: NVLink or PCIe, nothing to set

    # 2 hosts and more. NCCL ignores lo and docker*, but not libvirt's virtual bridges and containers'
    # veth devices, whose addresses are different machines on every host. "^" excludes.
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME-^lo,docker,virbr,veth}

    # Without InfiniBand, data goes over sockets, with one thread and one connection each (more only
    # on AWS and GCP, which NCCL detects): too few for 100 GbE. Not used with InfiniBand.
    if ! compgen -G '/sys/class/infiniband/*' >/dev/null; then
        export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS-4}
        export NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD-4}
    fi

    # An InfiniBand packet is resent after 4.096 us x 2^20 = 4.3 s (the default), seven times, and
    # then the run fails. More hosts mean more flapping links and switches that recompute routes.
    if ((hosts >= 8)); then
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT-22} # 17 s
    elif ((hosts >= 6)); then
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT-21} # 9 s
    fi
}
