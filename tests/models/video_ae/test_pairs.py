"""Tests folded and frame-by-frame convolutions against plain ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.models.video_ae import blocks, network, pairs
from jaxtrain.ops import per_device


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def pair(inputs: int, between: int, outputs: int) -> pairs.Pair:
    return pairs.Pair(
        normal(1, 3, 3, inputs, between),
        normal(2, between),
        normal(3, 3, 3, between, outputs),
        normal(4, outputs),
    )


def as_it_is(parts: pairs.Pair) -> pairs.Pair:
    return parts


def close(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), left, right)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("remat", ["none", "ends"])
@pytest.mark.parametrize("stride", [1, 2])
def test_pairs_compute_what_two_convolutions_do(
    stride: int, remat: blocks.VideoRemat, platform: str
) -> None:
    """Also if only the frames or only the pair is trained."""
    x, weights = normal(0, 2, 3, 4, 6, 3), pair(3, 4, 2)
    pull = normal(5, 2, 3, 4 // stride, 6 // stride, 2)

    def plain(x: jax.Array, pair: pairs.Pair) -> jax.Array:
        between = jnp.maximum(blocks.conv_frames(x, pair.kernel, pair.bias), 0)
        return blocks.conv_frames(between, pair.next_kernel, pair.next_bias, stride)

    def by_pair(x: jax.Array, pair: pairs.Pair) -> jax.Array:
        return pairs.by_pair(x, pair, as_it_is, stride, remat)

    def result(apply: Any, trained: Any) -> Any:
        def loss(x: jax.Array, weights: pairs.Pair) -> tuple[jax.Array, jax.Array]:
            found = apply(x, weights)
            return (found * pull).sum(), found

        with per_device.tracing(platform=platform):
            return jax.jit(jax.value_and_grad(loss, trained, has_aux=True))(x, weights)

    for trained in ((0, 1), 0, 1):
        close(result(by_pair, trained), result(plain, trained))


def same(found: Any, wanted: Any, *arguments: Any) -> None:
    """Checks results and gradients of two functions of arrays."""
    pull = normal(9, *jax.eval_shape(found, *arguments).shape)

    def result(function: Any) -> Any:
        def loss(arguments: Any) -> Any:
            y = function(*arguments)
            return (y * pull).sum(), y

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)

    for left, right in zip(*(jax.tree.leaves(result(f)) for f in (found, wanted)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


def enlarged(x: jax.Array, matrix: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes what `network` folds: a matrix, upsampling, and a convolution."""
    return blocks.conv_frames((x @ matrix).repeat(2, axis=2).repeat(2, axis=3), kernel)


@pytest.mark.parametrize("grow", [1, 2])
def test_enlarged_frames_are_those_of_upsampling_and_a_convolution(grow: int) -> None:
    stage = network.DecoderStage(4, 3, grow, rngs=nnx.Rngs(0))
    graph, params = nnx.split(stage)

    def plain(x: jax.Array, params: Any) -> jax.Array:
        stage = nnx.merge(graph, params)
        parts = [enlarged(x, matrix, stage.out.kernel[...]) for matrix in stage.grow.matrices()]
        return pairs.interleaved(parts, 0)

    same(lambda x, p: nnx.merge(graph, p).enlarged(x), plain, normal(0, 2, 3, 4, 5, 4), params)


@pytest.mark.parametrize("remat", ["none", "ends"])
def test_the_last_frames_are_those_of_upsampling_and_two_convolutions(
    remat: blocks.VideoRemat,
) -> None:
    """Also at the border, where the enlarged frame's neighbors are zeros."""
    decoder = network.Decoder(
        widths=(4, 4), latent_channels=2, patch_size=1, grows=(2,), rngs=nnx.Rngs(0)
    )
    decoder.tail.bias = nnx.Param(normal(3, 3))
    graph, params = nnx.split(decoder)

    def folded(x: jax.Array, params: Any) -> jax.Array:
        squares = nnx.merge(graph, params).last_layers(x, remat, [0, 1])
        return blocks.shuffle(jnp.concatenate(squares, axis=1), 2)

    def plain(x: jax.Array, params: Any) -> jax.Array:
        decoder = nnx.merge(graph, params)
        stage = decoder.stages[0]
        first, second = (
            decoder.tail(jnp.maximum(enlarged(x, matrix, stage.out.kernel[...]), 0))
            for matrix in stage.grow.matrices()
        )
        return jnp.concatenate([first, second[:, 1:]], axis=1)

    same(folded, plain, normal(0, 2, 3, 4, 5, 4), params)


