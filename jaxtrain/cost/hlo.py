"""Parses compiled HLO text: collectives, kernels, how often they run, and their source lines."""

import dataclasses
import itertools
import math
import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
KERNELS = (
    *("attention_forward", "attention_backward", "convolutions", "other_convolutions"),
    *("matmuls", "other_matmuls", "transposes"),
)
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{", re.ASCII)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|to_apply|calls|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)"
)
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
# Instructions whose computations run inside them; their scalars are not memory traffic.
_WHOLE = {"fusion", "reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"}
_WHOLE |= {"all-reduce", "all-reduce-start", "reduce-scatter", "reduce-scatter-start"}
# Instructions that move no data themselves.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
FREE |= {"call", "after-all", "partition-id", "replica-id", "opt-barrier", "async-start"}
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}"
)
TARGET = re.compile(r'custom_call_target="([^"]+)"')
# The library or the code generator of a fusion, such as "__triton_nested_gemm_fusion".
_KIND = re.compile(r'"fusion_backend_config":\{"kind":"(__[\w$]+)"')
_LEAST_TRANSPOSE = 2**20
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Array:
    """The element type and shape of an array, such as "bf16" and (256, 32)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of bytes."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D.*$", "", self.dtype.lstrip("usbfce")) or 8)
        return math.prod(self.shape) * max(bits, 8) // 8


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of :data:`KINDS`.
        inputs: arrays per device.
        outputs: arrays per device.
        times: how often it runs per step, including loop iterations.
    """

    name: str
    kind: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    groups: tuple[tuple[int, ...], ...]
    times: int
    overlapped: bool

    @property
    def wire_bytes(self) -> float:
        """The bytes each device sends per run of the collective, with ring algorithms."""
        n = len(self.groups[0])
        full = max(sum(a.size for a in self.inputs), sum(a.size for a in self.outputs))
        if self.kind == "all-reduce":
            return 2 * full * (n - 1) / n
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(full)
        return full * (n - 1) / n


def collectives(text: str, devices: int) -> list[Collective]:
    """Returns all collectives of a compiled step, in order."""
    times = executions(text)
    result = []
    for name, lines in computations(text).items():
        for number, line in enumerate(lines):
            collective = _collective(line, devices, times.get(name, 0))
            if collective is not None and collective.times:
                overlapped = _overlapped(lines, number, collective.name)
                result.append(dataclasses.replace(collective, overlapped=overlapped))
    return result


def computations(text: str) -> dict[str, list[str]]:
    """Returns the name of each computation -> its instructions, one per line."""
    lines_of: dict[str, list[str]] = {}
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("}"):
            if name:
                lines_of[name] = lines
            name, lines = "", []
        elif line and not line[0].isspace() and line.rstrip().endswith("{"):
            match = _COMPUTATION.match(line)
            if match:
                name, lines = match[2], []
        elif name:
            lines.append(line)
    return lines_of


def executions(text: str) -> dict[str, int]:
    """Returns how often each computation runs per step.

    Computations inside an instruction (a fusion, a reduction) are omitted.
    """
    lines_of = computations(text)
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in lines_of.get(name, ()):
            opcode = opcode_of(line)
            if opcode in _WHOLE:
                continue
            trips = _TRIPS.search(line) if opcode == "while" else None
            for match in _CALLED.finditer(line):
                for called in match[1].split(", "):
                    visit(called.lstrip("%"), count * (int(trips[1]) if trips else 1))

    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None, "HLO text has an entry computation"
    visit(entry[1], 1)
    return times


def kernels(text: str) -> dict[str, int]:
    """Counts how the expensive operations of a step are computed, per step and device.

    Returns:
        ``attention_forward`` and ``attention_backward``: calls of cuDNN's fused attention.
        ``convolutions``: cuDNN's. ``other_convolutions``: by the compiler's own code, which may be
        30 times as slow. ``matmuls``: of a library, or of code generated for tensor cores.
        ``other_matmuls``: in loops, for small or narrow arrays. ``transposes``: instructions that
        write at least 1 MiB in another order of dimensions than they read.
    """
    lines_of = computations(text)
    counts = dict.fromkeys(KERNELS, 0)
    for name, count in executions(text).items():
        for line in lines_of.get(name, ()):
            kernel = _kernel(line, lines_of)
            if kernel is not None:
                counts[kernel] += count
    return counts


