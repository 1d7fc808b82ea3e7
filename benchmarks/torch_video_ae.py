"""Implements TAEHV's base network in plain PyTorch, as in the reference, with jaxtrain's weights.

Processes all frames at once, folded into the batch; channels last on a GPU. As in the reference,
the number of frames grows after upsampling, and all decoded frames are computed.

Shapes: B clips, T frames, C channels, H height, W width.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from jaxtrain.models.reconstruction import timing
from jaxtrain.models.video_ae import network

_POOLS = (2, 2, 1)
_GROWS = (1, 2, 2)
_DROPPED = timing.TIME_FACTOR - 1


class MemoryBlock(nn.Module):
    """Three convolutions of each frame stacked with the previous one; a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv3 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        """[B T, C, H, W] -> the same shape."""
        clips = x.unflatten(0, (-1, frames))
        past = functional.pad(clips, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1].flatten(0, 1)
        h = functional.relu(self.conv1(torch.cat([x, past], 1)))
        h = functional.relu(self.conv2(h))
        return functional.relu(self.conv3(h) + x)


class EncoderStage(nn.Module):
    """Pools frames, halves the size, then applies memory blocks."""

    def __init__(self, width: int, pool: int) -> None:
        super().__init__()
        self.pool = nn.Conv2d(pool * width, width, 1, bias=False)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.ModuleList(MemoryBlock(width) for _ in range(network.MEMORY_BLOCKS))
        self.stride = pool

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        """[B T, C, H, W] -> [B T / pool, C, H / 2, W / 2]."""
        x = self.down(self.pool(x.unflatten(0, (-1, self.stride)).flatten(1, 2)))
        for block in self.blocks:
            x = block(x, frames // self.stride)
        return x


class Encoder(nn.Module):
    """Computes frames -> latents."""

    def __init__(self, width: int, latent_channels: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.ModuleList(EncoderStage(width, pool) for pool in _POOLS)
        self.tail = nn.Conv2d(width, latent_channels, 3, padding=1)

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        """[B T, 3, H, W] -> [B T / 4, latents, H / 8, W / 8]."""
        x = functional.relu(self.head(x))
        for stage in self.stages:
            x = stage(x, frames)
            frames //= stage.stride
        return self.tail(x)


class DecoderStage(nn.Module):
    """Applies memory blocks, doubles the size, and grows the number of frames."""

    def __init__(self, width: int, following: int, grow: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MemoryBlock(width) for _ in range(network.MEMORY_BLOCKS))
        self.grow = nn.Conv2d(width, grow * width, 1, bias=False)
        self.out = nn.Conv2d(width, following, 3, padding=1, bias=False)
        self.stride = grow

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        """[B T, C, H, W] -> [B T grow, following, 2 H, 2 W]."""
        for block in self.blocks:
            x = block(x, frames)
        x = self.grow(functional.interpolate(x, scale_factor=2))
        return self.out(x.unflatten(1, (self.stride, -1)).flatten(0, 1))


class Decoder(nn.Module):
    """Computes latents -> frames, including three extra ones."""

    def __init__(self, widths: tuple[int, ...], latent_channels: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(latent_channels, widths[0], 3, padding=1)
        pairs = zip(widths[:-1], widths[1:], _GROWS, strict=True)
        self.stages = nn.ModuleList(DecoderStage(*pair) for pair in pairs)
        self.tail = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        """[B L, latents, h, w] -> [B 4 L, 3, 8 h, 8 w]."""
        x = functional.relu(self.head(3 * torch.tanh(x / 3)))
        for stage in self.stages:
            x = stage(x, frames)
            frames *= stage.stride
        return self.tail(functional.relu(x))


class VideoAutoencoder(nn.Module):
    """Encoder, decoder and the reconstruction loss."""

    def __init__(
        self,
        encoder_width: int,
        decoder_widths: tuple[int, ...],
        latent_channels: int,
        reconstruction_weight: float,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(encoder_width, latent_channels)
        self.decoder = Decoder(decoder_widths, latent_channels)
        self.reconstruction_weight = reconstruction_weight

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """uint8 [B, T, H, W, 3] -> weighted mean squared error, float32 []."""
        x = video.permute(0, 1, 4, 2, 3).float() / 255
        missing = -x.shape[1] % timing.TIME_FACTOR
        x = torch.cat([x, x[:, -1:].expand(-1, missing, -1, -1, -1)], 1)
        frames = x.shape[1]
        flat = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        latents = self.encoder(flat, frames)
        found = self.decoder(latents, frames // timing.TIME_FACTOR).unflatten(0, (-1, frames))
        found = found[:, _DROPPED:].float()
        error = functional.mse_loss(found, x[:, :-_DROPPED])
        return self.reconstruction_weight * error


def load(module: VideoAutoencoder, params: Mapping[str, np.ndarray]) -> None:
    """Copies jaxtrain's parameters into the PyTorch module, which has the same names."""
    state = {}
    for name, array in params.items():
        if name.endswith(".kernel"):
            name, array = f"{name.removesuffix('.kernel')}.weight", _kernel(name, array)
        state[name] = torch.from_numpy(np.ascontiguousarray(array))
    module.load_state_dict(state)


def _kernel(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 2:  # pooling and growing: [in, out]
        return array.T[:, :, None, None]
    if ".conv1." in name:  # outputs for this and the next frame -> stacked inputs
        array = np.concatenate(np.split(array, 2, axis=3), axis=2)
    return array.transpose(3, 2, 0, 1)
