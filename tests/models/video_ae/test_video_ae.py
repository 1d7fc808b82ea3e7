"""Tests the video autoencoder: its receptive field, loss, metrics and sample images."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.small_causal import rows_of
from models.small_params import assert_same
from models.video_ae import small_autoencoder
from training import toy

from jaxtrain.cost.flops import product_flops
from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.models.reconstruction import samples, timing
from jaxtrain.models.video_ae import blocks
from jaxtrain.ops.cpu import COMPILER_OPTIONS
from jaxtrain.training.model_flops import model_flops

TINY = dataclasses.replace(video_ae.Config.tiny(), frames=6)  # padded to 8
batch = functools.partial(small_autoencoder.batch, TINY)


@pytest.fixture(scope="module")
def graph_and_params() -> tuple[Any, Any]:
    graph, params = nnx.split(TINY.build(nnx.Rngs(0)))
    return graph, toy.stirred(params)


@functools.cache
def jitted(method: str, graph: Any) -> Any:
    """Returns a function of the parameters and the method's arguments (a batch for the loss).

    Losses have the level of optimization that the step has: at the tests' level 0, XLA computes a
    PSNR that is off by up to 0.3%.
    """
    if method == "loss":
        step = lambda p, b: nnx.merge(graph, p).loss(b, jax.random.key(0))  # noqa: E731
        return jax.jit(step, compiler_options=COMPILER_OPTIONS)
    options = COMPILER_OPTIONS if method == "evaluate" else None  # the others are differentiated
    return jax.jit(lambda p, b: getattr(nnx.merge(graph, p), method)(b), compiler_options=options)


def influence(function: Any, x: jax.Array, out_frame: int) -> np.ndarray:
    """Returns output frame `out_frame`'s largest gradient with respect to each input frame."""
    rng = np.random.default_rng(0)
    y = jax.eval_shape(function, x)
    pull = jnp.zeros(y.shape).at[:, out_frame].set(rng.standard_normal((y.shape[0], *y.shape[2:])))
    (grad,) = jax.vjp(function, x)[1](pull)
    return np.abs(np.asarray(grad)).max((0, 2, 3, 4))


def test_a_memory_block_sees_this_frame_and_the_previous_one() -> None:
    fresh = blocks.MemoryBlock(4, rngs=nnx.Rngs(0))
    graph, params = nnx.split(fresh)
    block = nnx.merge(graph, toy.stirred(params))
    seen = influence(block, jax.random.normal(jax.random.key(1), (1, 5, 6, 6, 4)), 2)
    assert (seen > 0).tolist() == [False, True, True, False, False]


@pytest.mark.slow
def test_a_latent_sees_no_later_group_of_frames(graph_and_params: tuple[Any, Any]) -> None:
    encode = functools.partial(jitted("encode", graph_and_params[0]), graph_and_params[1])
    seen = influence(encode, jax.random.uniform(jax.random.key(1), (1, 12, 16, 16, 3)), 1)
    assert (seen[4:8] > 0).all()
    assert seen[0:4].max() > 0
    assert (seen[8:] == 0).all()


def test_a_decoded_frame_sees_no_later_latent(graph_and_params: tuple[Any, Any]) -> None:
    decode = functools.partial(jitted("decode", graph_and_params[0]), graph_and_params[1])
    latents = jax.random.normal(jax.random.key(1), (1, 3, 2, 2, 4))
    assert (influence(decode, latents, 0) > 0).tolist() == [True, False, False]
    assert (influence(decode, latents, 1) > 0).tolist() == [True, True, False]
    assert (influence(decode, latents, 8) > 0)[1:].all()


@pytest.mark.long
def test_a_new_network_preserves_variance() -> None:
    """Latents vary about as much as pixels; the reference's initialization divides by hundreds."""
    module = dataclasses.replace(TINY, encoder_width=64).build(nnx.Rngs(0))
    video = jax.random.normal(jax.random.key(1), (2, 8, 16, 16, 3))
    assert 0.03 < float(module.encode(video).std()) < 2


