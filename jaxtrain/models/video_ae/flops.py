"""Computes the floating-point operations (FLOPs) of the video autoencoder by formula.

Per output pixel, a 3x3 convolution costs `18 * in * out` FLOPs, and a pooling layer, a growing
layer or any other matrix `2 * in * out`. A memory block costs four convolutions (its first has
twice the output channels). A wide memory block costs `2 * 49` FLOPs for each of its 2 C stacked
channels, plus two matrices.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.models.video_ae import blocks, network
from jaxtrain.models.video_ae.timing import Timing

_CONV = 2 * 9


class Forward(NamedTuple):
    """FLOPs of a forward pass: all of it, and parts.

    Attributes:
        total: of encoder and decoder.
        encoder: of the encoder.
        first: of the encoder's first layer.
        decoder_first: of the decoder's first layer.
    """

    total: float
    encoder: float
    first: float
    decoder_first: float


def forward(
    *,
    frames: int,
    height: int,
    width: int,
    patch_size: int,
    latent_channels: int,
    encoder_width: int,
    decoder_widths: Sequence[int],
    wide: bool,
    pools: Sequence[int],
    grows: Sequence[int],
    timing: Timing,
) -> Forward:
    """Returns the forward FLOPs for one clip."""
    colours = 3 * patch_size**2
    latents = timing.latent_frames(frames)
    t, pixels = timing.encoded_frames(frames), height * width // patch_size**2
    w = encoder_width
    first = float(_CONV * t * pixels * colours * w)
    total = first
    for pool in pools:
        t //= pool
        total += 2 * t * pixels * pool * w * w
        pixels //= 4
        total += _CONV * t * pixels * w * w * (1 + 4 * network.MEMORY_BLOCKS)
    total += _CONV * t * pixels * w * latent_channels
    t, encoder = latents, total
    decoder_first = (2 if wide else _CONV) * t * pixels * latent_channels * decoder_widths[0]
    total += decoder_first
    stages = zip(decoder_widths[:-1], decoder_widths[1:], grows, strict=True)
    for number, (w, following, grow) in enumerate(stages):
        dropped = timing.dropped(latents) if number == len(grows) - 1 else 0
        after = 4 * pixels
        if wide:
            block = 2 * blocks.WIDE**2 * 2 * w + 2 * 2 * w * 4 * w + 2 * 4 * w * w
            total += t * pixels * (network.MEMORY_BLOCKS * block + _CONV * w * 4 * following)
            total += 2 * t * after * following**2 * grow
        else:
            total += t * pixels * (_CONV * w * w * 4 * network.MEMORY_BLOCKS + 2 * w * w * grow)
            total += _CONV * (t * grow - dropped) * after * w * following
        t, pixels = t * grow, after
    kept = t - timing.dropped(latents)
    total += _CONV * kept * pixels * decoder_widths[-1] * colours
    return Forward(total, encoder, first, decoder_first)
