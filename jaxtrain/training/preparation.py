"""What ``loop.train`` needs before its first step, each made by one function."""

import time
from pathlib import Path

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.checkpoint import layout, resume
from jaxtrain.checkpoint.restore import restore
from jaxtrain.config import run_length
from jaxtrain.data import pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.distributed import process_group
from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry.timeline import History
from jaxtrain.training import debugging
from jaxtrain.training import state as states
from jaxtrain.training import step as steps
from jaxtrain.training.save_policy import Meta, check_best_metric
from jaxtrain.training.setup import Built, Say
from jaxtrain.training.validation import Evaluator


def position(start_from: Path | None) -> run_length.Position:
    """Where a run goes on: at a checkpoint, or at its beginning."""
    if start_from is None:
        return run_length.Position()
    return run_length.Position.of_checkpoint(layout.read_meta(start_from))


def first_state(
    built: Built, start_from: Path | None, directory: Path, meta: Meta, say: Say
) -> states.State:
    """A fresh state, or that of a checkpoint; takes over the best so far into ``meta``."""
    if start_from is None:
        return _first_values(built, say)
    saved = layout.read_run_meta(start_from)
    resume.check_same_run(
        start_from,
        saved,
        model=built.run.model,
        fingerprint=meta["fingerprint"],
        settings=meta["config"],
        versions=meta["versions"],
        say=say,
    )
    state = restore(start_from, built.target, verified=True)
    meta["best"] = resume.best_so_far(saved["best"], built.run.checkpoint, start_from, directory)
    meta["evaluation_due"] = saved["evaluation_due"] and built.run.loop.eval_every is not None
    done = run_length.Position.of_checkpoint(saved).done
    say(
        f"resumed from {start_from}: {saved['examples_seen']} examples seen; the learning rate of "
        f"update {done + 1} is {float(built.schedule(done)):.3g} of a schedule for {built.total}"
    )
    return state


def _first_values(built: Built, say: Say) -> states.State:
    """A fresh state, with the values that the model takes from elsewhere.

    Raises:
        InputError: what lies there does not fit the model.
    """
    model = built.run.model
    frozen = model.frozen() if hasattr(model, "frozen") else {}
    params: dict[str, np.ndarray] = {}
    if model.init_from is not None:
        source = expanded(model.init_from)
        params, notes = weights.params_for(source, model, built.definition.params)
        say("; ".join([f"parameters from {source}", *notes]))
    return states.replaced(built.fresh_state(), params, frozen)


def compiled_step(built: Built, debug: bool, say: Say, history: History) -> steps.TrainStep:
    """The training step; returns when all processes have compiled theirs.

    So the first step is as long as the others, however much later one process compiles.
    """
    began = time.perf_counter()
    compiled = built.compile_step(donate=not debug)
    say(f"compiled in {time.perf_counter() - began:.1f} s")
    history.compiled(
        compiled,
        state_bytes=states.bytes_per_device(built.target),
        params=states.parameter_count(built.definition.params),
    )
    process_group.wait_for_all("compiled", PAUSE_ALLOWANCE_S)
    return debugging.checked(compiled) if debug else compiled


def open_batches(
    built: Built, sources: Sources, quarantine: Quarantine, *, start: int
) -> pipeline.TrainingBatches:
    """The training batches from ``start`` examples on."""
    run = built.run
    return pipeline.TrainingBatches(
        sources.train,
        built.rule.mesh,
        built.spec,
        start=start,
        seed=run.seed,
        workers=run.data.workers,
        prefetch=run.data.prefetch,
        quarantine=quarantine,
    )


def open_data(run: config.Run, start_from: Path | None, say: Say) -> Sources:
    """Both splits; process 0 first, so that it makes the caches.

    A resume takes what the data needs from the checkpoint, where it is there: a tokenizer.

    Raises:
        InputError: processes have different data.
    """
    resumes = start_from is not None and hasattr(run.data, "going_on")
    data = run.data.going_on(start_from) if resumes else run.data
    sources = process_group.process_zero_first(
        lambda: data.open(run.model, seed=run.seed, say=say), "data"
    )
    say(sources.summary)
    process_group.check_same(
        "data",
        sources.train.fingerprint,
        "give every process the same files, and let none change them during the run",
    )
    return sources


def quarantined(
    run: config.Run, sources: Sources, quarantine: Quarantine, say: Say
) -> pipeline.BadShare:
    """Records the inputs that were found broken when the data was opened.

    Raises:
        InputError: they are too many.
    """
    if jax.process_index() == 0:
        quarantine.add_all(sources.bad, found="index")
    share = pipeline.BadShare(sources, quarantine, run.data.max_bad_share, say=say)
    complaint = share.complaint()
    if complaint:
        raise InputError(complaint)
    return share


def evaluator(built: Built, sources: Sources, quarantine: Quarantine) -> Evaluator | None:
    """What validates a state; None for a run without validations."""
    run = built.run
    if run.loop.eval_every is None:
        return None
    # At most a microbatch, so that evaluation never needs more memory than a step; no more rows
    # than there are examples, but some for each device.
    devices = run.mesh.devices
    examples = max(1, min(run.loop.eval_examples, len(sources.val)))
    wanted = -(-examples // devices) * devices
    batch_size = min(run.data.batch_size // run.optim.accumulate, wanted)
    batches = pipeline.ValidationBatches(
        sources.val,
        built.rule.mesh,
        run.model.batch_spec(batch_size),
        examples=run.loop.eval_examples,
        seed=run.seed,
        threads=run.data.workers,
        quarantine=quarantine,
    )
    evaluator = Evaluator(
        built.definition,
        built.rule,
        run.precision,
        built.target,
        batches,
        deterministic=run.deterministic,
        decode=sources.decode,
    )
    check_best_metric(run.checkpoint, evaluator.names())
    return evaluator
