"""Checks a run before it opens its data, and reports all problems at once."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxtrain import config, machine
from jaxtrain.checkpoint import own_files, pointer, resume, start
from jaxtrain.checkpoint.candidates import CheckpointCandidates
from jaxtrain.config.mesh_fit import device_count_problem, fit_to_present_devices
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.distributed import cluster_env, process_group
from jaxtrain.errors import InputError, Problem, fields_of
from jaxtrain.interop import hub, weights
from jaxtrain.storage import addresses, bucket, run_marker
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry import tracker
from jaxtrain.training import run_directory
from jaxtrain.training.diagnosis import profiler


def check(run: config.Run, *, resumes: bool) -> None:
    """Rejects a run that cannot start on this machine."""
    problems = [*_devices(run), *_workers(run), *_replay(run), *unreadable(run, resumes=resumes)]
    if problems:
        raise InputError(*problems)


def refuse(run: config.Run, flags: RunFlags, other_problems: Sequence[str] = ()) -> None:
    """Rejects a wrong command line, and reports all other problems of the run with it.

    It does nothing for a correct command line: :func:`check` looks for the other problems once all
    processes of the run are connected.
    """
    cluster = cluster_env.find(os.environ)
    alone = cluster is None
    problems = [*config.problems(run), *_profile(run, flags.profile)]
    # Only process 0 needs the packages.
    problems += tracker.problems(flags.track, installed=cluster is None or cluster.index == 0)
    is_address = flags.output_dir is not None and addresses.is_address(flags.output_dir)
    problems += _bucket(flags.output_dir)
    if alone and not is_address:  # otherwise process 0 checks them for all
        problems += _places(run, flags)
    if not problems and not other_problems:
        return
    open_fields = {name for message in other_problems for name in fields_of(message)}
    # The devices of other processes are not known yet.
    if alone and "--simulate-devices" not in open_fields:
        process_group.connect(os.environ, flags.simulate_devices)
        problems += _devices(run)
    problems += unreadable(run, resumes=flags.resume is not None or flags.again)
    # Drops what may only be a consequence of an override that could not be applied.
    raise InputError(
        *other_problems,
        *(message for message in problems if not open_fields & {*fields_of(message)}),
    )


def _profile(run: config.Run, text: str | None) -> Iterator[str]:
    """Checks ``--profile``; the end of a run is known here only if ``loop.steps`` is set."""
    try:
        span = profiler.span(text)
    except InputError as error:
        yield from error.messages
        return
    interval, last = run.loop.replay_every, run.loop.steps
    if span is not None and isinstance(interval, int) and interval > 0:
        replayed = (span[0] // interval + 1) * interval  # the first one in the trace
        if isinstance(last, int):  # which is computed twice, too
            replayed = min(replayed, last)
        if span[0] < replayed <= span[1]:
            yield Problem(
                f"--profile {text} contains step {replayed}, which loop.replay_every {interval} "
                "computes twice: choose other steps, or set --loop.replay_every None",
                "loop.replay_every",
            )
    if span is not None and isinstance(run.loop.steps, int):
        problem = profiler.too_late(span, run.loop.steps)
        if problem:
            yield Problem(problem, "loop.steps")


def _bucket(output_dir: str | None) -> Iterator[str]:
    try:
        if output_dir is not None and addresses.is_address(output_dir):
            bucket.normalized(output_dir, "--output-dir")
    except InputError as error:
        yield from error.messages


def start_flags(run: config.Run, flags: RunFlags) -> start.Flags:
    """Returns what decides where a run starts."""
    weights = run.model.init_from or ""
    if weights and not (bucket.is_bucket(weights) or hub.is_named(weights)):
        weights = str(expanded(weights).absolute())
    return start.Flags(flags.resume, flags.again, weights, os.environ.get(own_files.LAUNCH, ""))


def _places(run: config.Run, flags: RunFlags) -> Iterator[str]:
    """Checks the folders in the flags. It reads no checkpoint, which may take minutes."""
    yield from run_directory.problems_of_name(flags.output_dir)
    if flags.output_dir is not None:
        yield from run_directory.problems(flags.output_dir, start_flags(run, flags))
    output_dir = None if flags.output_dir is None else expanded(flags.output_dir)
    if flags.resume is not None and bucket.is_bucket(flags.resume):
        try:
            bucket.normalized(flags.resume, "--resume")
        except InputError as error:
            yield from error.messages
        return
    yield from _resume(flags.resume, output_dir)


def _resume(resumed: str | None, output_dir: Path | None) -> Iterator[str]:
    """Checks ``--resume`` without reading checkpoints, which takes minutes."""
    if resumed is None or resumed == "latest":
        return
    try:
        if not start.is_step(resumed):
            if output_dir is not None and os.path.exists(output_dir / run_marker.NAME):
                return  # a run that has its own checkpoints does not need this one again
            path = expanded(resumed)
            if not any(map(os.path.exists, (path, path.with_name(f"{path.name}.json")))):
                resume.checkpoint_at(path, f"--resume {resumed}", lambda line: None)
        elif output_dir is None:
            yield f"--resume {resumed} requires --output-dir, the run that saved it"
        elif not output_dir.is_dir():
            yield (
                f"--resume {resumed}: {output_dir} does not exist: pass the --output-dir of the "
                "run that saved this step, or omit --resume to start from scratch"
            )
        elif not any((output_dir / kind).exists() for kind in pointer.KINDS):
            intent = start.Intent("step", resumed)
            start.own_checkpoint(intent, CheckpointCandidates(output_dir))
    except InputError as error:
        yield from error.messages


def unreadable(run: config.Run, *, resumes: bool = False, data: bool = True) -> Iterator[str]:
    """Finds missing input files and folders, without opening or downloading anything."""
    if run.model.init_from is not None and not resumes:
        try:
            if bucket.is_bucket(run.model.init_from):
                bucket.normalized(run.model.init_from, "model.init_from")
            elif hub.is_named(run.model.init_from):
                hub.parse(run.model.init_from)
            else:
                weights.check_there(expanded(run.model.init_from))
        except InputError as error:
            text = str(error)
            named = text if text.startswith("model.init_from ") else f"model.init_from {text}"
            yield Problem(named, "model.init_from")
    yield from run.model.problems()
    if data:
        yield from run.data.problems(run.model)


def _replay(run: config.Run) -> Iterator[str]:
    if run.loop.replay_every and not run.deterministic and jax.default_backend() == "gpu":
        yield Problem(
            f"loop.replay_every {run.loop.replay_every} compares steps bit by bit, but kernels of "
            "GPUs may sum in any order: add --deterministic True",
            *("loop.replay_every", "deterministic"),
        )


def _workers(run: config.Run) -> Iterator[str]:
    if run.data.workers and (text := machine.too_many(run.data.workers)):
        yield Problem(text, "data.workers")


def _devices(run: config.Run) -> Iterator[str]:
    try:
        run, _ = fit_to_present_devices(run)
    except InputError as error:
        yield from error.messages
        return
    problem = device_count_problem(run.mesh)
    if problem:
        yield Problem(problem, "mesh.data", "mesh.fsdp", "data.batch_size", "optim.accumulate")
