"""Measures how fast pairs of hosts exchange data, and names hosts and links that are slow.

In a collective that all devices join, all wait for the slowest link. So pairs of hosts exchange
data, each host with up to three others in turn.
"""

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
_AXIS = "devices"
Pair = tuple[int, int]


class ExchangeSizes(NamedTuple):
    """The sizes of an exchange.

    Attributes:
        sent: bytes that each device sends at once.
        exchanges: number of exchanges, one after the other, in each direction.
    """

    sent: int
    exchanges: int


# By the datasheets an exchange takes 3 ms between nodes of H100, and a second over 10 Gbit/s.
_SIZES = {"gpu": ExchangeSizes(2**24, 8), "cpu": ExchangeSizes(2**18, 8)}


class SlowLink(NamedTuple):
    """A slow host, or a slow link.

    Attributes:
        hosts: one, all of whose links are slow, or the two at the ends of a slow link.
        own: bytes/s in each direction, of its fastest link.
        others: the median of the other hosts or links.
    """

    hosts: tuple[int, ...]
    own: float
    others: float


class LinkRates:
    """Measures the links between hosts; all processes must build and call it at the same time.

    Device i of a host exchanges data with device i of another host. Devices that other hosts do
    not have take no part.

    Args:
        devices: the devices of all processes.
        hosts: the name of the host of each device.
        sizes: the sizes of the exchanges; those of the devices' platform by default.

    Attributes:
        names: the names of the hosts.
        of_host: the indices in ``devices`` of each host's devices that take part.
        rounds: the pairs of hosts that exchange data at the same time.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        hosts: Sequence[str],
        sizes: ExchangeSizes | None = None,
    ) -> None:
        self._sizes = sizes or _SIZES.get(devices[0].platform, _SIZES["gpu"])
        self.names = list(dict.fromkeys(hosts))
        all_of_host = [
            [index for index, host in enumerate(hosts) if host == name] for name in self.names
        ]
        width = min(map(len, all_of_host))
        self.of_host = [indices[:width] for indices in all_of_host]
        self.rounds = list(itertools.islice(disjoint_pairs(len(self.names)), _MOST_ROUNDS))
        self._programs = [
            exchange(devices, swaps(self.of_host, pairs), self._sizes) for pairs in self.rounds
        ]
        self._seeds = jax.make_array_from_callback(
            (len(devices),), split(devices), lambda _: np.zeros(1, np.float32)
        )

    def __call__(self) -> list[float]:
        """Returns the seconds of this process's exchange in each round.

        Raises:
            jax.errors.JaxRuntimeError: a device has failed, or another process is gone. The other
                processes then wait for this one as they do in a step, so it must end.
        """
        # The first time, the processes wait for each other, and may have to connect.
        return [
            min([self._seconds(program) for _ in range(1 + _TIMES)][1:])
            for program in self._programs
        ]

    def _seconds(self, program: Compiled) -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(self._seeds))
        return time.perf_counter() - began

    def rates(self, seconds: Sequence[Sequence[float]]) -> dict[Pair, float]:
        """Returns the bytes/s in each direction between pairs of hosts.

        Args:
            seconds: of each host's exchange in each round; of its slowest process.
        """
        moved = self._sizes.sent * self._sizes.exchanges * len(self.of_host[0])
        return {
            pair: moved / max(seconds[host][turn] for host in pair)
            for turn, pairs in enumerate(self.rounds)
            for pair in pairs
        }


def links(devices: list[jax.Device], store: KeyValueStore, host: str) -> Iterator[Finding]:
    """Measures the exchange between pairs of hosts, and names a host or a link that is slow.

    Args:
        devices: the devices of all processes.
        store: shared with the other processes.
        host: the name of this one.
    """
    hosts = store.gather("host of a link", host, ANSWER_S)
    machines = store.gather("machine of a link", lock.machine(), ANSWER_S)
    names = machine_names(hosts, machines)
    if len(set(names)) == 1:
        return
    measure = LinkRates(devices, [names[one.process_index] for one in devices])
    texts = store.gather("links", json.dumps(measure()), ANSWER_S)
    of_processes = list(zip(names, map(json.loads, texts), strict=True))
    slowest = [
        np.max([seconds for name, seconds in of_processes if name == host], axis=0).tolist()
        for host in measure.names
    ]
    yield from judged_links(measure.rates(slowest), measure.names)


def judged_links(rates: Mapping[Pair, float], names: Sequence[str]) -> Iterator[Finding]:
    """Names hosts all of whose links are slow, and other slow links.

    Args:
        rates: pair of hosts -> bytes/s in each direction.
        names: of the hosts.
    """
    slow = slow_links(rates)
    for one in slow:
        own, others = f"{one.own / 1e9:.3g} GB/s", f"{one.others / 1e9:.3g} GB/s (measured)"
        which = " and ".join(names[host] for host in one.hosts)
        yield warning(
            f"host {which} exchanges data with others at {own} at most, the other hosts at {others}"
            if len(one.hosts) == 1
            else f"hosts {which} exchange data at {own}, other pairs at {others}",
            "every step waits for it: check the cable, the port, and the driver of its network "
            "adapter (ethtool, ibstatus), and NCCL_DEBUG=INFO for the adapter that NCCL uses",
        )
    if not slow:
        low, high = min(rates.values()) / 1e9, max(rates.values()) / 1e9
        yield ok(
            f"{counted(len(rates), 'pair')} of {len(names)} hosts exchange data at {low:.3g} to "
            f"{high:.3g} GB/s in each direction (measured)"
        )


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
    devices: Sequence[jax.Device], permutation: Sequence[Pair], sizes: ExchangeSizes
) -> Compiled:
    """Compiles the exchanges between devices; takes a float32 for each device."""
    over = split(devices)
    seeds = jax.ShapeDtypeStruct((len(devices),), np.float32, sharding=over)

    def local(seed: jax.Array) -> jax.Array:
        def swap(_: Any, row: jax.Array) -> jax.Array:
            return jax.lax.ppermute(row + 1, _AXIS, permutation)

        row = jnp.broadcast_to(seed, sizes.sent // 4)
        return jax.lax.fori_loop(0, sizes.exchanges, swap, row)[:1]

    on_all = jax.shard_map(local, mesh=over.mesh, in_specs=over.spec, out_specs=over.spec)
    return jax.jit(on_all).lower(seeds).compile()


def split(devices: Sequence[jax.Device]) -> NamedSharding:
    """Returns the sharding of an array with an element for each device."""
    mesh = Mesh(np.asarray(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(_AXIS))


def slow_links(rates: Mapping[Pair, float]) -> list[SlowLink]:
    """Returns the hosts all of whose links are slow, and other slow links.

    Two hosts have one link, which is compared with nothing.

    Args:
        rates: pair of hosts -> bytes/s in each direction.
    """
    best = {
        host: max(rate for pair, rate in rates.items() if host in pair)
        for host in sorted({host for pair in rates for host in pair})
    }
    slow = [SlowLink((host,), *found) for host in best if (found := _slow(host, best))]
    slow_hosts = {one.hosts[0] for one in slow}
    rest = {pair: rate for pair, rate in rates.items() if not slow_hosts.intersection(pair)}
    return slow + [SlowLink(pair, *found) for pair in sorted(rest) if (found := _slow(pair, rest))]


def _slow(key: Any, rates: Mapping[Any, float]) -> tuple[float, float] | None:
    """Returns a rate and the median of the others if it is slow; None if not, or without others."""
    others = [rate for other, rate in rates.items() if other != key]
    if not others or rates[key] >= _SLOW * (median := statistics.median(others)):
        return None
    return rates[key], median
