"""Decides which checkpoint a run or a command starts from. No other module decides that.

The rules for a run, which :func:`choose` (1 to 4, 7), :func:`check_directory` (5) and
:mod:`jaxtrain.checkpoint.same_run` (6) apply in process 0 once the directory is locked, with
:func:`jaxtrain.checkpoint.candidates.newest_intact`:

1. No ``--resume``: none. The run starts fresh, with the parameters of ``model.init_from`` if set.
2. ``--resume latest``: the newest intact checkpoint in ``checkpoints/``, or else in ``best/``, of
   ``--output-dir``, or without that flag, of the run in ``output/NAME`` that saved last. Damaged
   ones are moved to ``aside/``. Without any checkpoint, the run starts fresh, or from the other
   run's checkpoint that its last start began with (``run_directory.origin``); with only damaged or
   suspect ones, it is refused, and nothing moves.
3. ``--resume STEP``: that step of ``--output-dir``; refused if it is missing or damaged.
4. ``--resume PATH``, or a URL: that checkpoint, or the newest intact one of that run, which may be
   another run's. Nothing moves.
5. Refused if the run directory has checkpoints and the chosen one is of another run; also without
   ``--resume``.
6. Refused if the data, the seed or the meaning of the parameters differ.
7. A run with a copy in a bucket looks in both places. What one lacks or has damaged, the other may
   have. If another machine has continued the run in the bucket, what is on this disk does not
   count, and is moved to ``aside/``. No clocks are compared: the disk has a list of what it
   gave to the bucket.
"""

import datetime
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.checkpoint import pointer, remote
from jaxtrain.checkpoint.candidates import CheckpointCandidates, Damage, newest_intact
from jaxtrain.checkpoint.pointer import ASIDE, BEST, CHECKPOINTS, KINDS, Damaged
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.config import invocation
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.terminal import Say


def choose(
    resume: str | None,
    output_dir: Path | None,
    runs_root: Path,
    say: Say = terminal.out,
    lock: Callable[[Path], None] = lambda run: None,
    candidates_of: Callable[[Path], CheckpointCandidates] | None = None,
) -> Path | None:
    """Returns the verified checkpoint to start from; None for a fresh start. Rules 1 to 4 and 7.

    Args:
        resume: the flag's value: ``"latest"``, a step, or a path; None without the flag.
        output_dir: the run directory, if given.
        runs_root: ``output/NAME``.
        say: receives a line for each damaged checkpoint.
        lock: locks a run directory before anything in it is moved.
        candidates_of: returns the checkpoints of a run directory; by default, those on its disk.

    Raises:
        InputError: refused; the message lists the existing checkpoints.
        RunAgain: a disk or the bucket does not respond.
    """
    checkpoints_of = candidates_of or (lambda directory: CheckpointCandidates(directory, say))
    try:
        if resume is None:
            return None
        if resume != "latest" and not is_step(resume):
            return checkpoint_at(expanded(resume), f"--resume {resume}", say)
        if resume == "latest":
            directory = output_dir or next(iter(_runs(runs_root)), None)
            if directory is None:
                return None
            lock(directory)
            return _latest(checkpoints_of(directory), say)
        if output_dir is None:
            raise InputError(f"--resume {resume} requires --output-dir, the run that saved it")
        if candidates_of is None and not output_dir.is_dir():
            raise InputError(
                f"--resume {resume}: {output_dir} does not exist: pass the --output-dir of the run "
                "that saved this step, or omit --resume to start from scratch"
            )
        lock(output_dir)
        return _step(int(resume), checkpoints_of(output_dir))
    except OSError as error:  # the checkpoints may be intact
        raise disk_trouble(
            error,
            f"--resume {resume}: {error.filename} cannot be read",
            "make it readable, or choose another --output-dir",
        ) from error


