"""Tests layers: rematerialization, norm, GELU, dropout, cross-entropy and the wide product."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

from jaxtrain.ops import convolution, layers, per_device


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def test_the_gradient_of_the_wide_product_matches_einsum() -> None:
    x, y, grad = arrays(2, (2, 5, 3), (7, 3), (2, 5, 7))
    found = jax.vjp(lambda x, y: layers.einsum_float32("bmd,vd->bmv", x, y), x, y)[1](grad)
    want = jax.vjp(lambda x, y: jnp.einsum("bmd,vd->bmv", x, y), x, y)[1](grad)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_frequent_token_is_summed_in_float32() -> None:
    """Added one after another in bfloat16, 16% of it would arrive."""
    (grad,) = arrays(3, (8192, 16))
    grad = jnp.abs(grad).astype(jnp.bfloat16)
    table, ids = jnp.zeros((4, 16), jnp.bfloat16), jnp.full((8192,), 2)
    _, pull = jax.vjp(lambda table: layers.embed(table, ids), table)
    (found,) = pull(grad)
    assert found.dtype == jnp.bfloat16
    want = np.asarray(grad, np.float64).sum(0)
    np.testing.assert_allclose(np.asarray(found[2], np.float64), want, rtol=2**-8)
    assert not np.asarray(found[np.array([0, 1, 3])]).any()


def test_the_gradient_of_a_shared_array_is_summed_over_all_other_axes() -> None:
    x, position, grad = arrays(4, (3, 5, 2, 4), (2, 4), (3, 5, 2, 4))
    found, pull = jax.vjp(layers.add_shared, x, position)
    np.testing.assert_array_equal(found, np.asarray(x) + np.asarray(position))
    np.testing.assert_array_equal(pull(grad)[0], grad)
    want = np.asarray(grad, np.float64).sum((0, 1))
    np.testing.assert_allclose(pull(grad)[1], want, rtol=1e-6, atol=1e-6)


def test_the_wide_product_multiplies_no_float32() -> None:
    x, y, grad = arrays(2, (2, 5, 3), (7, 3), (2, 5, 7))
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)

    def value_and_gradients(x: Any, y: Any, grad: Any) -> Any:
        z, pull = jax.vjp(lambda x, y: layers.einsum_float32("bmd,vd->bmv", x, y), x, y)
        return z, pull(grad)

    z, found = value_and_gradients(x, y, grad)
    assert (z.dtype, *(array.dtype for array in found)) == (jnp.float32, *[jnp.bfloat16] * 2)
    products = re.findall(
        r"dot_general.*: \((.+?)\) ->", jax.jit(value_and_gradients).lower(x, y, grad).as_text()
    )
    assert len(products) == 3
    assert not [operands for operands in products if "f32" in operands.replace("bf16", "")]


class Sharded(nnx.Param, layers.Gathered):
    pass


class Block(nnx.Module):
    def __init__(self) -> None:
        self.kernel = Sharded(jnp.full((3, 3, 2, 2), 0.1))

    def __call__(self, x: jax.Array) -> jax.Array:
        gathered = jax.lax.with_sharding_constraint(
            self.kernel[...], jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        kernel = checkpoint_name(gathered, layers.GATHERED)
        return jnp.tanh(convolution.conv(jnp.tanh(convolution.conv(x, kernel)), kernel))


def block_loss(mode: Any, kernel: jax.Array, x: jax.Array) -> jax.Array:
    block = Block()
    block.kernel[...] = kernel
    return (layers.remat(Block.__call__, mode)(block, x) ** 2).sum()


def saved(mode: Any, capsys: pytest.CaptureFixture[str]) -> str:
    x, kernel = arrays(0, (1, 8, 8, 2), (3, 3, 2, 2))
    print_saved_residuals(lambda k, x: block_loss(mode, k, x), kernel, x)
    return capsys.readouterr().out


def test_none_keeps_all_but_gathered_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = saved("none", capsys)
    parameters = [line for line in kept.splitlines() if "[3,3,2,2]" in line]
    assert parameters
    assert all("from the argument" in line for line in parameters), kept
    # Both tanh keep their results, or (newer jax) only what their gradients need.
    inner = [line for line in kept.splitlines() if "(Block.__call__)" in line]
    assert len(inner) >= 3, kept


def test_block_keeps_only_the_input(capsys: pytest.CaptureFixture[str]) -> None:
    kept = saved("block", capsys)
    inner = [line for line in kept.splitlines() if "__call__" in line and "tanh" in line]
    assert len(inner) <= 1, kept  # the block's result, which the square outside needs


def test_both_modes_give_the_same_gradients() -> None:
    x, kernel = arrays(0, (1, 8, 8, 2), (3, 3, 2, 2))
    none, block = (
        jax.value_and_grad(block_loss, argnums=(1, 2))(mode, kernel, x)
        for mode in ("none", "block")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), none, block)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'all' is unknown: use one of none, block"):
        layers.remat(Block.__call__, "all")  # type: ignore[arg-type]


def test_gelu_is_exact_with_its_gradient() -> None:
    """Compares with jax's, which computes it in another way."""
    x = jnp.concatenate([jnp.linspace(-9, 9, 4001), jnp.array([0.0, -30.0, 30.0])])

    def exact(x: Any) -> Any:
        return jax.nn.gelu(x, approximate=False)

    for found, wanted in (
        (layers.gelu, exact),
        (jax.grad(lambda x: layers.gelu(x)), jax.grad(exact)),
    ):
        np.testing.assert_allclose(jax.vmap(found)(x), jax.vmap(wanted)(x), atol=1e-6)
    low = layers.gelu(x.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), exact(x), atol=1e-2, rtol=2**-7)


