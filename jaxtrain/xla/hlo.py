"""Reads the text of a compiled program: its collectives, how often they run, and who wrote them."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{", re.ASCII)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|to_apply|calls|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)"
)
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
# Instructions whose computations run as part of them (their scalars are not traffic).
_WHOLE = {"fusion", "reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"}
_WHOLE |= {"all-reduce", "all-reduce-start", "reduce-scatter", "reduce-scatter-start"}
# Instructions that move nothing themselves.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
_FREE |= {"call", "after-all", "partition-id", "replica-id", "opt-barrier", "async-start"}
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}"
)
_ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha\w+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Array:
    """Element type and shape of an array, as "bf16" and (256, 32)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D.*$", "", self.dtype.lstrip("usbfce")) or 8)
        return math.prod(self.shape) * max(bits, 8) // 8


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
        name: of the instruction.
        kind: of :data:`KINDS`.
        inputs: arrays that a device puts in.
        outputs: arrays that it gets.
        groups: devices that talk with one another.
        times: how often it runs in a step (loops counted).
        overlapped: whether other work is scheduled between its start and its end.
        stack: number of its stack frame, 0 if it has none.
    """

    name: str
    kind: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    groups: tuple[tuple[int, ...], ...]
    times: int
    overlapped: bool
    stack: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends each time, with ring algorithms."""
        n = len(self.groups[0])
        whole = max(sum(a.size for a in self.inputs), sum(a.size for a in self.outputs))
        if self.kind == "all-reduce":
            return 2 * whole * (n - 1) / n
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(whole)
        return whole * (n - 1) / n


def collectives(text: str, devices: int) -> list[Collective]:
    """All collectives of a program, in its order.

    Args:
        text: ``compiled.as_text()``.
        devices: that the program runs on.
    """
    computations = dict(_computations(text))
    times = _times(text, computations)
    found = []
    for name, lines in computations.items():
        for number, line in enumerate(lines):
            one = _collective(line, devices, times.get(name, 0))
            if one is not None and one.times:
                apart = _apart(lines, number, one.name)
                found.append(dataclasses.replace(one, overlapped=apart))
    return found


def entry_name(text: str) -> str:
    """Name of the program's first computation."""
    match = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert match is not None, "a program has an entry"
    return match[1]


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name of each computation and its instructions, a line each."""
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("}"):
            if name:
                yield name, lines
            name, lines = "", []
        elif line and not line[0].isspace() and line.rstrip().endswith("{"):
            match = _COMPUTATION.match(line)
            if match:
                name, lines = match[2], []
        elif name:
            lines.append(line)


def moved_bytes(text: str) -> float:
    """Bytes that the instructions of a step read and write, each operand and result once.

    An estimate of the memory traffic. What an instruction keeps inside (a fusion, a library call)
    does not count; what stays in a cache between two instructions does, and so does all of an
    operand of which a part is read.

    Args:
        text: ``compiled.as_text()``; of one device.
    """
    computations = dict(_computations(text))
    total = 0.0
    for name, count in _times(text, computations).items():
        sizes: dict[str, int] = {}
        for line in computations.get(name, ()):
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            opcode = _opcode(line)
            shape, _, rest = match[2].partition(f" {opcode}(")
            sizes[match[1]] = sum(array.size for array in arrays(shape))
            if opcode in _FREE or opcode.endswith("-done"):
                continue
            operands = rest.partition(")")[0]
            read = sum(sizes.get(word, 0) for word in re.findall(r"%([\w.\-]+)", operands))
            total += count * (sizes[match[1]] + read)
    return total


def attention_calls(text: str) -> dict[str, int]:
    """How often a step calls cuDNN's attention: ``forward`` and ``backward``.

    Args:
        text: ``compiled.as_text()``.
    """
    computations = dict(_computations(text))
    found = {"forward": 0, "backward": 0}
    for name, count in _times(text, computations).items():
        for target in _ATTENTION.findall("\n".join(computations.get(name, ()))):
            found["backward" if target.endswith("Backward") else "forward"] += count
    return found


def _opcode(line: str) -> str:
    match = _OPCODE.search(line.partition(" = ")[2])
    return match[1] if match else ""


def _times(text: str, computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in a step."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in computations.get(name, ()):
            opcode = _opcode(line)
            if opcode in _WHOLE:
                continue
            trips = _TRIPS.search(line) if opcode == "while" else None
            for match in _CALLED.finditer(line):
                for part in match[1].split(", "):
                    visit(part.lstrip("%"), count * (int(trips[1]) if trips else 1))

    visit(entry_name(text), 1)
    return times


def _collective(line: str, devices: int, times: int) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, rest = match[1], match[2]
    opcode = re.match(r"(.*?) (" + "|".join(KINDS) + r")(-start)?\(", rest)
    if opcode is None or rest[:1] == "{":
        return None
    shape, kind = opcode[1], opcode[2]
    groups = _groups(rest, devices)
    inputs, outputs = _operands(shape, kind, started=opcode[3] is not None, n=len(groups[0]))
    stack = re.search(r"stack_frame_id=(\d+)", rest)
    return Collective(
        name, kind, inputs, outputs, groups, times, False, int(stack[1]) if stack else 0
    )


def _operands(
    shape: str, kind: str, *, started: bool, n: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """What goes in and what comes out, from the type of the instruction."""
    parts = _parts(shape)
    if started and (kind != "all-reduce" or parts[0].startswith("(")):
        return arrays(parts[0]), arrays(
            parts[1]
        )  # (inputs, outputs, ...); all-reduce since jax 0.12
    found = arrays(shape)
    if kind == "all-gather":
        return tuple(_scaled(array, 1, n) for array in found), found
    if kind == "reduce-scatter":
        return tuple(_scaled(array, n, 1) for array in found), found
    return found, found


def _scaled(array: Array, times: int, by: int) -> Array:
    """The array with another number of elements; which dimension changes is of no account."""
    return Array(array.dtype, (math.prod(array.shape) * times // by,))


def _parts(shape: str) -> list[str]:
    """The members of a tuple type; a single type is its only member."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, began = [], 0, 1
    for place, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(shape[began:place].strip())
            began = place + 1
        if depth == 0:
            break
    return parts


