"""Measures on this machine how fast the real loader reads a config's data.

It runs in a separate process, whose jax uses the CPU and leaves the GPUs alone.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.planning.input_rate import LoaderRate
from jaxtrain.storage import addresses
from jaxtrain.xla import subprocess_worker
from jaxtrain.xla.subprocess_worker import Send, SubprocessWorker, WorkerFailed

_FUNCTION = "jaxtrain.planning.input_measurement:measure_here"
_TIMEOUT_S = 24 * 3600.0  # indexing a large data set for the first time takes long
_SECONDS, _LONGEST_S = 10.0, 120.0


def measure(name: str, typed: Sequence[str], path: str | None) -> LoaderRate:
    """Measures the loader of a config with its data, or other data.

    Args:
        name: the config's name or path.
        typed: overrides.
        path: replaces ``data.path``; None keeps it.

    Raises:
        InputError: the data cannot be opened, or almost no batches arrived in time.
    """
    given = [*typed, *(() if path is None else ("--data.path", path))]
    run = config.load(name, given)
    if wrong := run.data.problems(run.model):
        raise InputError(*wrong)
    variables = subprocess_worker.environment(os.environ, JAX_PLATFORMS="cpu")
    with SubprocessWorker(_FUNCTION, {"config": name, "overrides": given}, variables) as worker:
        try:
            (found,) = worker.messages(_TIMEOUT_S)
        except WorkerFailed as failed:
            raise InputError(f"--measure-input: {failed}") from failed
    return LoaderRate(**found)


def measure_here(request: dict[str, Any], send: Send) -> None:
    """Measures in this process, and sends the attributes of a :class:`LoaderRate`.

    Raises:
        InputError: see :func:`measure`.
    """
    import jax

    from jaxtrain.data import loader_rate, worker_count
    from jaxtrain.data.quarantine import Quarantine
    from jaxtrain.sharding import make_mesh

    asked = config.load(request["config"], request["overrides"])
    sources = asked.data.open(asked.model, seed=asked.seed, say=lambda line: None)
    cores = worker_count.cores()
    workers = cores if asked.data.workers is None else asked.data.workers
    alone = config.Mesh(data=1, fsdp=1, shard="none")
    with tempfile.TemporaryDirectory() as folder:
        rate = loader_rate.measure(
            sources.train,
            make_mesh(alone, jax.local_devices()[:1]),
            asked.batch_spec,
            rows=asked.data.batch_size,
            workers=workers,
            prefetch=asked.data.prefetch,
            seed=asked.seed,
            quarantine=Quarantine.open(Path(folder), 0),
            seconds=_SECONDS,
            longest_s=_LONGEST_S,
        )
    if rate.examples_per_second is None:
        raise InputError(
            f"--measure-input: almost no batches arrived in {_LONGEST_S:.0f} s with {workers} "
            f"workers on {cores} cores; one core loads {rate.of_a_core:.2g} examples/s: use a "
            "machine with more cores, or smaller data"
        )
    send(
        {
            "examples_per_second": rate.examples_per_second,
            "workers": workers,
            "cores": cores,
            "path": addresses.public(asked.data.path) if asked.data.path else "demo data",
        }
    )
