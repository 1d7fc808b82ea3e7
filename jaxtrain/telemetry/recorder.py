"""One record in -> console line, ``metrics.jsonl``, TensorBoard, samples.

A line of ``metrics.jsonl`` is an object: ``step``, ``time`` (seconds since 1970) and the values
under their full names, with every digit. JSON knows no NaN: a value that is not finite stands as
``null``, and ``"nonfinite": {NAME: "nan" | "inf" | "-inf"}`` on the same line says which it is.
"""

import datetime
import functools
import json
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import errors, terminal
from jaxtrain.distributed.signals import why
from jaxtrain.errors import InputError, RunAgain, stop_inside
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import Appended, drop_torn_line, open_own, write_whole
from jaxtrain.telemetry import images
from jaxtrain.telemetry.throughput import Window

__all__ = [
    "Recorder",
    "Window",
    "console_line",
    "duration",
    "finish",
    "rate",
    "read",
]

LOG = "log.txt"  # of process 0

# Files of one JSON object a line that each process keeps for itself: the examples of each update
# (where loop.record_examples asks for it), and the updates that were not applied.
LISTS = ("examples", "bad_steps")

_NAME = re.compile(r"(train|val)/[a-z0-9_]+")
_SAMPLE_NAME = re.compile(r"[a-z0-9_]+")


