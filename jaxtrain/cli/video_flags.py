"""Flags, checks, and progress lines that the video commands share."""

import argparse
import dataclasses
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxtrain import terminal
from jaxtrain.cli import command_line, engine_flags, estimate
from jaxtrain.config import Precision
from jaxtrain.data import engine, worker_count
from jaxtrain.data.estimate import Measured, from_sample, spread
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference import folder
from jaxtrain.inference.load import TrainedModel
from jaxtrain.inference.video import Autoencoder

_MOST_WORKERS = 1024
_WORST_CRF = 51
_PRINT_EVERY_S = 10.0
_SAMPLE = 4  # files for an estimate, each of which is processed twice


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

    def one_of(self, expected: int) -> None:
        """Counts one more of a number that became known later."""
        self._expected = expected
        self.one()

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


@dataclasses.dataclass(frozen=True)
class Job:
    """A file of a folder.

    Attributes:
        source: the file.
        target: the file to write.
        check: raises if the command was stopped; called for each frame.
    """

    source: Path
    target: Path
    check: Callable[[], None]


Work = Callable[[Autoencoder, Job], dict[str, Any]]
"""Processes a file; returns what the manifest states about the result."""


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds ``--workers``, and the flags that choose who does the work."""
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        help="files processed at once, also by each Ray worker (default: based on cores and "
        "memory)",
    )
    engine_flags.add_share(parser)
    engine_flags.add_ray(parser)
    estimate.add(parser, "files of a folder", _SAMPLE)


def check_is_folder(flags: argparse.Namespace, source: Path) -> None:
    """Checks that ``--workers`` and Ray's flags are only given for a folder.

    Raises:
        InputError: one of them is given for a file.
    """
    cluster = None if flags.engine == "local" else flags.engine
    for name, value in (("workers", flags.workers), ("engine", cluster)):
        if value is not None:
            raise InputError(f"--{name} {value} is for folders, and {source} is not one: omit it")
    if flags.dry_run:
        raise InputError(f"--dry-run is for folders, and {source} is not one: omit it")
    engine_flags.cluster(flags)  # refuses Ray's other flags


def folder_jobs(
    source: Path,
    target: Path,
    suffixes: frozenset[str],
    target_suffix: str,
    flags: argparse.Namespace,
) -> list[folder.Job]:
    """Lists the files of a folder, and creates OUT unless it is a dry run; see `folder.jobs`.

    Raises:
        InputError: ``--workers`` is below 1 or too large, or :func:`folder.jobs` raises it.
    """
    if flags.workers is not None and not 0 < flags.workers <= _MOST_WORKERS:
        raise InputError(f"--workers {flags.workers}: use 1 to {_MOST_WORKERS}")
    estimate.check_local(flags)
    create = not flags.dry_run
    return folder.jobs(source, target, suffixes, target_suffix, terminal.out, create=create)


def process_folder(
    model: Autoencoder,
    todo: list[folder.Job],
    flags: argparse.Namespace,
    settings: dict[str, Any],
    work: Work,
    what: str,
    cluster: engine.Ray | None,
) -> int:
    """Processes the files of a folder on all devices; returns 1 if some failed.

    Args:
        model: the autoencoder.
        todo: the files.
        flags: of the command, with `target` and `workers`.
        settings: all that a result depends on.
        work: processes one file with the model on a worker's device; can be pickled.
        what: "encoded" or "decoded".
        cluster: processes the files instead of this machine; None without one.

    Raises:
        InputError: OUT has results with other settings.
    """
    if flags.dry_run:
        _estimate(model, folder.left(todo, flags.target, settings), flags, work)
        return 0
    counter = Counter(len(todo), "file")
    start = _on_this_machine if cluster is None else functools.partial(_on_cluster, cluster)
    try:
        with command_line.cleaning_up():
            found, place = start(model, todo, flags, settings, work, counter.one_of)
    except SystemExit:
        terminal.out(f"stopped by SIGTERM; to resume, repeat the command with OUT {flags.target}")
        raise
    counts = [f"{found.done} {what}"] if found.done or not found.skipped else []
    counts += [f"{found.skipped} already done"] if found.skipped else []
    counts += [f"{len(found.failed)} failed"] if found.failed else []
    terminal.out(
        f"{', '.join(counts)} of {len(todo)} files on {place}; "
        f"results and reasons: {flags.target / folder.MANIFEST}"
    )
    return 1 if found.failed else 0


def _estimate(
    model: Autoencoder, left: list[folder.Job], flags: argparse.Namespace, work: Work
) -> None:
    """Prints what the files take, from a sample that is processed one by one on one device."""
    devices = model.devices()
    own = model.on(devices[0])
    sizes = [(job.source.stat().st_size, job) for job in left]
    sample = []
    with tempfile.TemporaryDirectory() as temporary:
        for size, job in spread(sizes, lambda one: one[0], _SAMPLE):
            target = Path(temporary, job.target.name)
            seconds, written, dropped = 0.0, 0, None
            try:
                for _ in range(2):  # the first time, the model is compiled
                    began = time.monotonic()
                    work(own, Job(job.source, target, _never))
                    seconds, written = time.monotonic() - began, target.stat().st_size
            except InputError as error:
                dropped = BadExample(job.name, str(error))
            sample.append(Measured(size=size, seconds=seconds, written=written, dropped=dropped))
    found = from_sample(sample, len(left), sum(size for size, _ in sizes))
    room = (len(devices), 1)
    estimate.report(
        found, flags.target, "files", "results", room=room, worker="device", say=terminal.out
    )


def _on_this_machine(
    model: Autoencoder,
    todo: list[folder.Job],
    flags: argparse.Namespace,
    settings: dict[str, Any],
    work: Work,
    each_file: Callable[[int], None],
) -> tuple[folder.Outcome, str]:
    """Processes the files on all devices of this machine; returns where, for messages."""
    devices = model.devices()
    workers = flags.workers or max(len(devices), worker_count.threads())
    models = [model.on(device) for device in devices[:workers]]

    def one(worker: int, source: Path, target: Path, check: Callable[[], None]) -> dict[str, Any]:
        return _fitting(work, models[worker % len(models)], Job(source, target, check), workers)

    shared = engine_flags.share(flags)
    if shared is not None:
        terminal.out(f"sharing {flags.target} with other commands: {shared[1]}")
    found = folder.run(
        todo,
        flags.target,
        settings,
        one,
        workers=workers,
        say=terminal.out,
        each_file=each_file,
        share=None if shared is None else shared[0],
    )
    return found, f"{len(models)} device{'s' if len(models) > 1 else ''}"


def _on_cluster(
    cluster: engine.Ray,
    model: Autoencoder,
    todo: list[folder.Job],
    flags: argparse.Namespace,
    settings: dict[str, Any],
    work: Work,
    each_file: Callable[[int], None],
) -> tuple[folder.Outcome, str]:
    """Does the same on a cluster."""
    found = folder.run_on(
        cluster,
        todo,
        flags.target,
        settings,
        functools.partial(_load, model.trained, flags.precision, work, flags.workers),
        at_once=flags.workers,
        say=terminal.out,
        each_file=each_file,
    )
    return found, cluster.where


def _load(
    trained: TrainedModel, precision: Precision, work: Work, workers: int | None, cpus: int
) -> Callable[[Path, Path], dict[str, Any]]:
    """Puts the model on the devices of a worker; returns what processes a file there."""
    model = Autoencoder(trained, precision)
    turns = itertools.cycle([model.on(device) for device in model.devices()])

    def one(source: Path, target: Path) -> dict[str, Any]:
        return _fitting(work, next(turns), Job(source, target, _never), workers or cpus)

    return one


def _never() -> None:
    """Never stops: if the command ends, so do its workers."""


def _fitting(work: Work, model: Autoencoder, job: Job, workers: int) -> dict[str, Any]:
    """Processes a file; raises InputError if fewer at once would fit in a device's memory."""
    try:
        return work(model, job)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or workers == 1:
            raise
        fewer = max(1, workers // 2)
        raise InputError(
            f"{job.source}: {workers} files at once filled the memory of a device: repeat the "
            f"command with --workers {fewer} for the files that failed"
        ) from error
