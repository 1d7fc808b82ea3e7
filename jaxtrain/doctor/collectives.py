"""Measures what the devices do together and one by one: all-reduce, links, and rates of GPUs."""

import collections
import functools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.bench import ceilings
from jaxtrain.cost import cards
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S
from jaxtrain.doctor.subject import Subject
from jaxtrain.formats import counted, large
from jaxtrain.storage import lock

_AXIS = "devices"
_TIMES = 5
_REDUCED = {"gpu": 2**28, "cpu": 2**22}  # bytes that each device contributes to an all-reduce
_PERIOD = 1000
_SLOW_REDUCE = 0.3  # fraction of a link's speed below which it is suspicious; assumed
_SLOW_GPU = 0.9  # of the median rate of the GPUs: one below it is named
_RATES_S = 0.5  # for each of the rates of a GPU
_SLOW_LINK = 0.6  # of the rate of the faster links: one below it is named
# Bytes that each device sends to another host. By the datasheets, they take 1.3 ms between nodes of
# H100, and half a second over 10 Gbit/s.
_SENT = {"gpu": 2**26, "cpu": 2**21}

Reduce = Callable[[jax.Array], jax.Array]


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "collective"."""
    store, host = subject.store, socket.gethostname()
    return {
        "all-reduce": lambda: all_reduce(jax.devices(), store.count),
        "links": lambda: links(jax.devices(), store, host),
        "rates": lambda: rates(jax.local_devices(), store, host),
    }


def split(devices: Sequence[jax.Device]) -> NamedSharding:
    """Returns the sharding of an array with a row for each device."""
    mesh = Mesh(np.asarray(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(_AXIS))


def rows_of(over: NamedSharding, length: int) -> jax.Array:
    """Returns an array with a row of integers for each device; row n is the first one plus n."""
    row = np.arange(length, dtype=np.float32) % _PERIOD
    return jax.make_array_from_callback(
        (over.mesh.size, length), over, lambda at: row[None] + ((at or ())[0].start or 0)
    )


def summing(over: NamedSharding) -> Reduce:
    """Returns the reduction [n, L], a row on each device -> [L], the rows' sum on every device."""
    return jax.jit(
        jax.shard_map(
            lambda row: jax.lax.psum(row[0], _AXIS),
            mesh=over.mesh,
            in_specs=over.spec,
            out_specs=PartitionSpec(),
        )
    )


