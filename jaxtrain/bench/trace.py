"""Which operations of the compiled step take the time, read from a profiler trace."""

import collections
import dataclasses
import re
import warnings
from pathlib import Path

from jax.profiler import ProfileData

# Their time is that of the operations inside them, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+.*? ([\w\-]+)\(", re.MULTILINE)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Operation:
    """All operations of the compiled program that one line of the traced function made.

    Attributes:
        kind: opcode, as "convolution"; "" where the program does not list it.
        made_by: the traced function's path to them, as "transpose(jvp(...))/conv_general_dilated".
        count: how many the program holds that were run.
        ms_per_step: their time, summed over their calls in a step, mean over devices.
        share: of all operations' time.
    """

    kind: str
    made_by: str
    count: int
    ms_per_step: float
    share: float


def top_operations(
    folder: Path, program: str, *, steps: int, devices: int, count: int
) -> list[Operation]:
    """The operations that took longest, longest first.

    Args:
        folder: where ``jax.profiler.trace`` wrote.
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
        for path in folder.rglob("*.xplane.pb"):
            times.update(_nanoseconds(ProfileData.from_file(str(path)), described))
    total = sum(times.values())
    groups: collections.defaultdict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for name, nanoseconds in times.items():
        groups[described.get(name, ("", name))].append(nanoseconds)
    operations = [
        Operation(
            kind,
            made_by,
            count=len(group),
            ms_per_step=sum(group) / 1e6 / steps / devices,
            share=sum(group) / total,
        )
        for (kind, made_by), group in groups.items()
    ]
    return sorted(operations, key=lambda one: -one.share)[:count]


def _nanoseconds(
    profile: ProfileData, described: dict[str, tuple[str, str]]
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
                if name is not None and described.get(str(name), ("",))[0] not in _CONTAINERS:
                    times[str(name)] += event.duration_ns
    return times


def _described(program: str) -> dict[str, tuple[str, str]]:
    """Instruction -> (opcode, what made it)."""
    found = {}
    for text in program.splitlines():
        match = _INSTRUCTION.match(text)
        if match:
            made_by = _OP_NAME.search(text)
            found[match[1]] = (match[2], made_by[1] if made_by else "")
    return found
