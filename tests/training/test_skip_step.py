"""Bad steps: their detection, and that they do not change the model on any device."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import toy

from jaxtrain.training import skip_step

NONE = jnp.uint32(0)  # steps of warm-up


def norms(*values: float, **settings: Any) -> list[bool]:
    """Returns for each of these consecutive norms whether its step is bad."""
    detect = jax.jit(skip_step.detector(dataclasses.replace(toy.OPTIM, **settings)))
    state, found = skip_step.init(), []
    for value in values:
        bad, state, _ = detect(state, jnp.float32(1), {"w": jnp.float32(value)}, NONE)
        found.append(bool(bad))
    return found


def test_nan_and_inf_are_bad_from_the_first_step_on() -> None:
    assert norms(math.nan, 1.0, math.inf, 1.0) == [True, False, True, False]
    detect = skip_step.detector(toy.OPTIM)
    assert bool(detect(skip_step.init(), jnp.float32(math.nan), {"w": jnp.float32(1)}, NONE).bad)


def test_norms_are_compared_with_the_median_after_enough_steps() -> None:
    calm = [1.0 + 0.01 * number for number in range(skip_step.MIN_NORMS)]
    assert not any(norms(*calm[:-1], 100.0))
    assert norms(*calm, 19.0, 24.0)[-2:] == [False, True]
    assert not any(norms(*calm, 1e6, bad_updates="off"))


def test_norms_are_compared_only_after_the_warmup() -> None:
    """During the warm-up, only NaN/Inf is bad."""
    detect, state = jax.jit(skip_step.detector(toy.OPTIM)), skip_step.init()
    found = []
    for number in range(120):
        norm = {40: 1e6, 60: np.inf, 110: 1e6}.get(number, 1.0)
        grads = {"kernel": jnp.full(1, norm, jnp.float32)}
        health = detect(state, jnp.float32(1.0), grads, jnp.uint32(100))
        state = health.state
        if health.bad:
            found.append(number)
    assert found == [60, 110]


def test_a_bad_norm_does_not_move_the_median() -> None:
    found = norms(*[1.0] * skip_step.MIN_NORMS, *[1000.0] * skip_step.WINDOW)
    assert all(found[skip_step.MIN_NORMS :])


def test_a_separate_group_has_a_separate_norm() -> None:
    """It hides no spike in the others; its own spikes skip no step unless they are NaN/Inf."""
    detect = jax.jit(skip_step.detector(toy.OPTIM, {"critic": "critic."}))
    state = skip_step.init()
    for own, other, wanted in (
        *[(1.0, 100.0, False)] * skip_step.MIN_NORMS,
        (1.0, 1e6, False),
        (50.0, 100.0, True),
        (1.0, math.inf, True),
    ):
        grads = {"a": jnp.float32(own), "critic.a": jnp.float32(other)}
        bad, state, norms = detect(state, jnp.float32(1), grads, NONE)
        assert bool(bad) == wanted
        assert (float(norms["grad_norm"]), float(norms["critic_grad_norm"])) == (own, other)


def test_bad_steps_are_counted_until_a_good_one() -> None:
    detect, state, counts = skip_step.detector(toy.OPTIM), skip_step.init(), []
    for value in (math.nan, math.nan, 1.0, math.nan):
        state = detect(state, jnp.float32(1), {"w": jnp.float32(value)}, NONE).state
        counts.append(int(state["bad_in_a_row"]))
    assert counts == [1, 2, 0, 1]


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 4)])
def test_a_bad_step_changes_only_the_examples_seen(data: int, fsdp: int) -> None:
    model = toy.Config()
    stepper = toy.stepper(model, data=data, fsdp=fsdp)
    good = toy.random_batch(stepper.spec)
    broken = {name: array.copy() for name, array in good.items()}
    broken["x"][11, 3] = math.nan  # one number on one device
    stepper(good)
    before = jax.device_get(stepper.state)
    found = stepper(broken)
    after = jax.device_get(stepper.state)
    assert math.isnan(found["loss"])
    assert found["bad_in_a_row"] == 1
    assert (int(after.step), int(after.examples_seen)) == (1, 32)
    for part in ("params", "opt", "extras"):
        jax.tree.map(np.testing.assert_array_equal, getattr(before, part), getattr(after, part))
    assert stepper(good)["bad_in_a_row"] == 0
    assert int(stepper.state.step) == 2


@pytest.mark.parametrize("good", [0, 1, 4, 127, 128, 1000])
def test_the_median_ignores_unused_places(good: int) -> None:
    rng = np.random.default_rng(good)
    norms = np.full(skip_step.WINDOW, np.nan, np.float32)
    norms[:good] = rng.lognormal(size=min(good, skip_step.WINDOW))
    state = {"norms": jnp.asarray(norms), "good": jnp.uint32(good)}
    want = np.median(norms[:good]) if good else np.nan
    np.testing.assert_array_equal(np.float32(skip_step.median(state)), np.float32(want))