@pytest.mark.parametrize(
    ("frames", "latents", "decoded"), [(1, 1, 1), (4, 1, 1), (9, 3, 9), (12, 3, 9), (19, 5, 17)]
)
def test_frame_arithmetic(frames: int, latents: int, decoded: int) -> None:
    config = dataclasses.replace(TINY, frames=frames)
    graph, params = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    video = jax.ShapeDtypeStruct((1, frames, 16, 16, 3), jnp.float32)
    code = jax.eval_shape(jitted("encode", graph), params, video)
    assert code.shape == (1, latents, 2, 2, 4)
    assert jax.eval_shape(jitted("decode", graph), params, code).shape == (1, decoded, 16, 16, 3)
    assert timing.Timing().decoded(timing.Timing().latent_frames(frames)) == decoded


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_h3_drops_the_black_frames_of_each_chunk(chunks: int) -> None:
    """A chunk has 20 frames, of which the first 3 are black; the last 3 latents are dropped."""
    h3 = timing.Timing(trim="h3")
    latents = 5 * chunks - 3
    everything = range(4 * latents)
    later = h3.dropped_later(range(latents))
    kept = [i for i in everything if i >= h3.dropped(latents) and i not in later]
    assert [i // 20 * 17 + i % 20 - 3 for i in kept] == list(range(17 * chunks - 12))
    assert h3.decoded(latents) == len(kept)
    in_parts = [4 * n + i for n in range(latents) for i in h3.dropped_later(range(n, n + 1))]
    assert in_parts == later
    assert h3.latent_frames(17 * chunks) == h3.latent_frames(17 * chunks - 16) == latents


def test_h3_encodes_enough_chunks_to_show_every_frame() -> None:
    h3 = timing.Timing(trim="h3")
    for frames in range(1, 60):
        enough = next(n for n in range(2, 99, 5) if h3.decoded(n) >= frames)
        assert h3.needed(frames) == enough
        assert h3.latent_frames(h3.filled(frames)) == enough
        assert frames <= h3.filled(frames) == h3.decoded(enough)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "power"), [("squared", 2), ("absolute", 1)])
def test_the_loss_is_the_weighted_error_per_frame(
    graph_and_params: tuple[Any, Any], kind: Any, power: int
) -> None:
    """Compares frame i with frame i, not clamped."""
    graph = nnx.graphdef(dataclasses.replace(TINY, reconstruction_error=kind).build(nnx.Rngs(0)))
    params = graph_and_params[1]
    same = batch(2)
    module = nnx.merge(graph, params)
    tail = module.decoder.tail.kernel
    tail.set_value(20 * tail[...])  # far outside [0, 1]
    params = nnx.state(module)
    video = np.asarray(same["video"], np.float64) / 255
    decoded = nnx.jit(lambda module, video: module.decode(module.encode(video)))
    found = np.asarray(decoded(module, np.float32(video)), np.float64)
    assert found.min() < -0.1
    target = np.concatenate([video, video[:, -1:]], 1)[:, :5]
    error = (np.abs(found - target) ** power).mean((1, 2, 3, 4)).sum()
    total, weight, metrics = jitted("loss", graph)(params, same)
    assert total == pytest.approx(20 * error, rel=1e-4)
    assert weight == 2
    assert metrics["reconstruction_loss"][0] == pytest.approx(error, rel=1e-4)
    seen = ((np.clip(found, 0, 1) - target) ** 2).mean((2, 3, 4))
    assert metrics["psnr"][0] == pytest.approx(-10 * np.log10(seen).mean(1).sum(), rel=1e-4)
    assert metrics["psnr"][1] == 2


@pytest.mark.parametrize("method", ["loss", "evaluate"])
def test_weighted_sums_of_parts_add_up(graph_and_params: tuple[Any, Any], method: str) -> None:
    """Clips of weight zero do not count."""
    graph, params = graph_and_params
    compiled, whole = jitted(method, graph), batch(4)

    def function(params: Any, batch: dict[str, jax.Array]) -> Any:
        found = compiled(params, batch)  # an evaluation also has the values of each clip
        return {n: p[:2] for n, p in found.items()} if method == "evaluate" else found

    whole["weight"] = jnp.array([1.0, 2.0, 0.5, 1.0])
    halves = [function(params, rows_of(whole, part)) for part in (slice(2), slice(2, 4))]
    assert_same(function(params, whole), jax.tree.map(jnp.add, *halves))
    whole["weight"] = jnp.array([1.0, 1.0, 0.0, 0.0])
    assert_same(function(params, whole), function(params, rows_of(whole, slice(2))))


