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

_STEPS = 2**24  # float32 holds that many numbers of one distance in (-1, 1)


def uniform_init(rngs: nnx.Rngs, shape: tuple[int, ...], bound: float) -> nnx.Param[jax.Array]:
    """float32, even in (-bound, bound)."""
    return nnx.Param(bound * _even(*_drawn(rngs), shape))


def normal_init(rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float) -> nnx.Param[jax.Array]:
    """float32, of mean zero and this standard deviation, at most 5.42 times that large."""
    return nnx.Param(deviation * math.sqrt(2) * lax.erf_inv(_even(*_drawn(rngs), shape)))


def _drawn(rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
    """The stream's key, uint32 [2], and its next number, which `rngs.params()` would take too."""
    stream = rngs.params
    place = stream.count.get_value()
    stream.count.set_value(place + 1)
    return jax.random.key_data(stream.key.get_value()), place


@functools.partial(jax.jit, static_argnums=2)  # traced once for all parameters of a shape
def _even(words: jax.Array, place: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """In (-1, 1): the middles of `_STEPS` intervals, so that neither end is drawn."""
    first, second = mixed(words[0], place), mixed(words[1], place)
    bits = mixed(numbers(shape) + first, second) // (2**32 // _STEPS)
    return (2 * bits.astype(jnp.float32) + (1 - _STEPS)) / _STEPS
