"""What `--debug` adds to a step."""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError
from jaxtrain.training.state import State
from jaxtrain.training.step import Batch, Metrics, TrainStep


def checked(step: TrainStep) -> TrainStep:
    """A step that looks at all it has computed, and names what is not finite.

    It waits for each step. (`jax_debug_nans` looks at nothing here: it does not see the calls of a
    program that was compiled ahead.)
    """

    @jax.jit
    def finite(following: State, metrics: Metrics) -> dict[str, jax.Array]:
        arrays = {f"train/{name}": value for name, value in metrics.items()} | following.params
        return {name: jnp.isfinite(array).all() for name, array in arrays.items()}

    @functools.wraps(step)  # a profile asks for the program inside
    def checked_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # Before the step, which may take the state's memory; a bad update is not counted after it.
        first, number = int(state.examples_seen), int(state.step) + 1
        following, metrics = step(state, batch)
        good = jax.device_get(finite(following, metrics))
        bad = sorted((name for name in good if not good[name]), key=following.params.__contains__)
        if bad:
            raise InputError(
                f"update {number} (examples from {first} on) gives numbers that are not finite: "
                f"{', '.join(bad[:5])}"
                + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
                + ": lower --optim.peak_lr, or look at these examples"
            )
        return following, metrics

    return checked_step
