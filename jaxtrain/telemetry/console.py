"""Prints a run: on a terminal, permanent lines above a live status line.

Elsewhere it prints only permanent lines, with an occasional note during a long phase.
"""

import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Self, TextIO, cast

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from jaxtrain import errors, terminal
from jaxtrain.telemetry.events import EventLog, Message
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
    "find_nan": "finding a NaN",
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

_STEP = re.compile(r"step \d+/\d+ \| (?!validation )")
_VALIDATION = re.compile(r"step \d+/\d+ \| validation ")
_BANNER = re.compile(r"run directory |\S+: \d+ x .+, jaxtrain ")
# The versions of all packages (jaxtrain.versions.line), 180 columns, are only in the log.
_VERSIONS = re.compile(r", python [^,]+, jaxtrain ([^,]+), jax ([^,]+), jaxlib .+")

# The examples per second need a terminal as wide as this.
_WIDE = 90
# Columns of a step line in a file or a pipe.
_PIPED = 100
# Fields that a step line drops on a narrow terminal, in this order. The live line also shows the
# steps per second and the data wait.
_EXPENDABLE = (
    r" \| [^|]+ examples/s",
    r" \| gpu [^|]+ GiB",
    r" dB",
    r" \| data wait [^|]+?",
    r" \| [^|]+ steps/s",
    r" \| [^|]+ tokens/s",
    r" \| eta [^|]+?",
    r" \| (?:psnr|accuracy) [^|]+?",
)


class Console:
    """Prints a run between ``__enter__`` and ``__exit__``; only in process 0.

    Args:
        phases: the run's current phase and progress.
        process: index of this process.
        environment: ``os.environ``.
    """

    name = "console"
    takes = (Message,)

    def __init__(
        self, phases: Phases, process: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._phases = phases
        self._first = process == 0
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
        if self._live is not None:
            terminal.take(None)
            closing = threading.Thread(target=self._live.stop, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def note_in(self, log: EventLog) -> None:
        """Sends notes about long phases to a log; prints them if there is no live line."""
        self._note = log.say if self._live is None else log.log

    def handle(self, event: Message) -> None:
        """Prints a message in process 0."""
        if self._first and event.on_console:
            self.show(_VERSIONS.sub(r", jaxtrain \1, jax \2", event.text))

    def show(self, text: str) -> None:
        """Prints a line above the live line, in every process."""
        self._printed_at = self._phases.clock()
        if self._live is None or self._closed.is_set():
            columns = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else _PIPED
            terminal.plain(fitted(text, columns) if columns else text)
        else:
            line = errors.visible(fitted(text, self._live.console.width))
            # Not wrapped: you may copy a command from here.
            self._live.console.print(Text(line, style=_style(line)), soft_wrap=True)

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
        fields = [f"{work.what} {work.amount}", lasted]
    else:
        fields = [lasted]
        if now.step is not None and now.total is not None:
            fields.append(f"step {now.step}/{now.total}")
    # The width of the bar depends only on the terminal: numbers that grow must not move it.
    bar = 0 if fraction is None else min(max(columns // 5, _BAR[0]), _BAR[-1])
    if len(label) + bar + 2 + len(fields[0]) > columns:
        bar = 0
    room = columns - len(label) - 1 - (bar + 1 if bar else 0)
    while len(fields) > 1 and _reserved(fields) > room:
        fields.pop()
    text = " | ".join(fields)
    if fraction is not None and bar:
        full = round(fraction * bar)
        text = "━" * full + "╌" * (bar - full) + " " + text
    return f"{label} {text}"[:columns]


def _reserved(fields: list[str]) -> int:
    """Returns the columns of the fields at their usual widest, so that none comes and goes."""
    widest = {"eta": len("eta 59m59s"), "loss": len("loss 10.0000"), "data": len("data wait 10%")}
    widths = [max(len(field), widest.get(field.partition(" ")[0], 0)) for field in fields]
    return sum(widths) + len(" | ") * (len(fields) - 1)


def _training_fields(now: Now, clock: float) -> tuple[float, list[str]]:
    """Returns the completed fraction of the run, and the other fields by importance."""
    done, total = now.step or 0, now.total or 1
    fields = [f"{done:>{len(str(total))}}/{total}"]
    lasted = clock - now.step_began
    if lasted >= _SLOW_STEP_S:
        fields.append(f"this step {duration(lasted)}")
    if now.step_s:
        fields.append(f"{rate(1 / now.step_s, 2)} steps/s")
        fields.append(f"eta {duration(max(0.0, (total - done) * now.step_s - lasted))}")
    if "train/loss" in now.values:
        fields.append(f"loss {now.values['train/loss']:.4f}")
    if "train/data_wait_fraction" in now.values:
        fields.append(f"data wait {now.values['train/data_wait_fraction']:.0%}")
    return done / total, fields


def console_line(
    step: int, total_steps: int, values: Mapping[str, float], eta_s: float | None
) -> str:
    """Returns the line of a step; fields that are not in ``values`` are omitted.

    Example: ``step 100/100000 | loss 0.1200 | psnr 20.5 dB | gpu 39.0 GiB | 0.90 steps/s |
    115 examples/s | data wait 1% | eta 30h51m``.

    Args:
        step: completed steps.
        total_steps: of the run.
        values: metrics by full name.
        eta_s: estimated seconds to the end; None omits the field.
    """
    fields: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("loss", lambda value: f"loss {value:.4f}"),
        ("psnr", lambda value: f"psnr {value:.1f} dB"),
        ("accuracy", lambda value: f"accuracy {value:.1%}"),
        ("gpu_memory_usage", lambda value: f"gpu {value:.1f} GiB"),
        ("steps_per_second", lambda value: f"{rate(value, 2)} steps/s"),
        ("samples_per_second", lambda value: f"{rate(value, 0)} examples/s"),
        ("tokens_per_second", lambda value: f"{_thousands(value)} tokens/s"),
        ("data_wait_fraction", lambda value: f"data wait {value:.0%}"),
    )
    parts = [f"step {step}/{total_steps}"]
    parts += [show(values[f"train/{name}"]) for name, show in fields if f"train/{name}" in values]
    if eta_s is not None:
        parts.append(f"eta {duration(eta_s)}")
    return " | ".join(parts)


def fitted(line: str, columns: int) -> str:
    """Shortens a step or validation line to a number of columns; returns others unchanged.

    ``log.txt`` and ``metrics.jsonl`` keep every field.
    """
    if _VALIDATION.match(line) and len(line) > columns:
        return re.sub(r" \| val/\w+_std [^|]+?(?= \||$)", "", line)
    if not _STEP.match(line):
        return line
    for number, field in enumerate(_EXPENDABLE):
        if len(line) > columns or (number == 0 and columns < _WIDE):
            line = re.sub(field + r"(?= \||$)", "", line)
    return line


def _style(line: str) -> str:
    """Returns the rich style of a line."""
    if _VALIDATION.match(line):
        return "bold"
    return "dim" if _BANNER.match(line) else terminal.color_of(line)


def duration(seconds: float) -> str:
    """``45s``, ``3m20s``, ``30h51m``, ``4d06h``: the two largest units; days from 72 hours on."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 72 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def rate(value: float, digits: int) -> str:
    """Formats a rate with ``digits`` decimals, or two significant digits if that shows more."""
    return f"{value:.{digits}f}" if value >= 10.0 ** (1 - digits) else f"{value:.2g}"


def _thousands(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.1f}{unit}"
    return rate(value, 0)


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
