"""Prints a run: on a terminal, permanent lines above a live status line.

Elsewhere it prints only permanent lines, with an occasional note during a long phase.
"""

import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Self, TextIO, cast

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from jaxtrain import errors, terminal
from jaxtrain.formats import duration, rate, thousands
from jaxtrain.telemetry.events import EventLog, Message
from jaxtrain.telemetry.line import Field, Line
from jaxtrain.telemetry.phases import END, START, TRAINING, Now, Phases

_LABELS = {
    START: "starting",
    "data": "reading data",
    "restore": "preparing the state",
    "compile": "compiling",
    TRAINING: "training",
    "evaluation": "validating",
    "save": "saving",
    "rollback": "rolling back",
    "profile": "reading the profile",
    "report": "writing the report",
    "upload": "uploading",
    END: "closing",
}

# A phase that has printed nothing for LONG_S gets a note, and another one every AGAIN_S.
LONG_S, AGAIN_S = 30.0, 60.0
_DRAW_EVERY_S = 0.5  # each redraw holds the interpreter for a millisecond or two
_CHECK_EVERY_S = 1.0
# The duration of the current step is shown from here on; shorter ones would only flicker.
_SLOW_STEP_S = 10.0
_CLOSE_S = 1.0
_BAR = range(8, 41)  # columns of the bar, a fifth of the terminal

# Columns of a step line in a file or a pipe.
_PIPED = 110


