"""Sums in the steps compiled for an H100, without having one; requires ``cuda12``.

XLA adds bfloat16 in float32 on CPUs, but not on H100 and later, so tests on CPUs cannot see such a
sum. Matmuls, convolutions, and attention are calls of cuBLAS, cuDNN, and Triton, which accumulate
bfloat16 in float32.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from gpu_programs.described_gpus import h100s
from models.reconstruction import lpips_weights

from jaxtrain import config
from jaxtrain.cost import hlo
from jaxtrain.ops import per_device
from jaxtrain.sharding import make_mesh
from jaxtrain.training import step_setup

MOST = 64
"""Summands in bfloat16: sums over devices, and over pixels of an upsampled square."""
NARROW = {"bf16", "f16"}
# Instructions that only rearrange what another one summed.
_MOVES = {"bitcast", "copy", "reshape", "transpose"}

VIDEO = ("--model.height", "240", "--model.width", "240", "--data.batch_size", "64")
PROGRAMS = {
    "gpt": ("gpt_h100_8", "--model.depth", "2", "--model.width", "1280"),
    "llama": ("a6000_medium", "--model.layers", "1"),
    "mlm": ("bert_base_h200_8", "--model.layers", "1"),
    "modern_bert": ("ettin_150m_h100_8", "--model.layers", "2"),
    "video_ae_one_frame_at_a_time": ("h100_8", *VIDEO, "--model.remat", "ends"),
    "video_ae_losses": ("h100_8", *VIDEO, "--model.adversary.crop", "128"),
}


def compiled(function: "jax.stages.Traced") -> str:
    text = function.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    return text


def narrow_sums(text: str, devices: int) -> Iterator[str]:
    """Yields each sum of more than :data:`MOST` summands that is accumulated in 16 bits.

    Args:
        text: ``compiled.as_text()``.
    """
    computations = {
        name: {match[1]: line for line in lines if (match := hlo.INSTRUCTION.match(line))}
        for name, lines in hlo.computations(text).items()
    }
    callers = {
        match[1]: (name, line)
        for name, lines in computations.items()
        for line in lines.values()
        if hlo.opcode_of(line) == "fusion" and (match := re.search(r"calls=%?([\w.\-]+)", line))
    }

    def operands(line: str) -> list[str]:
        arguments = line.partition(f" {hlo.opcode_of(line)}(")[2].partition(")")[0]
        return re.findall(r"%([\w.\-]+)", arguments)

    def result(line: str) -> tuple[hlo.Array, ...]:
        return hlo.arrays(line.partition(" = ")[2].partition(f" {hlo.opcode_of(line)}(")[0])

    def adds_narrow(line: str) -> bool:
        region = re.search(r"(?:to_apply|scatter)=%?([\w.\-]+)", line)
        added = computations[region[1]].values() if region else ()
        return any(hlo.opcode_of(x) == "add" and result(x)[0].dtype in NARROW for x in added)

    def summands(name: str, instruction: str) -> int:
        """Counts what is summed in 16 bits to an element of this instruction's first result."""
        line = computations[name][instruction]
        opcode, arguments = hlo.opcode_of(line), operands(line)
        shapes = [result(computations[name][argument])[0].shape for argument in arguments]
        if opcode == "parameter" and name in callers:
            caller, call = callers[name]
            number = int(re.findall(r"parameter\((\d+)\)", line)[0])
            return summands(caller, operands(call)[number])
        if opcode == "get-tuple-element":
            tuple_line = computations[name][arguments[0]]
            if hlo.opcode_of(tuple_line) != "fusion":
                return 1
            number = int(re.findall(r"index=(\d+)", line)[0])
            return of_fusion(tuple_line, number)
        if opcode == "fusion":
            return of_fusion(line, 0)
        if opcode in _MOVES:
            return summands(name, arguments[0])
        if not adds_narrow(line):
            return 1
        window = re.search(r"window=\{size=([\dx]+)", line)
        if window is not None:
            return math.prod(map(int, window[1].split("x")))
        if opcode == "reduce":
            before = summands(name, arguments[0])  # XLA sums many summands in several steps
            return before * math.prod(shapes[0]) // math.prod(result(line)[0].shape)
        if "select_and_scatter" in line:
            return 1  # the gradient of LPIPS's max pooling: a pixel is in at most four windows
        if opcode == "scatter":  # at most: all indices may be the same
            axes = re.findall(r"\d+", re.findall(r"update_window_dims=\{([\d,]*)\}", line)[0])
            return math.prod(shapes[2]) // math.prod(shapes[2][int(axis)] for axis in axes)
        return 1

    def of_fusion(call: str, number: int) -> int:
        called = re.findall(r"calls=%?([\w.\-]+)", call)[0]
        root = next(n for n, line in computations[called].items() if "ROOT " in line[:8])
        if hlo.opcode_of(computations[called][root]) == "tuple":
            root = operands(computations[called][root])[number]
        return summands(called, root)

    stacks = hlo.Stacks(text)
    for name, lines in computations.items():
        for instruction, line in lines.items():
            if hlo.opcode_of(line) in _MOVES | {"parameter", "get-tuple-element", "fusion"}:
                continue
            count = summands(name, instruction)
            if count > MOST:
                stack = re.search(r"stack_frame_id=(\d+)", line)
                op_name = re.search(r'op_name="([^"]*)"', line)
                source = stacks.source(int(stack[1]) if stack else 0, op_name[1] if op_name else "")
                yield f"{instruction} sums {count} in 16 bits: {source}"
    for collective in hlo.collectives(text, devices):
        adds = collective.kind in ("all-reduce", "reduce-scatter")
        narrow = {array.dtype for array in collective.inputs} & NARROW
        if adds and narrow and len(collective.groups[0]) > MOST:
            yield f"{collective.name} sums over {len(collective.groups[0])} devices"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_device_sums_in_float32(name: str, tmp_path: Path) -> None:
    config_name, *changes = PROGRAMS[name]
    if name == "video_ae_losses":
        changes += [
            "--model.perceptual.weights",
            str(lpips_weights.write(tmp_path / "lpips.safetensors")),
        ]
    run = config.load(config_name, changes)
    built = step_setup.build_without_data(run, make_mesh(run.mesh, h100s(run.mesh.devices)))
    with per_device.tracing(platform="cuda"):
        text = compiled(built.trace_step())
    assert not [*narrow_sums(text, run.mesh.devices)]


@pytest.mark.parametrize(
    ("kind", "count"), [("reduce", 4096), ("reduce-window", 121), ("scatter", 512)]
)
def test_a_sum_in_bfloat16_is_found(kind: str, count: int) -> None:
    def total(x: jax.Array) -> jax.Array:
        zero = jnp.zeros((), x.dtype)
        if kind == "reduce":
            return jax.lax.reduce(x, zero, jax.lax.add, (0,))
        if kind == "reduce-window":
            window = (11, 11)
            return jax.lax.reduce_window(x, zero, jax.lax.add, window, (1, 1), "VALID")
        return jnp.zeros((8, x.shape[1]), x.dtype).at[x[:512, 0].astype(jnp.int32)].add(x[:512])

    (device, *_) = h100s(1)
    x = jax.ShapeDtypeStruct(
        (4096, 128), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    found = [*narrow_sums(compiled(jax.jit(total).trace(x)), 1)]
    assert len(found) == 1 or kind == "reduce"
    assert f"sums {count} in 16 bits" in found[-1]
    wide = jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
    assert not [*narrow_sums(compiled(jax.jit(total).trace(wide)), 1)]
