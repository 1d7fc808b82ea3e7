"""What a run reads: the data, the training batches, and the validation."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config
from jaxtrain.data import cache, pipeline, worker_count
from jaxtrain.data.quarantine import Quarantine, TooManyBroken
from jaxtrain.data.source import Sources
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError
from jaxtrain.training.first_state import with_source
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.run_start import OpenedDirectory
from jaxtrain.training.save_policy import (
    check_best_metric,
)
from jaxtrain.training.step_setup import StepSetup, validation_batch_size
from jaxtrain.training.validation import Evaluator

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class OpenedData:
    """What a run reads.

    Attributes:
        sources: both splits.
        quarantine: records broken files.
        bad_share: ends the run if too many are broken.
        init_from: local path of the initial parameters, if any.
    """

    sources: Sources
    quarantine: Quarantine
    bad_share: pipeline.BadShare
    init_from: str | None


def open_data(run: config.Run, directory: OpenedDirectory, log: RunLog) -> OpenedData:
    """Opens the data, and downloads the initial parameters of a new run.

    Raises:
        InputError: the data are missing, too many files are broken, or processes differ.
    """
    quarantine = Quarantine.open(directory.path, jax.process_index())
    with log.phases.within("data", allowance_s=None):  # may download
        new = directory.start_from is None
        model = with_source(run, log.say) if new else run.model
        try:
            sources = open_sources(run, model, directory.start_from, log.say)
        except TooManyBroken as error:
            if jax.process_index() == 0:
                quarantine.add_all(error.bad, found="index")
            raise
    bad_share = _quarantined(run, sources, quarantine, log.say)
    return OpenedData(sources, quarantine, bad_share, model.init_from)


def open_sources(run: config.Run, model: Any, start_from: Path | None, say: Say) -> Sources:
    """Opens both splits, in process 0 first, which writes the caches.

    A resume loads the files that the checkpoint stores for the data, such as a tokenizer.

    Args:
        run: the config.
        model: the run's model, with a local ``init_from``.
        start_from: the checkpoint to resume from, if any.
        say: prints what is opened.

    Raises:
        InputError: the processes have different data.
    """
    resumes = start_from is not None and hasattr(run.data, "for_resume")
    data = run.data.for_resume(start_from) if resumes else run.data
    sources = process_group.process_zero_first(
        lambda: data.open(model, seed=run.seed, say=say), "data"
    )
    say(sources.summary)
    if sources.small_training:
        say(sources.small_training)
    process_group.check_same(
        "data",
        f"{sources.train.fingerprint} {sources.val.fingerprint} {sorted(run.batch_spec(1))}",
        "give every process the same files, and do not change them during the run",
    )
    return sources


def _quarantined(
    run: config.Run, sources: Sources, quarantine: Quarantine, say: Say
) -> pipeline.BadShare:
    """Records the input files that were found broken when the data was opened.

    Raises:
        InputError: too many are broken.
    """
    if jax.process_index() == 0:
        quarantine.add_all(sources.bad, found="index")
    share = pipeline.BadShare(sources, quarantine, run.data.max_bad_share, say=say)
    complaint = share.complaint()
    if complaint:
        raise InputError(complaint)
    return share


def open_batches(
    setup: StepSetup, sources: Sources, quarantine: Quarantine, *, start: int, workers: int
) -> pipeline.TrainingBatches:
    """Opens the training batches from example ``start`` on."""
    run = setup.run
    return pipeline.TrainingBatches(
        sources.train,
        setup.rule.mesh,
        setup.spec,
        start=start,
        seed=run.seed,
        workers=workers,
        prefetch=run.data.prefetch,
        quarantine=quarantine,
    )


def workers_here(run: config.Run, mesh: jax.sharding.Mesh) -> worker_count.WorkerCount:
    """Returns the number of worker processes of this process: the config's, or this host's."""
    devices = mesh.local_devices
    return worker_count.choose(
        run.data,
        run.model,
        rows=run.data.batch_size * len(devices) // mesh.size,
        devices=len(devices),
        on_cpu=devices[0].platform == "cpu",
        processes=process_group.processes_on_this_host(os.environ),
    )


def evaluator_of(
    setup: StepSetup, sources: Sources, quarantine: Quarantine, *, threads: int
) -> Evaluator | None:
    """Builds the evaluator; returns None for a run without validation."""
    run = setup.run
    if run.loop.eval_every is None:
        return None
    # At most a microbatch, so that validation never needs more memory than a step; no more than the
    # existing examples, rounded up to a multiple of the devices.
    batch_size = validation_batch_size(run, len(sources.val))
    batches = pipeline.ValidationBatches(
        sources.val,
        setup.rule.mesh,
        run.model.batch_spec(batch_size),
        examples=run.loop.eval_examples,
        seed=run.seed,
        threads=threads,
        quarantine=quarantine,
    )
    evaluator = Evaluator(
        setup.definition,
        setup.rule,
        run.precision,
        setup.target,
        batches,
        deterministic=run.deterministic,
        decode=sources.decode,
    )
    check_best_metric(run.checkpoint, evaluator.names())
    return evaluator


def what_validates(run: config.Run, sources: Sources) -> str:
    """Returns a digest of the examples of a validation; "" for a run without validation."""
    if run.loop.eval_every is None:
        return ""
    examples = min(run.loop.eval_examples, len(sources.val))
    return cache.digest(sources.val.fingerprint, examples, run.seed)
