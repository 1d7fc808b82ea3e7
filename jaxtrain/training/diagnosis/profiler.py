"""Traces some steps for TensorBoard's profile page or Perfetto, and lists slow operations."""

import collections
import contextlib
import dataclasses
import inspect
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

from jaxtrain import versions
from jaxtrain.cost.hlo import Stacks
from jaxtrain.errors import InputError
from jaxtrain.models.contract import Batch
from jaxtrain.optim.schedule import Scalars
from jaxtrain.storage.atomic import write_whole
from jaxtrain.training.state import State
from jaxtrain.training.step import Metrics, TrainStep

SUMMARY = "summary.txt"

Phase = Callable[[str], contextlib.AbstractContextManager[None]]

_LISTED, _PRINTED = 30, 5  # operations in the file, and on the console

# The operations inside these have events of their own.
_CONTAINERS = ("while", "conditional", "call")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+.*? ([\w\-]+)\(", re.MULTILINE)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_STACK = re.compile(r"stack_frame_id=(\d+)")

# Transformations and calls that jax writes around and between the names of a model.
_WRAPPED = re.compile(r"(?:jit|jvp|transpose|vmap|remat|checkpoint)\((.*)\)")
_BETWEEN = {"", "while", "body", "closed_call", "checkpoint", "rematted_computation", "shard_map"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """All operations of the compiled step that one line of the traced function produced.

    Attributes:
        kind: opcode, such as "convolution"; "" if the compiled step does not list it.
        made_by: path in the traced function, such as "transpose(jvp(...))/conv_general_dilated".
        name: readable name, such as "models/mlm.py:167 (backward) dot_general".
        ms_per_step: their time per step, mean over devices.
    """

    kind: str
    made_by: str
    name: str
    count: int
    ms_per_step: float
    share: float


class _Described(NamedTuple):
    kind: str
    made_by: str
    name: str


def span(text: str | None) -> tuple[int, int] | None:
    """Parses ``"10:15"`` to (10, 15), the steps between which a trace is taken."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise InputError(f"--profile {text} is not START:STOP with START < STOP, such as 10:15")
    return int(first), int(last)


def check(steps: tuple[int, int] | None, step: int, total: int, say: Callable[[str], None]) -> None:
    """Checks that a trace begins within the run; prints a note if a resumed run is past it."""
    if steps is None:
        return
    if problem := too_late(steps, total):
        raise InputError(problem)
    if steps[0] < step:
        say(f"--profile {steps[0]}:{steps[1]}: no trace, because {step} steps are already done")


def too_late(steps: tuple[int, int], total: int) -> str | None:
    """Returns an error message if a trace begins after the end of the run, or None."""
    if steps[0] < total:
        return None
    return (
        f"--profile {steps[0]}:{steps[1]} begins after the end of the run ({total} steps): "
        "use a smaller START, or raise --loop.steps"
    )


class Profile:
    """Runs steps and traces some of them.

    It waits for the device at both ends of a trace, so that the trace contains complete steps only.

    Args:
        steps: completed steps at the beginning and at the end of the trace.
    """

    def __init__(
        self,
        steps: tuple[int, int],
        directory: Path,
        step: TrainStep,
        say: Callable[[str], None],
        open_phase: Phase,
    ) -> None:
        self._steps = steps
        self._open_phase = open_phase
        self._directory = directory
        self._step = step
        self._say = say
        self._running = self._began = False
        self._traced = 0
        self._before: set[Path] = set()
        self._began_s = 0.0

    def step(self, state: State, batch: Batch, scalars: Scalars) -> tuple[State, Metrics]:
        """Runs a step; a running trace records its number."""
        if not self._running:
            return self._step(state, batch, scalars)
        number = self._steps[0] + self._traced
        self._traced += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            result = self._step(state, batch, scalars)
        if self._traced == self._steps[1] - self._steps[0]:  # before a validation or a save
            jax.block_until_ready(result)
            self.end()
        return result

    def before_step(self, step: int, state: State) -> None:
        """Starts the trace before its first step; it stops after its last step."""
        if step == self._steps[0] and not self._began:  # a bad step keeps `step`
            jax.block_until_ready(state)
            self._before = set(self._files())
            jax.profiler.start_trace(self._own())
            self._running = self._began = True
            self._began_s = time.perf_counter()

    def end(self, *, summarize: bool = True) -> None:
        """Stops a running trace and summarizes it; the run may end during a trace."""
        if not self._running:
            return
        self._running = False
        took_s = time.perf_counter() - self._began_s
        with self._open_phase("profile"):
            jax.profiler.stop_trace()
            files = sorted(set(self._files()) - self._before)
            if not (summarize and files and self._traced) or jax.process_index():
                return
            try:
                self._summarize(files, took_s)
            except Exception as error:  # a full disk or an unknown format must not stop training
                self._say(
                    f"warning: no {SUMMARY} of the trace was written: "
                    f"{type(error).__name__}: {error}"
                )

    def _summarize(self, files: list[Path], took_s: float) -> None:
        program = inspect.unwrap(self._step).as_text()  # type: ignore[attr-defined]
        times = instruction_times(files, program)
        runs = self._traced * len(jax.local_devices())
        operations = top_operations(times, program, runs=runs, count=_LISTED)
        first, each_ms = self._steps[0], took_s * 1e3 / self._traced
        lines = [
            f"steps {first} to {first + self._traced} took {each_ms:.1f} ms each while traced; "
            "slowest operations (measured: fraction of the time, ms per step and device):",
            *(_line(operation) for operation in operations),
        ]
        write_whole(self._directory / SUMMARY, "\n".join(lines) + "\n")
        for line in lines[: 1 + _PRINTED]:
            self._say(line)
        self._say(f"more in {self._directory / SUMMARY}; to view the trace:")
        for path in sorted(files[0].parent.glob("*.trace.json.gz"))[:1]:
            self._say(f"  open {path} at https://ui.perfetto.dev")
        logs = shlex.quote(str(self._directory))
        install = versions.pip("install", "tensorboard", "xprof")
        self._say(f"  tensorboard --logdir {logs} ({install}), tab Profile")

    def _own(self) -> Path:
        """Returns this process's folder: processes on one host would write to the same files."""
        number = jax.process_index()
        return self._directory / f"process-{number}" if number else self._directory

    def _files(self) -> Iterator[Path]:
        return self._own().glob("plugins/profile/*/*.xplane.pb")


@contextlib.contextmanager
def profiled(
    steps: tuple[int, int] | None,
    directory: Path,
    step: TrainStep,
    say: Callable[[str], None],
    open_phase: Phase,
) -> Iterator[tuple[TrainStep, Callable[[int, State], None]]]:
    """Wraps a step with the profiler; yields the step and a function to call before each step."""
    if steps is None:
        yield step, lambda done, state: None
        return
    profile = Profile(steps, directory, step, say, open_phase)
    try:
        yield profile.step, profile.before_step
    except BaseException:  # a stop must not wait for the summary
        profile.end(summarize=False)
        raise
    profile.end()


def _line(operation: Operation) -> str:
    calls = f"{operation.count:4} x {operation.kind:<12} {operation.name}"
    return f"{operation.share:6.1%}  {operation.ms_per_step:9.2f}  {calls}"


def top_operations(
    times: Mapping[str, float], program: str, *, runs: int, count: int
) -> list[Operation]:
    """Returns the slowest operations, slowest first.

    Args:
        runs: how many times the program ran: traced steps, times the devices of this process.
    """
    described = _described(program)
    total = sum(times.values())
    groups: collections.defaultdict[_Described, list[float]] = collections.defaultdict(list)
    for name, nanoseconds in times.items():
        groups[described.get(name, _Described("", name, name))].append(nanoseconds)
    operations = [
        Operation(
            *described_as,
            count=len(group),
            ms_per_step=sum(group) / 1e6 / runs,
            share=sum(group) / total,
        )
        for described_as, group in groups.items()
    ]
    return sorted(operations, key=lambda operation: -operation.share)[:count]


def instruction_times(files: Iterable[Path], program: str) -> collections.Counter[str]:
    """Returns instruction -> its nanoseconds, summed over steps and devices."""
    opcodes = _opcodes(program)
    times: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings():
        # Python 3.13 warns about a type that jaxlib 0.12 creates here, which aborts the process if
        # warnings are errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        for path in files:
            times.update(_nanoseconds(ProfileData.from_file(str(path)), opcodes))
    return times


def _opcodes(program: str) -> dict[str, str]:
    matches = map(_INSTRUCTION.match, program.splitlines())
    return {match[1]: match[2] for match in matches if match}


def _nanoseconds(profile: ProfileData, opcodes: dict[str, str]) -> collections.Counter[str]:
    planes = list(profile.planes)
    # A GPU's kernels have a plane of their own; a CPU's operations run in the host's threads.
    on_device = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    times: collections.Counter[str] = collections.Counter()
    for plane in on_device or planes:
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue  # sums over the streams, for the viewer
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None and opcodes.get(str(name)) not in _CONTAINERS:
                    times[str(name)] += event.duration_ns
    return times


def _described(program: str) -> dict[str, _Described]:
    instructions = {}
    stacks = Stacks(program)
    for text in program.splitlines():
        match = _INSTRUCTION.match(text)
        if match:
            made_by, stack = _OP_NAME.search(text), _STACK.search(text)
            path = made_by[1] if made_by else ""
            line = stacks.source(int(stack[1]), path) if stack else None
            instructions[match[1]] = _Described(match[2], path, _name(path, line))
    return instructions


def _name(made_by: str, line: str | None) -> str:
    """Returns the line and the pass, if known, and the names that the model sets."""
    scopes = []
    for scope in made_by.split("/"):
        while match := _WRAPPED.fullmatch(scope):
            scope = match[1]
        scopes.append(scope)
    # The first part is the entire step.
    path = "/".join(scope for scope in scopes[1:] if scope not in _BETWEEN) or made_by
    return " ".join(filter(None, (line, path))) or "(added by the compiler)"
