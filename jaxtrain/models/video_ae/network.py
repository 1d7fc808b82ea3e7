"""The networks of the video autoencoder: TAEHV's (github.com/madebyollin/taehv).

Encoder: space shrinks by 8, time by 4. :class:`Decoder` is the base decoder, :class:`WideDecoder`
the larger one that the reference calls "super". Called, each takes all frames of a clip at once;
``step`` takes the next group of them (one latent's worth) with the memory that those before have
left, so that a video of any length needs the memory of one group.

Shapes: B clips, T frames, H height, W width, C channels; L latents in time. Layout BTHWC.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import layers
from jaxtrain.models.video_ae import blocks
from jaxtrain.models.video_ae.blocks import Memory, relu

SPACE_FACTOR = 8
"""Pixels (or patches) of a side that a latent stands for."""
MEMORY_BLOCKS = 3
ENCODER_POOLS = (2, 2, 1)
_SPACE_UP = 2


class EncoderStage(nnx.Module):
    """Half the height and width, a part of the frames, then memory blocks."""

    def __init__(self, width: int, pool: int, *, rngs: nnx.Rngs) -> None:
        self.pool = blocks.TimePool(width, pool, rngs=rngs)
        self.down = blocks.Conv(width, width, stride=2, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([blocks.MemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)])

    def __call__(self, x_BTHWC: jax.Array, remat: layers.Remat) -> jax.Array:
        """[B, T, H, W, C] -> [B, T / pool, H / 2, W / 2, C]."""
        return blocks.run(self.blocks, self.down(self.pool(x_BTHWC)), remat)

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """The same for the next frames; T is a multiple of `pool`."""
        return blocks.run_step(self.blocks, self.down(self.pool(x_BTHWC)), memory)


class Encoder(nnx.Module):
    """Video -> latents."""

    def __init__(
        self, *, width: int, latent_channels: int, patch_size: int, rngs: nnx.Rngs
    ) -> None:
        self.width = width
        self.patch_size = patch_size
        self.head = blocks.Conv(3 * patch_size**2, width, rngs=rngs)
        self.stages = nnx.List([EncoderStage(width, pool, rngs=rngs) for pool in ENCODER_POOLS])
        self.tail = blocks.Conv(width, latent_channels, rngs=rngs)

    def __call__(self, video_BTHW3: jax.Array, remat: layers.Remat) -> jax.Array:
        """[B, T, H, W, 3] in [0, 1], T a multiple of 4 -> [B, T / 4, H / 8 P, W / 8 P, latents]."""
        x = relu(self.head(blocks.unshuffle(video_BTHW3, self.patch_size)))
        for stage in self.stages:
            x = stage(x, remat)
        return self.tail(x)

    def step(self, video_BTHW3: jax.Array, memory: list[Memory]) -> tuple[jax.Array, list[Memory]]:
        """The next latents from the next frames."""
        x = relu(self.head(blocks.unshuffle(video_BTHW3, self.patch_size)))
        following: list[Memory] = []
        for stage, of_stage in zip(self.stages, memory, strict=True):
            x, left = stage.step(x, of_stage)
            following.append(left)
        return self.tail(x), following

    def no_memory(self, clips: int, height: int, width: int, dtype: jnp.dtype) -> list[Memory]:
        """What is remembered before the first frame of a video of this size (pixels): zeros."""
        side = self.patch_size
        memory: list[Memory] = []
        for _ in self.stages:
            side *= 2
            shape = (clips, 1, height // side, width // side, self.width)
            memory.append([jnp.zeros(shape, dtype)] * MEMORY_BLOCKS)
        return memory


class DecoderStage(nnx.Module):
    """Memory blocks, then twice the height and width and `grow` times the frames."""

    def __init__(
        self, width: int, next_width: int, grow: int, space_up: int, *, rngs: nnx.Rngs
    ) -> None:
        self.blocks = nnx.List([blocks.MemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)])
        self.grow = blocks.TimeGrow(width, grow, rngs=rngs)
        self.out = blocks.Conv(width, next_width, use_bias=False, rngs=rngs)
        self.width = width
        self.space_up = space_up

    def __call__(self, x_BTHWC: jax.Array, remat: layers.Remat, first_frame: int) -> jax.Array:
        """[B, T, H, W, C] -> [B, T * grow - first_frame, 2 H, 2 W, next_width].

        Frames before `first_frame` are not computed further.
        """
        return self._grown(blocks.run(self.blocks, x_BTHWC, remat), first_frame)

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """The same for the next frames."""
        x, left = blocks.run_step(self.blocks, x_BTHWC, memory)
        return self._grown(x, 0), left

    def _grown(self, x_BTHWC: jax.Array, first_frame: int) -> jax.Array:
        """The reference enlarges before it grows.

        Growing works pixel by pixel, so the order does not matter, and this one costs a quarter.
        """
        x = self.grow(x_BTHWC)[:, first_frame:]
        return self.out(blocks.upsample(x) if self.space_up == _SPACE_UP else x)


class WideStage(nnx.Module):
    """The same with wide memory blocks; a convolution makes the pixels of a larger frame."""

    def __init__(
        self, width: int, next_width: int, grow: int, space_up: int, *, rngs: nnx.Rngs
    ) -> None:
        self.blocks = nnx.List(
            [blocks.WideMemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)]
        )
        self.out = blocks.Conv(width, space_up**2 * next_width, rngs=rngs)
        self.grow = blocks.TimeGrow(next_width, grow, rngs=rngs)
        self.width = width
        self.space_up = space_up

    def __call__(self, x_BTHWC: jax.Array, remat: layers.Remat, first_frame: int) -> jax.Array:
        """[B, T, H, W, C] -> [B, T * grow - first_frame, 2 H, 2 W, next_width]."""
        return self._grown(blocks.run(self.blocks, x_BTHWC, remat))[:, first_frame:]

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """The same for the next frames."""
        x, left = blocks.run_step(self.blocks, x_BTHWC, memory)
        return self._grown(x), left

    def _grown(self, x_BTHWC: jax.Array) -> jax.Array:
        return self.grow(blocks.shuffle(relu(self.out(x_BTHWC)), self.space_up))


class _AnyDecoder(nnx.Module):
    """What both decoders do between their first and their last layer."""

    stage: type[DecoderStage] | type[WideStage]

    def __init__(
        self,
        *,
        widths: tuple[int, ...],
        latent_channels: int,
        patch_size: int,
        grows: tuple[int, ...],
        space_ups: tuple[int, ...],
        rngs: nnx.Rngs,
    ) -> None:
        self.patch_size = patch_size
        self.head = self.first(latent_channels, widths[0], rngs)
        pairs = zip(widths[:-1], widths[1:], grows, space_ups, strict=True)
        self.stages = nnx.List([self.stage(*pair, rngs=rngs) for pair in pairs])
        self.tail = _tail(widths[-1], patch_size, rngs)

    @staticmethod
    def first(inputs: int, outputs: int, rngs: nnx.Rngs) -> blocks.Conv | blocks.Pointwise:
        """The layer that takes the latents."""
        raise NotImplementedError

    def __call__(
        self, latents_BLHWC: jax.Array, remat: layers.Remat, first_frame: int
    ) -> jax.Array:
        """Latents -> [B, T, H, W, 3], not clamped; T of all latents' frames but the first ones."""
        x = self.opened(latents_BLHWC)
        for stage in self.stages[:-1]:
            x = stage(x, remat, 0)
        # The last layers look at one frame at a time: those dropped in the end are dropped here.
        return self.closed(self.stages[-1](x, remat, first_frame))

    def step(
        self, latents_BLHWC: jax.Array, memory: list[Memory]
    ) -> tuple[jax.Array, list[Memory]]:
        """All frames of the next latents."""
        x = self.opened(latents_BLHWC)
        following: list[Memory] = []
        for stage, of_stage in zip(self.stages, memory, strict=True):
            x, left = stage.step(x, of_stage)
            following.append(left)
        return self.closed(x), following

    def no_memory(self, clips: int, height: int, width: int, dtype: jnp.dtype) -> list[Memory]:
        """What is remembered before the first of latents of this size: zeros."""
        memory: list[Memory] = []
        for stage in self.stages:
            shape = (clips, 1, height, width, stage.width)
            memory.append([jnp.zeros(shape, dtype)] * MEMORY_BLOCKS)
            height, width = height * stage.space_up, width * stage.space_up
        return memory

    def opened(self, latents_BLHWC: jax.Array) -> jax.Array:
        """What goes into the first stage."""
        raise NotImplementedError

    def closed(self, x_BTHWC: jax.Array) -> jax.Array:
        """Frames from what comes out of the last stage."""
        raise NotImplementedError