def test_a_gpu_gets_units_of_eight_channels_and_the_bias_in_the_kernel() -> None:
    x, weights = normal(0, 1, 2, 4, 4, 6), pair(6, 24, 12)

    def loss(weights: pairs.Pair) -> jax.Array:
        y = pairs.by_pair(x, weights, as_it_is, 1, "none")
        assert y.shape == (1, 2, 4, 4, 12)
        return y.sum()

    with per_device.tracing(platform="cuda"):
        programs = list(_programs(jax.make_jaxpr(jax.grad(loss))(weights).jaxpr))
    convolved = {
        array.aval.shape[-1]
        for program in programs
        for equation in program.eqns
        if equation.primitive.name == "conv_general_dilated"
        for array in (*equation.invars, *equation.outvars)
    }
    assert convolved == {8, 24, 16}
    summed = [
        equation.outvars[0].aval.size
        for program in programs
        for equation in program.eqns
        if equation.primitive.name == "reduce_sum" and equation.invars[0].aval.ndim == 4
    ]
    assert summed == [16]  # the last bias, not that of 24 channels between the convolutions


def test_intermediates_exist_for_one_frame_at_a_time() -> None:
    """Forward and backward, no array has the intermediate's width and all three frames."""
    x, weights = normal(0, 1, 3, 4, 4, 2), pair(2, 17, 2)

    def shapes(remat: blocks.VideoRemat) -> set[tuple[int, ...]]:
        loss = jax.grad(lambda w: pairs.by_pair(x, w, as_it_is, 1, remat).sum())
        return {
            output.aval.shape
            for program in _programs(jax.make_jaxpr(loss)(weights).jaxpr)
            for equation in program.eqns
            for output in equation.outvars
            if output.aval.shape[-1:] == (17,)
        }

    assert (1, 3, 4, 4, 17) in shapes("none")
    assert (1, 1, 4, 4, 17) in shapes("ends")
    assert not {(1, 3, 4, 4, 17), (3, 4, 4, 17)} & shapes("ends")


def _programs(jaxpr: Any) -> Any:
    """Yields a jaxpr and those nested in its operations."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _programs(inner)


def test_gradients_of_frames_are_summed_in_float32_and_rounded_once() -> None:
    """They are rounded to the parameters' dtype, in which they are summed over devices."""
    frames = 24
    x = jnp.abs(normal(0, 1, frames, 4, 4, 2)).astype(jnp.bfloat16)
    weights = jax.tree.map(lambda part: jnp.abs(part).astype(jnp.bfloat16), pair(2, 3, 2))

    def wide(parts: pairs.Pair) -> pairs.Pair:
        return jax.tree.map(lambda part: part.astype(jnp.float32), parts)

    def gradient(weights: pairs.Pair, x: jax.Array) -> Any:
        def loss(weights: pairs.Pair) -> jax.Array:
            return pairs.by_pair(x, weights, wide, 1, "ends").sum(dtype=jnp.float32)

        return jax.grad(loss)(weights)

    found = jax.jit(gradient)(weights, x)
    each = [jax.jit(gradient)(weights, x[:, n : n + 1]) for n in range(frames)]
    exact = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=np.float64), *each)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8)


@pytest.mark.parametrize("remat", ["none", "ends"])
@pytest.mark.parametrize("argument", [1, (0, 1)])
def test_eight_gpus_match_the_gradients_of_one(argument: Any, remat: blocks.VideoRemat) -> None:
    """Each computes those of its own clips, in microbatches; the video needs no gradient."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "rows"))
    x, weights = normal(0, 2, 8, 3, 4, 4, 2), pair(2, 3, 2)

    def gradients(x: jax.Array, w: pairs.Pair, remat: Any) -> Any:
        def accumulate(total: Any, clips: jax.Array) -> Any:
            def loss(clips: jax.Array, w: pairs.Pair) -> jax.Array:
                return jnp.sin(pairs.by_pair(clips, w, as_it_is, 2, remat)).sum()

            found = jax.grad(loss, argnums=argument)(clips, w)
            of_pair = found[1] if argument == (0, 1) else found
            return jax.tree.map(jnp.add, total, of_pair), found

        return jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, w), x)

    def on_gpus(x: jax.Array, w: pairs.Pair) -> Any:
        with per_device.tracing(platform="cuda", mesh=mesh):
            return gradients(x, w, remat)

    found = jax.jit(on_gpus)(jax.device_put(x, rows), weights)
    close(found, jax.jit(gradients, static_argnums=2)(x, weights, "none"))