def test_geglu_is_the_product_of_its_halves_with_its_gradient() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 10)), jnp.float32)

    def exact(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        return jax.nn.gelu(first, approximate=False) * second

    for found, wanted in (
        (layers.geglu, exact),
        (
            jax.grad(lambda x: (layers.geglu(x) ** 2).sum()),
            jax.grad(lambda x: (exact(x) ** 2).sum()),
        ),
    ):
        np.testing.assert_allclose(found(x), wanted(x), atol=1e-5)
    assert layers.geglu(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_squared_relu_has_its_gradient_and_keeps_only_its_result() -> None:
    x = jnp.asarray([-2.0, -0.0, 0.0, 0.3, 1.0, 1e3])
    y, pull = jax.vjp(layers.squared_relu, x)
    np.testing.assert_allclose(y, np.maximum(x, 0) ** 2, rtol=1e-6)
    (slope,) = pull(jnp.ones_like(x))
    np.testing.assert_allclose(slope, 2 * np.maximum(x, 0), rtol=1e-6)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == x.shape]
    np.testing.assert_array_equal(kept, [y])
    low = jax.vjp(layers.squared_relu, x.astype(jnp.bfloat16))[1](jnp.ones_like(y, jnp.bfloat16))
    np.testing.assert_allclose(low[0].astype(jnp.float32), slope, rtol=2**-7)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_mean(rate: float) -> None:
    keys = jax.random.split(jax.random.key(7), 4)
    dropped = np.asarray(layers.dropout(jnp.ones((4, 100, 500)), rate, keys))
    assert not np.array_equal(dropped[0], dropped[1])
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / (1 - rate))}
    assert (dropped == 0).mean((1, 2)) == pytest.approx(rate, abs=0.006)  # 4 deviations: 0.0054
    np.testing.assert_array_equal(
        dropped[1:3], layers.dropout(jnp.ones((2, 100, 500)), rate, keys[1:3])
    )
    assert layers.dropout(dropped, rate, None) is dropped


def test_dropped_elements_are_independent() -> None:
    """Checks neighbors in each direction, rows, keys that differ by one, and bits."""
    counted = jax.random.wrap_key_data(jnp.arange(8, dtype=jnp.uint32).reshape(4, 2))
    drawn = jax.random.split(jax.random.key(0), 4)
    for keys in (counted, drawn):
        bits = np.asarray(layers.random_bits(keys, (64, 4096)))
        values = (bits >> 8).astype(np.float64) / 2**24 - 0.5
        for low in (values, (bits & 255) / 255 - 0.5):
            pairs = [
                (low[:, :, 1:], low[:, :, :-1]),
                (low[:, 1:], low[:, :-1]),
                (low[1:], low[:-1]),
                (low[2:], low[:-2]),
            ]
            for one, other in pairs:
                correlation = 12 * (one * other).mean()
                assert abs(correlation) < 5 / one.size**0.5, correlation
        low_bits = [(bits >> bit & 1).mean() for bit in range(32)]
        np.testing.assert_allclose(low_bits, 0.5, atol=5 * 0.5 / bits.size**0.5)
        counts = np.bincount((bits >> 20).ravel(), minlength=4096)
        spread = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(spread - 4095) < 5 * (2 * 4095) ** 0.5  # chi square


