"""Checks each step for NaN/Inf, for ``--debug``."""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError
from jaxtrain.training.state import State
from jaxtrain.training.step import Batch, Metrics, TrainStep


def checked(step: TrainStep) -> TrainStep:
    """Wraps a step so that it checks its metrics and the new parameters for NaN/Inf.

    It waits for each step. (``jax_debug_nans`` does not check ahead-of-time compiled functions.)

    The wrapped step raises InputError with the names of the arrays that contain NaN/Inf.
    """

    @jax.jit
    def finite(following: State, metrics: Metrics) -> dict[str, jax.Array]:
        arrays = {f"train/{name}": value for name, value in metrics.items()} | following.params
        return {name: jnp.isfinite(array).all() for name, array in arrays.items()}

    @functools.wraps(step)  # the profiler unwraps it to read the compiled step
    def checked_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # Read before the step, which may donate the state and does not count a bad step.
        first, number = int(state.examples_seen), int(state.step) + 1
        following, metrics = step(state, batch)
        good = jax.device_get(finite(following, metrics))
        bad = sorted((name for name in good if not good[name]), key=following.params.__contains__)
        if bad:
            raise InputError(
                f"step {number} (examples from {first} on) computes NaN/Inf in "
                f"{', '.join(bad[:5])}"
                + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
                + ": lower --optim.peak_lr, or check these examples"
            )
        return following, metrics

    return checked_step
