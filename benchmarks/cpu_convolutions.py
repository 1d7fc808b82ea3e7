"""Times the convolutions of the video autoencoder on a CPU: XLA's against PyTorch's (oneDNN).

    python benchmarks/cpu_convolutions.py [--frames N] [--side N] [--clips N] [--rounds N]

The shapes are those of the network in PyTorch (`torch_video_ae.py`), each once: forward, the
input's gradient and the kernel's gradient. Both sides alternate in one process. Prints the least
CPU time of each, which other work on the machine hardly changes, in GFLOP per CPU second, and the
sums over all layers of the network.
"""

import argparse
import collections
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would count as CPU time

import common_start  # noqa: F401
import jax
import numpy as np
import torch
import torch_video_ae
from torch import nn

from jaxtrain import config
from jaxtrain.ops import convolution, cpu
from jaxtrain.ops.per_device import Wanted
from jaxtrain.xla import options

_PASSES = ("forward", "input's gradient", "kernel's gradient")

Shape = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of the images [N, C, H, W] and of the kernel [O, I, K, K], and the stride."""


def main() -> None:
    """Times all shapes and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=12, help="frames per clip (default: 12)")
    parser.add_argument("--side", type=int, default=64, help="height and width (default: 64)")
    parser.add_argument("--clips", type=int, default=2, help="clips (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements (default: 5)")
    flags = parser.parse_args()
    cpu.keep_freed()
    print("| images | kernel | stride | layers | " + " | ".join(_PASSES) + " |")
    print("|---|---|---|---|" + "---|" * len(_PASSES))
    sums = np.zeros((len(_PASSES), 2))
    for shape, count in _shapes(flags.clips, flags.frames, flags.side).items():
        images, kernel, stride = shape
        size = -(-images[2] // stride) * -(-images[3] // stride)
        flops = 2 * images[0] * size * int(np.prod(kernel))
        found = _measured(shape, flags.rounds)
        sums += count * found
        cells = [f"{flops / 1e9 / ours:.0f} / {flops / 1e9 / theirs:.0f}" for ours, theirs in found]
        print(
            f"| {images} | {kernel} | {stride} | {count} | " + " | ".join(cells) + " |", flush=True
        )
    cells = [
        f"{ours:.3f} / {theirs:.3f} s, {theirs / ours:.2f} times as fast" for ours, theirs in sums
    ]
    print("| all | | | | " + " | ".join(cells) + " |")
    ours, theirs = sums.sum(0)
    print(f"all convolutions: ours {ours:.3f} s, theirs {theirs:.3f} s: {theirs / ours:.2f} times")


def _shapes(clips: int, frames: int, side: int) -> dict[Shape, int]:
    """Returns the shapes of all convolutions of 3x3, and the number of layers of each."""
    model = config.named("h100_8").model
    module = torch_video_ae.VideoAutoencoder(
        model.encoder_width, model.decoder_widths, model.latent_channels, 1.0
    )
    found: collections.Counter[Shape] = collections.Counter()

    def record(layer: nn.Module, given: Any, _: Any) -> None:
        assert isinstance(layer, nn.Conv2d)
        if layer.kernel_size != (1, 1):
            found[tuple(given[0].shape), tuple(layer.weight.shape), layer.stride[0]] += 1

    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(record)
    with torch.no_grad():
        module(torch.zeros((clips, frames, side, side, 3), dtype=torch.uint8))
    return dict(found)


def _measured(shape: Shape, rounds: int) -> np.ndarray:
    """Returns the least CPU seconds of each pass, ours and theirs."""
    (n, inputs, high, wide), (outputs, _, taps, _), stride = shape
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, high, wide, inputs), np.float32)
    kernel = rng.standard_normal((taps, taps, inputs, outputs), np.float32)
    ours, theirs = _ours(x, kernel, stride), _theirs(x, kernel, stride)
    took = np.full((len(_PASSES), 2), np.inf)
    for turn in range(rounds + 1):
        for side, passes in enumerate((ours, theirs)):
            for number, call in enumerate(passes):
                began = time.process_time()
                call()
                if turn:  # the first one compiles, and chooses kernels
                    took[number, side] = min(took[number, side], time.process_time() - began)
    return took


def _ours(x: np.ndarray, kernel: np.ndarray, stride: int) -> list[Callable[[], Any]]:
    jit = lambda function: jax.jit(function, compiler_options=options.options("cpu"))  # noqa: E731
    forward = jit(lambda x, kernel: convolution.conv(x, kernel, stride))
    x, kernel = jax.device_put((x, kernel))
    grad = jax.block_until_ready(forward(x, kernel))

    def gradient(wanted: Wanted) -> Any:
        return jit(
            lambda *rows: convolution.gradients(rows[:2], rows[2], stride=stride, wanted=wanted)
        )

    by_x, by_kernel = gradient(Wanted(True, False)), gradient(Wanted(False, True))
    return [
        lambda: jax.block_until_ready(forward(x, kernel)),
        lambda: jax.block_until_ready(by_x(x, grad, kernel)),
        lambda: jax.block_until_ready(by_kernel(x, grad, kernel)),
    ]


def _theirs(x: np.ndarray, kernel: np.ndarray, stride: int) -> list[Callable[[], Any]]:
    like = {"memory_format": torch.channels_last}
    x_t = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(**like)
    kernel_t = torch.from_numpy(kernel).permute(3, 2, 0, 1).contiguous(**like)
    grad = nn.functional.conv2d(x_t, kernel_t, stride=stride, padding=1)

    def gradient(of_x: bool, of_kernel: bool) -> Any:
        return torch.ops.aten.convolution_backward(
            *(grad, x_t, kernel_t, None, (stride, stride), (1, 1), (1, 1), False, (0, 0), 1),
            (of_x, of_kernel, False),
        )

    return [
        lambda: nn.functional.conv2d(x_t, kernel_t, stride=stride, padding=1),
        lambda: gradient(True, False),
        lambda: gradient(False, True),
    ]


if __name__ == "__main__":
    main()
