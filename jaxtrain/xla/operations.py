"""Counts FLOPs and bytes of each instruction of a compiled step, by class of operation."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxtrain.xla import hlo

CONVOLUTION, MATMUL, ATTENTION = "convolution", "matmul", "attention"
COLLECTIVE, REDUCTION, COPY, ELEMENTWISE = "collective", "reduction", "copy", "elementwise"

# cuDNN's calls keep the dimension labels of the forward convolution. Each takes one of the three
# arrays of that convolution as its result.
_CONVOLUTIONS = {
    "__cudnn$convForward": "output",
    "__cudnn$convBiasActivationForward": "output",
    "__cudnn$convForwardGraph": "output",
    "__cudnn$convBackwardInput": "input",
    "__cudnn$convBackwardFilter": "kernel",
}
_MATMULS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul")
# Matmuls over all queries and keys in cuDNN's attention; the backward pass recomputes the scores.
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_COPIES = {"copy", "transpose", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice"}
_COPIES |= {"pad", "reverse", "gather", "broadcast", "reshape", "copy-start"}
_REDUCTIONS = {"reduce", "reduce-window", "scatter", "sort", "select-and-scatter"}
_SLICES = {"dynamic-slice", "gather", "slice"}

_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one instruction of a compiled step computes and moves, each time that it runs.

    Attributes:
        name: of the instruction.
        kind: class of operation, such as "matmul bf16": convolutions and matmuls with the element
            type of their first operand.
        flops: of its convolutions, matmuls and attention; a multiply-add counts as two.
        moved: bytes read and written: see :func:`moved_bytes`.
        times: how often it runs per step, including loop iterations.
    """

    name: str
    kind: str
    flops: float
    moved: float
    times: int


class Totals(NamedTuple):
    """Sums over all instructions of one class, per step and device."""

    flops: float
    moved: float
    calls: float


class _Instruction(NamedTuple):
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    line: str
    root: bool


def costs(text: str) -> list[Cost]:
    """Returns the cost of each instruction that runs on the device.

    Args:
        text: ``compiled.as_text()``.
    """
    return [
        Cost(one.name, *_work(one, shapes, inside), _moved(one, shapes, inside), times)
        for one, shapes, inside, times in _executed(text)
    ]


def moved_bytes(text: str) -> float:
    """Returns the bytes that the instructions of a step read and write.

    This estimates the memory traffic of one device: each operand and each result counts once, and
    of an operand that is only sliced, the slices. Data inside an instruction (a fusion, a library
    call) does not count. Data that a cache keeps between two instructions does count.

    Args:
        text: ``compiled.as_text()``.
    """
    return sum(
        times * _moved(one, shapes, inside) for one, shapes, inside, times in _executed(text)
    )


def totals(found: Iterable[Cost]) -> dict[str, Totals]:
    """Sums costs by class, over all the times that the instructions run."""
    sums: dict[str, Totals] = {}
    for one in found:
        flops, moved, calls = sums.get(one.kind, Totals(0.0, 0.0, 0.0))
        sums[one.kind] = Totals(
            flops + one.times * one.flops, moved + one.times * one.moved, calls + one.times
        )
    return sums


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
        shapes = {one.name: one.shape for one in computations.get(name, ())}
        for one in computations.get(name, ()):
            if one.opcode not in hlo.FREE and not one.opcode.endswith("-done"):
                yield one, shapes, computations, times


def _instructions(lines: Iterable[str]) -> Iterator[_Instruction]:
    for line in lines:
        match = hlo.INSTRUCTION.match(line)
        if match is None:
            continue
        opcode = hlo.opcode_of(line)
        shape, _, rest = match[2].partition(f" {opcode}(")
        operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
        yield _Instruction(match[1], opcode, shape, operands, line, "ROOT " in line[:8])


def _work(
    one: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]
) -> tuple[str, float]:
    """Returns the class of an instruction, and its FLOPs."""
    if one.opcode.removesuffix("-start") in hlo.KINDS:
        return COLLECTIVE, 0.0
    kind, flops, dtype = _products(one, shapes, computations)
    if kind:
        return kind if kind == ATTENTION else f"{kind} {dtype}", flops
    opcodes = {one.opcode} | {part.opcode for part in _inside(one, computations)}
    if opcodes & _REDUCTIONS:
        return REDUCTION, 0.0
    if opcodes - hlo.FREE - {"fusion"} <= _COPIES:
        return COPY, 0.0
    return ELEMENTWISE, 0.0


def _inside(
    one: _Instruction, computations: dict[str, list[_Instruction]]
) -> Iterator[_Instruction]:
    """Yields the instructions of the fusion, and of those nested in it."""
    called = _CALLS.search(one.line) if one.opcode == "fusion" else None
    for part in computations.get(called[1], ()) if called else ():
        yield part
        yield from _inside(part, computations)