def _latest(checkpoints: CheckpointCandidates, say: Say) -> Path | None:
    """Rules 2 and 7."""
    start, damaged = newest_intact(checkpoints)
    if start is None:
        if refused := refusal(checkpoints, damaged):
            raise InputError(f"--resume latest: {refused}")
        return None
    if checkpoints.disk_is_shared:
        # A validation must not be compared with a best checkpoint that is damaged or elsewhere.
        damaged |= newest_intact(checkpoints, (BEST,))[1]
    checkpoints.set_aside(damaged)
    checkpoints.adopt_disk()
    shown = start.with_suffix("")
    if start.parent.name == BEST:
        say(f"warning: no intact checkpoint in {CHECKPOINTS}/: resuming from {shown}")
    elif any(kind == CHECKPOINTS for kind, _ in damaged):
        say(f"warning: resuming from {shown}, the newest intact one in {CHECKPOINTS}/")
    return start


def refusal(checkpoints: CheckpointCandidates, damaged: Damage) -> str:
    """Returns why a run without an intact checkpoint must not start from scratch; "" if it may."""
    problems = [f"{kind}/{step}: {why}" for (kind, step), why in damaged.items()]
    if not problems and checkpoints.unusable():
        problems = [f"damaged or suspect ones are in {ASIDE}/"]
    if not problems:
        return ""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    bucket_run = checkpoints.bucket_run
    directory = checkpoints.directory if bucket_run is None else bucket_run.bucket.url
    return (
        f"no checkpoint of {directory} is intact ({problems[0]}{more}; {invocation.program()} "
        f"checkpoints {shlex.quote(str(directory))} lists them): to start from scratch, choose "
        "another --output-dir or move this one away"
    )


def _step(step: int, checkpoints: CheckpointCandidates) -> Path:
    """Rule 3."""
    start, damaged = newest_intact(checkpoints, only=lambda number: number == step)
    if start is None:
        why = next((f" ({why})" for why in damaged.values()), "")
        others = pointer.format_other_steps({kind: checkpoints.steps(kind) for kind in KINDS}, step)
        raise InputError(
            f"--resume {step}: {checkpoints.directory} has no complete checkpoint {step}{why}; "
            f"{others}; pass one of these steps, or --resume latest"
        )
    checkpoints.adopt_disk()
    return start


def is_step(resume: str) -> bool:
    """Whether the value of ``--resume`` is a step."""
    return resume.isascii() and resume.isdigit()


def checkpoint_at(path: Path, flag: str, say: Say, kinds: Iterable[str] = KINDS) -> Path:
    """Returns the verified checkpoint at a path: of a checkpoint, or of a run directory.

    Args:
        path: as typed.
        flag: the flag and its value, for messages.
        say: receives a line for each damaged one.
        kinds: which folder of a run to prefer.

    Raises:
        InputError: there is no intact one.
        OSError: the disk does not respond.
    """
    named = pointer.find(path)
    if named is None and not path.is_dir():
        raise InputError(
            f"{flag}: no such folder: pass latest, a step, or the path of a checkpoint or run "
            "directory"
        )
    directory = path if named is None else pointer.run_of(named)
    if named is not None and pointer.is_aside(named):
        if damage := pointer.verify(named):
            raise InputError(f"{flag}: {named} is not a complete checkpoint ({damage})")
        return named
    if named is not None:
        kinds = (named.parent.name,)
    step = None if named is None else pointer.step_of(named.name)
    return checkpoint_of_run(
        CheckpointCandidates(directory), str(directory), flag, say, kinds, step
    )


def checkpoint_at_url(
    text: str, flag: str, cache_root: Path, say: Say, kinds: tuple[str, ...] = KINDS
) -> tuple[Path, str]:
    """Fetches the checkpoint at a URL; see :func:`checkpoint_at`. Also returns its own URL."""
    url, named, step = remote.split(text, flag)
    kinds = kinds if step is None else named
    with remote.reading(url, cache_root, say) as (bucket_run, local):
        checkpoints = CheckpointCandidates(local, bucket_run=bucket_run, disk_counts=False)
        path = checkpoint_of_run(checkpoints, url, f"{flag} {text}", say, kinds, step)
        bucket_run.forget(local)
    return path, f"{url}/{path.parent.name}/{path.stem}"


