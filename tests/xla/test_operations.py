"""Counting the bytes that compiled instructions move."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.xla import operations

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_a_loop_counts_each_iteration_and_only_the_slices_it_reads() -> None:
    """Ten matmuls with one slice each of a [10, 64, 64] array."""

    def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    inputs = (
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((10, 64, 64), jnp.float32),
    )
    moved = operations.moved_bytes(jax.jit(scanned).lower(*inputs).compile().as_text())
    matrix = 64 * 64 * 4
    # Per iteration: the slice is read and written, the matmul reads two and writes one, tanh reads
    # and writes one; XLA may copy the carried matrix.
    assert 10 * 7 * matrix <= moved < 10 * 12 * matrix


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
    assert operations.moved_bytes(text) < 10 * 256 * 4
