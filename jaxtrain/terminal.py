"""Standard output: whether a person is looking, who draws on it, and plain lines otherwise."""

import errno
import os
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, TextIO

from jaxtrain.errors import one_line, visible
from jaxtrain.storage import addresses

_LONGEST = 4000  # characters of an error; several times the longest of our own


class Work(NamedTuple):
    """How far a piece of work is.

    Attributes:
        what: is done, as "tokenising".
        done: megabytes, those of an earlier start included.
        total: megabytes; an estimate will do.
    """

    what: str
    done: float
    total: float


class Display(Protocol):
    """What draws on the terminal; only one can."""

    def working(self, work: Work | None) -> None:
        """Shows how far a piece of work is, until the next call."""


_display: Display | None = None


def take(display: Display | None) -> None:
    """From here on ``display`` draws on the terminal, and nobody else should; None: nobody does."""
    global _display
    _display = display


def taken() -> Display | None:
    """Who draws on the terminal now."""
    return _display


def lively(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream is a terminal on which lines can change in place.

    Args:
        stream: standard output or standard error.
        environment: ``os.environ``; CI, or a TERM that is empty, ``dumb`` or ``unknown``, rules it
            out.
    """
    capable = environment.get("TERM", "") not in ("", "dumb", "unknown")
    return capable and not environment.get("CI") and stream.isatty()


def without_color(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether NO_COLOR is set (https://no-color.org)."""
    return bool(environment.get("NO_COLOR"))


def color_of(line: str) -> str:
    """The color of a line: yellow for a warning, red for an error, "" for all others."""
    for start, color in (("warning: ", "yellow"), ("error: ", "red")):
        if line.startswith(start):
            return color
    return ""


def out(text: str) -> None:
    """Prints a line on standard output.

    Raises:
        BrokenPipeError: the reader of the output is gone.
    """
    print(visible(text), flush=True)


def say(text: str) -> None:
    """Prints exactly one line on standard output (:func:`one_line`).

    Raises:
        BrokenPipeError: the reader of the output is gone.
    """
    out(one_line(text))


def warn(text: str) -> None:
    """Prints a line on standard error, in color on a terminal; credentials in URLs are removed."""
    line = visible(addresses.scrub(text))
    color = color_of(line)
    if color and not without_color() and lively(sys.stderr):
        from rich.color import ColorSystem
        from rich.style import Style

        line = Style.parse(color).render(line, color_system=ColorSystem.STANDARD)
    print(line, file=sys.stderr, flush=True)


def fail(error: BaseException) -> None:
    """Prints each message of an error as one line, whatever a library has put into it."""
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
    """Prints a line; whoever read the output may have gone, for the log has every line."""
    try:
        out(text)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # a reader or a terminal that is gone
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        # Else into a file on a full disk: nothing is left to say it with.