def checkpoint_of_run(
    checkpoints: CheckpointCandidates,
    shown: str,
    flag: str,
    say: Say,
    kinds: Iterable[str],
    step: int | None,
) -> Path:
    """Returns the verified checkpoint of a run; see :func:`checkpoint_at`.

    Args:
        checkpoints: where it is.
        shown: its directory or URL.
        flag: for messages.
        say: receives a line for each damaged one.
        kinds: see :func:`newest_intact`.
        step: of the checkpoint; None for the newest.
    """
    start, damaged = newest_intact(checkpoints, kinds, lambda number: step in (None, number))
    by_kind = {kind: checkpoints.steps(kind) for kind in KINDS}
    if start is None and step is not None:
        why = next(iter(damaged.values()), "there is none")
        raise InputError(
            f"{flag}: {shown} has no complete checkpoint {step} ({why}); "
            f"{pointer.format_other_steps(by_kind, step)}"
        )
    for (kind, number), why in damaged.items():
        if start is None:
            raise InputError(f"{flag}: no checkpoint of {shown} is intact ({kind}/{number}: {why})")
        say(f"warning: checkpoint {shown}/{kind}/{number} is damaged ({why}): skipped")
    if start is None:
        raise InputError(f"{flag}: no complete checkpoint found in {shown}")
    if damaged:
        say(f"warning: using {shown}/{start.parent.name}/{start.stem}, the newest intact one")
    return start


def problems(resume: str | None, output_dir: Path | None) -> Iterator[str]:
    """Yields what is wrong with ``--resume``, without reading checkpoints, which takes minutes.

    Args:
        resume: the flag's value; None without the flag.
        output_dir: the run directory, if given.
    """
    if resume is None or resume == "latest":
        return
    folders = [output_dir / kind for kind in KINDS] if output_dir else []
    path = expanded(resume)
    paths = folders if is_step(resume) else [path, path.with_name(f"{path.name}.json")]
    if not any(map(os.path.exists, paths)):
        try:
            choose(resume, output_dir, Path())
        except InputError as error:
            yield from error.messages


def is_expected(resume: str | None, output_dir: Path | None, root: Path) -> bool:
    """Whether a run is likely to start from a checkpoint; reads none.

    Args:
        resume: the flag's value; None without the flag.
        output_dir: the run directory, if given.
        root: ``output``.
    """
    if resume is None:
        return False
    if resume != "latest":
        return True  # or an error, which the run reports
    if output_dir is None:
        return bool(newest_runs(root))
    return any(pointer.newest_complete(output_dir / kind) for kind in KINDS)


def newest_runs(root: Path) -> list[Path]:
    """Returns the runs of all configs in ``output``, the one that saved last first."""
    names = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    runs = [run for name in names for run in _runs(name)]
    return sorted(runs, key=lambda run: (_last_save(run), run), reverse=True)


def _runs(root: Path) -> list[Path]:
    """Returns the runs in ``output/NAME`` that ever saved, the one that saved last first.

    Also those whose checkpoints are all damaged: a resume must not skip them silently.
    """
    saved = {run: _last_save(run) for run in root.iterdir()} if root.is_dir() else {}
    return sorted((run for run in saved if saved[run]), key=lambda run: (saved[run], run))[::-1]


def _last_save(run_dir: Path) -> str:
    """Returns when a run saved last; "" if it never did.

    This is the recorded time, not the file's: a copied run is as old as the original.
    """
    if not run_dir.is_dir():
        return ""
    last = ""
    for name in CheckpointStore(Folder(run_dir)).pointers():
        path = run_dir / name
        try:
            saved = pointer.read(path).saved
        except (Damaged, InputError):
            when = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
            saved = when.strftime("%Y-%m-%dT%H:%M:%SZ")
        last = max(last, saved)
    return last


