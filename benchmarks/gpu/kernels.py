"""Times single kernels of the video autoencoder's step on one GPU.

    python benchmarks/gpu/kernels.py [--results FILE] [--json FILE] [--tiny]

Convolutions with few channels on one side, as they are and padded; enlarging convolutions with 3x3
kernels, of which 5 of 9 taps are zeros, and with 2x2 kernels; the gradient of a ReLU with the sum
for the bias, by XLA and by a Pallas kernel. Each in every direction, with the rate of its FLOPs or
bytes.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import results
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain.bench import timing

# Frames, height, width, input channels, output channels, side of the kernel; of a step of 8 clips.
THIN = {
    **{f"first, {n} channels": (48, 480, 720, n, 128, 3) for n in (6, 8, 16)},
    **{f"last, {n} channels": (40, 240, 360, 256, n, 3) for n in (12, 16, 32)},
}
ENLARGING = {
    f"{inputs} to {outputs}, {side}x{side}": (frames, height, width, inputs, outputs, side)
    for frames, height, width, inputs, outputs in (
        *((40, 240, 360, 64, 256), (24, 120, 180, 128, 512), (40, 240, 360, 256, 16)),
    )
    for side in (3, 2)
}
MASKED = (48, 240, 360, 64)
Specs = tuple[jax.ShapeDtypeStruct, ...]
_CALLS = 20
_BLOCK = 256  # pixels per program of the Pallas kernel


def convolution(x_NHWC: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves a padded input, without more padding, as XLA hands it to cuDNN best."""
    return lax.conv_general_dilated(
        x_NHWC, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def directions(shape: tuple[int, ...]) -> dict[str, tuple[Callable[..., Any], Specs]]:
    """Returns direction -> a function and the shapes of its arguments."""
    frames, height, width, inputs, outputs, side = shape
    # 2x2 kernels compute one row and column more: squares that are shifted by a pixel.
    more = 2 if side == 3 or inputs < outputs else 1
    x = jax.ShapeDtypeStruct((frames, height + more, width + more, inputs), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((side, side, inputs, outputs), jnp.bfloat16)
    grad = jax.eval_shape(convolution, x, kernel)

    def of_input(kernel: jax.Array, grad: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: convolution(x, kernel), x)(grad)[0]

    def of_kernel(x: jax.Array, grad: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda kernel: convolution(x, kernel), kernel)(grad)[0]

    return {
        "forward": (convolution, (x, kernel)),
        "gradient of the input": (of_input, (kernel, grad)),
        "gradient of the kernel": (of_kernel, (x, grad)),
    }


def masked_by_xla(y: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of a ReLU, and its sum over all pixels in float32."""
    masked = jnp.where(y > 0, grad, 0)
    return masked, masked.astype(jnp.float32).sum(0)


def masked_by_pallas(
    y: jax.Array, grad: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The same in one pass; each program sums the pixels of its block."""
    pixels, channels = y.shape
    block = next(size for size in (_BLOCK, 64, 8, 1) if pixels % size == 0)
    of_block = pl.BlockSpec((block, channels), lambda number: (number, 0))

    def kernel(y_ref: Any, grad_ref: Any, masked_ref: Any, sum_ref: Any) -> None:
        masked = jnp.where(y_ref[...] > 0, grad_ref[...], jnp.zeros((), y.dtype))
        masked_ref[...] = masked
        sum_ref[...] = masked.astype(jnp.float32).sum(0, keepdims=True)

    options: dict[str, Any] = {"interpret": interpret}
    if not interpret:
        from jax.experimental.pallas import triton

        options["compiler_params"] = triton.CompilerParams(num_warps=8)
    masked, sums = pl.pallas_call(
        kernel,
        grid=(pixels // block,),
        in_specs=[of_block, of_block],
        out_specs=[of_block, pl.BlockSpec((1, channels), lambda number: (number, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(y.shape, y.dtype),
            jax.ShapeDtypeStruct((pixels // block, channels), jnp.float32),
        ],
        **options,
    )(y, grad)
    return masked, sums.sum(0)


def random(specs: Specs) -> list[jax.Array]:
    """Returns random arrays: a GPU computes zeros faster."""
    keys = jax.random.split(jax.random.key(0), len(specs))
    drawn = zip(keys, specs, strict=True)
    return [jax.random.normal(key, spec.shape, spec.dtype) for key, spec in drawn]


def milliseconds(function: Callable[..., Any], specs: Specs, calls: int) -> float:
    """Times a function whose calls are queued back to back; the median of several times."""
    compiled, arguments = jax.jit(function).lower(*specs).compile(), random(specs)

    def action() -> None:
        for _ in range(calls):
            made = compiled(*arguments)  # replaces the last result, which may be gigabytes
        jax.block_until_ready(made)

    times = timing.measure(action, at_least=3, at_most_s=0.5, at_most=20)
    return 1000 * times.median_s / calls


def smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape with one frame of 16 x 24 pixels."""
    return (1, 16, 24, *shape[3:])


def measured(*, tiny: bool) -> Iterator[tuple[str, str]]:
    """Yields each kernel and its result, the most valuable first."""
    calls = 1 if tiny else _CALLS
    for name, shape in (THIN | ENLARGING).items():
        sizes = smaller(shape) if tiny else shape
        parts = []
        for direction, (function, specs) in directions(sizes).items():
            took = milliseconds(function, specs, calls)
            frames, height, width, inputs, outputs, side = sizes
            flops = 2.0 * frames * height * width * inputs * outputs * side**2
            parts.append(f"{direction} {took:.3f} ms ({flops / took / 1e9:.0f} TFLOP/s)")
        yield f"convolution {name}", ", ".join(parts)
    frames, height, width, channels = smaller(MASKED) if tiny else MASKED
    pair = (jax.ShapeDtypeStruct((frames * height * width, channels), jnp.bfloat16),) * 2
    by_pallas = functools.partial(masked_by_pallas, interpret=tiny)
    for name, function in (("XLA", masked_by_xla), ("Pallas", by_pallas)):
        took = milliseconds(function, pair, calls)
        moved = 3 * 2 * frames * height * width * channels
        yield f"mask and sum by {name}", f"{took:.3f} ms, {moved / took / 1e9:.2f} TB/s"
    arrays = random(pair)
    sums = [jax.jit(function)(*arrays)[1] for function in (masked_by_xla, by_pallas)]
    difference = float(jnp.abs(sums[0] - sums[1]).max() / jnp.abs(sums[0]).max())
    yield "mask and sum: largest difference of the sums", f"{difference:.1e}"


def main() -> None:
    """Prints and records a row for each kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    flags = parser.parse_args()
    kind = jax.devices()[0].device_kind
    listed = {}
    for what, result in measured(tiny=flags.tiny):
        print(f"{what}: {result}", flush=True)
        listed[what] = result
        if flags.results:
            command = "python benchmarks/gpu/kernels.py"
            results.append_row(flags.results, kind, what, result, command)
        if flags.json:
            flags.json.write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main()
