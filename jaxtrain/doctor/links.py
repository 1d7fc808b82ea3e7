"""Measures how fast pairs of hosts exchange data, and names hosts and links that are slow.

In a collective that all devices join, all wait for the slowest link. So each host exchanges data
with the next one, one pair after the other.
"""

import json
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
from jaxtrain.storage import lock
from jaxtrain.telemetry.formats import counted

_SLOW = 0.6  # of the rate of the faster links: one below it is slow
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
    pairs = neighbors(len(names))
    sent = _SENT.get(devices[0].platform, _SENT["gpu"])
    programs = [exchange(devices, swaps(of_host, pair), sent, _EXCHANGES) for pair in pairs]
    texts = store.gather("links", json.dumps(seconds_of(programs, devices)), ANSWER_S)
    measured = list(zip(of_processes, map(json.loads, texts), strict=True))
    moved = sent * _EXCHANGES * len(of_host[0])
    rates = {}
    for number, pair in enumerate(pairs):
        both = {names[host] for host in pair}
        rates[pair] = moved / max(seconds[number] for name, seconds in measured if name in both)
    yield from judged(rates, names)


def neighbors(count: int) -> list[Pair]:
    """Returns the pairs of a ring of hosts: each is in two of them, or in the only one."""
    return [(host, (host + 1) % count) for host in range(count if count > 2 else 1)]


def judged(rates: Mapping[Pair, float], names: Sequence[str]) -> Iterator[Finding]:
    """Names hosts both of whose links are slow, and other slow links.

    Args:
        rates: pair of hosts -> bytes/s in each direction.
        names: of the hosts.
    """
    # A slow host has two of the links, of three hosts most of them. So the median does not help.
    usual = sorted(rates.values())[-1 - len(rates) // 4]
    slow = [pair for pair, rate in rates.items() if rate < _SLOW * usual]
    if not slow:
        low, high = _speed(min(rates.values())), _speed(max(rates.values()))
        yield ok(
            f"{counted(len(rates), 'pair')} of {len(names)} hosts exchange data at "
            f"{low if low == high else f'{low} to {high}'} in each direction (measured)"
        )
        return
    of_both = [host for host in range(len(names)) if sum(host in pair for pair in slow) == 2]
    for host in of_both:
        best = max(rate for pair, rate in rates.items() if host in pair)
        yield _warning(f"host {names[host]} exchanges data at {_speed(best)} at most", usual)
    for first, second in slow:
        if first not in of_both and second not in of_both:
            seen = f"hosts {names[first]} and {names[second]} exchange data at"
            yield _warning(f"{seen} {_speed(rates[first, second])}", usual)


def _warning(seen: str, usual: float) -> Finding:
    return warning(
        f"{seen}, against {_speed(usual)} between others (measured)",
        "every step waits for it: check the cable, the port, and the driver of its network adapter "
        "(ethtool, ibstatus), and NCCL_DEBUG=INFO for the adapter that NCCL uses",
    )


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


def swaps(of_host: Sequence[Sequence[int]], pair: Pair) -> list[Pair]:
    """Returns from which device to which one a pair's data goes: each has one partner.

    Args:
        of_host: the devices of each host that take part, by their indices among all.
        pair: of hosts.
    """
    partners = zip(of_host[pair[0]], of_host[pair[1]], strict=True)
    return [swap for one, other in partners for swap in ((one, other), (other, one))]


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
