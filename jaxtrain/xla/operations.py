"""Counts the bytes that the instructions of a compiled step read and write."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxtrain.xla import hlo

_SLICES = {"dynamic-slice", "gather", "slice"}

_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


class _Instruction(NamedTuple):
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    line: str
    root: bool


def moved_bytes(text: str) -> float:
    """Returns the bytes that the instructions of a step read and write.

    This estimates the memory traffic of one device: each operand and each result counts once, and
    of an operand that is only sliced, the slices. Data inside an instruction (a fusion, a library
    call) does not count. Data that a cache keeps between two instructions does count.

    Args:
        text: ``compiled.as_text()``.
    """
    return sum(
        times * _moved(instruction, shapes, inside)
        for instruction, shapes, inside, times in _executed(text)
    )


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
    """Returns the bytes that an instruction reads and writes."""
    made = _size(instruction.shape)
    sizes = [  # one that appears twice, as in x * x, is read once
        0 if name in instruction.operands[:number] else _size(shapes.get(name, ""))
        for number, name in enumerate(instruction.operands)
    ]
    if instruction.opcode in _SLICES:
        return float(2 * made + sum(sizes[1:]))
    if instruction.opcode == "dynamic-update-slice":
        return float(2 * sizes[1])
    if instruction.opcode != "fusion":
        return float(made + sum(sizes))
    called = _CALLS.search(instruction.line)
    inner = computations.get(called[1], ()) if called else ()
    return float(sum(_read(inner, sizes)) + _written(inner, made))


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


def _written(inner: Iterable[_Instruction], made: int) -> int:
    """Returns the bytes that a fusion writes: an array updated in place counts its new part."""
    shapes = {instruction.name: instruction.shape for instruction in inner}
    for instruction in inner:
        if instruction.root and instruction.opcode == "dynamic-update-slice":
            return _size(shapes[instruction.operands[1]])
    return made


def _size(shape: str) -> int:
    return sum(array.size for array in hlo.arrays(shape))
