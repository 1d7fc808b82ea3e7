"""Prints to standard output and standard error, shows progress, and detects terminals."""

import contextlib
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, TextIO

from jaxtrain.errors import one_line, visible
from jaxtrain.formats import duration
from jaxtrain.storage import addresses

Say = Callable[[str], None]
"""Prints a line."""
SAY_EVERY_S = 30.0  # how often a long task reports where no line can be updated in place
_LONGEST = 4000  # characters of an error message; several times our own longest


class Work(NamedTuple):
    """The progress of a task.

    Attributes:
        task: its name, such as "tokenizing".
        done: completed things, including those of an earlier start.
        total: number of things.
        things: what is counted, such as "videos".
    """

    task: str
    done: int
    total: int
    things: str

    @property
    def amount(self) -> str:
        """Returns how much is done, such as "10 of 40 videos"."""
        return f"{self.done:,} of {self.total:,} {self.things}"


class Display(Protocol):
    """An object that draws on the terminal; there is at most one."""

    def working(self, work: Work | None) -> None:
        """Shows the progress of a task until the next call."""


_display: Display | None = None


def take(display: Display | None) -> None:
    """Makes ``display`` the only one that draws on the terminal; None releases the terminal."""
    global _display
    _display = display


def taken() -> Display | None:
    """Returns the display that draws on the terminal, if any."""
    return _display


def lively(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a stream is a terminal on which a line can be updated in place.

    Args:
        stream: standard output or standard error; None if it is closed.
        environment: ``os.environ``. False if CI is set, or if TERM is empty, ``dumb`` or
            ``unknown``.
    """
    capable = environment.get("TERM", "") not in ("", "dumb", "unknown")
    return capable and stream is not None and not environment.get("CI") and stream.isatty()


@contextlib.contextmanager
def progress_bar(
    task: str, things: str, total: int, before: int, say: Say
) -> Iterator[Callable[[int, int], None]]:
    """Shows how many things are done while the block runs, how fast, and how many failed, if any.

    On a terminal this is one line that is rewritten in place. If a run already has a live line
    there, the count is part of that line.

    Args:
        before: how many an earlier start completed.
        say: prints the plain lines.

    Yields:
        A function that takes how many are done, including ``before``, and how many of them failed.
    """
    began = printed = time.monotonic()

    def line(done: int, failed: int, now: float) -> str:
        passed = now - began
        rate = (done - before) / passed if passed > 0 else 0.0
        left = _left(total - done, rate)
        rate_text = f"{rate:,.1f}" if rate >= 1 else f"{rate:.2g}"
        text = f"{task}: {done:,} of {total:,} {things}, {rate_text}/s, {left}"
        return f"{text}, {failed:,} failed" if failed else text

    display = taken()
    if display is not None:
        work = Work(task, before, total, things)
        try:
            display.working(work)
            yield lambda done, failed: display.working(work._replace(done=done))
        finally:
            display.working(None)
        return
    if lively(sys.stderr):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(
            Text(task),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # a file or pipe still receives every line
            transient=True,
        ) as live:
            yield lambda done, failed: live.update(Text(line(done, failed, time.monotonic())))
        return

    def update(done: int, failed: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= SAY_EVERY_S:
            printed = now
            say(line(done, failed, now))

    yield update


def _left(remaining: float, rate: float) -> str:
    return f"about {duration(max(0.0, remaining) / rate)} left" if rate > 0 else "no rate yet"


def without_color(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether NO_COLOR is set (https://no-color.org)."""
    return bool(environment.get("NO_COLOR"))


def color_of(line: str) -> str:
    """Returns the color of a line: yellow for a warning, red for an error, "" otherwise."""
    for start, color in (("warning: ", "yellow"), ("error: ", "red")):
        if line.startswith(start):
            return color
    return ""


def out(text: str) -> None:
    """Prints a line on standard output.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    _print(visible(text), sys.stdout)


def _print(line: str, stream: TextIO) -> None:
    """Prints a line; escapes what the encoding of the stream lacks, as in a ``C`` locale."""
    try:
        print(line, file=stream, flush=True)
    except UnicodeEncodeError as error:
        escaped = line.encode(error.encoding, "backslashreplace").decode(error.encoding)
        print(escaped, file=stream, flush=True)


def escape_unwritable() -> None:
    """Lets both standard streams escape what their encoding lacks, whatever prints it.

    For programs of ours; in another program, only what this module prints is escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Prints exactly one line on standard output (:func:`one_line`).

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    out(one_line(text))


def warn(text: str) -> None:
    """Prints a line on standard error, in color on a terminal; removes credentials from URLs.

    Ignores a closed terminal.
    """
    line = visible(addresses.scrub(text))
    color = color_of(line)
    if color and not without_color() and lively(sys.stderr):
        with contextlib.suppress(ImportError):  # a node of SLURM may lack it
            from rich.color import ColorSystem
            from rich.style import Style

            line = Style.parse(color).render(line, color_system=ColorSystem.STANDARD)
    try:
        _print(line, sys.stderr)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _discard(sys.stderr)


def fail(error: BaseException) -> None:
    """Prints each message of an error as one line on standard error."""
    for message in getattr(error, "messages", (str(error),)):
        line = " ".join(filter(None, map(str.strip, str(message).split("\n"))))
        cut = f"{line[:_LONGEST]} ... ({len(line):,} characters)"
        warn(f"error: {line if len(line) <= _LONGEST else cut}")


def show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints a traceback on standard error; serves as ``sys.excepthook``."""
    warn("".join(traceback.format_exception(kind, error, trace)).rstrip())


def plain(text: str) -> None:
    """Prints a line; ignores a closed pipe or terminal, since log.txt has every line."""
    try:
        out(text)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # closed pipe or terminal
            _discard(sys.stdout)
        # Otherwise stdout is a file on a full disk, and there is no other place to report that.


def _discard(stream: TextIO) -> None:
    """Discards what is printed from now on, also by libraries."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
