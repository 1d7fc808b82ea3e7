"""Seraena: a discriminator that corrects reconstructions (github.com/madebyollin/seraena).

The discriminator sees a few successive frames, with the clip's latent averaged over time as
context, and scores patches: +1 for reconstructed, -1 for real. The correction is the negative
gradient, with respect to the reconstructed frames, of the distance between the scores of real and
reconstructed frames, scaled to a standard deviation of one. The decoder is trained toward its own
frames plus the correction. So no gradient passes through the discriminator into the decoder, and
none of the decoder's loss reaches the discriminator.

Upstream updates the discriminator first, and computes the correction with the updated one. Here one
gradient serves both, so the correction comes from the discriminator before the update; the
decoder's updates have the same direction (their cosine is above 0.999: benchmarks/LOG.md). Upstream
also repeats the first frames to get as many as the input: one window twice, whose second correction
it drops. Here each decoded frame is seen once, in complete windows; leftover frames are not seen.

The running statistics of its batch norms and the replay of earlier reconstructions are state of the
model: they stay on the device and are part of a checkpoint.

Shapes: B clips, T frames, H height, W width; N windows of F successive frames, 3 F channels; L
latents of size h, w with C channels; S side of a crop.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain.models.reconstruction import layers
from jaxtrain.models.reconstruction.replay_buffer import ReplayBuffer
from jaxtrain.ops import convolution

# Kernel size, stride and output channels of each layer.
_LAYERS = ((3, 1, 64), (4, 2, 128), (4, 2, 256), (4, 2, 512), (3, 1, 512), (3, 1, 512))
_MOMENTUM, _NORM_EPSILON = 0.1, 1e-5  # PyTorch's
_DEVIATION_EPSILON = 1e-5
_REAL, _FAKE = -1.0, 1.0


class Statistic(nnx.Variable[jax.Array]):
    """A running mean or variance of a batch norm."""


class LayerWeights(NamedTuple):
    """The trained parameters of one layer of the discriminator."""

    kernel: jax.Array
    scale: jax.Array
    shift: jax.Array
    head: jax.Array


class Outcome(NamedTuple):
    """The losses of a batch, float32.

    Attributes:
        decoder_B: each clip's mean squared distance from its corrected frames; its gradient reaches
            only the decoder.
        discriminator: mean squared error of the scores; its gradient reaches only the
            discriminator.
        right: fraction of the scores with the right sign, of which zeros count half.
    """

    decoder_B: jax.Array
    discriminator: jax.Array
    right: jax.Array


class Layer(nnx.Module):
    """Convolution, batch norm, ReLU, and a head that scores their output."""

    def __init__(self, side: int, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = layers.kernel(rngs, (side, side, inputs, outputs), side**2 * inputs)
        self.scale = nnx.Param(jnp.ones((outputs,)))
        self.shift = nnx.Param(jnp.zeros((outputs,)))
        self.head = layers.kernel(rngs, (outputs, 1), outputs)
        self.mean = Statistic(jnp.zeros((outputs,)))
        self.variance = Statistic(jnp.ones((outputs,)))

    def weights(self) -> LayerWeights:
        """Returns the trained parameters."""
        return LayerWeights(self.kernel[...], self.scale[...], self.shift[...], self.head[...])


class Discriminator(nnx.Module):
    """Six layers, each of which scores patches of 8x8 pixels."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        layers = []
        for side, _, outputs in _LAYERS:
            layers.append(Layer(side, channels, outputs, rngs=rngs))
            channels = outputs
        self.layers = nnx.List(layers)

    def weights(self) -> list[LayerWeights]:
        """Returns the trained parameters of all layers."""
        return [layer.weights() for layer in self.layers]

    def scores(self, weights: list[LayerWeights], x_NHWC: jax.Array, *, learns: bool) -> jax.Array:
        """Computes each layer's scores of each patch, float32 [N, H / 8, W / 8, 6].

        Args:
            x_NHWC: frames and context.
            learns: normalize by this batch, and update the running statistics with it; otherwise
                normalize by the running statistics.
        """
        scores = []
        for layer, layer_weights, (_, stride, _) in zip(self.layers, weights, _LAYERS, strict=True):
            x_NHWC = convolution.conv(x_NHWC, layer_weights.kernel, stride)
            x_NHWC = jnp.maximum(_normed(layer, layer_weights, x_NHWC, learns=learns), 0)
            score_NHW = (x_NHWC @ layer_weights.head)[..., 0].astype(jnp.float32)
            scores.append(score_NHW)
        height, width = scores[-1].shape[1:]
        return jnp.stack([_pooled(score, height, width) for score in scores], axis=-1)


