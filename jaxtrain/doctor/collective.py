"""Checks what all devices do together: an all-reduce, its result and speed."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain import config
from jaxtrain.doctor import devices, links
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.planning.cards import CARDS
from jaxtrain.sharding import AXES, batch_sharding, make_mesh

_BYTES = {"gpu": 2**28, "cpu": 2**22}  # of the array that each device contributes
_TIMES = 5
_PERIOD = 1000
_SLOW = 0.3  # fraction of a link's speed below which it is suspicious; assumed

Reduce = Callable[[jax.Array], jax.Array]
Build = Callable[[jax.sharding.Mesh], Reduce]


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "collective"."""
    return {
        "all-reduce": lambda: all_reduce(jax.devices(), subject.store.count),
        "links": lambda: links.links(jax.devices(), subject.store, socket.gethostname()),
        "rates": lambda: devices.rates(subject, jax.local_devices(), socket.gethostname()),
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
    length = _BYTES.get(devices[0].platform, _BYTES["gpu"]) // 4
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
