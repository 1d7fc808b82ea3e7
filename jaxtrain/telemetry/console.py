"""What a person sees of a run: on a terminal a live status line below the permanent ones.

Elsewhere only permanent lines, with a note now and then while a phase takes long.
"""

import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from jaxtrain import errors, terminal
from jaxtrain.telemetry.events import EventLog, Message
from jaxtrain.telemetry.phases import END, START, TRAINING, Now, Phases

WORDS = {
    START: "starting",
    "data": "reading data",
    "restore": "preparing the state",
    "compile": "compiling",
    TRAINING: "training",
    "evaluation": "validating",
    "save": "saving",
    "rollback": "going back to a checkpoint",
    "profile": "reading the profile",
    "report": "writing the report",
    END: "closing",
}

# A phase that says nothing for so long says that it is still there; then once a minute.
LONG_S, AGAIN_S = 30.0, 60.0
# Each drawing takes the interpreter for a millisecond or two.
_DRAW_EVERY_S = 0.5
_LOOK_EVERY_S = 1.0
# A step is said to last from here on; the numbers of shorter ones would only flicker.
_SLOW_STEP_S = 10.0
_CLOSE_S = 1.0
_BAR = range(8, 41)  # columns

_STEP = re.compile(r"step \d+/\d+ \| (?!validation )")
_VALIDATION = re.compile(r"step \d+/\d+ \| validation ")
_BANNER = re.compile(r"run directory |\S+: \d+ x .+, jaxtrain ")
# The versions of all packages (jaxtrain.versions.line), 180 columns, are only in the log.
_VERSIONS = re.compile(r", python [^,]+, jaxtrain ([^,]+), jax ([^,]+), jaxlib .+")