def test_validation_reports_the_values_of_each_clip(graph_and_params: tuple[Any, Any]) -> None:
    graph, params = graph_and_params
    clips = {**batch(2), "weight": jnp.array([0.5, 1.0])}
    found = jitted("evaluate", graph)(params, clips)
    assert set(found) == {"loss", "psnr", "ssim"}
    for name in ("psnr", "ssim"):
        total, weight, of_clips = found[name]
        assert weight == 1.5
        np.testing.assert_allclose(of_clips.sum(1), [total, weight], rtol=1e-6)
        np.testing.assert_array_equal(of_clips[1], [0.5, 1.0])
    assert found["loss"][1] == 1.5


def test_bfloat16_parameters_give_a_float32_loss(graph_and_params: tuple[Any, Any]) -> None:
    graph, params = graph_and_params
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    clips = batch(2)
    loss = jitted("loss", graph)
    want, found = float(loss(params, clips)[0]), loss(low, clips)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert float(found[0]) == pytest.approx(want, rel=0.02)


@pytest.mark.long
def test_bfloat16_gradients_point_the_same_way(graph_and_params: tuple[Any, Any]) -> None:
    """Single runs differ by more than the precisions do; benchmarks compare many runs."""
    graph, params = graph_and_params
    clips = batch(4)

    def grads(dtype: Any) -> np.ndarray:
        def loss(params: Any) -> jax.Array:
            low = jax.tree.map(lambda a: a.astype(dtype), params)
            return nnx.merge(graph, low).loss(clips, jax.random.key(0))[0]

        found = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
        return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in found])

    exact, rounded = grads(jnp.float32), grads(jnp.bfloat16)
    cosine = exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded)
    assert cosine > 0.99  # about thirty layers, each rounded to 8 bits


@pytest.mark.long
def test_remat_changes_no_number() -> None:
    results = []
    for mode in ("none", "ends", "block"):
        graph, params = nnx.split(dataclasses.replace(TINY, remat=mode).build(nnx.Rngs(0)))
        loss = jax.value_and_grad(
            lambda p, b, graph=graph: nnx.merge(graph, p).loss(b, jax.random.key(0))[0]
        )
        results.append(jax.jit(loss)(params, batch(1)))
    (loss_none, grads_none), *others = results
    for loss, grads in others:
        assert loss_none == pytest.approx(float(loss), rel=1e-6)
        assert_same(jax.tree.leaves(grads_none), jax.tree.leaves(grads), rtol=1e-4)


def test_samples_show_originals_above_reconstructions(graph_and_params: tuple[Any, Any]) -> None:
    clips = batch(4)
    found = jitted("samples", graph_and_params[0])(graph_and_params[1], clips)
    picture, clip, latents = (
        np.asarray(found[name]) for name in ("reconstruction", "clip", "latents")
    )
    assert {array.dtype for array in (picture, clip, latents)} == {np.dtype(np.uint8)}
    assert picture.shape == (3 * 3 * 16, 5 * 16, 3)
    np.testing.assert_array_equal(picture[:16, :16], clips["video"][0, 0])
    np.testing.assert_array_equal(picture[48:64, -16:], clips["video"][1, 4])
    assert clip.shape == (5, 3 * 16, 3 * 16, 3)
    np.testing.assert_array_equal(clip[2, :16, 16:32], clips["video"][1, 2])
    original, shown, heat = np.split(np.asarray(clip[0], np.float64), 3)
    error = np.abs(original - shown).mean(-1) / 255
    np.testing.assert_allclose(heat[..., 0], 255 * np.clip(3 * error / 0.25, 0, 1), atol=8)
    # Per clip four 2x2 channels, each value a square of 32 pixels, separated by lines.
    assert latents.shape == (3 * 2 * 66, 2 * 66, 3)
    assert len(np.unique(latents[:32, :32])) == 1
    assert np.unique(latents[64:66]) == [255]