def _kernel(line: str, lines_of: dict[str, list[str]]) -> str | None:
    """Returns the entry of :func:`kernels` to which an instruction belongs."""
    opcode = opcode_of(line)
    target, kind = TARGET.search(line), _KIND.search(line)
    if target is not None:
        if target[1].startswith("__cudnn$fmha"):
            return f"attention_{'backward' if target[1].endswith('Backward') else 'forward'}"
        if target[1].startswith("__cudnn$conv"):
            return "convolutions"
        return "matmuls" if target[1].startswith("__cublas") else None
    inside = _opcodes(line, lines_of) if opcode == "fusion" else {opcode}
    if "convolution" in inside:
        of_cudnn = kind is not None and kind[1].startswith("__cudnn")
        return "convolutions" if of_cudnn else "other_convolutions"
    if "dot" in inside:
        return "other_matmuls" if kind is None else "matmuls"
    if kind is None and inside & {"transpose", "copy"}:
        shape = line.partition(" = ")[2].partition(f" {opcode}(")[0]
        large = sum(array.size for array in arrays(shape)) >= _LEAST_TRANSPOSE
        return "transposes" if large else None
    return None


def _opcodes(line: str, lines_of: dict[str, list[str]]) -> set[str]:
    """Returns the opcodes in the computations that an instruction calls, and in those they call."""
    opcodes: set[str] = set()
    for match in _CALLED.finditer(line):
        for called in match[1].split(", "):
            for inner in lines_of.get(called.lstrip("%"), ()):
                opcodes |= {opcode_of(inner)} | _opcodes(inner, lines_of)
    return opcodes


def opcode_of(line: str) -> str:
    """Returns the opcode of an instruction, or "" if the line has none."""
    match = _OPCODE.search(line.partition(" = ")[2])
    return match[1] if match else ""


def _collective(line: str, devices: int, times: int) -> Collective | None:
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    name, rest = match[1], match[2]
    opcode = re.match(r"(.*?) (" + "|".join(KINDS) + r")(-start)?\(", rest)
    if opcode is None or rest[:1] == "{":
        return None
    shape, kind = opcode[1], opcode[2]
    groups = _groups(rest, devices)
    inputs, outputs = _operands(shape, kind, started=opcode[3] is not None, n=len(groups[0]))
    return Collective(name, kind, inputs, outputs, groups, times, overlapped=False)


