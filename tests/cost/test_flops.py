"""Tests counting operations of a traced program, rematerialization included."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxtrain.cost.flops import product_flops
from jaxtrain.ops import attention, per_device


def flops(f: Any, *arguments: jax.ShapeDtypeStruct) -> float:
    return product_flops(jax.jit(f).trace(*arguments).jaxpr)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_matmul() -> None:
    assert flops(jnp.matmul, array(3, 5), array(5, 7)) == 2 * 3 * 5 * 7
    batched = flops(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), array(4, 3, 5), array(4, 5, 7))
    assert batched == 4 * 2 * 3 * 5 * 7


def convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_and_its_two_gradients_cost_the_same(stride: int) -> None:
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolution(x, kernel, stride).sum()

    x, kernel = array(2, 8, 8, 4), array(3, 3, 4, 6)
    forward = 2 * (2 * 8 * 8 / stride**2 * 6) * (3 * 3 * 4)
    assert flops(loss, x, kernel) == forward
    both = flops(jax.value_and_grad(loss, argnums=(0, 1)), x, kernel)
    assert both == pytest.approx(3 * forward)


def test_a_loop_counts_once_per_iteration() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=6)[0]

    assert flops(f, array(4, 4)) == 6 * 2 * 4**3


def test_a_shard_map_counts_once_per_device() -> None:
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    each = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    assert flops(each, array(8, 5), array(5, 7)) == flops(jnp.matmul, array(8, 5), array(5, 7))


def test_a_conditional_counts_its_most_expensive_branch() -> None:
    def f(which: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(which[0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert flops(f, array(1), array(4, 4)) == 2 * 2 * 4**3


def test_rematerialization_counts() -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(x @ y) @ y).sum()

    plain = flops(jax.grad(f), array(4, 4), array(4, 4))
    again = flops(jax.grad(jax.checkpoint(f)), array(4, 4), array(4, 4))
    assert plain == (2 + 2) * 2 * 4**3  # forward, and the gradient of each matmul's left operand
    assert again == plain + 2 * 2 * 4**3


@pytest.mark.parametrize(("window", "keys"), [(None, 256), (64, 65), (255, 256)])
def test_fused_attention_counts_the_keys_of_its_window(
    window: int | None, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's call, traced as for a GPU: 2 matmuls forward, and 5 backward."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    q = jax.ShapeDtypeStruct((2, 256, 4, 32), jnp.bfloat16)

    def loss(q: jax.Array) -> jax.Array:
        return attention.attend(q, q, q, window=window).astype(jnp.float32).sum()

    with per_device.tracing(platform="cuda"):
        forward, both = flops(loss, q), flops(jax.value_and_grad(loss), q)
    assert forward == 2 * (2 * 2 * 4 * 256 * keys * 32)
    assert both == 7 / 2 * forward