class Recorder:
    """Writes what a run has to say. A disk that fails is reported once; the training goes on.

    Args:
        directory: the run's directory.
        process: number of this process. Process 0 has the console and the metrics; every process
            keeps a log (``log.txt``, ``log.<process>.txt``).
        process_count: processes of the run.
        show: puts a line on the console.
    """

    def __init__(
        self,
        directory: Path,
        process: int,
        process_count: int,
        show: Callable[[str], None] = terminal.plain,
    ) -> None:
        if not 0 <= process < process_count:
            raise ValueError(f"process {process} is not one of {process_count} processes")
        self._directory = directory
        self._first = process == 0
        self._show = show
        self._processes = process_count
        self._metrics = Appended(directory / "metrics.jsonl")
        self._log = Appended(directory / (LOG if self._first else f"log.{process}.txt"))
        suffix = ".jsonl" if self._first else f".{process}.jsonl"
        self._lists = {name: Appended(directory / f"{name}{suffix}") for name in LISTS}
        self._events: Any = None  # made with the first record: importing it takes a while
        self._purge_step: int | None = None
        self._failing: set[str] = set()
        self._lock = threading.RLock()  # the watchdog speaks from its own thread
        if self._first and self._metrics.path.is_file():
            self.guarded("metrics.jsonl", lambda: drop_torn_line(self._metrics.path))

    def say(self, text: str) -> None:
        """Prints a line (process 0) and logs it with the UTC time (every process).

        It stays one line, whatever file names are in it, and addresses lose their query
        (:mod:`jaxtrain.storage.addresses`).
        """
        text = errors.one_line(addresses.scrub(text))
        with self._lock:
            if self._first:
                self._show(text)
            self.log(text)

    def log(self, text: str) -> None:
        """Logs what the console has already, each line with the UTC time."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = errors.visible(addresses.scrub(text))
        with self._lock:
            lines = "".join(f"{now} {line}\n" for line in text.rstrip("\n").split("\n"))
            self.guarded(self._log.path.name, lambda: self._log.append(lines.encode()))

    def log_error(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Logs what ends the run, which the command line prints. For an ExitStack."""
        del kind, trace
        error = error and (stop_inside(error) or error)
        if isinstance(error, InputError | RunAgain):
            self.log(errors.one_line(f"error: {error}"))
        elif isinstance(error, Exception):
            self.log("".join(traceback.format_exception(error)).rstrip())
        elif error is not None:
            self.log(why(error))

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one record; process 0 only, the others return at once.

        Args:
            step: completed updates.
            values: by full name, ``train/...`` or ``val/...``.

        Raises:
            ValueError: a name of another form.
        """
        for name in values:
            if not _NAME.fullmatch(name):
                raise ValueError(f"metric name {name!r} is not train/NAME or val/NAME")
        if not self._first:
            return
        numbers = {name: float(value) for name, value in values.items()}
        with self._lock:
            line = _json_line(step, numbers).encode()
            self.guarded("metrics.jsonl", lambda: self._metrics.append(line))
            self.guarded("tensorboard", lambda: self._board().scalars(step, numbers))

    def enlist(self, name: str, step: int, entry: Mapping[str, Any]) -> None:
        """Adds a line to this process's ``NAME.jsonl``.

        Args:
            name: one of :data:`LISTS`.
            step: completed updates.
            entry: JSON-able.
        """
        line = json.dumps({"step": step, **entry}, allow_nan=False) + "\n"
        file = self._lists[name]
        with self._lock:
            self.guarded(file.path.name, lambda: file.append(line.encode()))

    def sample(self, step: int, name: str, shown: np.ndarray | str) -> Path | None:
        """Keeps a picture, a clip or a text in ``samples/`` and TensorBoard; process 0 only.

        Args:
            step: completed updates.
            name: lower-case letters, digits, underscores.
            shown: uint8 [H, W, 3], for ``NAME_STEP.png``, [T, H, W, 3], for ``.mp4``, or a text,
                for ``.txt``.

        Returns:
            The file; None in other processes, or if it could not be written.

        Raises:
            ValueError: the name or the array is of another form.
        """
        if not _SAMPLE_NAME.fullmatch(name):
            raise ValueError(f"sample name {name!r} is not of lower-case letters, digits and _")
        if not self._first:
            return None
        if isinstance(shown, str):
            made, ending, content = None, ".txt", shown.encode()
        else:
            made = images.encode(name, shown)
            ending, content = made.ending, made.file
        path = self._directory / "samples" / f"{name}_{step}{ending}"

        def keep() -> None:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, content)

        def show() -> None:
            if made is None:
                self._board().text(step, name, shown)
            else:
                self._board().image(step, name, made.shown, made.height, made.width)

        with self._lock:
            kept = self.guarded("samples", keep)
            self.guarded("tensorboard", show)
        return path if kept else None

    def rewind(self, step: int, seen: int, *, validated: bool = True) -> None:
        """Forgets records of updates after ``step``, which will be written again.

        Each process replaces its own lists whole, and process 0 also ``metrics.jsonl`` and the
        lists of processes that this run no longer has; TensorBoard is told to hide later events.

        Args:
            step: completed updates.
            seen: examples seen.
            validated: False where the validation after ``step`` comes again too.

        Raises:
            InputError: a line is no record.
        """
        files = [self._metrics, *self._lists.values()]
        paths = [file.path for file in files[0 if self._first else 1 :]]
        if self._first:
            paths += _lists_of_others(self._directory, self._processes)
        with self._lock:
            for file in files:
                file.close()
            for path in paths:
                key, last = ("position", seen - 1) if "bad_steps" in path.name else ("step", step)
                if path.is_file():
                    self.guarded(path.name, functools.partial(_rewind, path, key, last))
            if self._first and not validated and self._metrics.path.is_file():
                self.guarded("metrics.jsonl", lambda: _unvalidate(self._metrics.path, step))
            if self._first and any((self._directory / "tensorboard").glob("*tfevents*")):
                self._purge_step = step + 1
                if self._events is not None:
                    self._events.close()
                    self._events = None

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for file in (self._metrics, self._log, *self._lists.values(), self._events):
                if file is not None:
                    file.close()

    def _board(self) -> Any:
        if self._events is None:
            from jaxtrain.telemetry.tensorboard import Events

            self._events = Events(self._directory / "tensorboard", self._purge_step)
        return self._events

    def guarded(self, what: str, write: Callable[[], None]) -> bool:
        """Runs a write; says on the console when it begins to fail and when it works again.

        Args:
            what: is written, as the console is to name it.
            write: may raise ``OSError``.

        Returns:
            Whether it was written.
        """
        with self._lock:
            try:
                write()
            except OSError as error:
                if what not in self._failing:
                    self._failing.add(what)
                    self._show(
                        f"warning: cannot write {what} in {self._directory} "
                        f"({error.strerror or error}): training goes on, and records wait in "
                        "memory until it can be written"
                    )
                return False
            if what in self._failing:
                self._failing.remove(what)
                self._show(f"{what} in {self._directory} is written again")
            return True


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` in order, with NaN and infinities put back.

    A last line without an end, which a live or killed run may leave, is left out.
    """
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            record = json.loads(line)
            nonfinite = record.pop("nonfinite", {})
            yield record | {name: float(text) for name, text in nonfinite.items()}