def test_large_samples_are_scaled_down() -> None:
    wide = jnp.zeros((3, 3, 2, 16, 1440, 3))
    assert samples.in_a_row(wide).shape == (3 * 3 * 8, 2 * 720, 3)
    assert samples.moving(wide).shape == (2, 3 * 4, 3 * 360, 3)
    assert samples.beside(jnp.zeros((1, 1, 2, 2, 3)), jnp.ones((1, 1, 2, 2, 3)))[0, 2].min() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"patch_size": 2, "trim": "odd_latents"},
        {"decoder": "super"},
        {"time_downscale": (True,) * 3, "frames": 8},
    ],
    ids=["base", "patches", "super", "time8"],
)
def test_flops_match_xlas_count(changes: dict[str, Any]) -> None:
    """Compares the forward pass. XLA does not count multiplications with the zero padding.

    XLA counts those with zeros in folded kernels, which matter little at the width of real models.
    """
    size = {"height": 128, "width": 128, "frames": 4}
    widths = {"encoder_width": 64, "decoder_widths": None}
    config = dataclasses.replace(TINY, **(size | widths | changes))
    module = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    video = jax.ShapeDtypeStruct((1, config.frames, 128, 128, 3), jnp.float32)
    graph, params = nnx.split(module)
    run = jax.jit(lambda p, v: nnx.merge(graph, p).decode(nnx.merge(graph, p).encode(v)))
    traced = run.trace(params, video)
    counts, forward = traced.lower().cost_analysis(), product_flops(traced.jaxpr)
    assert counts is not None
    assert forward == pytest.approx(counts["flops"], rel=0.1)
    assert model_flops(config) == pytest.approx(3 * forward, rel=0.1)  # no gradient of the video


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 476}, r"model.height=476 and model.width=16 .* nearest are 480 and 16"),
        ({"height": 8}, r"model.height=8 .* at least 16"),
        ({"patch_size": 2, "height": 24}, r"multiples of 16: the nearest are 32 and 16"),
        ({"trim": "h3", "frames": 20}, r"model.frames=20: .* 17 n \+ 5 .*: use 17 or 22"),
        ({"trim": "h3", "frames": 3}, r"model.frames=3: .*: use 5$"),
        ({"time_downscale": (True,)}, r"model.time_downscale=\(True,\): use 3 values"),
        ({"trim": "h3", "frames": 5, "time_downscale": (True,) * 3}, r"4 frames .*, not 8"),
        ({"decoder_widths": (8, 8, 8)}, r"model.decoder_widths=\(8, 8, 8\): use 4 values"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    "changed",
    [
        {"decoder_widths": (24, 16, 12, 12)},
        {"decoder": "super", "decoder_widths": (16, 16, 12, 12)},
        {"patch_size": 2, "decoder_widths": (24, 16, 12, 12), "encoder_width": 12},
    ],
    ids=["base", "super", "patches"],
)
def test_a_model_can_start_as_a_thumbnail(changed: dict[str, Any]) -> None:
    """The first reconstruction is the mean over the pixels and frames of each latent."""
    side, frames = 8 * changed.get("patch_size", 1), 8
    config = dataclasses.replace(
        TINY, **{"encoder_width": 8, **changed}, frames=frames, height=4 * side, width=4 * side
    )
    config = dataclasses.replace(config, latent_channels=12, init="thumbnail")
    rng = np.random.default_rng(0)
    # Of one color per latent: any mean is exact.
    colors = rng.uniform(0.05, 0.3, (2, 2, 4, 4, 3)).astype(np.float32)
    clip = colors.repeat(4, 1).repeat(side, 2).repeat(side, 3)
    graph, params = nnx.split(jax.jit(lambda: config.build(nnx.Rngs(0)))())
    found = jax.jit(lambda p, x: (m := nnx.merge(graph, p)).decode(m.encode(x)))(params, clip)
    limited = clip if config.decoder == "super" else 3 * np.tanh(clip / 3)  # of latents
    np.testing.assert_allclose(found, limited[:, 3:], rtol=1e-5, atol=1e-6)


def test_a_thumbnail_needs_channels_for_the_colors() -> None:
    with pytest.raises(InputError, match=r"carries 3 x model.patch_size\^2 = 12 channels") as error:
        dataclasses.replace(TINY, init="thumbnail", patch_size=2, latent_channels=8)
    assert "narrowest has" in str(error.value)
