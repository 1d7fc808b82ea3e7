"""Checks an all-reduce over all devices, its result and speed, and compares the links of hosts."""

import itertools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain import config
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import devices
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S
from jaxtrain.doctor.subject import Subject, counted
from jaxtrain.planning.cards import CARDS
from jaxtrain.sharding import AXES, batch_sharding, make_mesh

_BYTES = {"gpu": 2**28, "cpu": 2**22}  # of the array that each device contributes
_TIMES = 5
_PERIOD = 1000
_SLOW = 0.3  # fraction of a link's speed below which it is suspicious; assumed

# An exchange between two hosts. By the datasheets it takes 3 ms between nodes of H100, and a second
# over 10 Gbit/s.
_EXCHANGED_BYTES = {"gpu": 2**24, "cpu": 2**18}  # by each device, in each direction
_EXCHANGES = 8
_MOST_ROUNDS = 3
_SLOW_LINK = 0.6  # of the median of the others: a link below it is named
Pair = tuple[int, int]

Reduce = Callable[[jax.Array], jax.Array]
Build = Callable[[jax.sharding.Mesh], Reduce]


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "collective"."""
    return {
        "all-reduce": lambda: all_reduce(jax.devices(), subject.store.count),
        "links": lambda: links(jax.devices(), subject.store, socket.gethostname()),
        "rates": lambda: devices.compare_hosts(subject, socket.gethostname()),
    }


def summing(mesh: jax.sharding.Mesh) -> Reduce:
    """Returns the reduction [n, L], a row on each device -> [L], the rows' sum on every device."""
    summed = jax.shard_map(
        lambda row: jax.lax.psum(row[0], AXES),
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(),
    )
    return jax.jit(summed)


