"""Updates that would spoil a model: found inside the step, left out on all devices alike.

An update is bad if its loss or its gradient's norm is not finite, or if the norm is more than
``optim.bad_norm`` times the median norm of the last good updates. What it needs to know rides in
the state, so a resumed run judges as the first one did.

Groups of parameters with an optimizer of their own, as a discriminator, have a norm of their own:
the one that is compared is that of all others, which ``optim.max_grad_norm`` clips.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config

Arrays = dict[str, jax.Array]

# Good updates whose norms make the median, and how many there must be before it counts: norms fall
# steeply in the first updates of a run.
WINDOW = 128
LEAST = 32


class StepHealth(NamedTuple):
    """What is known about a step.

    Attributes:
        bad: bool [].
        guard: the guard's own state after this update.
        norms: ``grad_norm`` and ``GROUP_grad_norm`` of each group apart, float32 [].
    """

    bad: jax.Array
    guard: Arrays
    norms: Arrays


Detector = Callable[[Arrays, jax.Array, Arrays], StepHealth]
"""(the guard's state, loss, gradients by dotted name) -> the step's health."""


def init() -> Arrays:
    """The guard's state before the first update: no norms, nothing bad."""
    return {
        "norms": jnp.full(WINDOW, jnp.nan, jnp.float32),
        "good": jnp.zeros((), jnp.uint32),
        "bad_in_a_row": jnp.zeros((), jnp.uint32),
    }


def detector(
    settings: config.Optim, apart: Mapping[str, str] | None = None, warmup: int = 0
) -> Detector:
    """Detects the bad steps of a run.

    Norms are compared when the warm-up is over. Before that they rise and fall by themselves, and a
    clipped gradient at a small rate harms little: ``demo`` for 6000 steps on real videos met a norm
    of 41.8, more than 20 times the median, in step 57 of 600 of warm-up, and converged.

    Args:
        settings: ``bad_norm``, the multiple of the median. None, or ``bad_updates="off"``, looks
            for finite numbers only.
        apart: group -> prefix of the parameters that it has.
        warmup: updates of the schedule's warm-up.
    """
    least = max(LEAST, warmup)
    prefixes = dict(apart or {})
    factor = None if settings.bad_updates == "off" else settings.bad_norm

    def too_large(guard: Arrays, norm: jax.Array) -> jax.Array:
        if factor is None:
            return jnp.zeros((), bool)
        return (guard["good"] >= least) & (norm > factor * median(guard))

    def norms_of(grads: Arrays) -> Arrays:
        own = {k: grad for k, grad in grads.items() if not k.startswith(tuple(prefixes.values()))}
        return {"grad_norm": optax.tree.norm(own)} | {
            f"{group}_grad_norm": optax.tree.norm(
                {name: grad for name, grad in grads.items() if name.startswith(prefix)}
            )
            for group, prefix in prefixes.items()
        }

    def detect(guard: Arrays, loss: jax.Array, grads: Arrays) -> StepHealth:
        found = norms_of(grads)
        finite = jnp.isfinite(loss)
        for norm in found.values():
            finite &= jnp.isfinite(norm)
        bad = ~finite | too_large(guard, found["grad_norm"])
        norms = guard["norms"].at[guard["good"] % WINDOW].set(found["grad_norm"])
        after = {
            "norms": jnp.where(bad, guard["norms"], norms),
            "good": guard["good"] + jnp.where(bad, 0, 1).astype(jnp.uint32),
            "bad_in_a_row": jnp.where(bad, guard["bad_in_a_row"] + 1, 0).astype(jnp.uint32),
        }
        return StepHealth(bad, after, found)

    return detect


def median(guard: Arrays) -> jax.Array:
    """Median norm of the last good updates, float32 []; NaN where there was none."""
    in_order = jnp.sort(guard["norms"])  # NaN, which stands where there is no norm yet, comes last
    known = jnp.minimum(guard["good"], WINDOW).astype(jnp.int32)
    place = jnp.arange(WINDOW)
    middle = (place == (known - 1) // 2) | (place == known // 2)
    # Sums, not two elements: XLA writes everything else again into each of the hundreds of
    # programs that keep or replace an array of the state.
    return jnp.sum(jnp.where(middle, in_order, 0)) / jnp.sum(middle)
