"""A trace of some steps, for TensorBoard's profile page or Perfetto."""

import contextlib
import inspect
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import write_whole
from jaxtrain.training import traces
from jaxtrain.training.state import State
from jaxtrain.training.step import Batch, Metrics, TrainStep

SUMMARY = "summary.txt"

Phase = Callable[[str], contextlib.AbstractContextManager[None]]

_LISTED, _SAID = 30, 5  # operations in the file, and on the console


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
        operations = traces.top_operations(
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


def _line(one: traces.Operation) -> str:
    return f"{one.share:6.1%}  {one.ms_per_step:9.2f}  {one.count:4} x {one.kind:<12} {one.name}"
