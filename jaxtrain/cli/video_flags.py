"""What the commands that read and write videos have in common: flags, and how they tell of it."""

import argparse
import os
import time
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.errors import InputError

_WORST_CRF = 51
_TELL_EVERY_S = 10.0


def add_crf(parser: argparse.ArgumentParser) -> None:
    """``--crf``."""
    parser.add_argument(
        "--crf",
        metavar="N",
        type=int,
        default=16,
        help="quality of the H.264 that is written, 0 (nothing lost) to 51 (16)",
    )


def check_crf(crf: int) -> None:
    """Refuses a quality that H.264 does not have.

    Raises:
        InputError: names the range.
    """
    if not 0 <= crf <= _WORST_CRF:
        raise InputError(f"--crf {crf}: use a number from 0 (nothing lost) to {_WORST_CRF}")


def check_apart(source: Path, target: Path) -> None:
    """Refuses to replace what is being read.

    Raises:
        InputError: both are one file.
    """
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise InputError(f"{target} is the input itself; name another file for the output")


class Counter:
    """Counts frames, or other things, and says every ten seconds how many there were.

    Args:
        expected: how many.
        what: a single one of them.
    """

    def __init__(self, expected: int, what: str = "frame") -> None:
        self._expected, self._done, self._what = expected, 0, what
        self._began = self._told = time.monotonic()
        self._first_s = 0.0

    def one(self) -> None:
        """One more is done."""
        now = time.monotonic()
        self._done += 1
        if self._done == 1:
            self._first_s = now - self._began
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            terminal.out(f"{self._done:,} of {self._expected:,} {self._what}s, {self._rate(now)}")

    def line(self) -> str:
        """As "30 frames (12.0 frames/s after a start of 3.1 s)"; of a single one "(3.1 s)"."""
        plural = "" if self._done == 1 else "s"
        return f"{self._done:,} {self._what}{plural} ({self._rate(time.monotonic())})"

    def _rate(self, now: float) -> str:
        """How many a second after the first one, which waits for the compiler."""
        busy_s = now - self._began - self._first_s
        if self._done < 2 or busy_s <= 0:
            return f"{self._first_s:.1f} s"
        rate = (self._done - 1) / busy_s
        return f"{rate:.1f} {self._what}s/s after a start of {self._first_s:.1f} s"
