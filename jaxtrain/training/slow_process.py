"""Names a process that delays the others because of its input or its own program.

All devices wait for each other in every step, so a step takes equally long in all processes. What
differs is when a process starts it: later if it waited for its input, or if its own program worked
(or slept, or was stopped) between steps. Both are measured with each process's own monotonic clock
and gathered from all processes.

A device that computes or communicates slowly looks, from outside of the step, like any other device
that waits for it: ``doctor`` measures devices one by one.
"""

import collections
import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.distributed import process_group
from jaxtrain.sharding import batch_sharding, replicated

# A process is slow if it starts a step later than the others by more than this fraction of it.
_FRACTION = 0.1
# Process 0 writes the files of the run, which takes milliseconds and more in a tiny step.
_LEAST_S = 0.05
# The median of fewer steps would follow a single late one, such as on a busy CPU.
_LEAST_STEPS = 5

INPUT, PROGRAM = "input", "program"
_MEANINGS = {
    INPUT: ("waits for its data", "raise --data.workers, or check its disk and network"),
    PROGRAM: (
        "works between steps",
        "check for other programs, a CPU limit, or a slow disk on this host",
    ),
}


class Seconds(NamedTuple):
    """Seconds per step of one process, each the lower median over the same steps.

    Attributes:
        input: waiting for its batch.
        program: neither waiting for its batch, nor for the devices, nor in a pause such as a save.
        ahead: waiting for a step while the next one is already dispatched: the devices had work,
            so the process delayed no others between steps.
        step: all of it, without pauses.
    """

    input: float
    program: float
    ahead: float
    step: float


class Slow(NamedTuple):
    """A slow process.

    Attributes:
        process: its number.
        kind: what it is slow at, ``INPUT`` or ``PROGRAM``.
        own_s: seconds per step for which it does that.
        others_s: the median of the other processes.
    """

    process: int
    kind: str
    own_s: float
    others_s: float


def slowest(processes: Sequence[Seconds]) -> Slow | None:
    """Returns the process that delays the others most; None if none does."""
    least_s = max(_FRACTION * max(own.step for own in processes), _LEAST_S)
    found: list[tuple[float, Slow]] = []
    for process, own in enumerate(processes):
        others = [*processes[:process], *processes[process + 1 :]]
        late_s = (
            own.input
            + own.program
            - statistics.median(other.input + other.program for other in others)
        )
        if late_s <= least_s or own.ahead > least_s:
            continue
        input_s = statistics.median(other.input for other in others)
        program_s = statistics.median(other.program for other in others)
        if own.input - input_s > own.program - program_s:
            found.append((late_s, Slow(process, INPUT, own.input, input_s)))
        else:
            found.append((late_s, Slow(process, PROGRAM, own.program, program_s)))
    return max(found)[1] if found else None


class StepTimes:
    """Measures what a process does in each step.

    Args:
        clock: monotonic clock, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: list[Seconds] = []
        self._restart()

    def _restart(self) -> None:
        self._began = self._clock()
        self._inside: collections.defaultdict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Counts the time inside as ``pause``, ``ahead``, or ``devices``: see :class:`Seconds`."""
        began = self._clock()
        try:
            yield
        finally:
            self._inside[what] += self._clock() - began

    def stepped(self, input_s: float) -> None:
        """Ends a step, which waited ``input_s`` for its batch."""
        step_s = self._clock() - self._began - self._inside["pause"]
        ahead_s, devices_s = self._inside["ahead"], self._inside["devices"]
        program_s = max(0.0, step_s - ahead_s - devices_s - input_s)
        self._steps.append(Seconds(input_s, program_s, ahead_s, step_s))
        self._restart()

    def forget(self) -> None:
        """Drops the steps so far."""
        self._steps.clear()

    def medians(self) -> Seconds | None:
        """Returns the medians of the steps since it last did; None while there are too few."""
        if len(self._steps) < _LEAST_STEPS:
            return None
        found = Seconds(*map(statistics.median_low, zip(*self._steps, strict=True)))
        self._steps.clear()
        return found


class SlowProcesses:
    """Gathers what each process does outside of steps, and prints which one is slow, and at what.

    Args:
        mesh: over all devices.
        say: prints a line.

    Attributes:
        times: receives the steps of this process.
    """

    def __init__(self, mesh: Mesh, say: Callable[[str], None]) -> None:
        self.times = StepTimes()
        self._alone = jax.process_count() == 1
        self._say = say
        self._named: set[tuple[int, str]] = set()
        self._pending: jax.Array | None = None
        if self._alone:
            return
        self._hosts = process_group.gather("host of a process", socket.gethostname())
        self._where = batch_sharding(mesh)
        self._devices = [one.process_index for one in mesh.devices.flat]
        self._gather = jax.jit(lambda values: values, out_shardings=replicated(mesh))

    def stepped(self, input_s: float) -> None:
        """Ends a step, which waited ``input_s`` for its batch; judges what was gathered before it.

        The devices gather it between two steps, so it is there once the second one is complete.
        """
        self.times.stepped(input_s)
        if self._pending is None:
            return
        with self.times.inside("devices"):
            pending, self._pending = np.asarray(self._pending).tolist(), None
        table = dict(zip(self._devices, pending, strict=True))
        self._judge([Seconds(*table[process]) for process in range(len(table))])

    def logged(self) -> None:
        """Contributes this process's steps. All must call it after the same steps."""
        medians = self.times.medians()
        if self._alone or medians is None:
            return
        own = np.asarray(medians, np.float32)
        local = np.broadcast_to(own, (len(self._where.addressable_devices), own.size))
        shape = (len(self._devices), own.size)
        values = jax.make_array_from_process_local_data(self._where, local, shape)
        self._pending = self._gather(values)

    def _judge(self, table: list[Seconds]) -> None:
        found = slowest(table)
        if found is None or (found.process, found.kind) in self._named:
            return
        self._named.add((found.process, found.kind))
        does, advice = _MEANINGS[found.kind]
        self._say(
            f"process {found.process} on host {self._hosts[found.process]} slows down the others "
            f"({found.kind}): it {does} for {found.own_s:.3g} s per step, the others for "
            f"{found.others_s:.3g} s (measured): {advice}"
        )
