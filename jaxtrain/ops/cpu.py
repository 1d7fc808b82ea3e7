"""Tuning for CPUs: memory, compiler options, gradients of convolutions. A GPU uses none of it."""

import ctypes
import functools
import platform
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops.per_device import Wanted

# ---- Memory

# Parameters of mallopt (malloc.h of the GNU C library).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed() -> bool:
    """Makes this process keep freed memory for its next allocations.

    On a CPU, XLA allocates a step's temporaries in every step. The C library takes blocks above 32
    MiB from the system and returns them at once, so each step touches all its pages for the first
    time: 86,000 page faults for `demo`, a fifth of the step's processor time. The cost is that the
    process never shrinks; its peak does not grow.

    It has one arena, because only the first can hold large blocks without calling the system. Call
    this before jax looks for devices: threads that have an arena by then keep it.

    Returns:
        Whether it was possible: only with the GNU C library, on Linux.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
    return all(mallopt(name, value) == 1 for name, value in settings)


# ---- Compiler options

# What XLA passes to YNNPACK on CPUs: not INDIVIDUAL_CONVOLUTION, which is on by default, and not
# ELTWISE, which includes every convolution that an elementwise operation follows.
_YNN = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "REDUCE"))

COMPILER_OPTIONS = {
    "xla_backend_optimization_level": "1",
    "xla_cpu_experimental_ynn_fusion_type": _YNN,
}
"""LLVM's level 1 compiles the demo's step in two thirds of the default's time, and the step is as
fast, because convolutions and matmuls are library calls. Level 0 computes some wrong numbers (jax
0.12.0: a PSNR off by 0.04%). Convolutions run in Eigen, not in YNNPACK, XLA's library for CPUs,
which uses a single thread for up to 80 output channels and takes five times as long for a kernel's
gradient."""


# ---- Gradients of a convolution
#
# Shapes: N images, H height, W width, I input and O output channels; P row phases and Q column
# phases.


def border(side: int) -> int:
    """Returns the zero border of `jaxtrain.ops.convolution.conv`, in pixels, for K taps."""
    return (side - 1) // 2


def conv_gradients(
    x_NHWI: jax.Array,
    kernel: jax.Array,
    grad_NHWO: jax.Array,
    *,
    stride: int,
    wanted: Wanted,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of `jaxtrain.ops.convolution.conv`.

    Args:
        kernel: [K, K, I, O].
        stride: 1 or 2.

    Returns:
        Gradients of the images and of the kernel; None for one that is not needed.
    """
    grad_x = _by_phases(grad_NHWO, kernel, stride, x_NHWI.shape) if wanted.of_rows else None
    if not wanted.of_shared:
        return grad_x, None
    # <conv(x, kernel), grad> = <x, by_phases(grad, kernel)>: either side gives the kernel's
    # gradient. Eigen extracts patches of conv's x or by_phases' grad: fewer channels, less work.
    inputs, outputs = kernel.shape[2:]
    if stride > 1 or outputs < inputs:
        by_phases = functools.partial(_by_phases, stride=stride, shape=x_NHWI.shape)
        (grad_kernel,) = jax.linear_transpose(lambda k: by_phases(grad_NHWO, k), kernel)(x_NHWI)
    else:
        padding = ((border(kernel.shape[0]),) * 2,) * 2
        (grad_kernel,) = jax.linear_transpose(lambda k: _conv(x_NHWI, k, padding), kernel)(
            grad_NHWO
        )
    return grad_x, grad_kernel


Padding = tuple[tuple[int, int], tuple[int, int]]


def _conv(x_NHWI: jax.Array, kernel: jax.Array, padding: Padding) -> jax.Array:
    """Convolves; it and its gradient of the kernel are in the layout that Eigen takes.

    XLA for CPUs brings other layouts to it, but not those in loops: there, its own convolution
    takes 40 ms for gradients of kernels that take Eigen 3.
    """

    def conv(images: jax.Array, kernel: jax.Array) -> jax.Array:
        axes = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(images, kernel, (1, 1), padding, dimension_numbers=axes)

    def grad_kernel(x_NHWI: jax.Array, grad_NHWO: jax.Array) -> jax.Array:
        grad_IHWO = conv(x_NHWI.transpose(3, 1, 2, 0), grad_NHWO.transpose(1, 2, 0, 3))
        return grad_IHWO.transpose(1, 2, 0, 3)

    return jax.custom_derivatives.linear_call(conv, grad_kernel, x_NHWI, kernel)


def _by_phases(
    grad_NHWO: jax.Array, kernel: jax.Array, stride: int, shape: tuple[int, ...]
) -> jax.Array:
    """Computes the gradient of images of `shape`, separately for even and odd rows and columns.

    Each is a dense convolution with the part of the kernel that reaches these pixels. XLA's version
    for CPUs puts zeros between the pixels of a strided gradient, and uses one thread.
    """
    n, height, width, channels = shape
    rows = [_phase(p, stride, kernel.shape[0], grad_NHWO.shape[1], height) for p in range(stride)]
    columns = [_phase(p, stride, kernel.shape[1], grad_NHWO.shape[2], width) for p in range(stride)]

    def pixel(row: _Phase, column: _Phase) -> jax.Array:
        taps_HWOI = kernel[row.taps, column.taps].swapaxes(2, 3)
        padding, images = (row.padding, column.padding), grad_NHWO
        if not border(kernel.shape[0]):
            # The result is larger than the gradient. XLA would exchange both in the kernel's
            # gradient, and then not call Eigen: the decoder's last layers took 82 instead of 12 ms.
            images = jnp.pad(images, ((0, 0), *padding, (0, 0)))
            padding = ((0, 0), (0, 0))
        return _conv(images, taps_HWOI, padding)

    if stride == 1:
        return pixel(rows[0], columns[0])
    by_row = [jnp.stack([pixel(row, column) for column in columns], axis=3) for row in rows]
    x_NHPWQI = jnp.stack(by_row, axis=2)
    _, h, p, w, q, _ = x_NHPWQI.shape
    return x_NHPWQI.reshape(n, h * p, w * q, channels)[:, :height, :width]


class _Phase(NamedTuple):
    """Every `stride`-th row or column of the images.

    Attributes:
        taps: the kernel's rows that reach it, from last to first.
        padding: of the gradient, before and after; negative if its last row is not needed.
    """

    taps: slice
    padding: tuple[int, int]


def _phase(number: int, stride: int, side: int, outputs: int, inputs: int) -> _Phase:
    """Returns the phase of the input rows that are `number` modulo `stride`.

    Output row h read input row stride h - border with tap 0, the next one with tap 1, and so on.

    Args:
        number: 0 to stride - 1.
        outputs: number of rows of the gradient.
        inputs: number of rows of the images.
    """
    first = (number + border(side)) % stride
    count = len(range(first, side, stride))
    last = first + (count - 1) * stride
    before = (last - border(side) - number) // stride
    behind = -(-inputs // stride) + count - 1 - outputs - before
    return _Phase(slice(last, first - 1 if first else None, -stride), (before, behind))