class Console:
    """Prints a run between ``__enter__`` and ``__exit__``; only in process 0.

    Args:
        phases: the run's current phase and progress.
        process: index of this process.
    """

    name = "console"
    takes = (Message,)

    def __init__(
        self,
        phases: Phases,
        process: int,
        environment: Mapping[str, str] = os.environ,
        *,
        quiet: bool = False,
    ) -> None:
        self._phases = phases
        self._first = process == 0
        self._quiet = quiet
        self._environment = environment
        self._file: _Terminal | None = None
        self._live: Live | None = None
        self._work: terminal.Work | None = None
        self._note: Callable[[str], None] = terminal.plain
        self._printed_at = phases.clock()
        self._noted = 0.0  # start of the phase that the last note was about
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="console", daemon=True)

    def __enter__(self) -> Self:
        if not self._first:
            return self
        if self._quiet:
            self._note = lambda text: None
            terminal.take(self)  # so that no other progress is shown
            return self
        if terminal.lively(sys.stdout, self._environment):
            sys.stdout.flush()
            self._file = _Terminal(sys.stdout)
            self._live = Live(
                console=_RichConsole(
                    file=cast("TextIO", self._file),
                    force_terminal=True,
                    force_jupyter=False,
                    no_color=terminal.without_color(self._environment),
                ),
                get_renderable=self._drawn,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),  # a redirected stderr stays in its file
            )
            self._live.start(refresh=True)
            self._note = lambda text: None  # the live line shows it
            terminal.take(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the live line; later messages are printed as plain lines.

        Can be called from any thread and just before the process exits. It returns after a second
        even if the terminal is blocked (Ctrl-S).
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if self._quiet or self._live is not None:
            terminal.take(None)
        if self._live is not None:
            closing = threading.Thread(target=self._live.stop, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def note_in(self, log: EventLog) -> None:
        """Sends notes about long phases to a log; prints them if there is no live line."""
        self._note = log.log if self._quiet or self._live is not None else log.say

    def handle(self, event: Message) -> None:
        """Prints a message in process 0."""
        if self._first and event.on_console and (not self._quiet or terminal.color_of(event.text)):
            self.show(event.text, event.line)

    def show(self, text: str, line: Line | None = None) -> None:
        """Prints a line above the live line, in every process.

        Args:
            text: the line.
            line: its fields: those that do not fit are omitted, or continue on another line.
        """
        self._printed_at = self._phases.clock()
        if self._live is None or self._closed.is_set():
            width = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else None
            for each in _lines(text, line, width):
                terminal.plain(each)
        else:
            for each in _lines(text, line, self._live.console.width):
                printable = errors.visible(each)
                # Not wrapped: you may copy a command from here.
                self._live.console.print(Text(printable, style=_style(text)), soft_wrap=True)

    def working(self, work: terminal.Work | None) -> None:
        """Shows the progress of a task until the next call."""
        self._work = work

    def _refresh(self) -> None:
        live = self._live
        while not self._closed.wait(_CHECK_EVERY_S if live is None else _DRAW_EVERY_S):
            self._note_long_phase()
            if live is not None and self._file is not None and self._file.in_foreground():
                live.refresh()

    def _note_long_phase(self) -> None:
        now, clock = self._phases.now, self._phases.clock()
        if now.phase in (TRAINING, END):
            return
        silent_s = clock - max(self._printed_at, now.began)
        if silent_s >= (AGAIN_S if self._noted == now.began else LONG_S):
            self._noted, self._printed_at = now.began, clock
            self._note(f"{_LABELS[now.phase]}: {duration(clock - now.began)} so far")

    def _drawn(self) -> Text:
        if self._live is None or self._file is None or not self._file.in_foreground():
            return Text("")
        columns = self._live.console.width - 1  # in the last column the cursor would wrap
        line = line_of(self._phases.now, self._phases.clock(), columns, self._work)
        return Text(line, no_wrap=True, overflow="crop")


def line_of(now: Now, clock: float, columns: int, work: terminal.Work | None = None) -> str:
    """Returns the live status line.

    Args:
        now: the run's current phase and progress.
        clock: current time in seconds, on the clock of ``now``.
        columns: maximum width; fields that do not fit are omitted, the last ones first.
        work: progress of a task in this phase.
    """
    label = _LABELS.get(now.phase, now.phase)
    lasted = duration(clock - now.began)
    fraction: float | None = None
    if now.phase == TRAINING:
        fraction, fields = _training_fields(now, clock)
    elif work is not None:
        fraction = min(1.0, work.done / work.total) if work.total else 0.0
        fields = [Field(f"{work.task} {work.amount}"), Field(lasted, 1)]
    else:
        fields = [Field(lasted)]
        if now.step is not None and now.total is not None:
            fields.append(Field(f"step {now.step}/{now.total}", 1))
    # The width of the bar depends only on the terminal: numbers that grow must not move it.
    bar = 0 if fraction is None else min(max(columns // 5, _BAR[0]), _BAR[-1])
    if len(label) + bar + 2 + len(fields[0].text) > columns:
        bar = 0
    text = str(Line(tuple(fields)).fitted(columns - len(label) - 1 - (bar + 1 if bar else 0)))
    if fraction is not None and bar:
        full = round(fraction * bar)
        text = "━" * full + "╌" * (bar - full) + " " + text
    return f"{label} {text}"[:columns]


def _training_fields(now: Now, clock: float) -> tuple[float, list[Field]]:
    """Returns the completed fraction of the run, and the other fields by importance."""
    step, total = now.step or 0, now.total or 1
    fields = [Field(f"{step:>{len(str(total))}}/{total}")]
    lasted = clock - now.step_began
    if lasted >= _SLOW_STEP_S:
        fields.append(Field(f"this step {duration(lasted)}", 1))
    if now.step_s:
        fields.append(Field(f"{rate(1 / now.step_s, 2)} steps/s", 2))
        fields.append(_eta(max(0.0, (total - step) * now.step_s - lasted), 3))
    if "train/loss" in now.values:
        fields.append(Field(f"loss {now.values['train/loss']:.4f}", 4, len("loss 10.0000")))
    if "train/data_wait_fraction" in now.values:
        fields.append(_data_wait(now.values["train/data_wait_fraction"], 5))
    return step / total, fields


def _eta(seconds: float, rank: int) -> Field:
    return Field(f"eta {duration(seconds)}", rank, len("eta 59m59s"))


def _data_wait(fraction: float, rank: int) -> Field:
    return Field(f"data wait {fraction:.0%}", rank, len("data wait 10%"))


def console_line(
    step: int, total_steps: int, values: Mapping[str, float], eta_s: float | None
) -> Line:
    """Returns the line of a step; fields that are not in ``values`` are omitted.

    Example: ``step 100/100000 | loss 0.1200 | psnr 20.5 dB | gpu 39.0 GiB | 0.90 steps/s |
    115 examples/s | data wait 1% | eta 30h51m``.

    On a narrow terminal, rates are omitted first: the live line has the steps/s, the time left
    follows from them, and the data wait says whether they could be higher.
    """
    fields: tuple[tuple[str, Callable[[float], Field]], ...] = (
        ("loss", lambda value: Field(f"loss {value:.4f}")),
        ("psnr", lambda value: Field(f"psnr {value:.1f} dB", 1)),
        ("accuracy", lambda value: Field(f"accuracy {value:.1%}", 1)),
        ("gpu_memory_usage", lambda value: Field(f"gpu {value:.1f} GiB", 6)),
        ("steps_per_second", lambda value: Field(f"{rate(value, 2)} steps/s", 5)),
        ("samples_per_second", lambda value: Field(f"{rate(value, 0)} examples/s", 7)),
        ("tokens_per_second", lambda value: Field(f"{thousands(value)} tokens/s", 4)),
        ("data_wait_fraction", lambda value: _data_wait(value, 2)),
    )
    of = f"/{total_steps}"
    line_fields = [Field(f"step {step}{of}", widest=len("step ") + 2 * len(of) - 1)]
    line_fields += [
        show(values[f"train/{name}"]) for name, show in fields if f"train/{name}" in values
    ]
    if eta_s is not None:
        line_fields.append(_eta(eta_s, 3))
    return Line(tuple(line_fields))


def validation_line(step: int, total_steps: int, values: Mapping[str, float]) -> Line:
    """Returns the line of a validation; the standard deviations are omitted first."""
    fields = [Field(f"step {step}/{total_steps}"), Field("validation")]
    for name, value in sorted(values.items()):
        fields.append(Field(f"{name} {value:.4g}", int(name.endswith("_std"))))
    return Line(tuple(fields))


def _lines(text: str, line: Line | None, columns: int | None) -> list[str]:
    """Returns a message as it is printed.

    Args:
        columns: of the terminal; None for a file or a pipe, whose lines are not broken.
    """
    if line is None or columns == 0:  # a terminal of unknown width
        return [text]
    if columns is None:
        return [str(line.fitted(_PIPED))]
    return line.fitted(columns).wrapped(columns)


def _style(text: str) -> str:
    if " | validation | " in text:
        return "bold"
    banner = text.startswith("run directory ") or ", jaxtrain " in text
    return "dim" if banner else terminal.color_of(text)


class _RichConsole(RichConsole):
    def show_cursor(self, show: bool = True) -> bool:
        """Never hides the cursor: a killed process could not restore it."""
        del show
        return False


class _Terminal(io.TextIOBase):
    """Writes to a terminal and ignores errors, since a terminal can disappear.

    It bypasses the stream's buffer: unwritten text would stay there and fail again at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding

    def write(self, text: str) -> int:
        rest = text.encode(self._encoding, errors="replace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # log.txt has every line
            pass
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return True

    def in_foreground(self) -> bool:
        """Returns whether this process is in the foreground; otherwise a shell owns the line."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not the controlling terminal of this process
            return True