class Decoder(_AnyDecoder):
    """The base decoder."""

    stage = DecoderStage

    @staticmethod
    def first(inputs: int, outputs: int, rngs: nnx.Rngs) -> blocks.Conv:
        """The layer that takes the latents."""
        return blocks.Conv(inputs, outputs, rngs=rngs)

    def opened(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Latents, squeezed into (-3, 3), to the width of the first stage."""
        return relu(self.head(3 * jnp.tanh(latents_BLHWC / 3)))

    def closed(self, x_BTHWC: jax.Array) -> jax.Array:
        """Colours, and patches to pixels."""
        return blocks.shuffle(self.tail(relu(x_BTHWC)), self.patch_size)


class WideDecoder(_AnyDecoder):
    """The "super" decoder: wider, with depthwise convolutions, and no squeeze in front."""

    stage = WideStage

    @staticmethod
    def first(inputs: int, outputs: int, rngs: nnx.Rngs) -> blocks.Pointwise:
        """The layer that takes the latents."""
        return blocks.Pointwise(inputs, outputs, use_bias=False, rngs=rngs)

    def opened(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Latents to the width of the first stage."""
        return self.head(latents_BLHWC)

    def closed(self, x_BTHWC: jax.Array) -> jax.Array:
        """Colours, and patches to pixels."""
        return blocks.shuffle(self.tail(x_BTHWC), self.patch_size)


def _tail(width: int, patch_size: int, rngs: nnx.Rngs) -> blocks.Conv:
    tail = blocks.Conv(width, 3 * patch_size**2, rngs=rngs)
    # Grey, so that few pixels start outside [0, 1] (the reference does so from scratch).
    tail.bias = nnx.Param(jnp.full((3 * patch_size**2,), 0.5))
    return tail
