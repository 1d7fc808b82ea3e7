"""Tests the convolution: its gradients, and its computation and communication per device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.ops import convolution, cpu, per_device


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def by_windows(x: Any, kernel: Any, grad: Any, stride: int) -> tuple[Any, Any]:
    """Computes gradients by definition in float64: a sum over windows of the padded input."""
    border = (kernel.shape[0] - 1) // 2
    x_pad = np.pad(np.float64(x), ((0, 0), (border, border), (border, border), (0, 0)))
    kernel, grad = np.float64(kernel), np.float64(grad)
    of_x, of_kernel = np.zeros_like(x_pad), np.zeros_like(kernel)
    side = kernel.shape[0]
    for h, w in np.ndindex(*grad.shape[1:3]):
        window = np.s_[:, stride * h : stride * h + side, stride * w : stride * w + side]
        of_x[window] += np.einsum("no,abio->nabi", grad[:, h, w], kernel)
        of_kernel += np.einsum("nabi,no->abio", x_pad[window], grad[:, h, w])
    return of_x[:, border : x.shape[1] + border, border : x.shape[2] + border], of_kernel


@pytest.mark.parametrize(
    ("side", "stride", "height", "width"),
    [
        (3, 1, 8, 6),
        (3, 2, 16, 12),
        (3, 2, 7, 11),
        (4, 2, 16, 12),
        (4, 1, 8, 6),
        (4, 2, 7, 11),
        (2, 1, 8, 6),
    ],
)
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (5, 3)])
@pytest.mark.parametrize("options", [{}, cpu.COMPILER_OPTIONS])
def test_the_gradients_match_a_sum_over_windows(
    options: Any, inputs: int, outputs: int, side: int, stride: int, height: int, width: int
) -> None:
    """Covers both implementations: XLA's own choice and ours."""
    border = (side - 1) // 2
    out = tuple((size + 2 * border - side) // stride + 1 for size in (height, width))
    shapes = (2, height, width, inputs), (side, side, inputs, outputs), (2, *out, outputs)
    x, kernel, grad = arrays(0, *shapes)

    def gradients(x: Any, kernel: Any, grad: Any) -> Any:
        return jax.vjp(lambda x, k: convolution.conv(x, k, stride), x, kernel)[1](grad)

    found = jax.jit(gradients, compiler_options=options)(x, kernel, grad)
    for got, want in zip(found, by_windows(x, kernel, grad, stride), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_bfloat16_gradients_are_summed_in_float32(stride: int) -> None:
    side = 32 * stride
    x, kernel, grad = arrays(1, (2, side, side, 2), (3, 3, 2, 2), (2, 32, 32, 2))
    low = [array.astype(jnp.bfloat16) for array in (x, kernel, grad)]
    y, pull = jax.vjp(lambda x, k: convolution.conv(x, k, stride), *low[:2])
    found = pull(low[2])
    assert [array.dtype for array in (y, *found)] == [jnp.bfloat16] * 3
    wide = [array.astype(jnp.float32) for array in low]
    want = by_windows(wide[0], wide[1], wide[2], stride)[1]
    # Rounded to bfloat16 once at the end; rounding after each of 2048 summands would be far off.
    np.testing.assert_allclose(found[1].astype(jnp.float32), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(2, 2, 1), (4, 2, 1), (2, 2, 2)])
def test_images_are_not_sent_between_devices(inputs: int, outputs: int, stride: int) -> None:
    """For sharded images, only the kernel's gradient is summed over devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("data",), ()))
    x, kernel = arrays(0, (16, 64, 32, inputs), (3, 3, inputs, outputs))
    gradient = jax.grad(lambda k, x: (convolution.conv(x, k, stride) ** 2).sum(), argnums=(0, 1))
    sharded = jax.jit(gradient, in_shardings=(whole, rows), out_shardings=(whole, rows))
    program = sharded.lower(kernel, x).compile()
    text = program.as_text()
    assert text is not None
    assert "all-reduce" in text
    assert not re.findall("all-gather|all-to-all|collective-permute", text)
    placed = program(jax.device_put(kernel, whole), jax.device_put(x, rows))
    for found, wanted in zip(placed, gradient(kernel, x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_only_gpus_insert_zeros_between_the_pixels_of_a_strided_gradient(platform: str) -> None:
    x, kernel = arrays(6, (2, 8, 6, 3), (3, 3, 3, 5))

    def gradients(x: Any, kernel: Any) -> Any:
        with per_device.tracing(platform=platform):
            return jax.grad(lambda x, k: convolution.conv(x, k, 2).sum(), (0, 1))(x, kernel)

    text = jax.jit(gradients).trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
    zeros = re.findall(r"[lr]hs_dilate = \[2, 2\]", text)
    assert len(zeros) == (2 if platform == "cuda" else 0)
    assert text.count("stablehlo.convolution") == (2 if platform == "cuda" else 8)


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(3, 5, 1), (5, 3, 1), (3, 5, 2)])
def test_convolutions_in_a_loop_have_the_layout_that_eigen_takes(
    inputs: int, outputs: int, stride: int
) -> None:
    """XLA for CPUs changes the layout of others only outside of loops."""

    def in_loop(x: Any, kernel: Any) -> Any:
        def loss(x: Any, kernel: Any) -> Any:
            return (convolution.conv(x, kernel, stride) ** 2).sum()

        def body(carry: Any, _: None) -> Any:
            return jax.tree.map(jnp.subtract, carry, jax.grad(loss, (0, 1))(*carry)), None

        return jax.lax.scan(body, (x, kernel), length=3)[0]

    x, kernel = arrays(8, (2, 8, 6, inputs), (3, 3, inputs, outputs))
    compiled = jax.jit(in_loop, compiler_options=cpu.COMPILER_OPTIONS).lower(x, kernel).compile()
    text = compiled.as_text()
    assert text is not None
    layouts = re.findall(r" convolution\(.*dim_labels=(\w+->\w+)", text)
    assert len(layouts) >= 3
    assert set(layouts) == {"b01f_01io->b01f"}


def test_gradients_of_a_folded_kernel_are_summed_in_the_dtype_of_its_parts() -> None:
    """They also equal the kernel's gradient, mapped back to the parts."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("rows",), ()))
    x, matrix, kernel, grad = arrays(7, (16, 8, 6, 3), (3, 11), (3, 3, 11, 5), (16, 8, 6, 5))

    def fold(parts: Any) -> Any:
        return jnp.einsum("im,yxmo->yxio", parts[0], parts[1].astype(jnp.float32))

    def gradients(x: Any, parts: Any, grad: Any) -> Any:
        with per_device.tracing(platform="cuda", mesh=mesh):
            pull = jax.vjp(lambda x, p: convolution.folded_conv(x, p, fold, 1), x, parts)[1]
            return pull(grad)

    program = jax.jit(gradients, in_shardings=(rows, whole, rows), out_shardings=(rows, whole))
    low = program.lower(x, (matrix, kernel.astype(jnp.bfloat16)), grad).as_text()
    sums = re.findall(r"stablehlo.reduce\(.*\(tensor<8x(\S+)>,", low)
    assert sorted(sums) == ["3x11xf32", "3x3x11x5xbf16"]

    parts = (matrix, kernel)
    placed = [jax.device_put(x, rows), jax.device_put(parts, whole), jax.device_put(grad, rows)]
    of_x, of_parts = program(*placed)
    wanted, of_kernel = by_windows(x, fold(parts), grad, 1)
    np.testing.assert_allclose(of_x, wanted, rtol=1e-5, atol=1e-4)
    (unfolded,) = jax.vjp(fold, parts)[1](jnp.asarray(of_kernel, jnp.float32))
    for found, want in zip(of_parts, unfolded, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("argument", "convolutions"), [(0, 1), (1, 1), ((0, 1), 2)])
def test_only_requested_gradients_are_computed(argument: Any, convolutions: int) -> None:
    """The barrier would keep the others alive, which are otherwise dead code."""
    x, kernel = arrays(5, (8, 8, 6, 3), (3, 3, 3, 5))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",), axis_types=(AxisType.Auto,))

    def gradient(x: Any, kernel: Any) -> Any:
        with per_device.tracing(platform="cuda", mesh=mesh):
            return jax.grad(lambda x, k: convolution.conv(x, k).sum(), argnums=argument)(x, kernel)

    traced = jax.jit(gradient).trace(x, kernel)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.optimization_barrier") == 1
    assert text.count("stablehlo.convolution") == convolutions  # none for the loss itself
    plain = by_windows(x, kernel, jnp.ones((8, 8, 6, 5)), 1)
    found = jax.jit(gradient)(x, kernel)
    wanted = plain if argument == (0, 1) else (plain[argument],)
    for got, want in zip(found if argument == (0, 1) else (found,), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("images", "together"), [(16, True), (4, False)])
def test_gpus_compute_both_gradients_together(images: int, together: bool, stride: int) -> None:
    """Each device computes those of its own images, if the images divide evenly."""
    devices = jax.devices()
    assert len(devices) == 8
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    rows = NamedSharding(mesh, PartitionSpec(("a", "b") if together else ()))
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = ((images, 8, 6, 3), (3, 3, 3, 5), (images, 8 // stride, 6 // stride, 5))
    x, kernel, grad = arrays(4, *shapes)

    def gradients(x: Any, kernel: Any, grad: Any) -> Any:
        with per_device.tracing(platform="gpu", mesh=mesh):
            return jax.vjp(lambda x, k: convolution.conv(x, k, stride), x, kernel)[1](grad)

    lowered = jax.jit(
        gradients, in_shardings=(rows, whole, rows), out_shardings=(rows, whole)
    ).lower(x, kernel, grad)
    assert ("optimization_barrier" in lowered.as_text()) == together
    program = lowered.compile()
    text = program.as_text()
    assert text is not None
    assert not re.findall("all-gather|all-to-all|collective-permute", text)
    placed = [jax.device_put(x, rows), jax.device_put(kernel, whole), jax.device_put(grad, rows)]
    wanted = by_windows(x, kernel, grad, stride)
    for found, want in zip(program(*placed), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