def all_reduce(
    devices: list[jax.Device], processes: int, build: Build = summing
) -> Iterator[Finding]:
    """Sums numbers over all devices, checks every sum, and measures the time.

    The numbers are integers and their sums below 2^24, so float32 is exact.

    Args:
        devices: the devices of all processes.
        processes: number of processes that they belong to.
        build: builds the reduction to test.
    """
    count = len(devices)
    if count == 1:
        yield ok("one device: nothing to reduce")
        return
    mesh = make_mesh(config.Mesh(data=1, fsdp=count, shard="none"), devices)
    length = _of(_BYTES, devices) // 4
    pattern = np.arange(length) % _PERIOD

    def row(index: Any) -> np.ndarray:
        return (pattern[None] + (index[0].start or 0)).astype(np.float32)

    sharding = batch_sharding(mesh)
    rows = jax.make_array_from_callback((count, length), sharding, row)
    reduce = build(mesh)
    result = jax.block_until_ready(reduce(rows))
    expected = (count * pattern + count * (count - 1) // 2).astype(np.float32)
    wrong = {
        shard.device.id: int(np.count_nonzero(np.asarray(shard.data) != expected))
        for shard in result.addressable_shards
    }
    wrong = {device: number for device, number in wrong.items() if number}
    if wrong:
        device, number = next(iter(wrong.items()))
        yield problem(
            f"an all-reduce over {count} devices is wrong on {len(wrong)} of this process's: for "
            f"example {number:,} of {length:,} sums on device {device}",
            "do not train here: a GPU or a link is broken (nvidia-smi -q -d ECC, dcgmi diag -r 3, "
            "nvidia-smi nvlink -e); if NCCL_P2P_DISABLE=1 helps, it is a link and not the memory",
        )
        return
    seconds = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        jax.block_until_ready(reduce(rows))
        seconds.append(time.perf_counter() - began)
    rate = bus_bandwidth(4 * length, count, float(np.median(seconds)))
    seen = (
        f"an all-reduce of {4 * length / 2**20:.0f} MiB over {count} devices is exact, at "
        f"{rate / 1e9:.2f} GB/s of bus bandwidth (measured)"
    )
    yield judged(seen, rate, devices[0].device_kind, count // processes, processes)


def bus_bandwidth(size: int, count: int, seconds: float) -> float:
    """Returns 2 (n - 1) / n x size / time, the bytes/s that each device sends, for any number.

    nccl-tests defines it (doc/PERFORMANCE.md), for comparison with a link's speed.
    """
    return 2 * (count - 1) / count * size / seconds


def judged(seen: str, rate: float, device_kind: str, per_process: int, processes: int) -> Finding:
    """Compares the rate with the speed of the card's links, if that is known."""
    card = next((one for one in CARDS.values() if one.name == device_kind), None)
    if card is None:
        return ok(seen)
    across = min(card.link_rate, card.node_rate * per_process)
    link, which = (card.link_rate, "in the node") if processes == 1 else (across, "between nodes")
    fraction = rate / link
    seen += f", {fraction:.0%} of {link / 1e9:.0f} GB/s {which} ({_SLOW:.0%} is enough: assumed)"
    if fraction >= _SLOW:
        return ok(seen)
    return warning(
        seen,
        "NCCL may not use the fast link: see nvidia-smi topo -m, and NCCL_DEBUG=INFO (it prints "
        "NET/IB or NET/Socket, and P2P or SHM); the times that plan predicts do not apply",
    )


def links(devices: list[jax.Device], store: KeyValueStore, host: str) -> Iterator[Finding]:
    """Measures the exchange between pairs of hosts, and names a host or a link that is slow.

    In a collective that all devices join, all wait for the slowest link. So pairs of hosts exchange
    data, each host with up to three others in turn.

    Args:
        devices: the devices of all processes.
        store: shared with the other processes.
        host: the name of this one.
    """
    hosts = store.gather("host of a link", host, ANSWER_S)
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return
    of_host = [
        [place for place, one in enumerate(devices) if hosts[one.process_index] == name]
        for name in names
    ]
    width = min(map(len, of_host))
    rounds = list(itertools.islice(disjoint_pairs(len(names)), _MOST_ROUNDS))
    own = [exchange_s(devices, of_host, pairs, width) for pairs in rounds]
    every = [json.loads(text) for text in store.gather("links", json.dumps(own), ANSWER_S)]
    size = _EXCHANGES * width * _of(_EXCHANGED_BYTES, devices)
    rates = {
        pair: size
        / max(
            seconds[number]
            for seconds, name in zip(every, hosts, strict=True)
            if names.index(name) in pair
        )
        for number, pairs in enumerate(rounds)
        for pair in pairs
    }
    yield from judged_links(rates, names)


def disjoint_pairs(count: int) -> Iterator[list[Pair]]:
    """Yields rounds of pairs, in which each of ``count`` hosts is at most once, and meets all.

    The circle method: host 0 keeps its place, and the others move around it.
    """
    even = count + count % 2
    for turn in range(even - 1):
        circle = [0, *(1 + (place + turn) % (even - 1) for place in range(even - 1))]
        pairs = zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]


def swaps(of_host: Sequence[Sequence[int]], pairs: Sequence[Pair], width: int) -> list[Pair]:
    """Returns from which device to which one a pair's data goes: each has one partner.

    Args:
        of_host: the devices of each host, by their places among all.
        pairs: of hosts.
        width: number of devices of a host that take part.
    """
    return [
        swap
        for first, second in pairs
        for one, other in zip(of_host[first][:width], of_host[second][:width], strict=True)
        for swap in ((one, other), (other, one))
    ]


def exchange_s(
    devices: list[jax.Device], of_host: Sequence[Sequence[int]], pairs: Sequence[Pair], width: int
) -> float:
    """Returns the seconds in which this process's devices exchange data with their partners'."""
    permutation = swaps(of_host, pairs, width)

    def exchange(row: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(
            0, _EXCHANGES, lambda _, x: jax.lax.ppermute(x + 1, AXES, permutation), row
        )

    mesh = make_mesh(config.Mesh(data=1, fsdp=len(devices), shard="none"), devices)
    split = PartitionSpec(AXES)
    program = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=split, out_specs=split))
    shape = (len(devices), _of(_EXCHANGED_BYTES, devices) // 4)
    rows = jax.make_array_from_callback(
        shape, batch_sharding(mesh), lambda _: np.zeros((1, shape[1]), np.float32)
    )
    jax.block_until_ready(program(rows))
    seconds = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        jax.block_until_ready(program(rows))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def judged_links(rates: Mapping[Pair, float], names: Sequence[str]) -> Iterator[Finding]:
    """Names hosts all of whose links are slow, and other slow links.

    Args:
        rates: pair of hosts -> bytes/s in each direction.
        names: of the hosts.
    """
    best = {
        host: max(rate for pair, rate in rates.items() if host in pair)
        for host in range(len(names))
    }
    slow = {host for host in best if len(best) > 2 and _is_slow(host, best)}
    cure = (
        "every step waits for it: check the cable, the port, and the driver of its network "
        "adapter (ethtool, ibstatus), and NCCL_DEBUG=INFO for the adapter that NCCL uses"
    )
    for host in sorted(slow):
        others = statistics.median(rate for other, rate in best.items() if other != host)
        yield warning(
            f"host {names[host]} exchanges data with others at {best[host] / 1e9:.3g} GB/s at "
            f"most, the other hosts at {others / 1e9:.3g} GB/s (measured)",
            cure,
        )
    rest = {pair: rate for pair, rate in rates.items() if not slow.intersection(pair)}
    for pair in sorted(one for one in rest if len(rest) > 1 and _is_slow(one, rest)):
        slow |= set(pair)
        others = statistics.median(rate for other, rate in rest.items() if other != pair)
        yield warning(
            f"hosts {names[pair[0]]} and {names[pair[1]]} exchange data at "
            f"{rest[pair] / 1e9:.3g} GB/s, other pairs at {others / 1e9:.3g} GB/s (measured)",
            cure,
        )
    if not slow:
        low, high = min(rates.values()) / 1e9, max(rates.values()) / 1e9
        yield ok(
            f"{counted(len(rates), 'pair')} of {len(names)} hosts exchange data at {low:.3g} to "
            f"{high:.3g} GB/s in each direction (measured)"
        )


def _is_slow(key: Any, rates: Mapping[Any, float]) -> bool:
    others = statistics.median(rate for other, rate in rates.items() if other != key)
    return rates[key] < _SLOW_LINK * others


def _of(table: Mapping[str, int], devices: Sequence[jax.Device]) -> int:
    return table.get(devices[0].platform, table["gpu"])