@pytest.mark.parametrize("cap", [None, 2.0, 15.0, 40.0])
def test_cross_entropy_matches_the_definition(cap: float | None) -> None:
    (logits,) = arrays(0, (3, 4, 50))
    logits = 5 * logits
    targets = jnp.asarray(np.random.default_rng(1).integers(0, 50, (3, 4)), jnp.int32)
    logits = logits.at[0, 0].set(0.0).at[0, 1, 7].set(90.0).at[1, 1].set(-200.0)
    targets = targets.at[0, 0].set(0).at[0, 1].set(7).at[0, 2].set(3)

    def cost(logits: Any) -> Any:
        chances = jax.nn.log_softmax(layers.capped(logits, cap))
        return -jnp.take_along_axis(chances, targets[..., None], -1)[..., 0]

    found, right = layers.cross_entropy(logits, targets, cap)
    np.testing.assert_allclose(found, cost(logits), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(right, logits.argmax(-1) == targets)
    assert right[0, 0], "all are equally likely, and it is the first"
    assert right[0, 1]
    tied = jnp.zeros((1, 3, 50)).at[..., 20:22].set(1.0)
    _, right = layers.cross_entropy(tied, jnp.asarray([[20, 21, 3]], jnp.int32), cap)
    assert right.tolist() == [[True, False, False]], "of two equal ones, the first is"
    gradients = [
        jax.grad(lambda x, f=f: (f(x) * targets).sum())(logits)
        for f in (lambda x: layers.cross_entropy(x, targets, cap)[0], cost)
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [None, 15.0])
def test_a_position_without_a_target_has_no_gradient(cap: float | None) -> None:
    logits = jnp.full((1, 2, 5), -300.0)  # their exponentials are 0 in float32
    targets = jnp.asarray([[-1, 2]], jnp.int32)

    def total(logits: jax.Array) -> jax.Array:
        costs = layers.cross_entropy(logits, targets, cap)[0]
        return jnp.where(targets < 0, 0.0, costs).sum()

    grad = jax.grad(total)(logits)
    assert np.isfinite(grad).all()
    assert not grad[0, 0].any()
    assert np.isfinite(total(logits))


def test_nothing_is_wrapped_where_nothing_is_gathered() -> None:
    """Otherwise each kept value would be rounded and copied."""
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def program(module: nnx.Module) -> str:
        graph, params = nnx.split(module)

        def call(params: Any, x: Any) -> Any:
            return layers.remat(nnx.Linear.__call__, "none")(nnx.merge(graph, params), x)

        return str(jax.make_jaxpr(call)(params, jnp.ones((2, 3))))

    assert "remat" not in program(linear)
    linear.kernel = Sharded(linear.kernel[...])
    assert "remat" in program(linear)


# ---- layer norm and chosen positions: the versions for GPUs ------------------------------------


def on_cpu_and_gpu(function: Any, *arrays: jax.Array) -> list[Any]:
    """Computes a weighted sum and its gradients with what is traced for a CPU, and for a GPU."""
    shape = jax.eval_shape(function, *arrays).shape
    weights = jnp.asarray(np.random.default_rng(9).standard_normal(shape), jnp.float32)

    def total(*arrays: jax.Array) -> jax.Array:
        return (function(*arrays).astype(jnp.float32) * weights).sum()

    found = []
    for platform in ("cpu", "cuda"):
        with per_device.tracing(platform=platform):
            found.append(jax.value_and_grad(total, argnums=tuple(range(len(arrays))))(*arrays))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layer_norm_for_gpus_has_the_same_numbers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.standard_normal((4, 6, 32)) + 1, dtype)
    scale, bias = (jnp.asarray(rng.standard_normal((1, 1, 32)), dtype) for _ in range(2))
    cpu, gpu = on_cpu_and_gpu(lambda *a: layers.layer_norm(*a, eps=1e-12), x, scale, bias)
    for left, right in zip(jax.tree.leaves(cpu), jax.tree.leaves(gpu), strict=True):
        assert left.dtype == right.dtype
        error = np.linalg.norm(np.asarray(left - right, np.float64)) / np.linalg.norm(left)
        assert error < (1e-5 if dtype == "float32" else 1e-2)


def test_chosen_positions_for_gpus_are_the_same() -> None:
    """Also a position that is chosen twice."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 8, 16)), jnp.float32)
    positions = jnp.asarray([[0, 3, 7], [1, 2, 0], [5, 0, 0]])
    cpu, gpu = on_cpu_and_gpu(lambda x: layers.take_positions(x, positions), x)
    np.testing.assert_array_equal(cpu[0], gpu[0])
    np.testing.assert_allclose(cpu[1][0], gpu[1][0], rtol=1e-6)
