"""The story of a run: build, restore, and for each step: batch -> step -> record -> save.

:func:`train` is the whole of it. What it calls is named after what it does.
"""

import contextlib
import dataclasses
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxtrain import (
    checkpoint,
    compiling,
    config,
    memory,
    metrics,
    optim,
    processes,
    rundir,
    versions,
)
from jaxtrain import mesh as meshes
from jaxtrain import state as states
from jaxtrain import step as steps
from jaxtrain.data import cache, pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.errors import InputError
from jaxtrain.evaluation import Evaluator
from jaxtrain.progress import Progress
from jaxtrain.signals import DONE, INTERRUPTED, RUN_AGAIN, WRONG_USE, StopSignals
from jaxtrain.watchdog import Watchdog

# What a process asks for when it wants the run to stop; the largest wins.
GO_ON, STOP_SIGTERM, STOP_SIGINT, STOP_BAD_DATA = range(4)
EXIT_CODES = {
    GO_ON: DONE,
    STOP_SIGTERM: RUN_AGAIN,
    STOP_SIGINT: INTERRUPTED,
    STOP_BAD_DATA: WRONG_USE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of the command line that are no fields of a config.

    Attributes:
        typed: the command line without ``--output-dir`` and ``--resume``.
    """

    output_dir: str | None = None
    resume: str | None = None
    simulate_devices: int | None = None
    debug: bool = False
    profile: tuple[int, int] | None = None
    typed: str = "python -m jaxtrain.main"


def start(run: config.Run, flags: Flags) -> int:
    """Connects the processes, trains, and returns the exit code."""
    with StopSignals() as signals:
        processes.connect(os.environ, flags.simulate_devices)
        signals.listen()  # jax.distributed has put its own handler over ours
        processes.check_accelerator(os.environ)
        compiling.use_cache(os.environ, cache.root(run.data.cache_dir) / "compiled")
        jax.config.update("jax_debug_nans", flags.debug)
        return train(run, flags, signals)


def train(run: config.Run, flags: Flags, signals: StopSignals) -> int:
    """One run from start to end."""
    mesh = meshes.make(run.mesh)
    start_from = rundir.start_from(run.name, flags.resume, flags.output_dir)
    directory = rundir.prepare(run.name, flags.output_dir, flags.resume, start_from)
    with contextlib.ExitStack() as stack:
        recorder = metrics.Recorder(directory, jax.process_index(), jax.process_count())
        stack.callback(recorder.close)
        say = recorder.say
        say(f"run directory {directory}")
        say(f"{run.name}: {mesh.size} x {jax.devices()[0].device_kind}, {versions.line()}")
        quarantine = Quarantine(directory / "quarantine.jsonl")
        sources = _open_data(run, quarantine, say)
        watchdog = stack.enter_context(Watchdog(run.loop.hang_timeout_s, directory, say))

        definition = states.Definition(run.model.build)
        rule = meshes.Rule(mesh, run.mesh)
        parameters = states.parameter_count(definition.params)
        known = {
            "examples": len(sources.train),
            "parameters": parameters,
            "tokens_per_example": run.model.tokens_per_example(),
        }
        total = config.resolve_steps(run, **known)
        say(f"{parameters:,} parameters; {config.steps_rule(run, **known)}; {_batch(run)}")
        schedule = optim.schedule(run.optim, total)
        optimizer = optim.make(run.optim, total, definition.params)
        target = states.abstract(definition, optimizer, rule)
        for name, shape in rule.unsharded(definition.params).items():
            say(f"not sharded: {name} {shape}: no dimension divides by mesh.fsdp {run.mesh.fsdp}")

        checkpoints = checkpoint.Checkpoints(
            directory / checkpoint.CHECKPOINTS, run.checkpoint.keep, say
        )
        stack.callback(checkpoints.close)
        meta: dict[str, Any] = {
            "fingerprint": sources.train.fingerprint,
            "config": config.to_dict(run),
            "versions": versions.versions(),
            "best": None,
        }
        with watchdog.pause("start"):
            if start_from is None:
                state = states.init(definition, optimizer, target, rule, run.seed)
            else:
                saved = checkpoint.read_meta(start_from)
                _check_resume(saved, meta, start_from, say)
                state = checkpoint.restore(start_from, target)
                meta["best"] = saved["best"]
                say(f"resumed from {start_from}: {saved['examples_seen']} examples seen")
        rundir.write_config(directory, meta["config"])
        done, seen = int(state.step), int(state.examples_seen)
        recorder.rewind(done)
        if done >= total:
            say(f"nothing to do: {done} updates are done, loop.steps is {total}")
            return DONE

        spec = run.model.batch_spec(run.data.batch_size)
        batches = pipeline.TrainingBatches(
            sources.train,
            mesh,
            spec,
            start=seen,
            batches=total - done,
            seed=run.seed,
            workers=run.data.workers,
            prefetch=run.data.prefetch,
            quarantine=quarantine,
        )
        stack.callback(batches.close)
        step = steps.build_train_step(
            definition,
            optimizer,
            schedule,
            rule,
            precision=run.precision,
            accumulate=run.optim.accumulate,
            seed=run.seed,
        )
        began = time.perf_counter()
        with watchdog.pause("compile"), memory.explained(run, target, spec, say):
            train_step = steps.compile_train_step(step, target, spec, mesh, donate=not flags.debug)
        say(f"compiled in {time.perf_counter() - began:.1f} s")

        evaluator = _evaluator(run, definition, rule, target, sources, quarantine)
        progress = Progress(run, recorder, watchdog, total, batches, mesh)
        stack.callback(progress.close)
        agreement = processes.Agreement(mesh)
        saver = _Saver(run, checkpoints, meta)
        wanted = GO_ON
        with memory.explained(run, target, spec, say), _profiler(flags, directory) as profiled:
            while done < total:
                profiled(done)
                state, found = train_step(state, next(batches))
                done += 1
                progress.push(done, found)  # looks at the step before this one

                if evaluator and _due(done, run.loop.eval_every, total):
                    with progress.interrupted("evaluation"):
                        values = evaluator.metrics(state)
                        progress.validated(done, values, evaluator.samples(state))
                        saver.keep_if_best(done, state, values)
                if _due(done, run.checkpoint.every, total):
                    with progress.interrupted("save"):
                        saver.save(done, state)

                wish = _wish(run, signals, sources, quarantine, batches)
                wanted = int(agreement.exchange(wish) or GO_ON)
                if wanted or saver.patience_over:
                    break
        batches.close()
        with progress.interrupted("save"):
            saver.save(done, state)
            checkpoints.wait()
        _farewell(run, flags, directory, done, total, wanted, saver, progress)
        return EXIT_CODES[wanted]


class _Saver:
    """Saves at cadence, keeps the best apart, and counts validations without improvement."""

    def __init__(
        self,
        run: config.Run,
        checkpoints: checkpoint.Checkpoints,
        meta: dict[str, Any],
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._meta = meta

    @property
    def patience_over(self) -> bool:
        """Whether so many validations brought nothing better that the run should end."""
        patience, best = self._run.loop.early_stop_patience, self._meta["best"]
        return patience is not None and best is not None and best["validations_since"] >= patience

    def save(self, done: int, state: states.State) -> None:
        """Saves the state after ``done`` updates; returns once it is copied to the host."""
        self._checkpoints.save(state, self._described(done, state))

    def keep_if_best(self, done: int, state: states.State, values: dict[str, float]) -> None:
        """Compares with the best validation so far; keeps this state apart if it is better."""
        settings = self._run.checkpoint
        if settings.best_metric is None:
            return
        if settings.best_metric not in values:
            raise InputError(
                f"checkpoint.best_metric is {settings.best_metric!r}, the model's validation gives "
                f"{', '.join(sorted(values))}: set --checkpoint.best_metric to one of these"
            )
        value, best = values[settings.best_metric], self._meta["best"]
        sign = 1 if settings.best_mode == "max" else -1
        if best is not None and sign * value <= sign * best["value"]:
            self._meta["best"] = best | {"validations_since": best["validations_since"] + 1}
            return
        self._meta["best"] = {
            "metric": settings.best_metric,
            "value": value,
            "step": done,
            "validations_since": 0,
        }
        self._checkpoints.save_best(state, self._described(done, state))

    def _described(self, done: int, state: states.State) -> dict[str, Any]:
        return self._meta | {"step": done, "examples_seen": int(state.examples_seen)}


def profile_span(text: str | None) -> tuple[int, int] | None:
    """``"10:15"`` -> (10, 15): the steps between which a trace is taken.

    Raises:
        InputError: it does not read so.
    """
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise InputError(f"--profile {text} is not START:STOP with START < STOP, as in 10:15")
    return int(first), int(last)


def _open_data(run: config.Run, quarantine: Quarantine, say: Any) -> Sources:
    sources = processes.process_zero_first(
        lambda: run.data.open(run.model, seed=run.seed, say=say), "data"
    )
    say(sources.summary)
    if jax.process_index() == 0:
        quarantine.add_all(sources.bad, found="index")
    reason = pipeline.check_bad_share(sources, quarantine, run.data.max_bad_share)
    if reason:
        raise InputError(reason)
    processes.check_same(
        "data",
        sources.train.fingerprint,
        "give every process the same files, and let none change them during the run",
    )
    return sources


def _evaluator(
    run: config.Run,
    definition: states.Definition,
    rule: meshes.Rule,
    target: states.State,
    sources: Sources,
    quarantine: Quarantine,
) -> Evaluator | None:
    if run.loop.eval_every is None:
        return None
    # A microbatch's size, so that evaluation never needs more memory than a step.
    batch_size = run.data.batch_size // run.optim.accumulate
    batches = pipeline.ValidationBatches(
        sources.val,
        rule.mesh,
        run.model.batch_spec(batch_size),
        examples=run.loop.eval_examples,
        seed=run.seed,
        threads=run.data.workers,
        quarantine=quarantine,
    )
    return Evaluator(definition, rule, run.precision, target, batches)


def _check_resume(saved: dict[str, Any], meta: dict[str, Any], start_from: Path, say: Any) -> None:
    """Refuses another seed or other data; prints whatever else differs."""
    if saved["fingerprint"] != meta["fingerprint"]:
        raise InputError(
            f"{start_from} was trained on data with fingerprint {saved['fingerprint']}, this run's "
            f"data has {meta['fingerprint']}: the order of examples would be another; give the "
            "same --data.path, or start a new run"
        )
    if saved["config"]["seed"] != meta["config"]["seed"]:
        raise InputError(
            f"{start_from} was trained with seed {saved['config']['seed']}, this run has seed "
            f"{meta['config']['seed']}: the order of examples would be another; leave --seed out"
        )
    for difference in config.differences(saved["config"], meta["config"]):
        say(f"differs from the checkpoint: {difference}")


def _wish(
    run: config.Run,
    signals: StopSignals,
    sources: Sources,
    quarantine: Quarantine,
    batches: pipeline.TrainingBatches,
) -> int:
    """What this process would like to do now; all processes then do the same."""
    if batches.substituted and pipeline.check_bad_share(
        sources, quarantine, run.data.max_bad_share
    ):
        return STOP_BAD_DATA
    return {None: GO_ON, "SIGTERM": STOP_SIGTERM, "SIGINT": STOP_SIGINT}[signals.requested]


def _due(done: int, every: int | None, total: int) -> bool:
    return every is not None and (done % every == 0 or done == total)


@contextlib.contextmanager
def _profiler(flags: Flags, directory: Path) -> Iterator[Any]:
    """Gives a function to call before each step; it starts and stops the trace."""
    running = False

    def before_step(done: int) -> None:
        nonlocal running
        if flags.profile is None:
            return
        if done == flags.profile[0]:
            jax.profiler.start_trace(directory / "profile")
            running = True
        elif done == flags.profile[1] and running:
            jax.profiler.stop_trace()
            running = False

    try:
        yield before_step
    finally:
        if running:
            jax.profiler.stop_trace()


def _batch(run: config.Run) -> str:
    devices = run.mesh.data * run.mesh.fsdp
    each = run.data.batch_size // (devices * run.optim.accumulate)
    return (
        f"{run.data.batch_size} examples a step = {each} per device x {devices} devices x "
        f"{run.optim.accumulate} accumulation"
    )


def _farewell(
    run: config.Run,
    flags: Flags,
    directory: Path,
    done: int,
    total: int,
    wanted: int,
    saver: _Saver,
    progress: Progress,
) -> None:
    """Says how it ended and what to type next."""
    again = f"{flags.typed} --output-dir {shlex.quote(str(directory))} --resume latest"
    ends = {
        GO_ON: f"done: {done} of {total} updates",
        STOP_SIGTERM: f"stopped by SIGTERM after {done} updates, saved; go on with: {again}",
        STOP_SIGINT: f"stopped by Ctrl-C after {done} updates, saved; go on with: {again}",
        STOP_BAD_DATA: f"stopped after {done} updates, saved: too many broken input files, see "
        f"{directory / 'quarantine.jsonl'}",
    }
    progress.say(ends[wanted])
    if wanted == GO_ON:
        if saver.patience_over:
            progress.say(
                f"stopped early: {run.loop.early_stop_patience} validations without a better "
                f"{run.checkpoint.best_metric}"
            )
        progress.summarise(directory, flags.typed, again)
