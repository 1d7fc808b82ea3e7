"""The events that a run reports, and the log that hands them to its sinks.

A run emits each event once, to one :class:`EventLog`. Everything that stores or shows events is a
:class:`Sink` of that log and receives the types of events that it asks for:

==============================  ==================================================================
:class:`Message`                console, ``log.txt``
:class:`Metrics`                ``metrics.jsonl``, TensorBoard
:class:`Sample`                 ``samples/``, TensorBoard
:class:`StepExamples`           ``examples.jsonl``
:class:`BadStep`                ``bad_steps.jsonl``
:class:`Rewound`                metrics, TensorBoard, samples and lists: remove later records
:class:`Started`,               ``history.jsonl``
:class:`StepCompiled`,
:class:`PhaseEnded`,
:class:`Ended`
==============================  ==================================================================

The trackers of ``--track`` receive only the beginning and the end of a run, and read the files of
the other sinks (:mod:`jaxtrain.telemetry.tracker`). To add a sink, write a class in a file, such
as ``telemetry/tensorboard.py``, and add it to the list in ``telemetry/sinks.py``.
"""

import dataclasses
import functools
import re
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxtrain import errors, terminal
from jaxtrain.config import metrics
from jaxtrain.distributed.signals import why
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import addresses
from jaxtrain.telemetry import images
from jaxtrain.telemetry.images import NO_LABELS, Labels
from jaxtrain.telemetry.line import Line

if TYPE_CHECKING:
    from jaxtrain.cost.step_cost import StepCost

_METRIC_NAME = re.compile(r"(train|val)/[a-z0-9_]+")
_SAMPLE_NAME = re.compile(r"[a-z0-9_]+")


@dataclasses.dataclass(frozen=True)
class Message:
    """A message for the user; on the console it is one line.

    Attributes:
        text: without control characters, and without credentials in URLs.
        on_console: False if the console has already shown it.
        line: its fields, of which a narrow console omits some; None if it has none.
    """

    text: str
    on_console: bool = True
    line: Line | None = None


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The metrics of a logged step or of a validation.

    Attributes:
        values: metrics by full name, ``train/NAME`` or ``val/NAME``.
    """

    step: int
    values: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in self.values:
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(f"metric name {name!r} is not train/NAME or val/NAME")
        numbers = {name: float(value) for name, value in self.values.items()}
        object.__setattr__(self, "values", numbers)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample image, clip, or text that the model made from the first validation batch.

    Attributes:
        name: lowercase letters, digits, underscores.
        content: an image uint8 [H, W, 3], a clip uint8 [T, H, W, 3], or a text.

    Raises:
        ValueError: the name has another form, or the array is not an image or a clip.
    """

    step: int
    name: str
    content: np.ndarray | str
    labels: Labels = NO_LABELS

    def __post_init__(self) -> None:
        if not _SAMPLE_NAME.fullmatch(self.name):
            raise ValueError(
                f"sample name {self.name!r} must consist of lowercase letters, digits, and _"
            )
        if not isinstance(self.content, str):
            images.check(self.name, self.content)

    @functools.cached_property
    def image(self) -> images.Encoded | None:
        """The image or clip, encoded once for all sinks; None for a text."""
        if isinstance(self.content, str):
            return None
        return images.encode(self.content, self.labels)

    @property
    def file(self) -> Path:
        """Its path in the run directory, such as ``samples/reconstruction_40.png``."""
        extension = ".txt" if isinstance(self.content, str) else images.extension(self.content)
        return Path("samples") / f"{self.name}_{self.step}{extension}"


@dataclasses.dataclass(frozen=True)
class StepExamples:
    """The examples of a step, if ``loop.record_examples`` is set; from each process.

    Attributes:
        step: completed steps, including this one.
        position: examples seen before it, over all processes.
    """

    step: int
    position: int
    ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class BadStep:
    """A skipped step; from each process.

    Attributes:
        step: completed steps, not including this one.
        position: examples seen before it, over all processes.
        loss, grad_norm: as text, since JSON has no NaN.
    """

    step: int
    position: int
    loss: str
    grad_norm: str
    ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Rewound:
    """The run is back at an earlier step; sinks remove what they recorded after it.

    Attributes:
        seen: examples seen.
        validated: False if the validation after ``step`` will be repeated, too.
    """

    step: int
    seen: int
    validated: bool = True


