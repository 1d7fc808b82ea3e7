"""Tests initial parameters: their distributions, and what their values depend on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.ops import init

SHAPE = (64, 48, 32)
COUNT = math.prod(SHAPE)


def numbers(param: nnx.Param[jax.Array]) -> np.ndarray:
    return np.asarray(param.get_value(), np.float64)


def distance(found: np.ndarray, expected_below: np.ndarray) -> float:
    """Computes the Kolmogorov-Smirnov distance of numbers from a distribution."""
    return float(np.abs((np.arange(found.size) + 0.5) / found.size - expected_below).max())


@pytest.mark.parametrize("seed", range(4))
def test_uniform_numbers_are_uniform_between_their_bounds(seed: int) -> None:
    found = np.sort(numbers(init.uniform_init(nnx.Rngs(seed), SHAPE, 0.5)).ravel())
    assert found[0] > -0.5
    assert found[-1] < 0.5
    assert distance(found, found + 0.5) < 1.95 / math.sqrt(COUNT)  # exceeded once in a thousand


@pytest.mark.parametrize("seed", range(4))
def test_normal_numbers_are_normal(seed: int) -> None:
    found = np.sort(numbers(init.normal_init(nnx.Rngs(seed), SHAPE, 3.0)).ravel())
    below = np.array([0.5 + 0.5 * math.erf(z / 3 / math.sqrt(2)) for z in found])
    assert distance(found, below) < 1.95 / math.sqrt(COUNT)
    assert np.abs(found).max() < 3 * 5.45


def test_neighboring_parameters_and_seeds_are_uncorrelated() -> None:
    rngs = nnx.Rngs(0)
    first, second = (numbers(init.normal_init(rngs, SHAPE, 1.0)) for _ in range(2))
    other = numbers(init.normal_init(nnx.Rngs(1), SHAPE, 1.0))
    pairs = [(first, second), (first, other), (second, other)]
    pairs += [(np.roll(first, 1, axis), first) for axis in range(3)]
    for left, right in pairs:
        assert abs((left * right).mean()) < 4 / math.sqrt(COUNT)


def test_a_layer_that_draws_its_own_key_shifts_those_after_it() -> None:
    """A parameter's numbers depend on the stream's count when it is created."""
    rngs, skipped = nnx.Rngs(0), nnx.Rngs(0)
    init.uniform_init(rngs, (4,), 1.0)
    skipped.params()
    want = numbers(init.uniform_init(rngs, (4,), 1.0))
    np.testing.assert_array_equal(numbers(init.uniform_init(skipped, (4,), 1.0)), want)


def test_sharded_parameters_match_those_of_one_device() -> None:
    devices = jax.devices()
    assert len(devices) == 8
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))

    def make(key: jax.Array) -> jax.Array:
        rngs = nnx.Rngs(key)
        init.normal_init(rngs, (3,), 1.0)
        return init.normal_init(rngs, SHAPE, 1.0).get_value()

    whole = jax.jit(make)(jax.random.key(7))
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    program = jax.jit(make, out_shardings=split).lower(jax.random.key(7)).compile()
    text = program.as_text()
    assert text is not None
    assert f"f32[{','.join(map(str, SHAPE))}]" not in text
    np.testing.assert_allclose(program(jax.random.key(7)), whole, rtol=1e-6, atol=1e-7)
    assert whole.dtype == jnp.float32
