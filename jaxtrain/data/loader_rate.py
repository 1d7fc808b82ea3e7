"""Measures how many examples per second the real pipeline delivers on this machine.

``doctor`` compares the rate with the step's.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable

import jax

from jaxtrain.data import pipeline, sampler
from jaxtrain.data.placement import Spec
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Source

TRIAL_S = 3.0
LONGEST_S = 20.0
_BATCH_S = 0.3  # time that one worker should take for a batch of the trial
_TRIED = 4  # examples loaded to measure that time


@dataclasses.dataclass(frozen=True)
class Rate:
    """The measured rate of a loader.

    Attributes:
        examples_per_second: its rate; None if almost no batches arrived in time.
        workers: its number of workers; 0 for the main process.
    """

    examples_per_second: float | None
    workers: int
    of_a_core: float


def measure(
    source: Source,
    mesh: jax.sharding.Mesh,
    spec: Callable[[int], Spec],
    *,
    rows: int,
    workers: int,
    prefetch: int,
    seed: int,
    quarantine: Quarantine,
    seconds: float = TRIAL_S,
    longest_s: float = LONGEST_S,
) -> Rate:
    """Measures the pipeline's examples/s once its workers have started.

    Batches are smaller than the config's if a worker takes long for those: the trial is short. They
    are complete blocks (:class:`Source`), which are then read once, like the run's.

    Args:
        mesh: a mesh of one device.
        spec: ``Run.sent_spec``.
        rows: examples of the config's batch that this process loads.
        longest_s: longest time, including the workers' start; batches up to then count.
    """
    of_a_core = _alone(source, seed, quarantine)
    block = sampler.order_of(source, seed).block
    batch = min(rows, max(1, round(of_a_core * _BATCH_S / block)) * block)
    batches = pipeline.TrainingBatches(
        source,
        mesh,
        spec(batch),
        start=0,
        seed=seed,
        workers=workers,
        prefetch=prefetch,
        quarantine=quarantine,
    )
    times = list[float]()
    # Batches made while the last worker was still starting do not show the rate.
    early = batches.ahead
    end = threading.Timer(longest_s, batches.close)  # ends a wait for a batch, too
    end.start()
    try:
        with contextlib.suppress(StopIteration):
            while len(times) <= early + 2 * max(1, workers) or times[-1] - times[early] < seconds:
                next(batches)
                times.append(time.monotonic())
    finally:
        end.cancel()
        end.join()
        batches.close()
    if len(times) < 2:
        return Rate(None, workers, of_a_core)
    first = min(early, len(times) // 2)
    rate = (len(times) - 1 - first) * batch / (times[-1] - times[first])
    return Rate(rate, workers, of_a_core)


def _alone(source: Source, seed: int, quarantine: Quarantine) -> float:
    """Measures examples/s of this process alone, without the first ones, which open files."""
    order = sampler.order_of(source, seed)
    first, tried = order.block, _TRIED * order.block
    rows = sampler.TrainingRows(source, order, 0, 1, 0, 1, first + tried, quarantine)
    for row in range(first):
        rows[row]
    began = time.perf_counter()
    for row in range(first, first + tried):
        rows[row]
    return tried / max(1e-9, time.perf_counter() - began)
