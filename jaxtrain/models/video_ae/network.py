"""The networks of the video autoencoder: TAEHV's (github.com/madebyollin/taehv).

The encoder shrinks space by 8 and time by 4 or 8. :class:`Decoder` is the base decoder,
:class:`WideDecoder` the larger one that the reference calls "super". A call processes all frames of
a clip at once. ``step`` processes the next group of frames (those of one latent) with the memory
that the groups before it left, so a video of any length needs only the memory of one group.

Shapes: B clips, T frames, H height, W width, C channels; L latents in time. Layout BTHWC.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.reconstruction.layers import Pointwise, zeros
from jaxtrain.models.video_ae import blocks, folding, pairs
from jaxtrain.models.video_ae.blocks import Memory, relu

SPACE_FACTOR = 8
"""Width and height, in pixels (or patches), of the square that one latent represents."""
MEMORY_BLOCKS = 3


_Halving = tuple[jax.Array, jax.Array]
"""A matrix and the kernel that is applied after it."""


def _halving(weights: _Halving) -> jax.Array:
    return folding.after_matrix(*weights)


class EncoderStage(nnx.Module):
    """Pools frames, halves the height and width, then applies memory blocks."""

    def __init__(self, width: int, pool: int, *, rngs: nnx.Rngs) -> None:
        self.pool = blocks.TimePool(width, pool, rngs=rngs)
        self.down = blocks.Conv(width, width, stride=2, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([blocks.MemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)])

    def halved(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> [B, T / pool, H / 2, W / 2, C], the input of the memory blocks."""
        groups = blocks.grouped(x_BTHWC, self.pool.stride)
        return blocks.conv_frames(groups, self.halving(), stride=2, fold=_halving)

    def halving(self) -> _Halving:
        """Returns the weights that reduce a group of frames to one of half the height and width."""
        return self.pool.kernel[...], self.down.kernel[...]


