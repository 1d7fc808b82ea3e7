"""Encodes or decodes the files of a folder with a video autoencoder, on all devices."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxtrain import machine
from jaxtrain.config import Precision
from jaxtrain.data import listing
from jaxtrain.errors import InputError
from jaxtrain.inference.load import TrainedModel
from jaxtrain.inference.video.autoencoder import Autoencoder
from jaxtrain.jobs import engines, resumable

Work = Callable[[Autoencoder, Path, Path, Callable[[], None]], dict[str, Any]]
"""(model, source, target, stop check) -> what the record states about the result.

Calls the stop check for each frame, which raises if the command was stopped."""


def items(
    source: Path,
    out: Path,
    suffixes: frozenset[str],
    target_suffix: str,
    say: Callable[[str], None],
) -> list[resumable.Item]:
    """Lists the files below a folder; the results have the same names and another suffix."""
    if out.exists() and not out.is_dir():
        raise InputError(f"OUT {out} is a file, but IN {source} is a folder: choose a folder")
    if out.suffix.lower() in suffixes | {target_suffix} and not out.is_dir():
        raise InputError(
            f"IN {source} is a folder, but OUT {out} is named like a file: use a folder"
        )
    if out.absolute().resolve().is_relative_to(source.resolve()):
        is_in = "is" if out.resolve() == source.resolve() else "is inside"
        raise InputError(f"OUT {out} {is_in} IN {source}: choose a folder outside")
    resumable.check_complete(source)
    listed = []
    for path in listing.files(source, say):
        if path.suffix.lower() in suffixes:
            name = path.relative_to(source)
            output = name.with_suffix(target_suffix).as_posix()
            absolute = str(path.absolute())  # workers of a cluster have other working directories
            identity = resumable.identity(path) if path.exists() else ()
            listed.append(resumable.Item(name.as_posix(), identity, output, source=absolute))
    if not listed:
        raise InputError(f"{source} has no files that end with {', '.join(sorted(suffixes))}")
    return listed


def workers_of(
    model: Autoencoder, work: Work, workers: int | None, cluster: engines.Ray | None
) -> tuple[engines.Engine, resumable.Begin, str]:
    """Returns what processes files on all devices of this machine, or on a cluster.

    Args:
        work: processes one file with the model on a worker's device; can be pickled for a cluster.
        workers: files processed at once on this machine; None is based on cores and memory.
        cluster: processes the files instead of this machine; None without one.

    Returns:
        Where the work runs and how a worker begins, for :func:`resumable.run`; and the place, for
        messages.
    """
    if cluster is not None:
        begin = functools.partial(_begin, model.trained, model.precision, work, cluster.workers)
        return cluster, begin, f"the Ray cluster {cluster.address}"
    devices = jax.local_devices()
    threads = workers or max(len(devices), machine.threads())
    models = [model.on(device) for device in devices[:threads]]

    def begin_thread(worker: engines.Worker) -> resumable.Make:
        model = models[worker.number % len(models)]
        return lambda item, path: _processed(work, model, worker, threads, item, path)

    place = f"{len(models)} device{'s' if len(models) > 1 else ''}"
    return engines.Threads(threads), begin_thread, place


def _begin(
    trained: TrainedModel,
    precision: Precision,
    work: Work,
    workers: int | None,
    worker: engines.Worker,
) -> resumable.Make:
    model = Autoencoder(trained, precision)
    turns = itertools.cycle([model.on(device) for device in jax.local_devices()])
    at_once = workers or worker.cpus
    return lambda item, path: _processed(work, next(turns), worker, at_once, item, path)


def _processed(
    work: Work,
    model: Autoencoder,
    worker: engines.Worker,
    at_once: int,
    item: resumable.Item,
    path: Path,
) -> dict[str, Any]:
    """Processes a file.

    Raises:
        Failed: it cannot be read, or fewer at once would fit in a device's memory.
    """
    try:
        return work(model, Path(item.source), path, worker.check)
    except InputError as error:
        raise resumable.Failed(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or at_once == 1:
            raise
        raise resumable.Failed(
            f"{at_once} files at once filled the memory of a device: repeat the command with "
            f"--workers {max(1, at_once // 2)} for the files that failed"
        ) from error
