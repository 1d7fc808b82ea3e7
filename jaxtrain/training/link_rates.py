"""Measures how fast pairs of hosts exchange data, and which hosts and links are slow.

In a collective that all devices join, all wait for the slowest link. So pairs of hosts exchange
data, each host with up to three others in turn. ``doctor`` does this before a run, and
:mod:`jaxtrain.training.slow_process` while it trains.
"""

import concurrent.futures
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxtrain.training import device_rates

COMMUNICATION = "communication"
CHECK = (
    "check the cable, the port, and the driver of its network adapter (ethtool, ibstatus), and "
    "NCCL_DEBUG=INFO for the adapter that NCCL uses"
)
_MOST_ROUNDS = 3
_SLOW = 0.6  # of the median of the others: a host or a link below it is slow
Pair = tuple[int, int]


class ExchangeSizes(NamedTuple):
    """The sizes of an exchange, and how often its time is taken; the shortest one counts.

    Attributes:
        sent: bytes that each device sends at once.
        exchanges: number of exchanges, one after the other, in each direction.
        times: number of measurements of all exchanges.
        least_s: a link that takes longer than the others by less than this is not slow.
    """

    sent: int
    exchanges: int
    times: int
    least_s: float = 0.0


# By the datasheets a measurement takes 20 ms between nodes of H100, and 6 s over 10 Gbit/s. Other
# programs delayed the quickest of two exchanges between CPUs by up to 32 ms, of four by up to 7 ms
# (load 15 to 20, two cores). GPUs exchange data without the CPU, which only takes the time.
_SIZES = {
    "gpu": ExchangeSizes(2**24, 4, 4, least_s=0.001),
    "cpu": ExchangeSizes(2**18, 2, 2, least_s=0.05),
}


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


class LinkSeconds(NamedTuple):
    """One measurement.

    Attributes:
        seconds: duration of the exchanges of each device of this process, in each round.
        cost_s: seconds for which the devices computed nothing else.
    """

    seconds: list[list[float]]
    cost_s: float


