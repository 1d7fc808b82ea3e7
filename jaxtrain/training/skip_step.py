"""Detects bad steps inside the compiled step, which all devices then skip alike.

A step is bad if its loss or gradient norm is NaN/Inf, or if the norm is more than
``LARGEST_NORM`` times the median norm of the last good steps. These norms are part of the state,
so a resumed run decides exactly as an uninterrupted one.

Groups of parameters with an optimizer of their own, such as a discriminator, have separate norms.
The norm that is compared is that of all other parameters, which ``optim.max_grad_norm`` clips.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config

Arrays = dict[str, jax.Array]

# The number of good steps in the median, and the lowest number before norms are compared: norms
# fall steeply in the first steps of a run.
WINDOW = 128
MIN_NORMS = 32
# The largest norm of a good step, as a multiple of the median.
LARGEST_NORM = 20.0


class StepHealth(NamedTuple):
    """Whether a step is bad, and the new state of the detector.

    Attributes:
        norms: ``grad_norm``, and ``GROUP_grad_norm`` of each separate group, float32 [].
    """

    bad: jax.Array
    state: Arrays
    norms: Arrays


Detector = Callable[[Arrays, jax.Array, Arrays, jax.Array], StepHealth]
"""(detector's state, loss, gradients by dotted path, steps of the warm-up) -> the step's health."""


def init() -> Arrays:
    """Returns the detector's state before the first step."""
    return {
        "norms": jnp.full(WINDOW, jnp.nan, jnp.float32),
        "good": jnp.zeros((), jnp.uint32),
        "bad_in_a_row": jnp.zeros((), jnp.uint32),
    }


def detector(settings: config.Optim, separate_groups: Mapping[str, str] | None = None) -> Detector:
    """Builds the detector of a run's bad steps.

    Norms are compared only after the warm-up. During it they vary widely, and a clipped gradient at
    a small learning rate does little harm: ``demo`` for 6000 steps on real videos had a norm of
    41.8, more than 20 times the median, in step 57 of 600 of warm-up, and converged.

    Args:
        settings: with ``bad_updates="off"``, only NaN/Inf is bad.
    """
    prefixes = dict(separate_groups or {})

    def too_large(state: Arrays, norm: jax.Array, warmup: jax.Array) -> jax.Array:
        if settings.bad_updates == "off":
            return jnp.zeros((), bool)
        compared = state["good"] >= jnp.maximum(warmup, MIN_NORMS)
        return compared & (norm > LARGEST_NORM * median(state))

    def norms_of(grads: Arrays) -> Arrays:
        separate = tuple(prefixes.values())
        compared = {name: grad for name, grad in grads.items() if not name.startswith(separate)}
        return {"grad_norm": optax.tree.norm(compared)} | {
            f"{group}_grad_norm": optax.tree.norm(
                {name: grad for name, grad in grads.items() if name.startswith(prefix)}
            )
            for group, prefix in prefixes.items()
        }

    def detect(state: Arrays, loss: jax.Array, grads: Arrays, warmup: jax.Array) -> StepHealth:
        step_norms = norms_of(grads)
        finite = jnp.isfinite(loss)
        for norm in step_norms.values():
            finite &= jnp.isfinite(norm)
        bad = ~finite | too_large(state, step_norms["grad_norm"], warmup)
        last_norms = state["norms"].at[state["good"] % WINDOW].set(step_norms["grad_norm"])
        new_state = {
            "norms": jnp.where(bad, state["norms"], last_norms),
            "good": state["good"] + jnp.where(bad, 0, 1).astype(jnp.uint32),
            "bad_in_a_row": jnp.where(bad, state["bad_in_a_row"] + 1, 0).astype(jnp.uint32),
        }
        return StepHealth(bad, new_state, step_norms)

    return detect


def median(state: Arrays) -> jax.Array:
    """Returns the median norm of the last good steps, float32 []; NaN before the first one."""
    in_order = jnp.sort(state["norms"])  # NaN in unused places sorts last
    count = jnp.minimum(state["good"], WINDOW).astype(jnp.int32)
    rank = jnp.arange(WINDOW)
    middle = (rank == (count - 1) // 2) | (rank == count // 2)
    # Sums, not two elements: XLA duplicates indexing into each of the hundreds of fusions that keep
    # or replace an array of the state.
    return jnp.sum(jnp.where(middle, in_order, 0)) / jnp.sum(middle)
