"""Finds the checkpoint at a path or URL, for runs and commands.

:mod:`jaxtrain.checkpoint.start` decides whether a run starts from it.
"""

import datetime
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import pointer, remote
from jaxtrain.checkpoint.candidates import CheckpointCandidates, Damage, newest_intact
from jaxtrain.checkpoint.pointer import ASIDE, BEST, CHECKPOINTS, KINDS, Damaged
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.config import invocation
from jaxtrain.errors import InputError
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.terminal import Say

_HASHED_BYTES = 2**16


def refusal(checkpoints: CheckpointCandidates, damaged: Damage) -> str:
    """Returns why a run without an intact checkpoint must not start from scratch; "" if it may."""
    problems = [f"{kind}/{step}: {why}" for (kind, step), why in damaged.items()]
    if not problems and checkpoints.unusable():
        problems = [f"damaged or suspect ones are in {ASIDE}/"]
    if not problems:
        return ""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    location = checkpoints.location
    return (
        f"no checkpoint of {location} is intact ({problems[0]}{more}; {invocation.program()} "
        f"checkpoints {shlex.quote(location)} lists them): to start from scratch, choose "
        "another --output-dir or move this one away"
    )


def checkpoint_at(path: Path, flag: str, say: Say, kinds: Iterable[str] = KINDS) -> Path:
    """Returns the verified checkpoint at a path: of a checkpoint, or of a run directory.

    Args:
        flag: the flag and its value, for messages.

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
        checkpoints = CheckpointCandidates(local, bucket_run=bucket_run)
        path = checkpoint_of_run(checkpoints, url, f"{flag} {text}", say, kinds, step)
        bucket_run.forget(local)
    return path, f"{url}/{path.parent.name}/{path.stem}"


def checkpoint_of_run(
    checkpoints: CheckpointCandidates,
    location: str,
    flag: str,
    say: Say,
    kinds: Iterable[str],
    step: int | None,
) -> Path:
    """Returns the verified checkpoint of a run; see :func:`checkpoint_at`."""
    start, damaged = newest_intact(checkpoints, kinds, lambda number: step in (None, number))
    by_kind = {kind: checkpoints.steps(kind) for kind in KINDS}
    if start is None and step is not None:
        why = next(iter(damaged.values()), "there is none")
        raise InputError(
            f"{flag}: {location} has no complete checkpoint {step} ({why}); "
            f"{pointer.format_other_steps(by_kind, step)}"
        )
    for (kind, number), why in damaged.items():
        if start is None:
            raise InputError(
                f"{flag}: no checkpoint of {location} is intact ({kind}/{number}: {why})"
            )
        say(f"warning: checkpoint {location}/{kind}/{number} is damaged ({why}): skipped")
    if start is None:
        raise InputError(f"{flag}: no complete checkpoint found in {location}")
    if damaged:
        say(f"warning: using {location}/{start.parent.name}/{start.stem}, the newest intact one")
    return start


def is_expected(resume: str | None, output_dir: Path | None, root: Path) -> bool:
    """Whether a run is likely to start from a checkpoint; reads none.

    Args:
        root: the folder of the runs of its config, ``output/NAME``.
    """
    if resume is None:
        return False
    if resume != "latest":
        return True  # or an error, which the run reports
    if output_dir is None:
        return newest_run(root) is not None
    return any(pointer.newest_complete(output_dir / kind) for kind in KINDS)


def newest_runs(root: Path) -> list[Path]:
    """Returns the runs of all configs in ``output``, the one that saved last first."""
    names = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    runs = [run for name in names for run in _runs(name)]
    return sorted(runs, key=lambda run: (_last_save(run), run), reverse=True)


def newest_run(root: Path) -> Path | None:
    """Returns the run in ``output/NAME`` that saved last; None if none ever did."""
    return next(iter(_runs(root)), None)


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


def digest_of_weights(path: Path) -> str:
    """Returns a digest of the file or folder of ``model.init_from``.

    Of a run, it is that of its checkpoint; else of the names, the sizes, and the first and last
    64 KiB of all files.
    """
    if (checkpoint := next(likely_checkpoints(path), None)) is not None:
        return hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    about: list[Any] = []
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as content:
            ends = content.read(_HASHED_BYTES)
            content.seek(max(0, size - _HASHED_BYTES))
            ends += content.read(_HASHED_BYTES)
        name = file.relative_to(path).as_posix() if file != path else ""
        about.append((name, size, hashlib.sha256(ends).hexdigest()))
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def rollback_checkpoint(
    checkpoints: CheckpointCandidates, last_step: int, every: int
) -> Path | None:
    """Returns the newest intact checkpoint for a rollback; None if there is none.

    Checkpoints at multiples of ``every`` are preferred: those saved by a stop signal depend on its
    timing, and a stopped run should continue like one that was not stopped.

    Args:
        checkpoints: where to look; damaged ones are moved aside.
        last_step: number of completed steps; later checkpoints were abandoned by a resume.

    Raises:
        InputError, RunAgain: the disk does not respond.
    """
    try:
        path, damaged = newest_intact(
            checkpoints, (CHECKPOINTS,), lambda step: step <= last_step and step % every == 0
        )
        if path is None:
            path, more = newest_intact(
                checkpoints, (CHECKPOINTS,), lambda step: step <= last_step and step % every != 0
            )
            damaged |= more
        if path is not None:
            checkpoints.set_aside(damaged)
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    return path
