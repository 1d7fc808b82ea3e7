"""Measures what each process does between steps, and names one that delays the others.

All devices wait for each other in every step, so a step takes equally long in all processes. What
differs is when a process starts it: later if it waited for its input, or if its own program worked
(or slept, or was stopped) between steps. Both are measured with each process's own monotonic clock,
gathered from all processes, and judged alike.
A limit on a process's CPU also slows down what it does inside of a step; the kernel counts for how
long it stopped the process.
"""

import collections
import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import machine
from jaxtrain.distributed import process_group
from jaxtrain.sharding import batch_sharding, replicated

# A process is slow if it starts a step later than the others by more than this fraction of it.
_FRACTION = 0.1
# Process 0 writes the files of the run, which takes milliseconds and more in a tiny step.
_LEAST_S = 0.05
# The median of fewer steps would follow a single late one, such as on a busy CPU.
_LEAST_STEPS = 5

INPUT, PROGRAM, LIMIT = "input", "program", "CPU limit"
_MEANINGS = {
    INPUT: ("waits for its data", "raise --data.workers, or check its disk and network"),
    PROGRAM: ("works between steps", "check for other programs, or a slow disk on this host"),
    LIMIT: (
        "is stopped by its CPU limit",
        "raise the limit of its container (docker run --cpus, a pod's limits) or cgroup (cpu.max)",
    ),
}


class Seconds(NamedTuple):
    """Seconds per step of one process, over the same steps: lower medians, and the mean of one.

    Attributes:
        input: waiting for its batch.
        program: neither waiting for its batch, nor for the devices, nor in a pause such as a save.
        ahead: waiting for a step while the next one is already dispatched: the devices had work,
            so the process delayed no others between steps.
        step: all of it, without pauses.
        limited: stopped by a limit on its CPU, at most ``step``; a mean.
    """

    input: float
    program: float
    ahead: float
    step: float
    limited: float = 0.0


class Slow(NamedTuple):
    """A slow process.

    Attributes:
        kind: what it is slow at, ``INPUT``, ``PROGRAM``, or ``LIMIT``.
        own_s: seconds per step for which it does that.
    """

    process: int
    kind: str
    own_s: float
    others_s: float


def slowest(processes: Sequence[Seconds], *, on_cpu: bool = False) -> Slow | None:
    """Returns the process that delays the others most; None if none does.

    Args:
        on_cpu: the devices are CPUs, so that a limit on a process's CPU slows them down, too.
    """
    least_s = max(_FRACTION * max(times.step for times in processes), _LEAST_S)
    late: list[tuple[float, Slow]] = []
    for process, times in enumerate(processes):
        others = [*processes[:process], *processes[process + 1 :]]
        others_limited_s = statistics.median(other.limited for other in others)
        limited_s = times.limited - others_limited_s
        if limited_s > least_s and (on_cpu or times.ahead <= least_s):
            late.append((limited_s, Slow(process, LIMIT, times.limited, others_limited_s)))
            continue
        late_s = (
            times.input
            + times.program
            - statistics.median(other.input + other.program for other in others)
        )
        if late_s <= least_s or times.ahead > least_s:
            continue
        input_s = statistics.median(other.input for other in others)
        program_s = statistics.median(other.program for other in others)
        if times.input - input_s > times.program - program_s:
            late.append((late_s, Slow(process, INPUT, times.input, input_s)))
        else:
            late.append((late_s, Slow(process, PROGRAM, times.program, program_s)))
    return max(late)[1] if late else None


class StepTimes:
    """Measures what a process does in each step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: list[Seconds] = []
        self._restart()

    def _restart(self) -> None:
        self._began = self._clock()
        self._inside: collections.defaultdict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Counts the time inside as ``pause``, ``ahead``, or ``devices``: see :class:`Seconds`."""
        began = self._clock()
        try:
            yield
        finally:
            self._inside[kind] += self._clock() - began

    def __len__(self) -> int:
        """Returns the number of steps since the last medians."""
        return len(self._steps)

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
        seconds = Seconds(*map(statistics.median_low, zip(*self._steps, strict=True)))
        self._steps.clear()
        return seconds


def described(slow: Slow, host: str) -> str:
    """Returns a line about a slow process, and what to do about it."""
    does, advice = _MEANINGS[slow.kind]
    return (
        f"process {slow.process} on host {host} slows down the others "
        f"({slow.kind}): it {does} for {slow.own_s:.3g} s per step, the others for "
        f"{slow.others_s:.3g} s (measured): {advice}"
    )


class SlowProcesses:
    """Gathers what each process does outside of steps, and prints which one is slow, and at what.

    Attributes:
        times: receives the steps of this process.
    """

    def __init__(self, mesh: jax.sharding.Mesh, say: Callable[[str], None]) -> None:
        self.times = StepTimes()
        self._throttled_s = machine.throttled_s()
        self._devices, self._say = list(mesh.devices.flat), say
        self._on_cpu = self._devices[0].platform == "cpu"
        self._named: set[tuple[int, str]] = set()
        self._pending: jax.Array | None = None
        self._where = batch_sharding(mesh)
        self._gather = jax.jit(lambda values: values, out_shardings=replicated(mesh))
        self._hosts = process_group.gather("host of a process", socket.gethostname())

    def started(self) -> None:
        """Drops the steps so far, which include the start."""
        self.times.forget()
        self._throttled_s = machine.throttled_s()

    def stepped(self, input_s: float) -> None:
        """Ends a step, which waited ``input_s`` for its batch; judges what was gathered before it.

        The devices gather it between two steps, so it is there once the second one is complete.
        """
        self.times.stepped(input_s)
        if self._pending is None:
            return
        with self.times.inside("devices"):
            pending, self._pending = self._pending, None
            rows = np.asarray(pending).tolist()
        each = {
            device.process_index: Seconds(*row)
            for device, row in zip(self._devices, rows, strict=True)
        }
        slow = slowest([each[process] for process in sorted(each)], on_cpu=self._on_cpu)
        if slow is not None and (slow.process, slow.kind) not in self._named:
            self._named.add((slow.process, slow.kind))
            self._say(described(slow, self._hosts[slow.process]))

    def logged(self) -> None:
        """Contributes this process's steps. All must call it after the same steps."""
        steps, medians = len(self.times), self.times.medians()
        if medians is None or len(self._hosts) == 1:
            return
        before_s, self._throttled_s = self._throttled_s, machine.throttled_s()
        limited_s = (self._throttled_s - before_s) / steps
        row_of_process = np.asarray(
            [medians._replace(limited=min(limited_s, medians.step))], np.float32
        )

        def row(_: Any) -> np.ndarray:
            return row_of_process

        shape = (len(self._devices), row_of_process.size)
        self._pending = self._gather(jax.make_array_from_callback(shape, self._where, row))
