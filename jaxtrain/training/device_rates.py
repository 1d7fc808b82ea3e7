"""Measures how fast each device of this process computes and copies, within a few milliseconds.

All devices of the process compute the same small program at the same time, and each one's time is
taken. The data is made inside the programs, so that no device memory is held between measurements.
"""

import concurrent.futures
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

COMPUTE, COPIES = "compute", "memory copies"
# A device is slow if its rate is lower than the median of the others by more than this fraction.
_FRACTION = 0.15
_AXIS = "devices"

_UNITS = {
    COMPUTE: ("computes matmuls", 1e12, "TFLOP/s"),
    COPIES: ("copies memory", 1e9, "GB/s"),
}


class Rates(NamedTuple):
    """The measured rates of one device; NaN if they were not measured.

    Attributes:
        flops: FLOP/s of bfloat16 matmuls.
        copied: bytes/s that copies read and write.
    """

    flops: float
    copied: float


class MeasuredRates(NamedTuple):
    """One measurement.

    Attributes:
        rates: of each device of this process, in the order of the mesh.
        cost_s: seconds for which the devices computed nothing else.
    """

    rates: list[Rates]
    cost_s: float


class ProgramSizes(NamedTuple):
    """The sizes of the programs.

    By the datasheets, matmuls take 3 ms and copies 3 ms on an H100, 26 ms and 14 ms on an A10. The
    copied array is larger than the cache of any of the cards, 50 MiB at most.
    """

    side: int = 4096
    matmuls: int = 24
    copied_bytes: int = 2**28
    copies: int = 16
    times: int = 2


SIZES = ProgramSizes()


class SlowDevice(NamedTuple):
    """A slow device.

    Attributes:
        device: its index among all devices.
        kind: what it is slow at, ``COMPUTE`` or ``COPIES``.
        own: its rate.
        others: the median of the other devices.
    """

    device: int
    kind: str
    own: float
    others: float


def slow_devices(rates: Sequence[Rates]) -> list[SlowDevice]:
    """Returns the devices whose rates are lower than those of the others."""
    found = []
    for kind, each in zip((COMPUTE, COPIES), zip(*rates, strict=True), strict=True):
        known = {index: rate for index, rate in enumerate(each) if not math.isnan(rate)}
        for index, own in known.items() if len(known) > 1 else ():
            others = statistics.median(rate for other, rate in known.items() if other != index)
            if own < (1 - _FRACTION) * others:
                found.append(SlowDevice(index, kind, own, others))
    return found


def described(slow: SlowDevice, device: jax.Device, host: str) -> str:
    """Returns a line about a slow device, and what to do about it."""
    does, scale, unit = _UNITS[slow.kind]
    return (
        f"device {device.id} ({device.device_kind}) of process {device.process_index} on "
        f"host {host} slows down the others ({slow.kind}): it "
        f"{does} at {slow.own / scale:.3g} {unit}, the others at {slow.others / scale:.3g} "
        f"{unit} (measured twice): check its temperature, power limit, and other programs "
        "with nvidia-smi -q"
    )


class DeviceRates:
    """Measures the devices of this process; compiles the programs when it is built.

    Args:
        devices: of this process.
        sizes: of the programs.
        clock: monotonic clock, seconds.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        sizes: ProgramSizes = SIZES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices, self._sizes, self._clock = devices, sizes, clock
        self._matmuls, self._copies = programs(devices, sizes)
        seeds = np.arange(len(devices), dtype=np.uint32)
        self._seeds = jax.device_put(seeds, split(devices))

    def __call__(self) -> MeasuredRates:
        """Measures all devices; first waits until they have computed what is dispatched.

        Raises:
            jax.errors.JaxRuntimeError: a device has too little memory left, or has failed.
        """
        sizes = self._sizes
        with concurrent.futures.ThreadPoolExecutor(len(self._devices)) as pool:
            self._seconds(self._matmuls, pool)
            began = self._clock()
            matmul_s, copy_s = (
                [
                    min(times)
                    for times in zip(
                        *(self._seconds(program, pool) for _ in range(sizes.times)), strict=True
                    )
                ]
                for program in (self._matmuls, self._copies)
            )
            cost_s = self._clock() - began + max(matmul_s)
        flop, moved = 2 * sizes.side**3 * sizes.matmuls, 2 * sizes.copied_bytes * sizes.copies
        return MeasuredRates(
            [Rates(flop / a, moved / b) for a, b in zip(matmul_s, copy_s, strict=True)], cost_s
        )

    def _seconds(self, program: Compiled, pool: concurrent.futures.Executor) -> list[float]:
        run = lambda: program(self._seeds)  # noqa: E731
        return seconds_per_device(run, self._devices, pool, self._clock)


def of_gpus(mesh: Mesh) -> DeviceRates | None:
    """Returns what measures the GPUs of this process, if there are others to compare them with."""
    if mesh.size == 1 or mesh.devices.flat[0].platform == "cpu":
        return None
    return DeviceRates(mesh.local_devices)


def seconds_per_device(
    run: Callable[[], jax.Array],
    devices: Sequence[jax.Device],
    pool: concurrent.futures.Executor,
    clock: Callable[[], float],
) -> list[float]:
    """Returns the seconds until each device of this process has completed what ``run`` starts.

    Args:
        run: returns an array with a part on each device.
        devices: of this process.
        pool: a thread for each of them.
        clock: monotonic clock, seconds.
    """
    began = clock()

    def wait(shard: jax.Shard) -> tuple[jax.Device, float]:
        shard.data.block_until_ready()
        return shard.device, clock() - began

    took = dict(pool.map(wait, run().addressable_shards))
    return [took[device] for device in devices]


def programs(devices: Sequence[jax.Device], sizes: ProgramSizes) -> tuple[Compiled, Compiled]:
    """Compiles the matmuls and the copies; each takes an uint32 for each device.

    Each is one program for all devices, with cuBLAS's own choice of an algorithm: XLA's autotuner
    could choose a different one in another process.
    """
    over = split(devices)
    seeds = jax.ShapeDtypeStruct((len(devices),), np.uint32, sharding=over)
    options: dict[str, str | bool] = {}
    if devices[0].platform != "cpu":
        options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}

    def multiply(seed: jax.Array) -> jax.Array:
        # Zeros would let a GPU clock higher; this scale keeps the products finite.
        matrix = jax.random.normal(jax.random.key(seed[0]), (sizes.side, sizes.side), jnp.bfloat16)
        product = matrix = matrix / math.sqrt(sizes.side)
        for _ in range(sizes.matmuls):  # XLA would copy the matrix in each pass of a loop
            product @= matrix
        return product[0, :1]

    def copy(seed: jax.Array) -> jax.Array:
        start = jnp.broadcast_to(seed.astype(jnp.float32), sizes.copied_bytes // 4)
        return jax.lax.fori_loop(0, sizes.copies, lambda _, x: x + 1, start)[:1]

    def compiled(local: Callable[[jax.Array], jax.Array]) -> Compiled:
        on_all = jax.shard_map(local, mesh=over.mesh, in_specs=over.spec, out_specs=over.spec)
        return jax.jit(on_all, compiler_options=options).lower(seeds).compile()

    return compiled(multiply), compiled(copy)


def split(devices: Sequence[jax.Device]) -> NamedSharding:
    """Returns the sharding of an array with an element for each device."""
    mesh = Mesh(np.asarray(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(_AXIS))