def _products(
    one: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]
) -> tuple[str, float, str]:
    """Returns class, FLOPs, and element type of the convolutions and matmuls in an instruction."""
    target = hlo.TARGET.search(one.line) if one.opcode == "custom-call" else None
    name = target[1] if target else ""
    if one.opcode == "dot" or name in _MATMULS:
        return MATMUL, _matmul(one, shapes), _dtype(one, shapes)
    if one.opcode == "convolution" or name in _CONVOLUTIONS:
        result = _CONVOLUTIONS.get(name, "output")
        return CONVOLUTION, _convolution(one, shapes, result), _dtype(one, shapes)
    if name.startswith("__cudnn$fmha"):
        return ATTENTION, _attention(one, shapes, backward=name.endswith("Backward")), ""
    called = _CALLS.search(one.line) if one.opcode == "fusion" else None
    inner = computations.get(called[1], ()) if called else ()
    of_inner = {part.name: part.shape for part in inner}
    parts = [part for part in (_products(x, of_inner, computations) for x in inner) if part[0]]
    if not parts:
        return "", 0.0, ""
    kind, _, dtype = max(parts, key=lambda part: part[1])
    return kind, sum(part[1] for part in parts), dtype


def _arrays(name: str, shapes: dict[str, str]) -> tuple[hlo.Array, ...]:
    return hlo.arrays(shapes.get(name, ""))


def _dtype(one: _Instruction, shapes: dict[str, str]) -> str:
    first = _arrays(one.operands[0], shapes)
    return first[0].dtype if first else ""


def _matmul(one: _Instruction, shapes: dict[str, str]) -> float:
    match = _CONTRACTED.search(one.line)
    (left, *_) = _arrays(one.operands[0], shapes)
    # XLA omits the dimensions of a oneDNN call, which contracts the last one.
    given = [int(axis) for axis in re.findall(r"\d+", match[1])] if match else []
    axes = [len(left.shape) - 1] if match is None and one.opcode != "dot" else given
    depth = math.prod(left.shape[axis] for axis in axes)
    return 2.0 * math.prod(hlo.arrays(one.shape)[0].shape) * depth


def _convolution(one: _Instruction, shapes: dict[str, str], result: str) -> float:
    """Counts the taps of the forward convolution for each of its outputs, whatever the result is.

    The zeros between the pixels of a dilated input are free.
    """
    labels, window = _LABELS.search(one.line), _WINDOW.search(one.line)
    assert labels is not None, f"a convolution has dimension labels: {one.line}"
    made, operands = hlo.arrays(one.shape)[0], [_arrays(name, shapes) for name in one.operands[:2]]
    first, second = operands[0][0], operands[1][0]
    arrays = {
        "output": {"input": first, "kernel": second, "output": made},
        "input": {"input": made, "kernel": second, "output": first},
        "kernel": {"input": first, "kernel": made, "output": second},
    }[result]
    kernel = dict(zip(labels[2], arrays["kernel"].shape, strict=True))
    depth = math.prod(size for label, size in kernel.items() if label != "o")
    dilated = re.search(r"lhs_dilate=([\dx]+)", window[1]) if window else None
    zeros = math.prod(int(one) for one in dilated[1].split("x")) if dilated else 1
    return 2.0 * math.prod(arrays["output"].shape) * depth / zeros


def _attention(one: _Instruction, shapes: dict[str, str], *, backward: bool) -> float:
    """Counts masked scores too. cuDNN's operands are [batch, length, heads, width]."""
    query, key = _arrays(one.operands[0], shapes)[0], _arrays(one.operands[1], shapes)[0]
    pairs = math.prod(query.shape) * key.shape[1]
    return 2.0 * pairs * (_BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS)


def _moved(
    one: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]
) -> float:
    """Returns the bytes that an instruction reads and writes."""
    made = _size(one.shape)
    sizes = [  # one that appears twice, as in x * x, is read once
        0 if name in one.operands[:number] else _size(shapes.get(name, ""))
        for number, name in enumerate(one.operands)
    ]
    if one.opcode in _SLICES:
        return float(2 * made + sum(sizes[1:]))
    if one.opcode == "dynamic-update-slice":
        return float(2 * sizes[1])
    if one.opcode != "fusion":
        return float(made + sum(sizes))
    called = _CALLS.search(one.line)
    inner = computations.get(called[1], ()) if called else ()
    return float(sum(_read(inner, sizes)) + _written(inner, made))


def _read(inner: Iterable[_Instruction], sizes: list[int]) -> Iterator[int]:
    """Yields the bytes that a fusion reads of each operand: of one that is only sliced, the slices.

    Slices that overlap count once.
    """
    inner = list(inner)
    shapes = {one.name: one.shape for one in inner}
    for one in inner:
        if one.opcode != "parameter":
            continue
        number = int(re.findall(r"parameter\((\d+)\)", one.line)[0])
        size = sizes[number] if number < len(sizes) else 0
        users = [user for user in inner if one.name in user.operands]
        if users and all(user.operands[0] == one.name and user.opcode in _SLICES for user in users):
            yield min(size, sum(_size(user.shape) for user in users))
        elif users and all(
            user.operands[0] == one.name and user.opcode == "dynamic-update-slice" for user in users
        ):
            yield sum(_size(shapes[user.operands[1]]) for user in users)
        else:
            yield size


def _written(inner: Iterable[_Instruction], made: int) -> int:
    """Returns the bytes that a fusion writes: an array updated in place counts its new part."""
    shapes = {one.name: one.shape for one in inner}
    for one in inner:
        if one.root and one.opcode == "dynamic-update-slice":
            return _size(shapes[one.operands[1]])
    return made


def _size(shape: str) -> int:
    return sum(array.size for array in hlo.arrays(shape))
