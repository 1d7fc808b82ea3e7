"""Counting FLOPs and bytes of compiled instructions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtrain.planning import flops
from jaxtrain.xla import operations

X = jax.ShapeDtypeStruct((4, 32, 32, 8), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 8, 16), jnp.float32)

FIXTURES = Path(__file__).parents[1] / "fixtures"
GPU = (FIXTURES / "gpu_calls.hlo").read_text()


def of(function: object, *inputs: jax.ShapeDtypeStruct) -> tuple[list[operations.Cost], float]:
    """Compiles a function; returns its costs, and the FLOPs of its matmuls by its trace."""
    traced = jax.jit(function).trace(*inputs)  # type: ignore[arg-type]
    return operations.costs(traced.lower().compile().as_text()), flops.product_flops(traced.jaxpr)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_flops_of_convolutions_and_their_gradients_equal_those_of_the_trace(stride: int) -> None:
    def both(x: jax.Array, kernel: jax.Array) -> object:
        return jax.value_and_grad(lambda *of: conv(*of, stride=stride).sum(), argnums=(0, 1))(
            x, kernel
        )

    found, flops = of(both, X, KERNEL)
    assert operations.totals(found)["convolution f32"].flops == pytest.approx(flops, rel=1e-6)


def test_a_loop_counts_each_iteration_and_only_the_slices_it_reads() -> None:
    """Ten matmuls with one slice each of a [10, 64, 64] array."""

    def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    found, flops = of(
        scanned,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((10, 64, 64), jnp.float32),
    )
    totals = operations.totals(found)
    assert totals["matmul f32"].flops == flops == 10 * 2 * 64**3
    matrix = 64 * 64 * 4
    # Per iteration: the slice is read and written, the matmul reads two and writes one, tanh reads
    # and writes one; XLA may copy the carried matrix.
    assert sum(one.moved for one in totals.values()) < 10 * 12 * matrix


def test_bytes_moved_include_loops_but_not_the_inside_of_fusions() -> None:
    body = (16 + 64 + 16) + 16 + 8  # the gather with its operand, the fusion, the scatter
    program = (FIXTURES / "program.hlo").read_text()
    assert operations.moved_bytes(program) == 3 * body + (40 + 40) + (40 + 40)


def test_overlapping_slices_of_an_operand_count_it_once() -> None:
    text = """HloModule m

%neighbors (p: f32[100]) -> f32[90] {
  %p = f32[100]{0} parameter(0)
  %left = f32[90]{0} slice(%p), slice={[0:90]}
  %right = f32[90]{0} slice(%p), slice={[10:100]}
  ROOT %sum = f32[90]{0} add(%left, %right)
}

ENTRY %main (x: f32[100]) -> f32[90] {
  %x = f32[100]{0} parameter(0)
  ROOT %y = f32[90]{0} fusion(%x), kind=kLoop, calls=%neighbors
}
"""
    assert operations.moved_bytes(text) == 4 * (100 + 90)
    part = text.replace("slice(%p), slice={[10:100]}", "negate(%left)")
    assert operations.moved_bytes(part) == 4 * (90 + 90)


def test_an_operand_that_appears_twice_is_read_once() -> None:
    text = """HloModule m

ENTRY %main (x: f32[100], y: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %y = f32[100]{0} parameter(1)
  ROOT %z = f32[100]{0} multiply(%x, %x)
}
"""
    assert operations.moved_bytes(text) == 4 * (100 + 100)
    other = text.replace("multiply(%x, %x)", "multiply(%x, %y)")
    assert operations.moved_bytes(other) == 4 * (100 + 100 + 100)


def test_an_update_in_place_counts_the_new_part() -> None:
    def write(x: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x, row * 2, at, 0)

    inputs = (
        jax.ShapeDtypeStruct((1000, 256), jnp.float32),
        jax.ShapeDtypeStruct((256,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    text = jax.jit(write, donate_argnums=0).lower(*inputs).compile().as_text()
    assert sum(one.moved for one in operations.costs(text)) < 10 * 256 * 4


def test_calls_of_gpu_libraries_are_classified_and_counted() -> None:
    totals = operations.totals(operations.costs(GPU))
    one = 2 * 2 * 8 * 8 * 6 * 3 * 3 * 4  # the same for a convolution and each of its gradients
    assert totals["convolution bf16"].flops == 3 * one
    assert totals["convolution bf16"].calls == 3
    assert totals["matmul bf16"].flops == 2 * 2 * 8 * 16 * 32  # cuBLAS's, and the fused one
    assert totals["attention"].flops == 2 * 2 * (2 * 4 * 64 * 64 * 16)
    assert set(totals) == {"convolution bf16", "matmul bf16", "attention"}


def test_elementwise_copies_and_reductions_are_told_apart() -> None:
    found, _ = of(
        lambda x: (jnp.tanh(x) * 2, lax.optimization_barrier(x.T), x.sum(axis=0)),
        jax.ShapeDtypeStruct((300, 200), jnp.float32),
    )
    kinds = operations.totals(found)
    assert {"elementwise", "copy", "reduction"} <= set(kinds)
    assert kinds["elementwise"].moved >= 2 * 300 * 200 * 4
    assert all(one.flops == 0 for one in kinds.values())
