"""Tests the average of the parameters: its rules, its use and its settings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import toy

from jaxtrain import config
from jaxtrain.checkpoint.restore import named
from jaxtrain.errors import InputError
from jaxtrain.optim import build, ema
from jaxtrain.optim.schedule import Schedule

UPDATES = 14


def run(settings: config.Average) -> tuple[list[float], list[float]]:
    """Returns the parameters and their average after each step."""
    averaging = ema.averaging(settings)
    params = {"w": jnp.float32(100.0)}
    state, seen, found = averaging.init(params), [], []
    for number in range(UPDATES):
        updates = {"w": jnp.float32(number) - params["w"]}
        same, state = averaging.update(updates, state, params)
        assert same is updates
        params = {"w": params["w"] + updates["w"]}
        seen.append(float(params["w"]))
        found.append(float(state.average["w"]))
    return seen, found


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rule", ["ema", "ramp"])
def test_averages_match_the_rules(rule: Any, every: int) -> None:
    seen, found = run(config.Average(rule=rule, decay=0.6, every=every))
    average, entries = 100.0, 0
    for number, value in enumerate(seen, 1):
        if number < every:
            average = value
        if number % every == 0:
            early = (1 + entries) / (10 + entries) if rule == "ema" else entries / 10
            stays = min(0.6, early) if entries else 0.0
            average, entries = stays * average + (1 - stays) * value, entries + 1
        assert found[number - 1] == pytest.approx(average, rel=1e-5)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rule", ["ema", "ramp"])
def test_the_initial_value_is_discarded(rule: Any, every: int) -> None:
    """It may be random, drawn before the parameters were imported."""
    seen, found = run(config.Average(rule=rule, decay=0.95, every=every))
    assert found[:every] == seen[:every]


def settings(**more: Any) -> config.Optim:
    return dataclasses.replace(toy.OPTIM, average=config.Average(**more))


def params() -> dict[str, Any]:
    return {
        "a.kernel": jnp.ones((4, 3)),
        "a.bias": jnp.ones((3,)),
        "other.kernel": jnp.ones((2, 2)),
    }


GROUP = config.Group(prefix="other.", peak_lr=0.1, b1=0.9, b2=0.99, weight_decay=0.0)


@pytest.mark.parametrize("others", [{}, {"other": GROUP}])
def test_averaged_parameters_replace_the_current_ones(others: dict[str, config.Group]) -> None:
    optimizer = build.make_optimizer(settings(decay=0.5), params(), others)
    now, state = params(), optimizer.init(params())
    scalars = Schedule(settings(decay=0.5), 20, others).at(0)
    for _ in range(3):
        updates, state = optimizer.update(
            jax.tree.map(jnp.ones_like, now), state, now, scalars=scalars
        )
        now = optax.apply_updates(now, updates)
    used = ema.with_averages(now, state)
    assert set(used) == set(now)
    for name in ("a.kernel", "a.bias"):
        assert np.all(np.asarray(used[name]) > np.asarray(now[name])), name  # it lags
    apart = np.array_equal(used["other.kernel"], now["other.kernel"])
    assert apart == bool(others)  # a discriminator has no average
    stored = named({"params": now, "opt": state})
    where = ema.names(stored)
    assert set(where) == {"a.kernel", "a.bias"} | (set() if others else {"other.kernel"})
    for name, stored_name in where.items():
        np.testing.assert_array_equal(stored[stored_name], used[name])


def test_without_an_average_the_parameters_are_used() -> None:
    optimizer = build.make_optimizer(toy.OPTIM, params())
    state = optimizer.init(params())
    assert ema.with_averages(params(), state).keys() == params().keys()
    assert ema.names(named({"opt": state})) == {}


def test_meaningless_settings_are_refused() -> None:
    with pytest.raises(InputError, match=r"optim.average.decay=1.0"):
        config.Average(decay=1.0)
    with pytest.raises(InputError, match=r"optim.average.every=0"):
        config.Average(every=0)
