"""Measures how fast pairs of hosts exchange data, and names hosts and links that are slow.

In a collective that all devices join, all wait for the slowest link. So pairs of hosts exchange
data, each host with up to three others in turn.
"""

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor.finding import Finding, ok, warning
from jaxtrain.doctor.hosts import ANSWER_S
from jaxtrain.doctor.subject import counted
from jaxtrain.storage import lock

_MOST_ROUNDS = 3
_SLOW = 0.6  # of the median of the others: a host or a link below it is slow
_TIMES = 5  # measurements of an exchange, of which the shortest one counts
_EXCHANGES = 8  # one after the other, in each direction
# Bytes that each device sends in an exchange. By the datasheets, all exchanges take 3 ms between
# nodes of H100, and a second over 10 Gbit/s.
_SENT = {"gpu": 2**24, "cpu": 2**18}
_AXIS = "devices"
Pair = tuple[int, int]


def links(devices: Sequence[jax.Device], store: KeyValueStore, host: str) -> Iterator[Finding]:
    """Measures the exchange between pairs of hosts, and names a host or a link that is slow.

    Device i of a host exchanges data with device i of another host. All processes must call it at
    the same time.

    Args:
        devices: the devices of all processes.
        store: shared with the other processes.
        host: the name of this one.
    """
    hosts = store.gather("host of a link", host, ANSWER_S)
    machines = store.gather("machine of a link", lock.machine(), ANSWER_S)
    of_processes = machine_names(hosts, machines)
    names = list(dict.fromkeys(of_processes))
    if len(names) == 1:
        return
    of_host = devices_of(names, [of_processes[one.process_index] for one in devices])
    rounds = list(itertools.islice(disjoint_pairs(len(names)), _MOST_ROUNDS))
    sent = _SENT.get(devices[0].platform, _SENT["gpu"])
    programs = [exchange(devices, swaps(of_host, pairs), sent, _EXCHANGES) for pairs in rounds]
    texts = store.gather("links", json.dumps(seconds_of(programs, devices)), ANSWER_S)
    measured = list(zip(of_processes, map(json.loads, texts), strict=True))
    moved = sent * _EXCHANGES * len(of_host[0])
    rates = {}
    for turn, pairs in enumerate(rounds):
        for pair in pairs:
            both = {names[number] for number in pair}
            slowest_s = max(seconds[turn] for name, seconds in measured if name in both)
            rates[pair] = moved / slowest_s
    yield from judged_links(rates, names)


def judged_links(rates: Mapping[Pair, float], names: Sequence[str]) -> Iterator[Finding]:
    """Names hosts all of whose links are slow, and other slow links.

    Args:
        rates: pair of hosts -> bytes/s in each direction.
        names: of the hosts.
    """
    best = {
        (host,): max(rate for pair, rate in rates.items() if host in pair)
        for host in sorted({host for pair in rates for host in pair})
    }
    slow = _slow(best)
    slow_hosts = {host for (host,) in slow}
    slow |= _slow({pair: r for pair, r in rates.items() if not slow_hosts.intersection(pair)})
    for hosts, (own, others) in slow.items():
        which = " and ".join(names[host] for host in hosts)
        yield warning(
            f"host {which} exchanges data with others at {_speed(own)} at most, the other hosts at "
            f"{_speed(others)} (measured)"
            if len(hosts) == 1
            else f"hosts {which} exchange data at {_speed(own)}, other pairs at {_speed(others)} "
            "(measured)",
            "every step waits for it: check the cable, the port, and the driver of its network "
            "adapter (ethtool, ibstatus), and NCCL_DEBUG=INFO for the adapter that NCCL uses",
        )
    if not slow:
        low, high = _speed(min(rates.values())), _speed(max(rates.values()))
        yield ok(
            f"{counted(len(rates), 'pair')} of {len(names)} hosts exchange data at "
            f"{low if low == high else f'{low} to {high}'} in each direction (measured)"
        )


