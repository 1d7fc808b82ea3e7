"""Prints to standard output and standard error, and detects terminals."""

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, TextIO

from jaxtrain.errors import one_line, visible
from jaxtrain.storage import addresses

Say = Callable[[str], None]
"""Prints a line."""
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