def all_reduce(
    devices: list[jax.Device], processes: int, build: Callable[[NamedSharding], Reduce] = summing
) -> Iterator[Finding]:
    """Sums numbers over all devices, checks every sum, and measures the time.

    The numbers are integers and their sums below 2^24, so float32 is exact.
    """
    count = len(devices)
    if count == 1:
        yield ok("one device: nothing to reduce")
        return
    over = split(devices)
    length = _of(_REDUCED, devices) // 4
    rows = rows_of(over, length)
    reduce = build(over)
    result = jax.block_until_ready(reduce(rows))
    expected = (count * (np.arange(length) % _PERIOD) + count * (count - 1) // 2).astype(np.float32)
    errors = {
        shard.device.id: int(np.count_nonzero(np.asarray(shard.data) != expected))
        for shard in result.addressable_shards
    }
    errors = {device: number for device, number in errors.items() if number}
    if errors:
        device, number = next(iter(errors.items()))
        yield problem(
            f"an all-reduce over {count} devices is wrong on {len(errors)} of this process's: for "
            f"example {number:,} of {length:,} sums on device {device}",
            "do not train here: a GPU or a link is broken (nvidia-smi -q -d ECC, dcgmi diag -r 3, "
            "nvidia-smi nvlink -e); if NCCL_P2P_DISABLE=1 helps, it is a link and not the memory",
        )
        return
    seconds = statistics.median(_seconds(lambda: reduce(rows)))
    # The bytes/s that each device sends, for any number, as nccl-tests defines it
    # (doc/PERFORMANCE.md), for comparison with a link's speed.
    rate = 2 * (count - 1) / count * 4 * length / seconds
    seen = (
        f"an all-reduce of {4 * length / 2**20:.0f} MiB over {count} devices is exact, at "
        f"{rate / 1e9:.2f} GB/s of bus bandwidth (measured)"
    )
    yield judge_reduce(seen, rate, devices[0].device_kind, count // processes, processes)


def judge_reduce(
    seen: str, rate: float, device_kind: str, per_process: int, processes: int
) -> Finding:
    """Compares the rate with the speed of the card's links, if that is known."""
    card = cards.of_device(device_kind)
    if card is None:
        return ok(seen)
    across = min(card.link_rate, card.node_rate * per_process)
    link, extent = (card.link_rate, "in the node") if processes == 1 else (across, "between nodes")
    seen += (
        f", {rate / link:.0%} of {link / 1e9:.0f} GB/s {extent} ({_SLOW_REDUCE:.0%} is enough: "
        "assumed)"
    )
    if rate >= _SLOW_REDUCE * link:
        return ok(seen)
    return warning(
        seen,
        "NCCL may not use the fast link: see nvidia-smi topo -m, and NCCL_DEBUG=INFO (it prints "
        "NET/IB or NET/Socket, and P2P or SHM); the times that plan predicts do not apply",
    )


def rates(
    devices: list[jax.Device],
    store: KeyValueStore,
    host: str,
    measure: Callable[..., ceilings.Ceilings] = ceilings.measure,
) -> Iterator[Finding]:
    """Measures the matmul and copy rates of each GPU by itself, and names those that are slow.

    All processes must call it with their own devices, also without GPUs.
    """
    own_rates = {
        f"GPU {device.local_hardware_id} of {host}": (
            peaks.bf16_flops / 1e12,
            peaks.copy_bytes / 1e9,
        )
        for device in devices
        if device.platform != "cpu"
        for peaks in [measure(device, _RATES_S)]
    }
    texts = store.gather("rates of the GPUs", json.dumps([*own_rates.items()]), 3 * ANSWER_S)
    gpus = [gpu for text in texts for gpu in json.loads(text)]
    if not gpus:
        return
    for number, label in enumerate(("bf16 matmuls at {:,.0f} TFLOP/s", "copies at {:,.0f} GB/s")):
        measured = [peaks[number] for _, peaks in gpus]
        median = statistics.median(measured)
        slow = [(name, peaks[number]) for name, peaks in gpus if peaks[number] < _SLOW_GPU * median]
        for name, rate in slow:
            yield warning(
                f"{name}: {label.format(rate)}, against {median:,.0f} in the median of {len(gpus)} "
                "GPUs (measured)",
                "every step waits for it: check its temperature, power limit, and other programs "
                "with nvidia-smi -q, or exclude it with CUDA_VISIBLE_DEVICES",
            )
        if not slow:
            yield ok(
                f"{counted(len(gpus), 'GPU')}, measured one by one: "
                f"{label.format(min(measured))} or more"
            )


def links(devices: Sequence[jax.Device], store: KeyValueStore, host: str) -> Iterator[Finding]:
    """Measures how fast hosts exchange data, and names a host or a link that is slow.

    In a collective that all devices join, all wait for the slowest link. So each host exchanges
    data with the next one, one pair after the other: device i of a host with device i of the other.
    All processes must call it at the same time, with the devices of all.
    """
    own_host = json.dumps([lock.machine(), host])
    processes = [*map(json.loads, store.gather("host of a link", own_host, ANSWER_S))]
    # Containers on one machine have different host names, but a faster link than other machines.
    names: dict[str, str] = {}
    for machine, name in processes:
        names.setdefault(machine, name)
    if len(names) == 1:
        return
    of_machine = {
        machine: [n for n, device in enumerate(devices) if owner(device, processes) == machine]
        for machine in names
    }
    over = split(devices)
    sent = _of(_SENT, devices)
    rows = rows_of(over, sent // 4)
    rates = {}
    for first, second in ring(list(names)):
        permutation = swaps(of_machine[first], of_machine[second])
        swap = exchange(over, permutation)
        jax.block_until_ready(swap(rows))  # the processes meet, and may have to connect
        seconds = min(_seconds(functools.partial(swap, rows)))
        times = store.gather("link", repr(seconds), 3 * ANSWER_S)
        pair_times = [
            float(text)
            for text, (machine, _) in zip(times, processes, strict=True)
            if machine in (first, second)
        ]
        rates[names[first], names[second]] = len(permutation) // 2 * sent / max(pair_times)
    yield judge_links(rates)


def owner(device: jax.Device, processes: Sequence[Sequence[str]]) -> str:
    """Returns the machine of a device, given machine and host name of each process."""
    return processes[device.process_index][0]


def ring(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of a ring of hosts: each is in two of them, or in the only one."""
    following = (*hosts[1:], hosts[0]) if len(hosts) > 2 else hosts[1:]
    return list(zip(hosts, following, strict=False))


def swaps(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """Returns from which device to which one data goes: each has one partner on the other host."""
    partners = zip(first, second, strict=False)  # as many as the smaller host has
    return [swap for first, second in partners for swap in ((first, second), (second, first))]


def exchange(over: NamedSharding, permutation: Sequence[tuple[int, int]]) -> Any:
    """Returns the jitted function that sends rows from device to device."""
    send = functools.partial(jax.lax.ppermute, axis_name=_AXIS, perm=permutation)
    return jax.jit(jax.shard_map(send, mesh=over.mesh, in_specs=over.spec, out_specs=over.spec))


def judge_links(rates: Mapping[tuple[str, str], float]) -> Finding:
    """Names the pairs that are slow in bytes/s, and the host that is in two of them."""
    # A slow host has two of the links, of three hosts most of them. So the median does not help.
    usual = sorted(rates.values())[-1 - len(rates) // 4]
    slow = {pair: rate for pair, rate in rates.items() if rate < _SLOW_LINK * usual}
    if not slow:
        return ok(
            f"{counted(len(rates), 'pair')} of hosts exchange data at "
            f"{large(min(rates.values()), 'B/s')} or more in each direction (measured)"
        )
    pairs = "; ".join(
        f"{first} and {second} at {large(rate, 'B/s')}" for (first, second), rate in slow.items()
    )
    number = collections.Counter(host for pair in slow for host in pair)
    hosts = "".join(f"; host {host} is slow" for host in number if number[host] == 2)
    return warning(
        f"hosts that exchange data slowly, against {large(usual, 'B/s')} between others "
        f"(measured): {pairs}{hosts}",
        "every step waits for them: check the cable, the port, and the driver of the network "
        "adapter (ethtool, ibstatus), and NCCL_DEBUG=INFO for the adapter that NCCL uses",
    )


def _seconds(action: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        jax.block_until_ready(action())
        times.append(time.perf_counter() - began)
    return times


def _of(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> int:
    return sizes.get(devices[0].platform, sizes["gpu"])
