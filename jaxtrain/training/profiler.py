"""A trace of some steps, for TensorBoard's profile page or Perfetto, and what took its time."""

import collections
import contextlib
import dataclasses
import inspect
import re
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import write_whole
from jaxtrain.training.state import State
from jaxtrain.training.step import Batch, Metrics, TrainStep
from jaxtrain.xla.hlo import Stacks

SUMMARY = "summary.txt"

Phase = Callable[[str], contextlib.AbstractContextManager[None]]

_LISTED, _SAID = 30, 5  # operations in the file, and on the console

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


def span(text: str | None) -> tuple[int, int] | None:
    """``"10:15"`` -> (10, 15): the steps between which a trace is taken.

    Raises:
        InputError: it does not read so.
    """
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise InputError(f"--profile {text} is not START:STOP with START < STOP, as in 10:15")
    return int(first), int(last)


def check(steps: tuple[int, int] | None, done: int, total: int, say: Callable[[str], None]) -> None:
    """A trace has to begin within the run; a resumed run may have passed it, and says so.

    Raises:
        InputError: it begins after the end.
    """
    if steps is None:
        return
    if wrong := too_late(steps, total):
        raise InputError(wrong)
    if steps[0] < done:
        say(f"--profile {steps[0]}:{steps[1]}: no trace, {done} updates are done already")


def too_late(steps: tuple[int, int], total: int) -> str | None:
    """What is wrong with a trace that begins after the end of the run; None where it does not."""
    if steps[0] < total:
        return None
    return (
        f"--profile {steps[0]}:{steps[1]} begins after the end of the run ({total} steps): "
        "take a smaller START, or raise --loop.steps"
    )


class Profile:
    """Steps of which some are traced. It waits for the device where a trace begins and ends, so
    that what is in it is these steps, whole.

    Args:
        steps: the first, and the one before which the trace ends, counted in completed updates.
        directory: ``profile/`` of the run.
        step: compiled.
        say: takes a line.
        apart: opens a phase, by its name, whose time is no step's.
    """

    def __init__(
        self,
        steps: tuple[int, int],
        directory: Path,
        step: TrainStep,
        say: Callable[[str], None],
        apart: Phase,
    ) -> None:
        self._steps = steps
        self._apart = apart
        self._directory = directory
        self._step = step
        self._say = say
        self._running = self._began = False
        self._traced = 0
        self._before: set[Path] = set()
        self._began_s = 0.0

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """The step; while a trace runs, with its number in it."""
        if not self._running:
            return self._step(state, batch)
        number = self._steps[0] + self._traced
        self._traced += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            result = self._step(state, batch)
        if self._traced == self._steps[1] - self._steps[0]:  # before a validation or a save
            jax.block_until_ready(result)
            self.end()
        return result

    def before_step(self, done: int, state: State) -> None:
        """Starts the trace where it is time to; it ends with its last step.

        Args:
            done: completed updates.
            state: that the next step takes.
        """
        if done == self._steps[0] and not self._began:  # a bad update is tried again
            jax.block_until_ready(state)
            self._before = set(self._files())
            jax.profiler.start_trace(self._own())
            self._running = self._began = True
            self._began_s = time.perf_counter()

    def end(self, *, summarize: bool = True) -> None:
        """Ends a trace that runs, and says what it shows; a run may end inside of it."""
        if not self._running:
            return
        self._running = False
        took_s = time.perf_counter() - self._began_s
        with self._apart("profile"):
            jax.profiler.stop_trace()
            files = sorted(set(self._files()) - self._before)
            if not (summarize and files and self._traced) or jax.process_index():
                return
            try:
                self._summarize(files, took_s)
            except Exception as error:  # a full disk, or a trace of another form: training goes on
                self._say(f"no {SUMMARY} of the trace: {type(error).__name__}: {error}")

    def _summarize(self, files: list[Path], took_s: float) -> None:
        operations = top_operations(
            files,
            inspect.unwrap(self._step).as_text(),  # type: ignore[attr-defined]
            steps=self._traced,
            devices=len(jax.local_devices()),
            count=_LISTED,
        )
        first, each_ms = self._steps[0], took_s * 1e3 / self._traced
        lines = [
            f"steps {first} to {first + self._traced} took {each_ms:.1f} ms each while traced; "
            "where it went (measured: share and ms a step of a device's operations):",
            *(_line(operation) for operation in operations),
        ]
        write_whole(self._directory / SUMMARY, "\n".join(lines) + "\n")
        for line in lines[: 1 + _SAID]:
            self._say(line)
        self._say(f"more in {self._directory / SUMMARY}; to look at the trace:")
        for path in sorted(files[0].parent.glob("*.trace.json.gz"))[:1]:
            self._say(f"  https://ui.perfetto.dev opens {path}")
        logs = shlex.quote(str(self._directory))
        self._say(f"  tensorboard --logdir {logs} (pip install tensorboard xprof), tab Profile")

    def _own(self) -> Path:
        """Processes of one host would write into the same files."""
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
    apart: Phase,
) -> Iterator[tuple[TrainStep, Callable[[int, State], None]]]:
    """A step, and what to call before each; without ``steps`` they are the plain step and nothing.

    Args:
        steps: as :func:`span` gives them.
        directory: ``profile/`` of the run.
        step: compiled.
        say: takes a line.
        apart: opens a phase, by its name, whose time is no step's.
    """
    if steps is None:
        yield step, lambda done, state: None
        return
    profile = Profile(steps, directory, step, say, apart)
    try:
        yield profile.step, profile.before_step
    except BaseException:  # whoever wants to stop now waits for no summary
        profile.end(summarize=False)
        raise
    profile.end()


def _line(operation: Operation) -> str:
    calls = f"{operation.count:4} x {operation.kind:<12} {operation.name}"
    return f"{operation.share:6.1%}  {operation.ms_per_step:9.2f}  {calls}"


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
