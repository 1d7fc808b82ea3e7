"""Flags, checks and progress lines that the video commands share."""

import argparse
import os
import time
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.errors import InputError

_WORST_CRF = 51
_PRINT_EVERY_S = 10.0


def add_crf(parser: argparse.ArgumentParser) -> None:
    """Adds ``--crf``."""
    parser.add_argument(
        "--crf",
        metavar="N",
        type=int,
        default=16,
        help="H.264 quality, from 0 (lossless) to 51 (worst) (default: 16)",
    )


def check_crf(crf: int) -> None:
    """Checks that H.264 has this quality.

    Raises:
        InputError: it does not; the message has the range.
    """
    if not 0 <= crf <= _WORST_CRF:
        raise InputError(f"--crf {crf}: use a number from 0 (lossless) to {_WORST_CRF}")


def check_apart(source: Path, target: Path) -> None:
    """Checks that the output would not replace the input.

    Raises:
        InputError: both are the same file.
    """
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise InputError(f"output {target} is the same file as the input: choose another one")


class Counter:
    """Counts frames or clips, and prints the progress every ten seconds."""

    def __init__(self, expected: int, what: str = "frame") -> None:
        self._expected, self._done, self._what = expected, 0, what
        self._began = self._printed = time.monotonic()
        self._first_s = 0.0

    def one(self) -> None:
        """Counts one more."""
        now = time.monotonic()
        self._done += 1
        if self._done == 1:
            self._first_s = now - self._began
        if now - self._printed >= _PRINT_EVERY_S:
            self._printed = now
            terminal.out(f"{self._done:,} of {self._expected:,} {self._what}s, {self._rate(now)}")

    def line(self) -> str:
        """Returns "30 frames (12.0 frames/s after a start of 3.1 s)", or "1 frame (3.1 s)"."""
        plural = "" if self._done == 1 else "s"
        return f"{self._done:,} {self._what}{plural} ({self._rate(time.monotonic())})"

    def _rate(self, now: float) -> str:
        """The rate after the first one, which waits for the compiler."""
        busy_s = now - self._began - self._first_s
        if self._done < 2 or busy_s <= 0:
            return f"{self._first_s:.1f} s"
        rate = (self._done - 1) / busy_s
        return f"{rate:.1f} {self._what}s/s after a start of {self._first_s:.1f} s"
