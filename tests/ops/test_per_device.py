"""Tests that each device computes a layer's gradients for its rows before they are summed."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.cost import hlo
from jaxtrain.ops import per_device

ROWS = np.arange(48, dtype=np.float32).reshape(16, 3)
SHARED = np.arange(6, dtype=np.float32).reshape(3, 2)


def mesh() -> jax.sharding.Mesh:
    devices = jax.devices()
    assert len(devices) == 8
    return jax.sharding.Mesh(
        np.array(devices).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )


def backward(rows: jax.Array, shared: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns gradients as for a matmul: that of `shared` is a sum over rows."""
    return rows @ shared, rows.T @ jnp.sin(rows @ shared)


def at_once(rows: Any, shared: Any) -> Any:
    return per_device.at_once(backward, rows, shared)


def on_gpus(rows: Any, shared: Any) -> Any:
    with per_device.tracing(platform="cuda", mesh=mesh()):
        return at_once(rows, shared)


def nested(rows: Any, shared: Any) -> Any:
    with per_device.tracing(platform="cuda", mesh=mesh()):
        return per_device.at_once(at_once, rows, shared)


@pytest.mark.parametrize(("function", "barriers"), [(on_gpus, 1), (nested, 2), (at_once, 0)])
def test_the_numbers_match_one_device(function: Any, barriers: int) -> None:
    rows = NamedSharding(mesh(), PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh(), PartitionSpec())
    jitted = jax.jit(function, in_shardings=(rows, whole), out_shardings=(rows, whole))
    lowered = jitted.lower(ROWS, SHARED)
    assert len(re.findall("optimization_barrier", lowered.as_text())) == barriers
    program = lowered.compile()
    text = program.as_text()
    assert text is not None
    assert not re.findall("all-gather|all-to-all|collective-permute", text)
    placed = jax.device_put(ROWS, rows), jax.device_put(SHARED, whole)
    for got, want in zip(program(*placed), backward(ROWS, SHARED), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", [1, 12])
def test_rows_that_cannot_be_divided_evenly_stay_together(count: int) -> None:
    text = jax.jit(on_gpus).lower(ROWS[:count], SHARED).as_text()
    assert "optimization_barrier" not in text
    for got, want in zip(
        on_gpus(ROWS[:count], SHARED), backward(ROWS[:count], SHARED), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_sums_over_devices_keep_their_dtype() -> None:
    """A sum in float32 would double the communication volume."""
    low = [jnp.asarray(array, jnp.bfloat16) for array in (ROWS, SHARED)]
    jaxpr = str(jax.make_jaxpr(on_gpus)(*low))
    assert re.search(r"bf16\[3,2\] = reduce(_sum)?\[", jaxpr)
    assert "f32" not in jaxpr


def test_a_batch_is_summed_in_float32_and_communicated_in_bfloat16() -> None:
    def total(x: jax.Array) -> jax.Array:
        with per_device.tracing(platform="cuda", mesh=mesh()):
            return per_device.batch_sum(x, 1)

    low = jnp.asarray(ROWS, jnp.bfloat16)
    jaxpr = str(jax.make_jaxpr(total)(low))
    assert re.search(r"f32\[3\] = reduce_sum\[", jaxpr)
    assert re.search(r"bf16\[3\] = reduce(_sum)?\[", jaxpr)
    np.testing.assert_allclose(total(low), ROWS.sum(0), rtol=2**-7)


def test_cpus_get_no_barrier() -> None:
    with per_device.tracing(mesh=mesh()):
        assert "optimization_barrier" not in jax.jit(at_once).lower(ROWS, SHARED).as_text()


def test_the_gradients_of_two_uses_are_summed_over_devices_once() -> None:
    rows = NamedSharding(mesh(), PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh(), PartitionSpec())

    def loss(table: jax.Array, numbers: jax.Array) -> jax.Array:
        copied = per_device.copies(table, numbers.shape[0])

        def look_up(table: jax.Array, numbers: jax.Array) -> jax.Array:
            return table[numbers]

        def score(table: jax.Array, rows: jax.Array) -> jax.Array:
            return jnp.sin(rows) @ table.T

        if copied is None:
            return (score(table, look_up(table, numbers)) ** 2).sum()
        return (copied.use(score, copied.use(look_up, numbers)) ** 2).sum()

    def on_gpus(table: jax.Array, numbers: jax.Array) -> Any:
        with per_device.tracing(platform="cuda", mesh=mesh()):
            return jax.value_and_grad(loss)(table, numbers)

    table, numbers = ROWS[:12], np.arange(16) % 12
    jitted = jax.jit(on_gpus, in_shardings=(whole, rows), out_shardings=whole)
    program = jitted.lower(table, numbers).compile()
    sums = [one for one in hlo.collectives(program.as_text(), 8) if one.wire_bytes > 8]
    assert [one.kind for one in sums] == ["all-reduce"]
    wanted = jax.value_and_grad(loss)(jnp.asarray(table), jnp.asarray(numbers))
    got = program(jax.device_put(table, whole), jax.device_put(numbers, rows))
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-4)


def test_there_are_copies_only_for_several_gpus_that_divide_the_rows() -> None:
    table = jnp.asarray(ROWS)
    assert per_device.copies(table, 16) is None
    with per_device.tracing(mesh=mesh()):
        assert per_device.copies(table, 16) is None
    with per_device.tracing(platform="cuda", mesh=mesh()):
        assert per_device.copies(table, 15) is None
        copies = per_device.copies(table, 16)
    assert copies is not None
    assert copies.array.shape == (8, *table.shape)
