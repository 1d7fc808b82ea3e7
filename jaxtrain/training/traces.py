"""Which operations of the compiled step take the time, read from a profiler trace."""

import collections
import dataclasses
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from jaxtrain.xla.hlo import Stacks

# Their time is that of the operations inside them, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+.*? ([\w\-]+)\(", re.MULTILINE)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_STACK = re.compile(r"stack_frame_id=(\d+)")

# What jax writes around and between the names of a model: transformations, and ways to call.
_WRAPPED = re.compile(r"(?:jit|jvp|transpose|vmap|remat|checkpoint)\((.*)\)")
_BETWEEN = {"", "while", "body", "closed_call", "checkpoint", "rematted_computation", "shard_map"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """All operations of the compiled program that one line of the traced function made.

    Attributes:
        kind: opcode, as "convolution"; "" where the program does not list it.
        made_by: the traced function's path to them, as "transpose(jvp(...))/conv_general_dilated".
        name: them in words of the model, as "models/mlm.py:167 (backward) dot_general".
        count: how many the program holds that were run.
        ms_per_step: their time, summed over their calls in a step, mean over devices.
        share: of all operations' time.
    """

    kind: str
    made_by: str
    name: str
    count: int
    ms_per_step: float
    share: float


class _Described(NamedTuple):
    """An instruction; as :class:`Operation`."""

    kind: str
    made_by: str
    name: str


def top_operations(
    files: Iterable[Path], program: str, *, steps: int, devices: int, count: int
) -> list[Operation]:
    """The operations that took longest, longest first.

    Args:
        files: ``.xplane.pb`` that the profiler of this process wrote.
        program: ``compiled.as_text()`` of the step.
        steps: that ran while it was traced.
        devices: of this process.
        count: how many to give.
    """
    described = _described(program)
    times: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings():
        # Python 3.13 warns of a type that jaxlib 0.12 makes here; where warnings are errors, that
        # aborts the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for path in files:
            times.update(_nanoseconds(ProfileData.from_file(str(path)), described))
    total = sum(times.values())
    groups: collections.defaultdict[_Described, list[float]] = collections.defaultdict(list)
    for name, nanoseconds in times.items():
        groups[described.get(name, _Described("", name, name))].append(nanoseconds)
    operations = [
        Operation(
            *described_as,
            count=len(group),
            ms_per_step=sum(group) / 1e6 / steps / devices,
            share=sum(group) / total,
        )
        for described_as, group in groups.items()
    ]
    return sorted(operations, key=lambda one: -one.share)[:count]


def _nanoseconds(
    profile: ProfileData, described: dict[str, _Described]
) -> collections.Counter[str]:
    """Operation -> its time on all devices."""
    planes = list(profile.planes)
    # A GPU's kernels have a plane of their own; the CPU's run in the host's threads.
    on_device = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    times: collections.Counter[str] = collections.Counter()
    for plane in on_device or planes:
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue  # sums over the streams' events, made for the viewer
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None and _kind(described, name) not in _CONTAINERS:
                    times[str(name)] += event.duration_ns
    return times


def _kind(described: dict[str, _Described], name: object) -> str:
    found = described.get(str(name))
    return found.kind if found else ""


def _described(program: str) -> dict[str, _Described]:
    """Instruction -> what it is."""
    found = {}
    stacks = Stacks(program)
    for text in program.splitlines():
        match = _INSTRUCTION.match(text)
        if match:
            made_by, stack = _OP_NAME.search(text), _STACK.search(text)
            path = made_by[1] if made_by else ""
            line = stacks.source(int(stack[1]), path) if stack else None
            found[match[1]] = _Described(match[2], path, _name(path, line))
    return found


def _name(made_by: str, line: str | None) -> str:
    """Line and pass, where they are known, and the names that the model gave."""
    parts = []
    for part in made_by.split("/"):
        while match := _WRAPPED.fullmatch(part):
            part = match[1]
        parts.append(part)
    # The first is the whole step.
    path = "/".join(part for part in parts[1:] if part not in _BETWEEN) or made_by
    return " ".join(filter(None, (line, path))) or "the compiler's own"
