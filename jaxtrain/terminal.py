"""Standard output: whether a person looks at it, who draws on it, and a line for everybody else."""

import errno
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TextIO


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
    """Whether what changes in place can be shown there, and somebody looks.

    Args:
        stream: standard output or standard error.
        environment: TERM, NO_COLOR (https://no-color.org) and CI in it may say no.
    """
    capable = environment.get("TERM", "") not in ("", "dumb", "unknown")
    asked_not_to = environment.get("NO_COLOR") or environment.get("CI")
    return capable and not asked_not_to and stream.isatty()


def plain(text: str) -> None:
    """Prints a line; whoever read the output may have gone, for the log has every line."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # a reader or a terminal that is gone
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        # Else into a file on a full disk: nothing is left to say it with.
