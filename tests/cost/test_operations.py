"""Counting the operations of compiled instructions, and the bytes that they move."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtrain.cost import operations

FIXTURES = Path(__file__).parents[1] / "fixtures"


def moved_bytes(text: str | None) -> float:
    return sum(row.count * row.moved_bytes for row in operations.work(text or ""))


def test_a_loop_counts_each_iteration_and_only_the_slices_it_reads() -> None:
    """Ten matmuls with one slice each of a [10, 64, 64] array."""

    def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    inputs = (
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((10, 64, 64), jnp.float32),
    )
    moved = moved_bytes(jax.jit(scanned).lower(*inputs).compile().as_text())
    matrix = 64 * 64 * 4
    # Per iteration: the slice is read and written, the matmul reads two and writes one, tanh reads
    # and writes one; XLA may copy the carried matrix.
    assert 10 * 7 * matrix <= moved < 10 * 12 * matrix


def test_bytes_moved_include_loops_but_not_the_inside_of_fusions() -> None:
    body = (16 + 64 + 16) + 16 + 8  # the gather with its operand, the fusion, the scatter
    program = (FIXTURES / "program.hlo").read_text()
    assert moved_bytes(program) == 3 * body + (40 + 40) + (40 + 40)


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
    assert moved_bytes(text) == 4 * (100 + 90)
    part = text.replace("slice(%p), slice={[10:100]}", "negate(%left)")
    assert moved_bytes(part) == 4 * (90 + 90)


def test_an_operand_that_appears_twice_is_read_once() -> None:
    text = """HloModule m

ENTRY %main (x: f32[100], y: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %y = f32[100]{0} parameter(1)
  ROOT %z = f32[100]{0} multiply(%x, %x)
}
"""
    assert moved_bytes(text) == 4 * (100 + 100)
    other = text.replace("multiply(%x, %x)", "multiply(%x, %y)")
    assert moved_bytes(other) == 4 * (100 + 100 + 100)


def test_an_update_in_place_counts_the_new_part() -> None:
    def write(x: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x, row * 2, at, 0)

    inputs = (
        jax.ShapeDtypeStruct((1000, 256), jnp.float32),
        jax.ShapeDtypeStruct((256,), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    text = jax.jit(write, donate_argnums=0).lower(*inputs).compile().as_text()
    assert moved_bytes(text) < 10 * 256 * 4


def entry(*lines: str) -> str:
    return "\n".join(["HloModule m", "", "ENTRY %main (x: f32[]) -> f32[] {", *lines, "}", ""])


PIXELS, COPIED = "bf16[8,16,24,64]{3,2,1,0}", "bf16[8,8,12,32]{3,2,1,0}"  # at stride 2
KERNEL = "bf16[32,3,3,64]{3,2,1,0}"
OF_CONVOLUTION = 2.0 * 8 * 8 * 12 * 32 * 9 * 64


@pytest.mark.parametrize(
    ("way", "result", "operands"),
    [
        ("Forward", COPIED, (PIXELS, KERNEL)),
        ("BiasActivationForward", COPIED, (PIXELS, KERNEL, "bf16[32]{0}")),
        ("BackwardInput", PIXELS, (COPIED, KERNEL)),
        ("BackwardFilter", KERNEL, (PIXELS, COPIED)),
    ],
)
def test_a_convolution_of_cudnn_does_equally_much_in_all_directions(
    way: str, result: str, operands: tuple[str, ...]
) -> None:
    names = [f"%p{number}" for number in range(len(operands))]
    text = entry(
        *(f"  {name} = {shape} parameter(0)" for name, shape in zip(names, operands, strict=True)),
        f"  ROOT %c = ({result}, u8[0]{{0}}) custom-call({', '.join(names)}), "
        "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, "
        f'custom_call_target="__cudnn$conv{way}"',
    )
    assert operations.work(text)[0].flops == OF_CONVOLUTION


@pytest.mark.parametrize(
    ("target", "mask", "window", "flops"),
    [
        ("fmhaSoftmax", "PADDING", 0, 2 * 2.0 * 4 * 6 * 100 * 100 * 64),
        ("fmhaSoftmaxBackward", "PADDING", 0, 5 * 2.0 * 4 * 6 * 100 * 100 * 64),
        ("fmhaSoftmax", "CAUSAL", 0, 2 * 2.0 * 4 * 6 * 100 * 50 * 64),
        ("fmhaSoftmax", "CAUSAL", 20, 2 * 2.0 * 4 * 6 * 100 * 18 * 64),
    ],
)
def test_attention_counts_what_its_mask_does_not_hide(
    target: str, mask: str, window: int, flops: float
) -> None:
    text = entry(
        "  %q = bf16[4,100,6,64]{3,2,1,0} parameter(0)",
        "  ROOT %a = (bf16[4,6,100,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), "
        f'custom_call_target="__cudnn${target}", backend_config={{"cudnn_fmha_backend_config": '
        '{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
        f'["4", "6", "100", "100"], "tuple_shapes": []}}, "mask_type": "{mask}", '
        f'"sliding_window_length": {window}}}}}',
    )
    attention, others = operations.work(text)
    assert (attention.flops, attention.head_width, attention.count) == (flops, 64, 1)
    assert others.moved_bytes == 0


def test_matmuls_count_in_fusions_and_in_calls_of_a_library() -> None:
    text = """HloModule m

%inner (p: bf16[10,20], q: bf16[20,30]) -> bf16[10,30] {
  %p = bf16[10,20]{1,0} parameter(0)
  %q = bf16[20,30]{1,0} parameter(1)
  ROOT %d = bf16[10,30]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[10,20], y: bf16[20,30]) -> bf16[10,30] {
  %x = bf16[10,20]{1,0} parameter(0)
  %y = bf16[20,30]{1,0} parameter(1)
  %f = bf16[10,30]{1,0} fusion(%x, %y), kind=kCustom, calls=%inner
  %g = bf16[10,30]{1,0} fusion(%x, %y), kind=kCustom, calls=%inner
  %s = (bf16[10,30]{1,0}, s8[64]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %n = bf16[10,30]{1,0} add(%f, %g)
}
""".replace("\\\n", "")
    library, fused, others = sorted(operations.work(text), key=lambda row: -row.moved_bytes)
    assert library.flops == fused.flops == 2 * 10 * 20 * 30
    assert (library.count, fused.count) == (1, 2)
    assert others == operations.Work(0.0, 2 * 3 * 10 * 30, 0, 1)