class LinkRates:
    """Measures the links between hosts; all processes must build and call it at the same time.

    Device i of a host exchanges data with device i of another host. Devices that other hosts do
    not have take no part. No device memory is held between measurements, but for the buffers of
    NCCL, which are outside of XLA's memory: one pool for all partners of a GPU
    (NCCL_NET_SHARED_BUFFERS), by its defaults 16 x 128 KiB per channel. Not yet run on GPUs.

    Args:
        devices: the devices of all processes.
        hosts: the name of the host of each device.
        sizes: the sizes of the exchanges.
        clock: monotonic clock, seconds.

    Attributes:
        names: the names of the hosts.
        of_host: the indices in ``devices`` of each host's devices that take part.
        rounds: the pairs of hosts that exchange data at the same time.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        hosts: Sequence[str],
        sizes: ExchangeSizes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices, self._sizes, self._clock = devices, sizes, clock
        self.names = list(dict.fromkeys(hosts))
        all_of_host = [
            [index for index, host in enumerate(hosts) if host == name] for name in self.names
        ]
        width = min(map(len, all_of_host))
        self.of_host = [indices[:width] for indices in all_of_host]
        self.rounds = list(itertools.islice(disjoint_pairs(len(self.names)), _MOST_ROUNDS))
        self._own = [one for one in devices if one.process_index == jax.process_index()]
        self._programs = [
            exchange(devices, swaps(self.of_host, pairs), sizes) for pairs in self.rounds
        ]
        self._seeds = jax.make_array_from_callback(
            (len(devices),),
            device_rates.split(devices),
            lambda _: np.zeros(1, np.float32),
        )

    def check_memory(self) -> None:
        """Allocates what an exchange needs on each device of this process, and releases it.

        Raises:
            jax.errors.JaxRuntimeError: a device has too little memory left.
        """
        # One buffer to send and one to receive.
        buffers = [jnp.zeros(self._sizes.sent // 2, device=device) for device in self._own]
        jax.block_until_ready(buffers)

    def __call__(self) -> LinkSeconds:
        """Measures all links; first waits until the devices have computed what is dispatched.

        Raises:
            jax.errors.JaxRuntimeError: a device has failed, or another process is gone. The other
                processes then wait for this one as they do in a step, so it must end.
        """
        began, first_s, seconds = 0.0, 0.0, []
        with concurrent.futures.ThreadPoolExecutor(len(self._own)) as pool:
            for turn, program in enumerate(self._programs):
                # The first time, the processes wait for each other, and may have to connect.
                self._seconds(program, pool)
                if turn == 0:
                    began = self._clock()
                every = [self._seconds(program, pool) for _ in range(self._sizes.times)]
                seconds.append([min(times) for times in zip(*every, strict=True)])
                if turn == 0:
                    first_s = max(seconds[0])
        cost_s = self._clock() - began + first_s
        return LinkSeconds([list(own) for own in zip(*seconds, strict=True)], cost_s)

    def _seconds(self, program: Compiled, pool: concurrent.futures.Executor) -> list[float]:
        run = lambda: program(self._seeds)  # noqa: E731
        return device_rates.seconds_per_device(run, self._own, pool, self._clock)

    def rates(self, seconds: Sequence[Sequence[float]]) -> list[dict[Pair, float]]:
        """Returns the bytes/s in each direction between pairs of hosts, of each of their devices.

        Args:
            seconds: duration of the exchanges of each device of all processes, in each round.
        """
        moved = self._sizes.sent * self._sizes.exchanges
        return [
            {
                pair: moved / max(seconds[self.of_host[host][number]][turn] for host in pair)
                for turn, pairs in enumerate(self.rounds)
                for pair in pairs
            }
            for number in range(len(self.of_host[0]))
        ]

    def slow(
        self, seconds: Sequence[Sequence[float]]
    ) -> dict[tuple[tuple[int, ...], int], SlowLink]:
        """Returns the slow hosts and links, by their hosts and the index of a device on its host.

        A network adapter may serve one device only, so devices are compared with those that have
        the same index on other hosts.

        Args:
            seconds: duration of the exchanges of each device of all processes, in each round.
        """
        moved = self._sizes.sent * self._sizes.exchanges
        return {
            (one.hosts, index): one
            for index, rates in enumerate(self.rates(seconds))
            for one in slow_links(rates)
            if moved / one.own - moved / one.others >= self._sizes.least_s
        }

    def described(self, slow: Mapping[tuple[tuple[int, ...], int], SlowLink]) -> Iterator[str]:
        """Yields a line about each slow host or link of :meth:`slow`, and what to do about it."""
        for hosts in sorted({hosts for hosts, _ in slow}):
            of_hosts = {index: one for (ends, index), one in slow.items() if ends == hosts}
            if len(of_hosts) == len(self.of_host[0]):
                yield self._described(list(of_hosts.values()), None)
                continue
            for index, one in of_hosts.items():
                yield self._described([one], index)

    def _described(self, slow: Sequence[SlowLink], index: int | None) -> str:
        """Describes a host or a link: of all devices, or of those with one index on their host."""
        hosts = slow[0].hosts
        ends = [self._end(host, index) for host in hosts]
        own, others = (
            len(slow) * min(rates) / 1e9
            for rates in ([one.own for one in slow], [one.others for one in slow])
        )
        if len(hosts) == 1:
            which, does = ends[0], "exchanges data with other hosts"
        else:
            which, does = f"the link between {ends[0]} and {ends[1]}", "carries data"
        return (
            f"{which} slows down the others ({COMMUNICATION}): it {does} at "
            f"{own:.3g} GB/s, the others at {others:.3g} GB/s (measured twice): {CHECK}"
        )

    def _end(self, host: int, index: int | None) -> str:
        name = f"host {self.names[host]}"
        if index is None:
            return name
        device = self._devices[self.of_host[host][index]]
        return (
            f"device {device.id} ({device.device_kind}) of process {device.process_index} on {name}"
        )


def between_hosts(mesh: Mesh, hosts: Sequence[str]) -> LinkRates | None:
    """Returns what measures the links, if there are others to compare them with.

    Args:
        mesh: over all devices.
        hosts: the name of the host of each device.
    """
    if len(set(hosts)) < 3:
        return None
    devices = list(mesh.devices.flat)
    return LinkRates(devices, hosts, _SIZES.get(devices[0].platform, _SIZES["gpu"]))


def machine_names(hosts: Sequence[str], machines: Sequence[str]) -> list[str]:
    """Returns a name for the machine of each process.

    Containers on one machine have different host names, but a faster link than other machines.

    Args:
        hosts: the host name that each process sees.
        machines: the identifier of each process's machine.
    """
    names: dict[str, list[str]] = {}
    for host, one in zip(hosts, machines, strict=True):
        names.setdefault(one, []).append(host)
    return [", ".join(dict.fromkeys(names[one])) for one in machines]


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
    """Compiles the exchanges between devices; takes a float32 for each device.

    The data is made inside, so that no memory is held between two calls.
    """
    over = device_rates.split(devices)
    seeds = jax.ShapeDtypeStruct((len(devices),), np.float32, sharding=over)

    def local(seed: jax.Array) -> jax.Array:
        def swap(_: Any, row: jax.Array) -> jax.Array:
            return jax.lax.ppermute(row + 1, over.spec[0], permutation)

        row = jnp.broadcast_to(seed, sizes.sent // 4)
        return jax.lax.fori_loop(0, sizes.exchanges, swap, row)[:1]

    on_all = jax.shard_map(local, mesh=over.mesh, in_specs=over.spec, out_specs=over.spec)
    return jax.jit(on_all).lower(seeds).compile()


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
