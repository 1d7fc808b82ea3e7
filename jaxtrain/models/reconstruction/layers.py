"""Layers, and how they start: of the small autoencoder, the discriminator, and the projections."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.ops import layers
from jaxtrain.ops.init import uniform_init


def kernel(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param[jax.Array]:
    """Draws a kernel from U(-b, b) with b = sqrt(3 / fan_in), which preserves the variance.

    The reference uses PyTorch's default, a third of that variance: the signal fades over sixty
    layers, and training is stuck for hundreds of steps at clips of one color (14.7 dB where this
    initialization reaches 20; benchmarks/LOG.md).
    """
    bound = math.sqrt(3 / fan_in)
    return uniform_init(rngs, shape, bound)


def zeros(*shape: int) -> nnx.Param[jax.Array]:
    """Returns a bias, or a kernel that adds nothing at first."""
    return nnx.Param(jnp.zeros(shape))


class Pointwise(nnx.Module):
    """A linear layer over channels, for each pixel."""

    def __init__(self, inputs: int, outputs: int, *, use_bias: bool, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (inputs, outputs), inputs)
        self.bias = zeros(outputs) if use_bias else None

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, inputs] to [B, T, H, W, outputs]."""
        y = x_BTHWC @ self.kernel[...]
        return y if self.bias is None else layers.add_shared(y, self.bias[...])
