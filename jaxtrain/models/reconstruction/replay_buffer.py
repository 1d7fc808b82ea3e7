"""A replay buffer of reconstructions from earlier steps.

The buffer's slots are divided among the windows of a batch: each window draws from and writes to a
shelf of its own. Slots are split over devices like the windows, so buffered windows never cross
devices if the slots are a multiple of the windows, and these of the number of devices; drawing from
all slots would send every window of every batch between devices. Which window draws what depends
only on the batch. Clips are at random positions in a batch, so a shelf holds windows of any clip.

Shapes: R slots; N windows per batch, P = R // N slots per shelf; H, W, C of a window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.ops.layers import PerExample


class Kept(nnx.Variable[jax.Array], PerExample):
    """A buffered array, whose slots are split over devices like the windows of a batch."""


class Drawn(NamedTuple):
    """The windows drawn for a batch.

    Attributes:
        images_NHWC: windows of frames, float32.
        context_NhwC: the context of each window, float32.
        filled_N: whether the drawn slot held a window.
    """

    images_NHWC: jax.Array
    context_NhwC: jax.Array
    filled_N: jax.Array


class ReplayBuffer(nnx.Module):
    """Stores windows and their contexts in bfloat16.

    Args:
        slots: their number, R. Of a batch with more windows, the first R are kept. Slots
            that cannot be divided evenly among the windows stay empty.
        image: shape of a window.
        context: shape of a window's context.
    """

    def __init__(self, slots: int, image: tuple[int, ...], context: tuple[int, ...]) -> None:
        self.images = Kept(jnp.zeros((slots, *image), jnp.bfloat16))
        self.context = Kept(jnp.zeros((slots, *context), jnp.bfloat16))
        self.filled = Kept(jnp.zeros((slots,), jnp.bool_))

    def draw(self, draws_N: jax.Array) -> Drawn:
        """Draws a slot of each window's shelf, chosen by a number in [0, 1)."""
        windows = draws_N.size
        chosen_NP = self._chosen(draws_N)

        def pick(kept: Kept) -> jax.Array:
            shelves = _shelves(kept[...], windows)
            picked = jnp.where(_wide(chosen_NP, shelves), shelves, 0).sum(1, dtype=jnp.float32)
            beyond = [(0, windows - picked.shape[0])] + [(0, 0)] * (picked.ndim - 1)
            return jnp.pad(picked, beyond)

        return Drawn(pick(self.images), pick(self.context), pick(self.filled) > 0)

    def keep(self, images_NHWC: jax.Array, context_NhwC: jax.Array, draws_N: jax.Array) -> None:
        """Writes each window of a batch to a slot of its shelf, chosen by a number in [0, 1)."""
        windows = draws_N.size
        chosen_NP = self._chosen(draws_N)
        arrays = (
            (self.images, images_NHWC),
            (self.context, context_NhwC),
            (self.filled, jnp.ones_like(draws_N)),
        )
        for kept, new in arrays:
            shelves = _shelves(kept[...], windows)
            put = new[: shelves.shape[0], None].astype(shelves.dtype)
            after = jnp.where(_wide(chosen_NP, shelves), put, shelves)
            after = after.reshape(-1, *after.shape[2:])
            # Replaces the arrays, not the variables, which are the model's state.
            kept.set_value(jnp.concatenate([after, kept[...][after.shape[0] :]]))

    def _chosen(self, draws_N: jax.Array) -> jax.Array:
        """Returns whether each slot is the one that was drawn, [N, P]; N is at most R."""
        shelves, slots = _shelves(self.filled[...], draws_N.size).shape
        slot_N = jnp.floor(draws_N[:shelves] * slots)
        return jnp.arange(slots)[None] == slot_N[:, None]


def _shelves(kept: jax.Array, windows: int) -> jax.Array:
    """[R, ...] -> [N, P, ...], or [R, 1, ...] if there are more windows than slots."""
    shelves = min(windows, kept.shape[0])
    slots = kept.shape[0] // shelves
    return kept[: shelves * slots].reshape(shelves, slots, *kept.shape[1:])


def _wide(chosen_NP: jax.Array, like: jax.Array) -> jax.Array:
    return chosen_NP.reshape(chosen_NP.shape + (1,) * (like.ndim - 2))