def _slow(rates: Mapping[Any, float]) -> dict[Any, tuple[float, float]]:
    """Returns the rates that are slow, each with the median of the others."""
    found = {}
    for key, rate in rates.items():
        others = [other for name, other in rates.items() if name != key]
        # Two hosts have one link, which is compared with nothing.
        if others and rate < _SLOW * (median := statistics.median(others)):
            found[key] = (rate, median)
    return found


def _speed(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GB/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GB/s"


def machine_names(hosts: Sequence[str], machines: Sequence[str]) -> list[str]:
    """Returns a name for the machine of each process.

    Containers on one machine have different host names, but a faster link than other machines.

    Args:
        hosts: the host name that each process sees.
        machines: the identifier of each process's machine.
    """
    names: dict[str, list[str]] = {}
    for host, machine in zip(hosts, machines, strict=True):
        names.setdefault(machine, []).append(host)
    return [", ".join(dict.fromkeys(names[machine])) for machine in machines]


def devices_of(names: Sequence[str], hosts: Sequence[str]) -> list[list[int]]:
    """Returns the indices of each host's devices, as many as the smallest host has.

    Args:
        names: of the hosts.
        hosts: the name of the host of each device.
    """
    every = [[index for index, host in enumerate(hosts) if host == name] for name in names]
    return [indices[: min(map(len, every))] for indices in every]


def disjoint_pairs(count: int) -> Iterator[list[Pair]]:
    """Yields rounds of pairs, in which each of ``count`` hosts is at most once, and meets all.

    The circle method: host 0 stays, and the others move around it.
    """
    even = count + count % 2
    for turn in range(even - 1):
        circle = [0, *(1 + (index + turn) % (even - 1) for index in range(even - 1))]
        pairs = zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]


def swaps(of_host: Sequence[Sequence[int]], pairs: Sequence[Pair]) -> list[Pair]:
    """Returns from which device to which one a pair's data goes: each has one partner.

    Args:
        of_host: the devices of each host that take part, by their indices among all.
        pairs: pairs of hosts.
    """
    return [
        swap
        for first, second in pairs
        for one, other in zip(of_host[first], of_host[second], strict=True)
        for swap in ((one, other), (other, one))
    ]


def exchange(
    devices: Sequence[jax.Device], permutation: Sequence[Pair], sent: int, exchanges: int
) -> Compiled:
    """Compiles the exchanges between devices; takes a float32 for each device.

    Args:
        devices: the devices of all processes.
        permutation: from which device to which one data goes.
        sent: bytes that each device sends at once.
        exchanges: their number, one after the other.
    """
    over = split(devices)
    seeds = jax.ShapeDtypeStruct((len(devices),), np.float32, sharding=over)

    def local(seed: jax.Array) -> jax.Array:
        def swap(_: Any, row: jax.Array) -> jax.Array:
            return jax.lax.ppermute(row + 1, _AXIS, permutation)

        row = jnp.broadcast_to(seed, sent // 4)
        return jax.lax.fori_loop(0, exchanges, swap, row)[:1]

    on_all = jax.shard_map(local, mesh=over.mesh, in_specs=over.spec, out_specs=over.spec)
    return jax.jit(on_all).lower(seeds).compile()


def seconds_of(programs: Sequence[Compiled], devices: Sequence[jax.Device]) -> list[float]:
    """Returns the shortest time of each program in this process."""
    seeds = jax.make_array_from_callback(
        (len(devices),), split(devices), lambda _: np.zeros(1, np.float32)
    )
    shortest = []
    for program in programs:
        jax.block_until_ready(program(seeds))  # the processes meet, and may have to connect
        times = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            jax.block_until_ready(program(seeds))
            times.append(time.perf_counter() - began)
        shortest.append(min(times))
    return shortest


def split(devices: Sequence[jax.Device]) -> NamedSharding:
    """Returns the sharding of an array with an element for each device."""
    mesh = Mesh(np.asarray(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(_AXIS))
