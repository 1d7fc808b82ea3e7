"""Encodes or decodes the files of a folder with a video autoencoder, on all devices."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Precision
from jaxtrain.data import engine, worker_count
from jaxtrain.errors import InputError
from jaxtrain.inference import folder
from jaxtrain.inference.load import TrainedModel
from jaxtrain.inference.video import Autoencoder

Work = Callable[[Autoencoder, Path, Path, Callable[[], None]], dict[str, Any]]
"""(model, source, target, stop check) -> what the manifest states about the result.

Calls the stop check for each frame, which raises if the command was stopped."""


def process(
    model: Autoencoder,
    todo: Sequence[folder.Job],
    out: Path,
    settings: Mapping[str, Any],
    work: Work,
    *,
    workers: int | None,
    cluster: engine.Ray | None,
    share: str | None,
    say: Callable[[str], None],
    each_file: Callable[[int], None],
) -> tuple[folder.Outcome, str]:
    """Processes files on all devices of this machine, or on a cluster.

    Args:
        model: the autoencoder.
        todo, out, settings, say, each_file: see :func:`folder.run`.
        work: processes one file with the model on a worker's device; can be pickled for a cluster.
        workers: files processed at once, also by each worker of a cluster; None is based on cores
            and memory.
        cluster: processes the files instead of this machine; None without one.
        share: see :func:`folder.run`; None with a cluster.

    Returns:
        What happened, and where, for messages.

    Raises:
        InputError: OUT has results with other settings, or a node does not see the files or OUT.
        RunAgain: another process is using OUT, or the cluster failed.
    """
    if cluster is not None:
        load = functools.partial(_load, model.trained, model.precision, work, workers)
        outcome = folder.run_on_cluster(
            cluster, todo, out, settings, load, at_once=workers, say=say, each_file=each_file
        )
        return outcome, cluster.where
    devices = model.devices()
    threads = workers or max(len(devices), worker_count.threads())
    models = [model.on(device) for device in devices[:threads]]

    def one(worker: int, source: Path, target: Path, check: Callable[[], None]) -> dict[str, Any]:
        return _fitting(work, models[worker % len(models)], source, target, check, threads)

    outcome = folder.run(
        todo, out, settings, one, workers=threads, say=say, each_file=each_file, share=share
    )
    return outcome, f"{len(models)} device{'s' if len(models) > 1 else ''}"


def _load(
    trained: TrainedModel, precision: Precision, work: Work, workers: int | None, cpus: int
) -> Callable[[Path, Path], dict[str, Any]]:
    """Puts the model on the devices of a worker; returns what processes a file there."""
    model = Autoencoder(trained, precision)
    turns = itertools.cycle([model.on(device) for device in model.devices()])

    def one(source: Path, target: Path) -> dict[str, Any]:
        return _fitting(work, next(turns), source, target, _never, workers or cpus)

    return one


def _never() -> None:
    """Never stops: if the command ends, so do its workers."""


def _fitting(
    work: Work,
    model: Autoencoder,
    source: Path,
    target: Path,
    check: Callable[[], None],
    workers: int,
) -> dict[str, Any]:
    """Processes a file; raises InputError if fewer at once would fit in a device's memory."""
    try:
        return work(model, source, target, check)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or workers == 1:
            raise
        fewer = max(1, workers // 2)
        raise InputError(
            f"{source}: {workers} files at once filled the memory of a device: repeat the "
            f"command with --workers {fewer} for the files that failed"
        ) from error