class Encoder(nnx.Module):
    """Encodes a video into latents."""

    def __init__(
        self,
        *,
        width: int,
        latent_channels: int,
        patch_size: int,
        pools: tuple[int, ...],
        rngs: nnx.Rngs,
    ) -> None:
        self.width = width
        self.patch_size = patch_size
        self.head = blocks.Conv(3 * patch_size**2, width, rngs=rngs)
        self.stages = nnx.List([EncoderStage(width, pool, rngs=rngs) for pool in pools])
        self.tail = blocks.Conv(width, latent_channels, rngs=rngs)

    def __call__(self, video_BTHW3: jax.Array, remat: blocks.VideoRemat) -> jax.Array:
        """[B, T, H, W, 3] in [0, 1] -> [B, T / 4, H / 8 P, W / 8 P, latents], or T / 8."""
        x = blocks.run(self.stages[0].blocks, self._opened(video_BTHW3, remat), remat)
        for stage in self.stages[1:]:
            x = blocks.run(stage.blocks, stage.halved(x), remat)
        return self.tail(x)

    def start_as_thumbnail(self) -> None:
        """Makes some initial latents the colors at an eighth of the size: means over pixels."""
        channels = 3 * self.patch_size**2
        blocks.carry(self.head.kernel, channels, blocks.SAME)
        for stage in self.stages:
            blocks.carry(stage.pool.kernel, channels, pool=stage.pool.stride)
            blocks.carry(stage.down.kernel, channels, blocks.MEAN_OF_SQUARE)
        blocks.carry(self.tail.kernel, channels, blocks.SAME)

    def step(self, video_BTHW3: jax.Array, memory: list[Memory]) -> tuple[jax.Array, list[Memory]]:
        """Encodes the next frames into the next latents."""
        x, left = blocks.run_step(self.stages[0].blocks, self._opened(video_BTHW3), memory[0])
        following = [left]
        for stage, of_stage in zip(self.stages[1:], memory[1:], strict=True):
            x, left = blocks.run_step(stage.blocks, stage.halved(x), of_stage)
            following.append(left)
        return self.tail(x), following

    def _opened(self, video_BTHW3: jax.Array, remat: blocks.VideoRemat = "none") -> jax.Array:
        """Computes the input of the first memory blocks, the only part at full resolution."""
        first, bias = self.stages[0], self.head.bias
        count = first.pool.stride
        assert bias is not None

        def fold(weights: tuple[jax.Array, jax.Array, _Halving]) -> pairs.Pair:
            kernel, bias, halving = weights
            return pairs.Pair(
                folding.side_by_side(kernel, count),
                jnp.tile(bias.astype(jnp.float32), count),
                _halving(halving),
                None,
            )

        pixels = blocks.grouped(blocks.unshuffle(video_BTHW3, self.patch_size), count)
        weights = (self.head.kernel[...], bias[...], first.halving())
        return pairs.by_pair(pixels, weights, fold, 2, remat)

    def no_memory(self, clips: int, height: int, width: int, dtype: jnp.dtype) -> list[Memory]:
        """Returns the zero memory before the first frame of a video of this size (in pixels)."""
        side = self.patch_size
        memory: list[Memory] = []
        for _ in self.stages:
            side *= 2
            shape = (clips, 1, height // side, width // side, self.width)
            memory.append([jnp.zeros(shape, dtype)] * MEMORY_BLOCKS)
        return memory


class DecoderStage(nnx.Module):
    """Applies memory blocks, then enlarges space twice and time `grow` times."""

    def __init__(self, width: int, next_width: int, grow: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([blocks.MemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)])
        self.grow = blocks.TimeGrow(width, grow, rngs=rngs)
        self.out = blocks.Conv(width, next_width, use_bias=False, rngs=rngs)
        self.width = width

    def enlarged(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] of the memory blocks -> [B, T * grow, 2 H, 2 W, next_width]."""

        def fold(weights: tuple[list[jax.Array], jax.Array]) -> jax.Array:
            matrices, kernel = weights
            kernels = [_enlarging(matrix, kernel) for matrix in matrices]
            return jnp.concatenate(kernels, axis=-1)

        weights = (self.grow.matrices(), self.out.kernel[...])
        squares = blocks.conv_frames(blocks.bordered(x_BTHWC), weights, fold=fold)
        return _unfolded(squares, self.grow.stride)

    def carry(self, channels: int) -> None:
        """Makes the first channels of the enlarged frames those of the small ones."""
        blocks.carry(self.grow.kernel, channels, grow=self.grow.stride)
        blocks.carry(self.out.kernel, channels, blocks.SAME)


class WideStage(nnx.Module):
    """Does the same with wide memory blocks; a convolution computes the larger frame's pixels."""

    def __init__(self, width: int, next_width: int, grow: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List(
            [blocks.WideMemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)]
        )
        self.out = blocks.Conv(width, folding.UP**2 * next_width, rngs=rngs)
        self.grow = blocks.TimeGrow(next_width, grow, rngs=rngs)
        self.width = width

    def enlarged(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] of the memory blocks -> [B, T * grow, 2 H, 2 W, next_width]."""
        return self.grow(blocks.shuffle(relu(self.out(x_BTHWC)), folding.UP))

    def carry(self, channels: int) -> None:
        """Makes the first channels of the enlarged frames those of the small ones."""
        blocks.carry(self.out.kernel, channels, blocks.SAME, copies=folding.UP**2)
        blocks.carry(self.grow.kernel, channels, grow=self.grow.stride)


class _AnyDecoder(nnx.Module):
    """Implements what both decoders share."""

    stage: type[DecoderStage] | type[WideStage]

    def __init__(
        self,
        *,
        widths: tuple[int, ...],
        latent_channels: int,
        patch_size: int,
        grows: tuple[int, ...],
        rngs: nnx.Rngs,
    ) -> None:
        self.patch_size = patch_size
        self.head = self.first(latent_channels, widths[0], rngs)
        sizes = zip(widths[:-1], widths[1:], grows, strict=True)
        self.stages = nnx.List([self.stage(*pair, rngs=rngs) for pair in sizes])
        self.tail = _tail(widths[-1], patch_size, rngs)

    @staticmethod
    def first(inputs: int, outputs: int, rngs: nnx.Rngs) -> blocks.Conv | Pointwise:
        """The layer that takes the latents."""
        raise NotImplementedError

    def __call__(
        self, latents_BLHWC: jax.Array, remat: blocks.VideoRemat, first_frame: int
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Decodes latents to [B, T, H, W, 3], not clamped, without frames before `first_frame`.

        Also returns the outputs of the memory blocks of each stage but the last, with all frames.
        """
        features = [self.first_features(latents_BLHWC, remat)]
        for stage, following in itertools.pairwise(self.stages):
            x = blocks.run(following.blocks, stage.enlarged(features[-1]), remat)
            features.append(x)
        return self._frames(features.pop(), remat, first_frame), features

    def first_features(self, latents_BLHWC: jax.Array, remat: blocks.VideoRemat) -> jax.Array:
        """Computes the output of the first stage's memory blocks."""
        return blocks.run(self.stages[0].blocks, self.first_layers(latents_BLHWC), remat)

    def step(
        self, latents_BLHWC: jax.Array, memory: list[Memory]
    ) -> tuple[jax.Array, list[Memory]]:
        """Decodes all frames of the next latents."""
        x = self.first_layers(latents_BLHWC)
        following: list[Memory] = []
        for stage, of_stage in zip(self.stages[:-1], memory[:-1], strict=True):
            x, left = blocks.run_step(stage.blocks, x, of_stage)
            following.append(left)
            x = stage.enlarged(x)
        x, left = blocks.run_step(self.stages[-1].blocks, x, memory[-1])
        return self._frames(x, "none", 0), [*following, left]

    def _frames(self, x_BTHWC: jax.Array, remat: blocks.VideoRemat, first_frame: int) -> jax.Array:
        """Computes the frames from `first_frame` on from the last memory block's output.

        This is the only part at full resolution. Each layer sees a single frame, so dropped frames
        are not computed.
        """
        grow = self.stages[-1].grow.stride
        skipped = [max(0, math.ceil((first_frame - number) / grow)) for number in range(grow)]
        squares = pairs.interleaved(self.last_layers(x_BTHWC, remat, skipped), first_frame)
        return blocks.shuffle(blocks.shuffle(squares, folding.UP), self.patch_size)

    def start_as_thumbnail(self) -> None:
        """Makes the initial decoder enlarge the colors that the encoder carries.

        The last layer reads nothing else at first; the other channels keep their random weights.
        """
        channels = 3 * self.patch_size**2
        taps = blocks.SAME if isinstance(self.head, blocks.Conv) else np.ones(())
        blocks.carry(self.head.kernel, channels, taps)
        for stage in self.stages:
            stage.carry(channels)
        self.tail.kernel = zeros(*self.tail.kernel.shape)
        self.tail.bias = zeros(channels)
        blocks.carry(self.tail.kernel, channels, blocks.SAME)

    def no_memory(self, clips: int, height: int, width: int, dtype: jnp.dtype) -> list[Memory]:
        """Returns the zero memory before the first latent of this size."""
        memory: list[Memory] = []
        for stage in self.stages:
            shape = (clips, 1, height, width, stage.width)
            memory.append([jnp.zeros(shape, dtype)] * MEMORY_BLOCKS)
            height, width = folding.UP * height, folding.UP * width
        return memory

    def first_layers(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Computes the input of the first stage."""
        raise NotImplementedError

    def last_layers(
        self, x_BTHWC: jax.Array, remat: blocks.VideoRemat, skipped: Sequence[int]
    ) -> list[jax.Array]:
        """Computes colors from the output of the last memory block.

        Args:
            x_BTHWC: small frames; each becomes several.
            skipped: for each of these, the number of leading small frames that do not compute it.

        Returns:
            For each of these, [B, T - skipped, H, W, 3 P P S]: the pixels of the square that
            replaces a small pixel are channels.
        """
        raise NotImplementedError


class Decoder(_AnyDecoder):
    """The base decoder."""

    stage = DecoderStage

    @staticmethod
    def first(inputs: int, outputs: int, rngs: nnx.Rngs) -> blocks.Conv:
        """The layer that takes the latents."""
        return blocks.Conv(inputs, outputs, rngs=rngs)

    def first_layers(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Limits latents to (-3, 3) by tanh and maps them to the width of the first stage."""
        return relu(self.head(3 * jnp.tanh(latents_BLHWC / 3)))

    def last_layers(
        self, x_BTHWC: jax.Array, remat: blocks.VideoRemat, skipped: Sequence[int]
    ) -> list[jax.Array]:
        """See :meth:`_AnyDecoder.last_layers`."""
        stage, outputs = self.stages[-1], []
        assert isinstance(stage, DecoderStage)
        assert self.tail.bias is not None

        def fold(weights: tuple[jax.Array, ...]) -> pairs.Pair:
            matrix, kernel, last, bias = weights
            enlarging = _enlarging(matrix, kernel)
            return pairs.Pair(enlarging, None, folding.of_enlarged(last), _last_bias(bias))

        shared = (stage.out.kernel[...], self.tail.kernel[...], self.tail.bias[...])
        for matrix, skip in zip(stage.grow.matrices(), skipped, strict=True):
            # XLA would compute the kernel's gradient with a window as large as the frame, if the
            # convolution added the border.
            frames, weights = blocks.bordered(x_BTHWC[:, skip:]), (matrix, *shared)
            outputs.append(pairs.by_pair(frames, weights, fold, 1, remat))
        return outputs


class WideDecoder(_AnyDecoder):
    """The "super" decoder: wider, with depthwise convolutions, and without limiting latents."""

    stage = WideStage

    @staticmethod
    def first(inputs: int, outputs: int, rngs: nnx.Rngs) -> Pointwise:
        """The layer that takes the latents."""
        return Pointwise(inputs, outputs, use_bias=False, rngs=rngs)

    def first_layers(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Maps latents to the width of the first stage."""
        return self.head(latents_BLHWC)

    def last_layers(
        self, x_BTHWC: jax.Array, remat: blocks.VideoRemat, skipped: Sequence[int]
    ) -> list[jax.Array]:
        """See :meth:`_AnyDecoder.last_layers`."""
        stage, fewest = self.stages[-1], min(skipped)
        assert stage.out.bias is not None
        assert self.tail.bias is not None

        def fold(
            weights: tuple[jax.Array, jax.Array, list[jax.Array], jax.Array, jax.Array],
        ) -> pairs.Pair:
            kernel, kernel_bias, matrices, last, bias = weights
            lasts = [folding.of_squares(folding.after_matrix(matrix, last)) for matrix in matrices]
            return pairs.Pair(
                folding.square_major(kernel),
                folding.square_major(kernel_bias),
                jnp.concatenate(lasts, axis=-1),
                jnp.tile(_last_bias(bias), len(lasts)),
            )

        weights = (
            *(stage.out.kernel[...], stage.out.bias[...], stage.grow.matrices()),
            *(self.tail.kernel[...], self.tail.bias[...]),
        )
        outputs = pairs.by_pair(x_BTHWC[:, fewest:], weights, fold, 1, remat)
        of_frames = jnp.split(outputs, stage.grow.stride, axis=-1)
        return [frame[:, skip - fewest :] for frame, skip in zip(of_frames, skipped, strict=True)]


def _enlarging(matrix: jax.Array, kernel_33IO: jax.Array) -> jax.Array:
    """Folds the kernel that computes one of a frame's enlarged frames, squares as channels."""
    return folding.enlarged(folding.after_matrix(matrix, kernel_33IO))


def _last_bias(bias: jax.Array) -> jax.Array:
    return jnp.repeat(bias.astype(jnp.float32), folding.UP**2)


def _unfolded(x_BTHWC: jax.Array, grow: int) -> jax.Array:
    """Unfolds channels (frame, row, column, C) of :func:`folding.enlarged`, without the border.

    [B, T, H + 1, W + 1, grow S C] -> [B, T * grow, 2 H, 2 W, C].
    """
    (b, t, h, w, _), up = x_BTHWC.shape, folding.UP
    squares = x_BTHWC.reshape(b, t, h, w, grow, up, up, -1)
    frames = squares.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(b, t * grow, h * up, w * up, -1)
    return frames[:, :, 1:-1, 1:-1]


def _tail(width: int, patch_size: int, rngs: nnx.Rngs) -> blocks.Conv:
    tail = blocks.Conv(width, 3 * patch_size**2, rngs=rngs)
    # Gray, so that few pixels start outside [0, 1]; the reference does the same from scratch.
    tail.bias = nnx.Param(jnp.full((3 * patch_size**2,), 0.5))
    return tail
