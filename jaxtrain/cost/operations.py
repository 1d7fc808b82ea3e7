"""Counts the operations of a compiled step's instructions, and the bytes they read and write."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxtrain.cost import hlo

_SLICES = {"dynamic-slice", "gather", "slice"}

_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_CONTRACTED = re.compile(r"lhs_contracting_(?:dims=\{|dimensions\": ?\[)([\d,\" ]*)")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_DILATED = re.compile(r"lhs_dilate=([\dx]+)")
# The number of matmuls over all queries and keys in a call. The backward pass repeats the scores.
_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{[^\[]*"dimensions": ?\[([\d,\" ]+)\]')
_WINDOW = re.compile(r'"sliding_window_length": ?"?(\d+)')
# Operands of a convolution's call, -1 for its result: the kernel, and the result of the forward
# pass, which has one matrix product for each of its pixels in both backward passes, too.
_CONVOLUTIONS = {"BackwardInput": (1, 0), "BackwardFilter": (-1, 1)}


@dataclasses.dataclass(frozen=True, order=True)
class Work:
    """Instructions of one device that do equally much.

    Attributes:
        flops: of the matmuls and convolutions in an instruction; a multiply-add counts as two, and
            what a causal mask hides does not count.
        head_width: channels of a head, in calls of cuDNN's attention; 0 in all others.
        count: instructions per step, including loop iterations. Those without ``flops`` are one
            row, with all their bytes.
    """

    flops: float
    moved_bytes: float
    head_width: int
    count: int


class _Instruction(NamedTuple):
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    line: str
    root: bool


def work(text: str) -> tuple[Work, ...]:
    """Returns the work of all instructions of a step on one device, the largest first.

    The bytes estimate the memory traffic: each operand and each result counts once, and of an
    operand that is only sliced, the slices. Data inside an instruction (a fusion, a library call)
    does not count. Data that a cache keeps between two instructions does count.
    """
    counts: Counter[tuple[float, float, int]] = Counter()
    without = 0.0
    for instruction, shapes, inside, times in _executed(text):
        moved = _moved(instruction, shapes, inside)
        flops, width = _flops(instruction, shapes, inside)
        if flops:
            counts[flops, moved, width] += times
        else:
            without += times * moved
    rows = sorted((Work(*key, count) for key, count in counts.items()), reverse=True)
    return (*rows, Work(0.0, without, 0, 1))


def _executed(
    text: str,
) -> Iterator[tuple[_Instruction, dict[str, str], dict[str, list[_Instruction]], int]]:
    """Yields the instructions that run on the device.

    Each comes with the shapes of its computation's values, with all computations, and with how
    often it runs per step.
    """
    computations = {
        name: list(_instructions(lines)) for name, lines in hlo.computations(text).items()
    }
    for name, times in hlo.executions(text).items():
        shapes = {instruction.name: instruction.shape for instruction in computations.get(name, ())}
        for instruction in computations.get(name, ()):
            if instruction.opcode not in hlo.FREE and not instruction.opcode.endswith("-done"):
                yield instruction, shapes, computations, times


def _instructions(lines: Iterable[str]) -> Iterator[_Instruction]:
    for line in lines:
        match = hlo.INSTRUCTION.match(line)
        if match is None:
            continue
        opcode = hlo.opcode_of(line)
        shape, _, rest = match[2].partition(f" {opcode}(")
        operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
        yield _Instruction(match[1], opcode, shape, operands, line, "ROOT " in line[:8])


def _moved(
    instruction: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]
) -> float:
    output_bytes = _size(instruction.shape)
    sizes = [  # one that appears twice, as in x * x, is read once
        0 if name in instruction.operands[:number] else _size(shapes.get(name, ""))
        for number, name in enumerate(instruction.operands)
    ]
    if instruction.opcode in _SLICES:
        return float(2 * output_bytes + sum(sizes[1:]))
    if instruction.opcode == "dynamic-update-slice":
        return float(2 * sizes[1])
    if instruction.opcode != "fusion":
        return float(output_bytes + sum(sizes))
    called = _CALLS.search(instruction.line)
    inner = computations.get(called[1], ()) if called else ()
    return float(sum(_read(inner, sizes)) + _written(inner, output_bytes))


def _read(inner: Iterable[_Instruction], sizes: list[int]) -> Iterator[int]:
    """Yields the bytes that a fusion reads of each operand: of one that is only sliced, the slices.

    Slices that overlap count once.
    """
    inner = list(inner)
    shapes = {instruction.name: instruction.shape for instruction in inner}
    for instruction in inner:
        if instruction.opcode != "parameter":
            continue
        number = int(re.findall(r"parameter\((\d+)\)", instruction.line)[0])
        size = sizes[number] if number < len(sizes) else 0
        users = [user for user in inner if instruction.name in user.operands]
        if users and all(
            user.operands[0] == instruction.name and user.opcode in _SLICES for user in users
        ):
            yield min(size, sum(_size(user.shape) for user in users))
        elif users and all(
            user.operands[0] == instruction.name and user.opcode == "dynamic-update-slice"
            for user in users
        ):
            yield sum(_size(shapes[user.operands[1]]) for user in users)
        else:
            yield size


def _written(inner: Iterable[_Instruction], output_bytes: int) -> int:
    """Returns the bytes that a fusion writes: an array updated in place counts its new part."""
    shapes = {instruction.name: instruction.shape for instruction in inner}
    for instruction in inner:
        if instruction.root and instruction.opcode == "dynamic-update-slice":
            return _size(shapes[instruction.operands[1]])
    return output_bytes


def _size(shape: str) -> int:
    return sum(array.size for array in hlo.arrays(shape))


def _flops(
    instruction: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]
) -> tuple[float, int]:
    """Returns the operations of an instruction's matmuls, and the width of a head of attention."""
    if instruction.opcode == "fusion":
        called = _CALLS.search(instruction.line)
        inner = computations.get(called[1], ()) if called else ()
        inside = {each.name: each.shape for each in inner}
        return sum(_flops(each, inside, computations)[0] for each in inner), 0
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0.0, 0
    match = hlo.TARGET.search(instruction.line)
    target = match[1] if match else ""
    sizes = [array.shape for array in hlo.arrays(instruction.shape)]
    operands = [
        array.shape for name in instruction.operands for array in hlo.arrays(shapes.get(name, ""))
    ]
    if target in _ATTENTION:
        return _attention(instruction.line, target, sizes[0][-1])
    labels = _LABELS.search(instruction.line)
    if labels:
        way = target.removeprefix("__cudnn$conv")
        kernel, forward = ((*operands, sizes[0])[at] for at in _CONVOLUTIONS.get(way, (1, -1)))
        depth = math.prod(kernel) / kernel[labels[1].index("o")]
        dilated = _DILATED.search(instruction.line)
        skipped = math.prod(map(int, dilated[1].split("x"))) if dilated else 1
        return 2.0 * math.prod(forward) * depth / skipped, 0
    contracted = _CONTRACTED.search(instruction.line)
    if contracted is None:
        return 0.0, 0
    axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(sizes[0]) * math.prod(operands[0][axis] for axis in axes), 0


def _attention(line: str, target: str, width: int) -> tuple[float, int]:
    scores = _SCORES.search(line)
    if scores is None:  # a run must not fail for it; tests/gpu_programs/serial_bound.py would
        return 0.0, 0
    *outer, queries, keys = (int(size) for size in re.findall(r"\d+", scores[1]))
    visible_keys = float(keys)
    if "CAUSAL" in line:
        window = _WINDOW.search(line)
        length = min(keys, int(window[1]) if window and int(window[1]) else keys)
        visible_keys = length - length**2 / (2 * keys)  # of an average query
    return _ATTENTION[target] * 2.0 * math.prod(outer) * queries * visible_keys * width, width
