"""Parsing compiled HLO text: collectives, kernels, how often they run, source lines."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.cost import hlo

TEXT = (Path(__file__).parents[1] / "fixtures" / "program.hlo").read_text()


def test_collectives_have_groups_and_counts() -> None:
    gather, scatter, reduce = hlo.collectives(TEXT, 8)
    assert (gather.kind, gather.times, gather.overlapped) == ("all-gather", 3, True)
    assert gather.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert gather.outputs == (hlo.Array("bf16", (4, 8)),)
    assert gather.wire_bytes == 64 * 3 / 4
    assert scatter.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (scatter.kind, scatter.times, scatter.wire_bytes) == ("reduce-scatter", 3, 16 / 2)
    assert reduce.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (reduce.times, reduce.overlapped, reduce.wire_bytes) == (1, False, 2 * 40 / 2)


SCHEDULE = """HloModule step, is_scheduled=true

ENTRY %main (p0: bf16[4], p1: bf16[4]) -> bf16[8] {{
  %p0 = bf16[4]{{0}} parameter(0)
  %p1 = bf16[4]{{0}} parameter(1)
  %first = (bf16[4]{{0}}, bf16[8]{{0}}) all-gather-start(%p0), replica_groups={{{{0,1}}}}
  %all-gather-done.1 = bf16[8]{{0}} all-gather-done(%first)
  %second = (bf16[4]{{0}}, bf16[8]{{0}}) all-gather-start(%p1), replica_groups={{{{0,1}}}}
  {between}
  ROOT %all-gather-done.2 = bf16[8]{{0}} all-gather-done(%second)
}}
"""


@pytest.mark.parametrize(
    ("between", "overlapped"),
    [
        ("%x = bf16[8]{0} fusion(%p0), kind=kLoop, calls=%add", True),
        ("%x = bf16[8]{0} fusion(%all-gather-done.1), kind=kLoop, calls=%add", True),
        ("%x = bf16[8]{0} fusion(%get-tuple-element.7), kind=kLoop, calls=%add", True),
        ('%x = bf16[4]{0} copy(%constant), metadata={op_name="tuple(x)"}', True),
        ("%x = (bf16[8]{0}) while(%tuple.1), condition=%less, body=%add", True),
        ("%fusion.3 = bf16[2,4]{1,0} bitcast(%all-gather-done.1)", False),
        ("%x = (bf16[8]{0}) tuple(%all-gather-done.1)", False),
        ("%x = (bf16[8]{0}, bf16[8]{0}, u32[]) copy-start(%all-gather-done.1)", False),
        ("", False),
    ],
)
def test_a_kernel_during_a_collective_overlaps_it_whatever_it_reads(
    between: str, overlapped: bool
) -> None:
    first, second = hlo.collectives(SCHEDULE.format(between=between), 2)
    assert (first.overlapped, second.overlapped) == (False, overlapped)


def test_the_line_of_the_model_is_preferred() -> None:
    stacks = hlo.Stacks(TEXT)
    assert stacks.line(3, "models/") == "models/mlm.py:166"
    assert stacks.line(3, "training/") == "training/step.py:63"
    assert stacks.line(1, "models/") is None
    assert stacks.line(0, "models/") is None


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0}", 24),
        ("(bf16[4], s8[3], pred[])", 8 + 3 + 1),
        ("u32[]", 4),
        ("f8e4m3fn[8]", 8),
    ],
)
def test_sizes_of_types(shape: str, size: int) -> None:
    assert sum(array.size for array in hlo.arrays(shape)) == size


def test_a_real_step_on_eight_devices() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=0)

    compiled = jax.jit(total, in_shardings=rows, out_shardings=whole).lower(
        jax.ShapeDtypeStruct((16, 32), jnp.float32)
    )
    found = hlo.collectives(compiled.compile().as_text(), 8)
    assert [(one.kind, one.times, len(one.groups[0])) for one in found] == [("all-reduce", 1, 8)]
    assert found[0].outputs[0] == hlo.Array("f32", (32,))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, x", ((0, 2), (1, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
        ("to_apply=%add", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=1,'b'=4], device_ids=([4]) {'b'}", ((0, 1, 2, 3),)),
    ],
)
def test_groups_in_all_notations_of_xla(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert hlo._groups(text, 4) == groups


def test_an_unknown_notation_of_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the groups"):
        hlo._groups("replica_groups=<=[tiled]4", 4)


@pytest.mark.parametrize(
    "shape",
    ["bf16[8]{0}", "((bf16[8]{0}), bf16[8]{0})", "((bf16[4]{0}, bf16[4]), (bf16[4], bf16[4]))"],
)
def test_a_started_all_reduce_sends_its_operands_once(shape: str) -> None:
    """The type has the outputs in jax 0.10, and also the inputs in 0.12."""
    line = f"  %sum = {shape} all-reduce-start(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add"
    found = hlo._collective(line, 4, times=1)
    assert found is not None
    assert found.wire_bytes == 2 * 16 * 3 / 4


def test_calls_of_attention_are_counted_in_loops() -> None:
    text = """HloModule m

body (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %a = (f32[2]{0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %b = (f32[2]{0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}

ENTRY main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %other = f32[2]{0} custom-call(%x), custom_call_target="__cublas$gemm"
  %once = f32[2]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %w = f32[2]{0} while(%x), condition=cond, body=body, backend_config={LOOP}
}
""".replace("LOOP", '"known_trip_count":{"n":"3"}')
    calls = hlo.kernels(text)
    assert (calls["attention_forward"], calls["attention_backward"]) == (4, 3)


KERNELS = """
%loop_fusion (p: f32[8,8]) -> f32[8,8] {
  ROOT %convolution.1 = f32[1,8,8,4]{3,2,1,0} convolution(%p, %p), window={size=3x3}
}

%nested (p: bf16[8,8]) -> bf16[8,8] {
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p, %p)
}

%matmul (p: bf16[8,8]) -> bf16[8,8] {
  ROOT %nested.1 = bf16[8,8]{1,0} fusion(%p), kind=kCustom, calls=%nested
}

%turn (p: f32[1024,512]) -> f32[512,1024] {
  ROOT %transpose.1 = f32[512,1024]{1,0} transpose(%p), dimensions={1,0}
}

%body (p: (s32[])) -> (s32[]) {
  %conv.1 = (bf16[8]{0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$convForward"
  %gemm.1 = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%matmul, CONFIG
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %while.1 = (s32[]) while(%x), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %lost.1 = f32[1,8,8,4]{3,2,1,0} fusion(%x), kind=kLoop, calls=%loop_fusion
  %other.1 = bf16[8,8]{1,0} fusion(%x), kind=kInput, calls=%nested
  %gemm.2 = (bf16[8,8]{1,0}, s8[0]{0}) custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %turned.1 = f32[512,1024]{1,0} fusion(%x), kind=kInput, calls=%turn
  %small.1 = f32[512,8]{1,0} transpose(%x), dimensions={1,0}
  ROOT %copy.1 = f32[1024,1024]{0,1} copy(%x)
}
""".replace(
    "CONFIG", 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
)


def test_kernels_are_counted_in_loops_and_fusions() -> None:
    assert hlo.kernels(KERNELS) == {
        "attention_forward": 0,
        "attention_backward": 0,
        "convolutions": 3,
        "other_convolutions": 1,
        "matmuls": 4,
        "other_matmuls": 1,
        "transposes": 2,
    }
