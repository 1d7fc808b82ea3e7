"""Measures a device's matmul and memory-bandwidth peaks."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.bench import timing

# Large enough to make kernel launches negligible, small enough to finish quickly on a CPU.
_SIDE = {"gpu": 8192, "cpu": 1024}
_COPY_BYTES = {"gpu": 2**31, "cpu": 2**28}
_CALLS = {"gpu": 20, "cpu": 2}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The measured peaks of one device.

    Attributes:
        bf16_flops: FLOP/s of a square bfloat16 matmul with float32 accumulation.
        float32_flops: the same in float32 (on a GPU with jax's default precision).
        copy_bytes: bytes/s read and written by ``x + 1`` on an array larger than any cache.
    """

    bf16_flops: float
    float32_flops: float
    copy_bytes: float


def measure(device: jax.Device | None = None, at_most_s: float = 3.0) -> Peaks:
    """Measures one device.

    Args:
        device: the device to measure; None for the first.
        at_most_s: seconds for each of the three peaks.
    """
    device = device or jax.local_devices()[0]
    return Peaks(
        _matmul_peak(device, jnp.bfloat16, at_most_s),
        _matmul_peak(device, jnp.float32, at_most_s),
        _copy_peak(device, at_most_s),
    )


def _matmul_peak(device: jax.Device, dtype: jax.typing.DTypeLike, at_most_s: float) -> float:
    """Measures FLOP/s, 2 n^3 per matmul of random matrices (zeros would let a GPU clock higher)."""
    side = _of(_SIDE, device)
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.device_put(jax.random.normal(key, (side, side), dtype), device) for key in keys)
    matmul = jax.jit(jnp.matmul)
    calls = _of(_CALLS, device)

    def action() -> None:
        # Queued back to back, so that the device never waits for the host.
        jax.block_until_ready([matmul(x, y) for _ in range(calls)])

    times = timing.measure(action, at_least=3, at_most_s=at_most_s)
    return calls * 2 * side**3 / times.median_s


def _copy_peak(device: jax.Device, at_most_s: float) -> float:
    size = _of(_COPY_BYTES, device)
    x = jax.device_put(jnp.zeros(size // 4, jnp.float32), device)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    calls = _of(_CALLS, device)

    def action() -> None:
        nonlocal x
        for _ in range(calls):
            x = add(x)
        x.block_until_ready()

    times = timing.measure(action, at_least=3, at_most_s=at_most_s)
    return calls * 2 * size / times.median_s


def _of(table: dict[str, int], device: jax.Device) -> int:
    return table.get(device.platform, table["gpu"])
