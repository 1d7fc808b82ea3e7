"""Reconstructions of earlier updates, kept where they will be looked at again.

The places are shared out among the windows of a batch: each window has a shelf of its own, from
which it draws and to which it puts. So what is kept crosses no device, where a draw from all places
would send every window of every batch over the wire, and which window sees what depends on the
batch alone. Clips stand at random in a batch: what lies on a shelf is of any clip.

Shapes: R places; N windows of a batch, P = R // N places of a shelf; H, W, C of a window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Kept(nnx.Variable[jax.Array]):
    """A part of what is kept."""


class Drawn(NamedTuple):
    """What a batch drew; float32.

    Attributes:
        images_NHWC: windows of frames.
        context_NhwC: and the context of each.
        there_N: whether there was one.
    """

    images_NHWC: jax.Array
    context_NhwC: jax.Array
    there_N: jax.Array


class Replay(nnx.Module):
    """Windows and their contexts, in bfloat16.

    Args:
        places: R. A batch with more windows keeps the first R; places that cannot be shared out
            evenly stay empty.
        image: shape of a window.
        context: shape of its context.
    """

    def __init__(self, places: int, image: tuple[int, ...], context: tuple[int, ...]) -> None:
        self.images = Kept(jnp.zeros((places, *image), jnp.bfloat16))
        self.context = Kept(jnp.zeros((places, *context), jnp.bfloat16))
        self.there = Kept(jnp.zeros((places,), jnp.bool_))

    def draw(self, draws_N: jax.Array) -> Drawn:
        """A place of each window's shelf, by a number in [0, 1)."""
        windows = draws_N.size
        chosen_NP = self._chosen(draws_N)

        def pick(kept: Kept) -> jax.Array:
            shelves = _shelves(kept[...], windows)
            found = jnp.where(_wide(chosen_NP, shelves), shelves, 0).sum(1, dtype=jnp.float32)
            beyond = [(0, windows - found.shape[0])] + [(0, 0)] * (found.ndim - 1)
            return jnp.pad(found, beyond)

        return Drawn(pick(self.images), pick(self.context), pick(self.there) > 0)

    def keep(self, images_NHWC: jax.Array, context_NhwC: jax.Array, draws_N: jax.Array) -> None:
        """Puts a batch in a place of each window's shelf."""
        windows = draws_N.size
        chosen_NP = self._chosen(draws_N)
        parts = (
            (self.images, images_NHWC),
            (self.context, context_NhwC),
            (self.there, jnp.ones_like(draws_N)),
        )
        for kept, new in parts:
            shelves = _shelves(kept[...], windows)
            put = new[: shelves.shape[0], None].astype(shelves.dtype)
            after = jnp.where(_wide(chosen_NP, shelves), put, shelves)
            after = after.reshape(-1, *after.shape[2:])
            # New arrays in place of the old ones: the variables are the model's state.
            kept.set_value(jnp.concatenate([after, kept[...][after.shape[0] :]]))

    def _chosen(self, draws_N: jax.Array) -> jax.Array:
        """Whether a place is the one that was drawn, [N, P]; N at most R."""
        shelves, places = _shelves(self.there[...], draws_N.size).shape
        place_N = jnp.floor(draws_N[:shelves] * places)
        return jnp.arange(places)[None] == place_N[:, None]


def _shelves(kept: jax.Array, windows: int) -> jax.Array:
    """[R, ...] -> [N, P, ...], or [R, 1, ...] of more windows than places."""
    shelves = min(windows, kept.shape[0])
    places = kept.shape[0] // shelves
    return kept[: shelves * places].reshape(shelves, places, *kept.shape[1:])


def _wide(chosen_NP: jax.Array, like: jax.Array) -> jax.Array:
    return chosen_NP.reshape(chosen_NP.shape + (1,) * (like.ndim - 2))