def _operands(
    shape: str, kind: str, *, started: bool, n: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the inputs and outputs of a collective, from the type of its instruction."""
    members = _members(shape)
    # (inputs, outputs, ...); all-reduce only since jax 0.12
    if started and (kind != "all-reduce" or members[0].startswith("(")):
        return arrays(members[0]), arrays(members[1])
    result = arrays(shape)
    if kind == "all-gather":
        return tuple(_scaled(array, 1, n) for array in result), result
    if kind == "reduce-scatter":
        return tuple(_scaled(array, n, 1) for array in result), result
    return result, result


def _scaled(array: Array, times: int, by: int) -> Array:
    """Returns an array with the scaled number of elements, in one dimension."""
    return Array(array.dtype, (math.prod(array.shape) * times // by,))


def _members(shape: str) -> list[str]:
    """Returns the members of a tuple type; a single type is its only member."""
    if not shape.startswith("("):
        return [shape]
    members, depth, began = [], 0, 1
    for place, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or depth == 0:
            members.append(shape[began:place].strip())
            began = place + 1
        if depth == 0:
            break
    return members


def arrays(shape: str) -> tuple[Array, ...]:
    """Returns all arrays of a type, such as "(bf16[8,4]{1,0}, f32[])"."""
    bare = re.sub(r"\{[^{}]*\}", "", re.sub(r"/\*.*?\*/", "", shape))
    return tuple(
        Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(bare)
    )


def _groups(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Parses the device groups of a collective, in any of XLA's three notations.

    Without groups, all devices are one group.

    Raises:
        ValueError: the notation is unknown.
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
        return tuple(tuple(int(device) for device in group.split(",")) for group in groups)
    if re.search(r"(?:replica_groups|source_target_pairs)=(?!\{\})", rest):
        raise ValueError(f"cannot read the groups of this collective: {rest}")
    return (tuple(range(devices)),)


def _of_mesh(
    sizes: list[tuple[str, int]], along: set[str], devices: list[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups along some axes of a mesh, whose devices are listed in row-major order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*(range(size) for _, size in sizes))
    for device, place in zip(devices, places, strict=True):
        fixed = tuple(at for at, (name, _) in zip(place, sizes, strict=True) if name not in along)
        groups.setdefault(fixed, []).append(device)
    return tuple(tuple(group) for group in groups.values())


def _iota(sizes: str, order: str | None) -> list[int]:
    """Returns the numbers from 0 in shape ``sizes`` ("8,4"), transposed by ``order`` ("1,0")."""
    import numpy as np

    dims = [int(size) for size in sizes.split(",")]
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if order:
        numbers = numbers.transpose([int(axis) for axis in order.split(",")])
    return [int(device) for device in numbers.flat]


# Opcodes that run no kernel; "" stands for lines without one.
_NO_KERNEL = (FREE | {""}) - {"while", "conditional", "call"}


def _overlapped(lines: list[str], number: int, name: str) -> bool:
    """Returns whether computation is scheduled between a collective's start and its end."""
    for line in itertools.islice(lines, number + 1, None):
        if re.search(rf"-done\(%?{re.escape(name)}\)", line):
            return False
        opcode = opcode_of(line)  # operands may be named after other collectives
        if opcode not in _NO_KERNEL and not opcode.endswith(("-start", "-done")):
            return any(
                re.search(rf"-done\(%?{re.escape(name)}\)", later) for later in lines[number:]
            )
    return False


class Stacks:
    """Maps an instruction to the source line that produced it."""

    def __init__(self, text: str) -> None:
        def table(name: str) -> dict[int, str]:
            match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
            lines = match[1].splitlines() if match else []
            return {int(line.split(" ", 1)[0]): line.split(" ", 1)[1] for line in lines}

        files = {number: line.strip('"') for number, line in table("FileNames").items()}
        locations = {number: _fields(line) for number, line in table("FileLocations").items()}
        self._locations = {
            number: (files[location["file_name_id"]], location["line"])
            for number, location in locations.items()
        }
        self._frames = {number: _fields(line) for number, line in table("StackFrames").items()}

    def line(self, stack: int, inside: str) -> str | None:
        """Returns the innermost line in a folder of jaxtrain, such as "models/mlm.py:167".

        None if there is none. The program may be from another machine, so a file is recognized by
        its path inside the package: "jaxtrain/" alone may be the checkout, which also has tests.
        """
        visited = set()
        while stack in self._frames and stack not in visited:
            visited.add(stack)
            frame = self._frames[stack]
            path, line = self._locations[frame["file_location_id"]]
            _, in_package, ours = path.rpartition("jaxtrain/")
            if in_package and ours.startswith(inside) and (_PACKAGE / ours).is_file():
                return f"{ours}:{line}"
            stack = frame["parent_frame_id"] - 1  # XLA counts from 1, and 1 means no parent
        return None

    def source(self, stack: int, op_name: str) -> str | None:
        """Returns the line and the pass, such as "models/mlm.py:167 (backward)".

        It prefers a line of a model to another line of jaxtrain, both recognized by their folder.

        Args:
            stack: number of the stack frame.
        """
        line = self.line(stack, "models/") or self.line(stack, "")
        if line is None:
            return None
        if "rematted_computation" in op_name:
            return f"{line} (recomputed)"
        return f"{line} ({'backward' if 'transpose(' in op_name else 'forward'})"


def _fields(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", line)}
