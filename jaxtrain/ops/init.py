"""Initializes parameters, with the same numbers on every device and for every sharding.

Each number is a hash of the model's key, of the parameter's place in the order of drawing, and of
the number's place in the parameter. So any part of a parameter can be computed anywhere, with the
same values, and a compiled program computes it in one pass. `jax.random` would be stronger than
this needs, and compiling its keys and bits was most of the work before the first step: 9 of 10
seconds of processor time for the 52 kernels of `demo`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain.ops.layers import mixed, numbers

_STEPS = 2**24  # float32 has that many evenly spaced numbers in (-1, 1)


def uniform_init(rngs: nnx.Rngs, shape: tuple[int, ...], bound: float) -> nnx.Param[jax.Array]:
    """Returns a float32 parameter, uniform in (-bound, bound)."""
    return nnx.Param(bound * _even(*_drawn(rngs), shape))


def normal_init(rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float) -> nnx.Param[jax.Array]:
    """Returns a normal float32 parameter with mean 0, cut off at 5.42 standard deviations."""
    return nnx.Param(deviation * math.sqrt(2) * lax.erf_inv(_even(*_drawn(rngs), shape)))


def _drawn(rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
    """Returns the stream's key, uint32 [2], and its counter, which it increments.

    `rngs.params()` uses the same counter.
    """
    stream = rngs.params
    count = stream.count.get_value()
    stream.count.set_value(count + 1)
    return jax.random.key_data(stream.key.get_value()), count


@functools.partial(jax.jit, static_argnums=2)  # traced once for all parameters of a shape
def _even(key_data: jax.Array, count: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uniform numbers in (-1, 1): the middles of `_STEPS` intervals, so never an end."""
    first, second = mixed(key_data[0], count), mixed(key_data[1], count)
    bits = mixed(numbers(shape) + first, second) // (2**32 // _STEPS)
    return (2 * bits.astype(jnp.float32) + (1 - _STEPS)) / _STEPS
