# shellcheck shell=bash
# Sourced by the launchers of several hosts: NCCL's settings by the number of hosts.
#
# Only variables that NCCL reads (https://docs.nvidia.com/deeplearning/nccl, "Environment Variables"),
# only where its default does not suit such a run, and never over what the user has set. NCCL looks at
# links, rings and GPUDirect itself, so these stay unset:
# - NCCL_P2P_DISABLE, NCCL_IB_DISABLE, NCCL_NET_GDR_LEVEL: NCCL_IB_DISABLE=1 sends all over TCP.
# - NCCL_ALGO, NCCL_PROTO: they forbid choices; Ring alone is the slow one over many hosts.
# - NCCL_BUFFSIZE: more than the default 4 MiB costs memory on each GPU for each channel and peer.
# NCCL has no variable for the time that a collective may take: --loop.hang_timeout_s is that limit.

nccl_settings() { # nccl_settings HOSTS
    local hosts=$1
    # The default says nothing at all, also where it fails; WARN says why, and nothing else.
    export NCCL_DEBUG=${NCCL_DEBUG-WARN}
    ((hosts > 1)) || return 0 # one node: NVLink or PCIe, nothing to set

    # 2 hosts and more. NCCL leaves out lo and docker*, but a virtual bridge of libvirt or a container's
    # veth has an address that means another thing on every host. "^" excludes.
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME-^lo,docker,virbr,veth}

    # Without InfiniBand the data goes over sockets, by one thread and one connection each (more only
    # on AWS and GCP, which NCCL knows): too little for 100 GbE. Unused where there is InfiniBand.
    if ! compgen -G '/sys/class/infiniband/*' >/dev/null; then
        export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS-4}
        export NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD-4}
    fi

    # An InfiniBand packet is sent again after 4.096 us x 2^20 = 4.3 s (the default), seven times, and
    # then the run dies. More hosts mean more links that flap and switches that route anew.
    if ((hosts >= 8)); then
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT-22} # 17 s
    elif ((hosts >= 6)); then
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT-21} # 9 s
    fi
}
