"""Updates that would spoil a model: found inside the step, left out on all devices alike.

An update is bad if its loss or its gradient's norm is not finite, or if the norm is more than
``optim.bad_norm`` times the median norm of the last good updates. What it needs to know rides in
the state, so a resumed run judges as the first one did.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain import config

Arrays = dict[str, jax.Array]

# Good updates whose norms make the median, and how many there must be before it counts: norms fall
# steeply in the first updates of a run.
WINDOW = 128
LEAST = 32

# (state, loss, gradient's norm) -> is it bad, and the guard's own state after this update.
Judge = Callable[[Arrays, jax.Array, jax.Array], tuple[jax.Array, Arrays]]


def init() -> Arrays:
    """The guard's state before the first update: no norms, nothing bad."""
    return {
        "norms": jnp.full(WINDOW, jnp.nan, jnp.float32),
        "good": jnp.zeros((), jnp.uint32),
        "bad_in_a_row": jnp.zeros((), jnp.uint32),
    }


def judge(settings: config.Optim) -> Judge:
    """The judge of a run's updates.

    Args:
        settings: ``bad_norm``, the multiple of the median. None, or ``bad_updates="off"``, looks
            for finite numbers only.
    """
    factor = None if settings.bad_updates == "off" else settings.bad_norm

    def too_large(guard: Arrays, norm: jax.Array) -> jax.Array:
        if factor is None:
            return jnp.zeros((), bool)
        return (guard["good"] >= LEAST) & (norm > factor * median(guard))

    def judged(guard: Arrays, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, Arrays]:
        bad = ~(jnp.isfinite(loss) & jnp.isfinite(norm)) | too_large(guard, norm)
        norms = guard["norms"].at[guard["good"] % WINDOW].set(norm)
        return bad, {
            "norms": jnp.where(bad, guard["norms"], norms),
            "good": guard["good"] + jnp.where(bad, 0, 1).astype(jnp.uint32),
            "bad_in_a_row": jnp.where(bad, guard["bad_in_a_row"] + 1, 0).astype(jnp.uint32),
        }

    return judged


def median(guard: Arrays) -> jax.Array:
    """Median norm of the last good updates, float32 []; NaN where there was none."""
    return jnp.nanmedian(guard["norms"])