def check_directory(directory: Path, resume: str | None, start_from: Path | None) -> None:
    """Rule 5: two runs in one directory would overwrite each other's checkpoints.

    Args:
        directory: the run directory to write to.
        resume: the flag's value; None without the flag.
        start_from: the result of :func:`choose`.

    Raises:
        InputError: the directory contains checkpoints of another run.
        RunAgain: its disk does not respond.
    """
    try:
        check_empty(
            CheckpointCandidates(directory), f"--output-dir {directory}", resume, start_from
        )
    except OSError as error:
        raise disk_trouble(
            error, f"{directory} cannot be read", "make it readable, or choose another --output-dir"
        ) from error


def check_empty(
    checkpoints: CheckpointCandidates, shown: str, resume: str | None, start_from: Path | None
) -> None:
    """Rule 5 for a run directory and its copy; see :func:`check_directory`."""
    if is_in(checkpoints.directory, start_from):
        return
    steps = sorted({step for kind in KINDS for step in checkpoints.steps(kind)})
    if not steps:
        return
    if resume is None:
        raise InputError(
            f"{shown} already contains checkpoints (newest: {steps[-1]}): resume with --resume "
            "latest, or choose another directory"
        )
    raise InputError(
        f"{shown} already contains checkpoints (newest: {steps[-1]}), and --resume {resume} is "
        "another run: use --resume latest, or choose another directory"
    )


def is_in(directory: Path, start_from: Path | None) -> bool:
    """Whether a checkpoint is in a run directory."""
    return start_from is not None and directory.resolve() in start_from.resolve().parents


def trained_checkpoint(source: Path) -> Path:
    """Returns the checkpoint at a path, for a command that uses a trained model.

    That is the path itself if it is a complete checkpoint, or in a run directory the best intact
    one, or else the newest intact one. Nothing is moved.

    Raises:
        InputError: the path is neither a checkpoint nor a run directory with an intact one.
        OSError: the disk does not respond.
    """
    named = pointer.find(source)
    if named is not None and pointer.is_complete(named):
        return named
    if named is None:
        path, _ = newest_intact(CheckpointCandidates(source), (BEST, CHECKPOINTS))
        if path is not None:
            return path
    raise InputError(
        f"no checkpoint found in {source}: pass another run or a checkpoint (in a run directory, "
        f"{invocation.program()} checkpoints {shlex.quote(str(source))} shows what is there)"
    )


def likely_checkpoints(source: Path) -> Iterator[Path]:
    """Yields the complete checkpoints that :func:`trained_checkpoint` tries first, unverified."""
    named = pointer.find(source)
    if named is not None and pointer.is_complete(named):
        yield named
    for kind in (BEST, CHECKPOINTS):
        path = pointer.newest_complete(source / kind)
        if path is not None:
            yield path


def rollback_checkpoint(checkpoints: CheckpointCandidates, done: int, every: int) -> Path | None:
    """Returns the newest intact checkpoint for a rollback; None if there is none.

    Checkpoints at multiples of ``every`` are preferred: those saved by a stop signal depend on its
    timing, and a stopped run should continue like one that was not stopped.

    Args:
        checkpoints: where to look; damaged ones are moved aside.
        done: number of completed steps; later checkpoints were abandoned by a resume.
        every: steps between checkpoints.

    Raises:
        InputError, RunAgain: the disk does not respond.
    """
    try:
        path, damaged = newest_intact(
            checkpoints, (CHECKPOINTS,), lambda step: step <= done and step % every == 0
        )
        if path is None:
            path, more = newest_intact(
                checkpoints, (CHECKPOINTS,), lambda step: step <= done and step % every != 0
            )
            damaged |= more
        if path is not None:
            checkpoints.set_aside(damaged)
            checkpoints.adopt_disk()
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    return path