def arrays(shape: str) -> tuple[Array, ...]:
    """All arrays of a type, as "(bf16[8,4]{1,0}, f32[])"."""
    bare = re.sub(r"\{[^{}]*\}", "", re.sub(r"/\*.*?\*/", "", shape))
    return tuple(
        Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(bare)
    )


def _groups(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Who talks with whom, from any of XLA's three ways to write it; all if it is left out.

    Raises:
        ValueError: XLA has found a fourth way.
    """
    mesh = _MESH.search(rest)
    if mesh is not None:
        sizes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])]
        along = set(re.findall(r"'([^']*)'", mesh[4]))
        return _of_mesh(sizes, along, _iota(mesh[2] or str(devices), mesh[3]))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota is not None:
        numbers, size = _iota(iota[3], iota[4]), int(iota[2])
        return tuple(
            tuple(group)
            for group in (numbers[at : at + size] for at in range(0, len(numbers), size))
        )
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", rest)
    if listed is not None:
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return tuple(tuple(int(one) for one in group.split(",")) for group in groups)
    if re.search(r"(?:replica_groups|source_target_pairs)=(?!\{\})", rest):
        raise ValueError(f"cannot read the groups of this collective: {rest}")
    return (tuple(range(devices)),)


def _of_mesh(
    sizes: list[tuple[str, int]], along: set[str], devices: list[int]
) -> tuple[tuple[int, ...], ...]:
    """Devices stand row by row over the axes; a group differs along the named ones only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*(range(size) for _, size in sizes))
    for device, place in zip(devices, places, strict=True):
        fixed = tuple(at for at, (name, _) in zip(place, sizes, strict=True) if name not in along)
        groups.setdefault(fixed, []).append(device)
    return tuple(tuple(group) for group in groups.values())


def _iota(sizes: str, order: str | None) -> list[int]:
    """``"8,4"`` and ``"1,0"``: the numbers from zero in that shape, its dimensions reordered."""
    import numpy as np

    dims = [int(size) for size in sizes.split(",")]
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if order:
        numbers = numbers.transpose([int(axis) for axis in order.split(",")])
    return [int(one) for one in numbers.flat]


def _apart(lines: list[str], number: int, name: str) -> bool:
    """Whether instructions that compute stand between a collective's start and its end."""
    idle = (
        "-start",
        "-done",
        "get-tuple-element(",
        "bitcast(",
        "parameter(",
        "constant(",
        "tuple(",
    )
    for line in itertools.islice(lines, number + 1, None):
        if re.search(rf"-done\(%?{re.escape(name)}\)", line):
            return False
        if not any(word in line for word in idle):
            return any(
                re.search(rf"-done\(%?{re.escape(name)}\)", later) for later in lines[number:]
            )
    return False


class Stacks:
    """Which line of which file made an instruction."""

    def __init__(self, text: str) -> None:
        def table(name: str) -> dict[int, str]:
            match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
            lines = match[1].splitlines() if match else []
            return {int(line.split(" ", 1)[0]): line.split(" ", 1)[1] for line in lines}

        files = {number: line.strip('"') for number, line in table("FileNames").items()}
        places = {number: _fields(line) for number, line in table("FileLocations").items()}
        self._places = {
            number: (files[place["file_name_id"]], place["line"])
            for number, place in places.items()
        }
        self._frames = {number: _fields(line) for number, line in table("StackFrames").items()}

    def line(self, stack: int, inside: str) -> str | None:
        """The innermost place in a file whose path holds ``inside``, as "models/mlm.py:167"."""
        seen = set()
        while stack in self._frames and stack not in seen:
            seen.add(stack)
            frame = self._frames[stack]
            path, line = self._places[frame["file_location_id"]]
            if inside in path:
                return f"{path.rpartition('jaxtrain/')[2]}:{line}"
            stack = frame["parent_frame_id"] - 1  # XLA counts from one, and one is no parent
        return None

    def source(self, stack: int, op_name: str) -> str | None:
        """The line of a model, or else of the program, and in which pass: "models/mlm.py:167
        (backward)". A file of either is known by its folder.

        Args:
            stack: number of the stack frame.
            op_name: of the instruction.
        """
        line = self.line(stack, "jaxtrain/models/") or self.line(stack, "jaxtrain/")
        if line is None:
            return None
        if "rematted_computation" in op_name:
            return f"{line} (recomputed)"
        return f"{line} ({'backward' if 'transpose(' in op_name else 'forward'})"


def _fields(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", line)}
