"""Tuning for CPUs: memory, compiler options, gradients of convolutions. A GPU uses none of it."""

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops.per_device import Wanted

# ---- Memory

# Of mallopt (malloc.h of the GNU C library).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed() -> bool:
    """Has this process keep the memory that it frees, for its next allocation.

    On a CPU, XLA allocates a step's temporaries again each step. Blocks above 32 MiB the C library
    takes from the system and gives back at once, so each step touches all its pages for the first
    time: for `demo` 86,000 page faults, a fifth of the step's processor time. The price is that the
    process stays as large as it once was; its peak does not grow.

    One arena, because only the first of them can hold large blocks without asking the system. Call
    it before jax looks for devices: threads that have an arena by then keep it.

    Returns:
        Whether it was possible: with the GNU C library only, on Linux.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
    return all(mallopt(name, value) == 1 for name, value in settings)


# ---- Compiler options

# What XLA hands to YNNPACK on CPUs: not INDIVIDUAL_CONVOLUTION, which it does by default, and not
# ELTWISE, with which every convolution goes there that has an elementwise operation behind it.
_YNN = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "REDUCE"))

COMPILER_OPTIONS = {
    "xla_backend_optimization_level": "1",
    "xla_cpu_experimental_ynn_fusion_type": _YNN,
}
"""LLVM's level 1 compiles the demo's step in two thirds of the time of the default and the step is
as fast, because convolutions and products are library calls. Level 0 computes wrong numbers in
places (jax 0.12.0: a PSNR off by 0.04%). And YNNPACK, XLA's library for CPUs, gets no convolutions:
it gives one of up to 80 output channels a single thread, and takes five times as long for a
kernel's gradient as Eigen does, which then has them."""


# ---- Gradients of a convolution
#
# Shapes: N images, H height, W width, I input and O output channels; P and Q phases of rows and of
# columns.


def conv_gradients(
    x_NHWI: jax.Array,
    kernel: jax.Array,
    grad_NHWO: jax.Array,
    conv: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    stride: int,
    wanted: Wanted,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Gradients of `jaxtrain.ops.convolution.conv`, with a border of one pixel.

    Args:
        x_NHWI: images.
        kernel: [K, K, I, O].
        grad_NHWO: gradient of the convolution's result.
        conv: that convolution, of (images, kernel).
        stride: 1 or 2.
        wanted: which of the two gradients are needed.

    Returns:
        Of the images and of the kernel; None for one that is not needed.
    """
    by_phases = functools.partial(_by_phases, stride=stride, shape=x_NHWI.shape)
    grad_x = by_phases(grad_NHWO, kernel) if wanted.of_rows else None
    if not wanted.of_shared:
        return grad_x, None
    # <conv(x, kernel), grad> = <x, by_phases(grad, kernel)>: both have the kernel's gradient.
    # Eigen makes patches of conv's x or by_phases' grad: fewer channels are less work.
    inputs, outputs = kernel.shape[2:]
    if stride > 1 or outputs < inputs:
        (grad_kernel,) = jax.linear_transpose(lambda k: by_phases(grad_NHWO, k), kernel)(x_NHWI)
    else:
        (grad_kernel,) = jax.linear_transpose(lambda k: conv(x_NHWI, k), kernel)(grad_NHWO)
    return grad_x, grad_kernel


def _by_phases(
    grad_NHWO: jax.Array, kernel: jax.Array, *, stride: int, shape: tuple[int, ...]
) -> jax.Array:
    """The gradient of images of `shape`, those of even and of odd rows and columns by themselves.

    Each is a dense convolution with the part of the kernel that reaches such pixels. XLA's own for
    CPUs puts zeros between the pixels of a strided gradient, and computes with them on one thread.
    """
    n, height, width, channels = shape
    rows = [_phase(p, stride, kernel.shape[0], grad_NHWO.shape[1], height) for p in range(stride)]
    columns = [_phase(p, stride, kernel.shape[1], grad_NHWO.shape[2], width) for p in range(stride)]

    def one(row: _Phase, column: _Phase) -> jax.Array:
        part = kernel[row.taps, column.taps]
        padding = (row.padding, column.padding)
        return lax.conv_general_dilated(
            grad_NHWO, part, (1, 1), padding, dimension_numbers=("NHWC", "HWOI", "NHWC")
        )

    if stride == 1:
        return one(rows[0], columns[0])
    by_row = [jnp.stack([one(row, column) for column in columns], axis=3) for row in rows]
    x_NHPWQI = jnp.stack(by_row, axis=2)
    _, h, p, w, q, _ = x_NHPWQI.shape
    return x_NHPWQI.reshape(n, h * p, w * q, channels)[:, :height, :width]


class _Phase(NamedTuple):
    """Every `stride`th row, or column, of the images.

    Attributes:
        taps: the kernel's rows that reach it, from the last one to the first.
        padding: of the gradient, before and behind; negative where its last row is not needed.
    """

    taps: slice
    padding: tuple[int, int]


def _phase(number: int, stride: int, side: int, outputs: int, inputs: int) -> _Phase:
    """Of `inputs` rows those that are `number` modulo `stride`, by the gradient's `outputs` rows.

    Output row h saw input row stride h - 1 by tap 0, the next one by tap 1, and so on up to `side`.
    """
    first = (number + 1) % stride
    count = len(range(first, side, stride))
    last = first + (count - 1) * stride
    before = (last - 1 - number) // stride
    behind = -(-inputs // stride) + count - 1 - outputs - before
    return _Phase(slice(last, first - 1 if first else None, -stride), (before, behind))