# The examples per second need a terminal as wide as this.
_WIDE = 90
# What a step line does without on a narrow terminal, first to last: the live line shows the steps
# per second and the data wait, too.
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
    """Shows a run while it is entered: process 0 only.

    Args:
        phases: where the run is.
        process: number of this process.
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
        self._said_at = phases.clock()
        self._noted = 0.0  # when the phase that is open had begun, if it was said that it is long
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="console", daemon=True)

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
                redirect_stderr=sys.stderr.isatty(),  # elsewhere it should stay in its file
            )
            self._live.start(refresh=True)
            self._note = lambda text: None  # it is on the screen
            terminal.take(self)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Clears the living line; what is said later is printed as elsewhere.

        From any thread, also before the process ends at once: a terminal that takes nothing (Ctrl-S
        was pressed) keeps nobody longer than a second.
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
        """Logs that a phase lasts long; prints it where there is no live line to show it."""
        self._note = log.say if self._live is None else log.log

    def handle(self, event: Message) -> None:
        """Prints a message, in process 0."""
        if self._first and event.on_console:
            self.show(_VERSIONS.sub(r", jaxtrain \1, jax \2", event.text))

    def show(self, text: str) -> None:
        """Prints a line, above the live one; in every process."""
        self._said_at = self._phases.clock()
        if self._live is None or self._closed.is_set():
            columns = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0
            terminal.plain(fitted(text, columns) if columns else text)
        else:
            line = errors.visible(fitted(text, self._live.console.width))
            # Not wrapped: you may copy a command from here.
            self._live.console.print(Text(line, style=_style(line)), soft_wrap=True)

    def working(self, work: terminal.Work | None) -> None:
        """Shows how far a piece of work is, until the next call."""
        self._work = work

    def _look(self) -> None:
        live = self._live
        while not self._closed.wait(_LOOK_EVERY_S if live is None else _DRAW_EVERY_S):
            self._mention_length()
            if live is not None and self._file is not None and self._file.in_front():
                live.refresh()

    def _mention_length(self) -> None:
        now, clock = self._phases.now, self._phases.clock()
        if now.phase in (TRAINING, END):
            return
        silent_s = clock - max(self._said_at, now.began)
        if silent_s >= (AGAIN_S if self._noted == now.began else LONG_S):
            self._noted, self._said_at = now.began, clock
            self._note(f"{WORDS[now.phase]}: {duration(clock - now.began)} so far")

    def _drawn(self) -> Text:
        if self._live is None or self._file is None or not self._file.in_front():
            return Text("")
        columns = self._live.console.width - 1  # in the last one the cursor would wrap
        line = line_of(self._phases.now, self._phases.clock(), columns, self._work)
        return Text(line, no_wrap=True, overflow="crop")


def line_of(now: Now, clock: float, columns: int, work: terminal.Work | None = None) -> str:
    """The line that lives.

    Args:
        now: where the run is.
        clock: seconds, as in ``now``.
        columns: that it may take; fields that have no room are left out, the last ones first.
        work: how far a piece of work in this phase is.
    """
    what = WORDS.get(now.phase, now.phase)
    lasted = duration(clock - now.began)
    share: float | None = None
    if now.phase == TRAINING:
        share, fields = _of_training(now, clock)
    elif work is not None:
        share = min(1.0, work.done / work.total) if work.total else 0.0
        fields = [f"{work.what} {work.done:,.0f} of {work.total:,.0f} MB", lasted]
    else:
        fields = [lasted]
        if now.step is not None and now.total is not None:
            fields.append(f"step {now.step}/{now.total}")
    while len(fields) > 1 and len(what) + 1 + len(" | ".join(fields)) > columns:
        fields.pop()
    text = " | ".join(fields)
    room = min(columns - len(what) - len(text) - 2, _BAR[-1])
    if share is not None and room in _BAR:
        full = round(share * room)
        text = "━" * full + "╌" * (room - full) + " " + text
    return f"{what} {text}"[:columns]


def _of_training(now: Now, clock: float) -> tuple[float, list[str]]:
    """How much of the run is done, and what else there is to say, the most important first."""
    done, total = now.step or 0, now.total or 1
    fields = [f"{done}/{total}"]
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
    """The line of a step; what ``values`` does not have is omitted.

    Example: ``step 100/100000 | loss 0.1200 | psnr 20.5 dB | gpu 39.0 GiB | 0.90 steps/s |
    115 examples/s | data wait 1% | eta 30h51m``.

    Args:
        step: completed steps.
        total_steps: of the run.
        values: by full name.
        eta_s: seconds to the end; None omits it.
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
    """Shortens the line of a step to the width of a terminal; other lines stay as they are.

    ``log.txt`` and ``metrics.jsonl`` keep every field.

    Args:
        line: as :func:`console_line` returns it.
        columns: of the terminal.
    """
    if not _STEP.match(line):
        return line
    for number, field in enumerate(_EXPENDABLE):
        if len(line) > columns or (number == 0 and columns < _WIDE):
            line = re.sub(field + r"(?= \||$)", "", line)
    return line


def _style(line: str) -> str:
    """The style of a line on a terminal, in the words of rich."""
    if _VALIDATION.match(line):
        return "bold"
    return "dim" if _BANNER.match(line) else terminal.color_of(line)


def duration(seconds: float) -> str:
    """``45s``, ``3m20s``, ``30h51m``, ``4d06h``: the two largest units; days from 72 hours on."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 72 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def rate(value: float, digits: int) -> str:
    """Fixed ``digits``, or two significant ones where those would show less than that."""
    return f"{value:.{digits}f}" if value >= 10.0 ** (1 - digits) else f"{value:.2g}"


def _thousands(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.1f}{unit}"
    return rate(value, 0)


class _RichConsole(RichConsole):
    def show_cursor(self, show: bool = True) -> bool:
        """It is never hidden: a process that is killed could not bring it back."""
        del show
        return False


class _Terminal(io.TextIOBase):
    """Writes to a terminal, which may go away; then there is nothing to write to, and no error.

    Past the stream's buffer: what cannot be written would stay there, and fail once more at exit.

    Args:
        stream: standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding

    def write(self, text: str) -> int:
        left = text.encode(self._encoding, errors="replace")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:  # the log has every line
            pass
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return True

    def in_front(self) -> bool:
        """Whether the terminal is this program's now: in the background a shell is typed into."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # it is not the terminal that this process belongs to
            return True