def _lists_of_others(directory: Path, processes: int) -> list[Path]:
    """Lists of processes that an earlier start of the run had, and this one has not."""
    found = {path: re.fullmatch(r"\w+\.(\d+)\.jsonl", path.name) for path in directory.iterdir()}
    return [
        path
        for path, match in found.items()
        if match and path.name.startswith(LISTS) and int(match[1]) >= processes
    ]


def _rewind(path: Path, key: str, last: int) -> None:
    drop_torn_line(path)
    lines = _lines(path)
    kept = [line for line in lines if _number_of(line, key, path) <= last]
    if len(kept) < len(lines):
        write_whole(path, "".join(kept))


def _unvalidate(path: Path, step: int) -> None:
    """Drops the records of validations after ``step``; those of the training hold other names."""
    lines = _lines(path)
    kept = [
        line
        for line in lines
        if not (
            json.loads(line)["step"] == step and any("val/" in name for name in json.loads(line))
        )
    ]
    write_whole(path, "".join(kept))


def _lines(path: Path) -> list[str]:
    try:
        with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): move the file away"
        ) from error
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []


def _number_of(line: str, key: str, path: Path) -> int:
    try:
        return int(json.loads(line)[key])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise InputError(
            f"{path} contains a line that jaxtrain did not write ({line[:60].strip()!r}): fix the "
            "line, or move the file away"
        ) from None


def _json_line(step: int, values: Mapping[str, float]) -> str:
    record: dict[str, Any] = {"step": step, "time": time.time()}
    record |= {name: value if math.isfinite(value) else None for name, value in values.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False) + "\n"


def finish(sums: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Divides sums by weights, once, after all devices and batches.

    Args:
        sums: name -> (sum, weight), or (sum, weight, sum of squares) for a ``NAME_std`` beside it.

    Returns:
        name -> sum / weight; name_std -> sqrt(squares / weight - mean^2), the standard deviation of
        the population. A weight of zero gives NaN.
    """
    found = {}
    for name, parts in sums.items():
        total, weight = float(parts[0]), float(parts[1])
        mean = total / weight if weight else math.nan
        found[name] = mean
        if len(parts) > 2:
            square = float(parts[2]) / weight if weight else math.nan
            # Rounding may put a variance of zero just below it; max() would also hide a NaN.
            variance = square - mean * mean
            found[f"{name}_std"] = 0.0 if variance < 0 else math.sqrt(variance)
    return found


def console_line(
    step: int, total_steps: int, values: Mapping[str, float], eta_s: float | None
) -> str:
    """The line of a step; what ``values`` does not hold is left out.

    Example: ``step 100/100000 | loss 0.1200 | psnr 20.5 dB | gpu 39.0 GiB | 0.90 steps/s |
    115 samples/s | data 1% | eta 30h51m``.

    Args:
        step: completed updates.
        total_steps: of the run.
        values: by full name.
        eta_s: seconds to the end; None leaves it out.
    """
    fields: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("loss", lambda value: f"loss {value:.4f}"),
        ("psnr", lambda value: f"psnr {value:.1f} dB"),
        ("accuracy", lambda value: f"acc {value:.1%}"),
        ("gpu_memory_usage", lambda value: f"gpu {value:.1f} GiB"),
        ("steps_per_second", lambda value: f"{rate(value, 2)} steps/s"),
        ("samples_per_second", lambda value: f"{rate(value, 0)} samples/s"),
        ("tokens_per_second", lambda value: f"{_thousands(value)} tokens/s"),
        ("data_wait_fraction", lambda value: f"data {value:.0%}"),
    )
    parts = [f"step {step}/{total_steps}"]
    parts += [show(values[f"train/{name}"]) for name, show in fields if f"train/{name}" in values]
    if eta_s is not None:
        parts.append(f"eta {duration(eta_s)}")
    return " | ".join(parts)


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
