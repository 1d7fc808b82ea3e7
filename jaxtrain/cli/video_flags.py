"""Checks and printed lines that the video commands share."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain import terminal
from jaxtrain.cli import command_line, commands, job_flags
from jaxtrain.data import engines, jobs
from jaxtrain.errors import InputError
from jaxtrain.telemetry.progress_bar import SAY_EVERY_S

if TYPE_CHECKING:  # they import jax, which takes seconds: flags and input are checked before
    from jaxtrain.inference import video_folder
    from jaxtrain.inference.video import Autoencoder


def check_present(path: Path, things: str) -> None:
    """Checks that the input exists.

    Args:
        path: the input.
        things: what to pass, for the message.

    Raises:
        InputError: it does not.
    """
    if not path.exists():
        raise InputError(f"IN {path}: no such file or folder; pass {things}")


def check_apart(source: Path, target: Path) -> None:
    """Checks that the output would not replace the input.

    Raises:
        InputError: both are the same file.
    """
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise InputError(f"output {target} is the same file as the input: choose another one")


def autoencoder(
    flags: commands.Encode | commands.Decode | commands.Reconstruct, command: str
) -> "Autoencoder":
    """Loads the model. Imports jax, which takes seconds, so IN and OUT are checked before."""
    from jaxtrain.inference.video import Autoencoder
    from jaxtrain.interop import hub

    return Autoencoder(hub.local(flags.source), flags.precision, command=command)


class Counter:
    """Counts frames or clips, and prints the progress every 30 seconds."""

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
        if now - self._printed >= SAY_EVERY_S:
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


def check_is_folder(flags: commands.Folder, source: Path) -> None:
    """Checks that flags for a folder are only given for a folder.

    Raises:
        InputError: one of them is given for a file.
    """
    cluster = None if flags.engine == "local" else flags.engine
    for name, value in (("workers", flags.workers), ("engine", cluster), ("part", flags.part)):
        if value is not None:
            raise InputError(f"--{name} {value} is for folders, and {source} is not one: omit it")
    job_flags.cluster(flags)  # refuses Ray's other flags


def process_folder(
    model: "Autoencoder",
    todo: list[jobs.Item],
    flags: commands.Encode | commands.Decode,
    settings: dict[str, Any],
    work: "video_folder.Work",
    doing: str,
    cluster: engines.Ray | None,
) -> int:
    """Processes the files of a folder, and prints how many; returns 1 if some failed.

    Args:
        model: the autoencoder.
        todo: the files.
        flags: of the command, with `target` and `workers`.
        settings: all that a result depends on.
        work: processes one file.
        doing: "encoding" or "decoding".
        cluster: processes the files instead of this machine; None without one.

    Raises:
        InputError: OUT has results with other settings.
    """
    from jaxtrain.inference import video_folder

    out = flags.target
    with command_line.resumable("files"):
        engine, begin, place = video_folder.workers_of(model, work, flags.workers, cluster)
        outcome = jobs.run(
            todo,
            begin,
            out,
            settings,
            engine=engine,
            say=terminal.out,
            part=job_flags.part(flags),
            doing=doing,
        )
    counts = [
        f"{outcome.made} {doing.removesuffix('ing')}ed"
        if outcome.made or not outcome.skipped
        else "",
        f"{outcome.skipped} already done" if outcome.skipped else "",
        f"{len(outcome.failed)} failed" if outcome.failed else "",
    ]
    counted = outcome.made + outcome.skipped + len(outcome.failed)
    terminal.out(
        f"{', '.join(filter(None, counts))} of {counted} files on {place}; "
        f"results and reasons: {out / jobs.REPORT}"
    )
    return outcome.exit_code