@dataclasses.dataclass(frozen=True)
class Started:
    """A start of the run.

    Attributes:
        step, seen: completed steps and examples seen when it began.
        total: steps of the complete run; None if the run ended before that was known.
        began: when the command or the call of :func:`jaxtrain.train` began, seconds since 1970.
        added_metrics: those that the model adds to the table of :mod:`jaxtrain.config.metrics`.
    """

    step: int
    seen: int
    total: int | None
    resumed_from: str | None
    config: Mapping[str, Any]
    arguments: Sequence[str]
    began: float = dataclasses.field(default_factory=time.time)
    added_metrics: Mapping[str, metrics.Metric] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepCompiled:
    """The training step has been compiled.

    Attributes:
        state_bytes: size of the training state on each device.
        params: number of parameters, also of frozen ones.
        planned: what ``plan`` says (:func:`jaxtrain.training.diagnosis.planned.planned`).
    """

    step: int
    cost: "StepCost"
    state_bytes: float
    params: int
    code: str = ""
    data: str = ""
    planned: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PhaseEnded:
    """A span of time that the run spent in one phase, without the phases nested in it.

    Attributes:
        from_step: completed steps at its beginning; None if not known yet.
        step: completed steps at its end; None if not known yet.
    """

    name: str
    ended: float
    seconds: float
    from_step: int | None
    step: int | None
    waited_s: float


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of this start of the run. Only messages and the writing of the report follow it.

    Attributes:
        diverged: whether a gate, a canary, or bad steps ended it: to try again changes nothing.
    """

    step: int | None
    code: int
    why: str
    diverged: bool = False


Event = (
    Message
    | Metrics
    | Sample
    | StepExamples
    | BadStep
    | Rewound
    | Started
    | StepCompiled
    | PhaseEnded
    | Ended
)


class Sink(Protocol):
    """Stores or shows events, such as a file or a tracker.

    Attributes:
        name: name of its output for warnings, such as ``"metrics.jsonl"``.
        takes: the types of events that it receives.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def takes(self) -> tuple[type, ...]:
        """See above."""

    def handle(self, event: Any) -> None:
        """Writes an event. Only one thread at a time calls it.

        Raises:
            OSError: the event could not be written. The sink keeps it and retries with the next.
            InputError: a file in the run directory was not written by jaxtrain. Before the first
                step this ends the run.
        """

    def close(self) -> None:
        """Writes pending data and closes all files. Does not raise."""


class ConsoleSink(Sink, Protocol):
    """The sink that exists before the run has a directory."""

    def show(self, text: str) -> None:
        """Prints a line, in every process."""


class EventLog:
    """Hands each event to all sinks. A failing sink never ends a run that trains.

    A sink that raises OSError is reported once and gets the next event, too. One that raises
    another error is reported with its traceback in the log, closed, and gets no more events.

    Args:
        console: shows messages from the start; :meth:`attach` adds the other sinks once the run
            has a directory.
    """

    def __init__(self, console: ConsoleSink) -> None:
        self._console = console
        self._sinks: list[Sink] = [console]
        self._early: list[Event] = []
        self._failing: set[str] = set()
        self._dropped: list[Sink] = []
        self._training = False
        self._directory: Path | None = None
        # The watchdog, the signal thread and the system-metrics thread emit events, too.
        self._lock = threading.RLock()

    def attach(self, sinks: Iterable[Sink], directory: Path) -> None:
        """Adds the sinks of the run directory and hands them all earlier events."""
        with self._lock:
            self._directory = directory
            added = list(sinks)
            self._sinks += added  # first: a sink that fails on an early event is reported in all
            early, self._early = self._early, []
            for event in early:
                for sink in added:
                    self._deliver(sink, event)

    def emit(self, event: Event) -> None:
        """Hands an event to all sinks."""
        with self._lock:
            self._training |= isinstance(event, StepCompiled)
            if self._directory is None:
                self._early.append(event)
            for sink in self._sinks:
                self._deliver(sink, event)

    def say(self, text: str | Line) -> None:
        """Prints one line (process 0) and logs it (every process)."""
        line = text if isinstance(text, Line) else None
        self.emit(Message(errors.one_line(addresses.scrub(str(text))), line=line))

    def log(self, text: str) -> None:
        """Logs text without printing it: the console has shown it, or it is too long."""
        self.emit(Message(errors.visible(addresses.scrub(text)), on_console=False))

    def log_error(self, error: BaseException) -> None:
        """Logs an error; an unexpected one with its traceback."""
        if isinstance(error, InputError | RunAgain):
            self.log(errors.one_line(f"error: {error}"))
        elif isinstance(error, Exception):
            self.log("".join(traceback.format_exception(error)).rstrip())
        else:
            self.log(why(error))

    def close(self) -> None:
        """Closes all sinks except the console, which its owner closes."""
        while len(self._sinks) > 1:
            with self._lock:
                sink = self._sinks.pop()
            # Without the lock, because a tracker may take a minute. The log closes last.
            if not any(sink is dropped for dropped in self._dropped):
                self._close_sink(sink)

    def _deliver(self, sink: Sink, event: Event) -> None:
        if not isinstance(event, sink.takes) or any(sink is dropped for dropped in self._dropped):
            return
        try:
            sink.handle(event)
        except OSError as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self._show(
                    f"warning: cannot write {sink.name} in {self._directory} "
                    f"({error.strerror or error}): training continues; unwritten data is kept in "
                    "memory, up to 16 MiB (samples: 64 MiB), and retried"
                )
            return
        except Exception as error:
            # Before the first step, a file that jaxtrain did not write is an error for the user.
            if isinstance(error, InputError) and not self._training:
                raise
            self._drop(sink, error)
            return
        if sink.name in self._failing:
            self._failing.remove(sink.name)
            self._show(f"{sink.name} in {self._directory} is written again")

    def _drop(self, sink: Sink, error: Exception) -> None:
        """Stops handing events to a sink that raised something other than an OSError."""
        self._dropped.append(sink)
        warning = (
            f"warning: {sink.name} failed ({type(error).__name__}: {errors.first_line(error)}): "
            f"training continues without {sink.name}"
        )
        self._show(warning)
        self.log(f"{warning}\n{''.join(traceback.format_exception(error)).rstrip()}")
        self._close_sink(sink)

    def _close_sink(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            self._show(f"warning: cannot close {sink.name} ({errors.first_line(error)})")

    def _show(self, text: str) -> None:
        text = errors.one_line(addresses.scrub(text))
        try:
            self._console.show(text)
        except Exception:
            terminal.plain(text)
