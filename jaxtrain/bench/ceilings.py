"""What a device can do at most, measured: matrix products and copies."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.bench import timing

# Large enough that starting a kernel does not count, small enough for a CPU to end soon.
_SIDE = {"gpu": 8192, "cpu": 1024}
_COPY_BYTES = {"gpu": 2**31, "cpu": 2**28}
_CALLS = {"gpu": 20, "cpu": 2}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Of one device.

    Attributes:
        bf16_flops: FLOP/s of a square matrix product in bfloat16, summed in float32.
        float32_flops: the same in float32 (on a GPU with the precision that jax takes by itself).
        copy_bytes: bytes read and written a second by ``x + 1`` on an array larger than any cache.
    """

    bf16_flops: float
    float32_flops: float
    copy_bytes: float


def measure(device: jax.Device | None = None, at_most_s: float = 3.0) -> Ceilings:
    """Measures one device, the first unless told.

    Args:
        device: the one to measure.
        at_most_s: time for each of the three.
    """
    device = device or jax.local_devices()[0]
    return Ceilings(
        _products(device, jnp.bfloat16, at_most_s),
        _products(device, jnp.float32, at_most_s),
        _copies(device, at_most_s),
    )


def product_rate(dtype: str, at_most_s: float = 0.5) -> float:
    """FLOP/s of matrix products on the first device right now: a shared machine's speed changes.

    Args:
        dtype: ``"bfloat16"`` or ``"float32"``.
        at_most_s: time for it.
    """
    return _products(jax.local_devices()[0], jnp.dtype(dtype), at_most_s)


def _products(device: jax.Device, dtype: jnp.dtype | type, at_most_s: float) -> float:
    """FLOP/s: 2 n^3 for each product of random matrices (zeros would let a GPU clock higher)."""
    side = _of(_SIDE, device)
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.device_put(jax.random.normal(key, (side, side), dtype), device) for key in keys)
    product = jax.jit(jnp.matmul)
    calls = _of(_CALLS, device)

    def action() -> None:
        # Queued one behind the other, so that the device never waits for the host.
        jax.block_until_ready([product(x, y) for _ in range(calls)])

    found = timing.measure(action, least=3, at_most_s=at_most_s)
    return calls * 2 * side**3 / found.median_s


def _copies(device: jax.Device, at_most_s: float) -> float:
    size = _of(_COPY_BYTES, device)
    x = jax.device_put(jnp.zeros(size // 4, jnp.float32), device)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    calls = _of(_CALLS, device)

    def action() -> None:
        nonlocal x
        for _ in range(calls):
            x = add(x)
        x.block_until_ready()

    found = timing.measure(action, least=3, at_most_s=at_most_s)
    return calls * 2 * size / found.median_s


def _of(table: dict[str, int], device: jax.Device) -> int:
    return table.get(device.platform, table["gpu"])