class Seraena(nnx.Module):
    """The discriminator, its replay, and both losses.

    Args:
        frames: F, successive frames per window.
        crop: S, side of the random squares that it sees (pixels); None is the full frame.
        height, width: size of a clip (pixels).
        space_factor: pixels per latent along a side.
    """

    def __init__(
        self,
        *,
        frames: int,
        crop: int | None,
        replay: int,
        height: int,
        width: int,
        space_factor: int,
        latent_channels: int,
        rngs: nnx.Rngs,
    ) -> None:
        self.discriminator = Discriminator(3 * frames + latent_channels, rngs=rngs)
        self.frames, self.crop, self.factor = frames, crop, space_factor
        high, wide = (height, width) if crop is None else (crop, crop)
        latent = (high // space_factor, wide // space_factor, latent_channels)
        self.replay = ReplayBuffer(replay, (high, wide, 3 * frames), latent)

    def __call__(
        self,
        real_BTHW3: jax.Array,
        fake_BTHW3: jax.Array,
        latents_BLhwC: jax.Array,
        keys_B: jax.Array,
        dtype: jnp.dtype,
    ) -> Outcome:
        """Computes the losses of a batch, and puts its reconstructions into the replay.

        Args:
            real_BTHW3: the clips, in [0, 1].
            fake_BTHW3: their reconstructions, not clamped; T is at least F.
            keys_B: one random key per clip.
        """
        clips = real_BTHW3.shape[0]
        keys_B4 = jax.vmap(lambda key: jax.random.split(key, 4))(keys_B)
        context_BhwC = lax.stop_gradient(latents_BLhwC).astype(jnp.float32).mean(1)
        real, fake, context = self._cropped(real_BTHW3, fake_BTHW3, context_BhwC, keys_B4[:, 0])
        real, fake = self._windows(real), self._windows(fake)
        each = real.shape[0] // clips
        context = jnp.repeat(context, each, axis=0)
        detached = lax.stop_gradient(fake)

        weights = self.discriminator.weights()
        fixed = jax.tree.map(lax.stop_gradient, weights)
        correction = self._correction(fixed, real, detached, context, dtype)
        distance = jnp.square(fake - (detached + correction)).mean((1, 2, 3))

        def numbers(place: int) -> jax.Array:
            return jax.vmap(lambda key: jax.random.uniform(key, (each,)))(keys_B4[:, place]).ravel()

        old = self.replay.draw(numbers(1))
        # Every second reconstruction is one of an earlier step, if there is any.
        other = (jnp.arange(each * clips) % 2 == 1) & old.filled_N
        fakes = _chosen(other, old.images_NHWC, detached)
        fake_context = _chosen(other, old.context_NhwC, context)
        is_fake = numbers(2) < 0.5
        images = _chosen(is_fake, fakes, real)
        contexts = _chosen(is_fake, fake_context, context)
        scores = self.discriminator.scores(
            weights, self._input(images, contexts, dtype), learns=True
        )
        wanted = jnp.where(is_fake, _FAKE, _REAL)[:, None, None, None]
        self.replay.keep(detached, context, numbers(3))
        return Outcome(
            decoder_B=distance.reshape(clips, each).mean(1),
            discriminator=jnp.square(scores - wanted).mean(),
            right=(1 + jnp.sign(scores) * wanted).mean() / 2,
        )

    def once_begun(self, begun: jax.Array, *inputs: Any) -> Outcome:
        """Does what a call does, or, before the loss begins, nothing: its losses are then 0.

        Args:
            begun: whether the loss has begun, bool [].
        """
        split: Any = nnx.split  # its types do not know an ellipsis after a filter
        graph, params, variables = split(self, nnx.Param, ...)

        def judge(params: Any, variables: Any) -> tuple[Outcome, Any]:
            module = nnx.merge(graph, params, variables)
            outcome = module(*inputs)
            return outcome, split(module, nnx.Param, ...)[2]

        zero = jnp.zeros((), jnp.float32)
        nothing = Outcome(jnp.zeros(inputs[0].shape[0], jnp.float32), zero, zero)
        outcome, following = lax.cond(
            begun, judge, lambda params, variables: (nothing, variables), params, variables
        )
        nnx.update(self, following)
        return outcome

    def _cropped(
        self, real: jax.Array, fake: jax.Array, context: jax.Array, keys_B: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Crops each clip, its reconstruction, and its context to the same random square."""
        if self.crop is None:
            return real, fake, context
        side = self.crop // self.factor

        def cropped(
            real: jax.Array, fake: jax.Array, context: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            positions = jnp.asarray(context.shape[:2]) - side + 1
            down, right = jax.random.randint(key, (2,), 0, positions)

            def cut(x: jax.Array, factor: int) -> jax.Array:
                for axis, start in ((-3, down), (-2, right)):
                    x = lax.dynamic_slice_in_dim(x, start * factor, side * factor, axis)
                return x

            return cut(real, self.factor), cut(fake, self.factor), cut(context, 1)

        return jax.vmap(cropped)(real, fake, context, keys_B)

    def _windows(self, video_BTHW3: jax.Array) -> jax.Array:
        """Cuts windows of F frames that do not overlap, [N, H, W, 3 F]; drops leftover frames."""
        b, t, h, w, _ = video_BTHW3.shape
        count = t // self.frames
        windows = video_BTHW3[:, : count * self.frames].reshape(b * count, self.frames, h, w, 3)
        return windows.transpose(0, 2, 3, 1, 4).reshape(b * count, h, w, 3 * self.frames)

    def _input(self, images: jax.Array, context: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Stacks frames, scaled to [-1, 1], and the context, enlarged to their size."""
        n, h, w, c = context.shape
        f = self.factor
        large = jnp.broadcast_to(context[:, :, None, :, None], (n, h, f, w, f, c))
        large = large.reshape(n, h * f, w * f, c)
        return jnp.concatenate([2 * images - 1, large], axis=-1).astype(dtype)

    def _correction(
        self,
        weights: list[LayerWeights],
        real: jax.Array,
        fake: jax.Array,
        context: jax.Array,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """Computes the negative gradient of the scores' distance, scaled to a deviation of one."""

        def scores(images: jax.Array) -> jax.Array:
            x = self._input(images, context, dtype)
            return self.discriminator.scores(weights, x, learns=False)

        wanted = lax.stop_gradient(scores(real))

        def distance(correction: jax.Array) -> jax.Array:
            return jnp.square(wanted - scores(fake + correction)).mean((1, 2, 3)).sum()

        down = -jax.grad(distance)(jnp.zeros_like(fake))
        return lax.stop_gradient(down / (down.std() + _DEVIATION_EPSILON))


def _chosen(first_N: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.where(first_N[:, None, None, None], first, second)


def _normed(
    layer: Layer, layer_weights: LayerWeights, x_NHWC: jax.Array, *, learns: bool
) -> jax.Array:
    """Applies batch norm in float32, with statistics over the global batch."""
    x = x_NHWC.astype(jnp.float32)
    mean, variance = layer.mean[...], layer.variance[...]  # [C]
    if learns:
        count = x[..., 0].size
        new_mean, new_variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        unbiased = new_variance * (count / (count - 1))
        for kept, old, new in ((layer.mean, mean, new_mean), (layer.variance, variance, unbiased)):
            kept.set_value(old + _MOMENTUM * (lax.stop_gradient(new) - old))
        mean, variance = new_mean, new_variance
    wide = (1, 1, 1, -1)
    scaled = (x - mean.reshape(wide)) * lax.rsqrt(variance + _NORM_EPSILON).reshape(wide)
    return (scaled * layer_weights.scale.reshape(wide) + layer_weights.shift.reshape(wide)).astype(
        x_NHWC.dtype
    )


def _pooled(score_NHW: jax.Array, height: int, width: int) -> jax.Array:
    n, h, w = score_NHW.shape
    blocks = score_NHW.reshape(n, height, h // height, width, w // width)
    return blocks.mean((2, 4))
