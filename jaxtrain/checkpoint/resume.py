"""Decides which checkpoint a run or a command starts from. No other module decides that.

A run calls :func:`choose` in process 0, once its directory is locked:

1. No ``--resume``: none. The run starts fresh, with the parameters of ``model.init_from`` if set.
2. ``--resume latest``: the newest checkpoint in ``checkpoints/`` of ``--output-dir``, or without
   that flag, of the run in ``output/NAME`` that saved last. If a repeated save of a step never
   finished, the step's old checkpoint counts.
3. The newest is damaged: the newest intact one, or if all of ``checkpoints/`` are damaged, the one
   in ``best/``. Damaged checkpoints are moved to ``damaged/`` with a ``reason.txt``. A damaged one
   in ``best/`` is always moved, as no validation should be compared with it.
4. None is intact, but no step after ``max_lost_steps`` was saved: a fresh start.
5. None is intact, and more steps would be lost: refused, and nothing moves.
6. No checkpoint of the run that saved last is intact (4 or 5), and there is no ``--output-dir``:
   the run that saved before it is tried. A warning names the damaged run, its damage and the
   checkpoint used instead. This also holds if the damaged checkpoints do not record when they were
   saved (then the folders' modification times count) or are all in ``damaged/`` or
   ``uncertified/``.
7. The run has never saved: a fresh start.
8. ``--resume STEP``: that step of ``--output-dir``, in ``checkpoints/`` or else in ``best/``;
   refused if it is missing or damaged.
9. ``--resume PATH``: that checkpoint, refused if it is missing or damaged; or the newest intact one
   in that run directory, which may be another run's. Damaged ones are reported and do not move.
   A URL is the same (:func:`jaxtrain.checkpoint.bucket_checkpoints.checkpoint_to_resume`).
10. A file cannot be read at the moment: refused, or a temporary failure, and nothing moves. The
    checkpoint may be intact.

Then, for the checkpoint of 2, 3, 6, 8 or 9:

11. :func:`check_directory`: refused if the run directory already contains checkpoints, and this is
    not one of them. Also without ``--resume``.
12. :func:`check_same_run`: refused if the data, the seed or the meaning of the parameters differ.
13. :func:`best_so_far`: its best validation counts only in the same run directory, with the same
    metric and validation set, and while the best checkpoint exists.

A command that uses a trained model calls :func:`of_source`; a rollback calls
:func:`to_roll_back_to`. "Intact" means that every byte was verified
(:func:`jaxtrain.checkpoint.manifest.verify`).
"""

import contextlib
import dataclasses
import datetime
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain import config, terminal
from jaxtrain.checkpoint import files, manifest
from jaxtrain.checkpoint.layout import (
    BEST,
    CHECKPOINTS,
    DAMAGED,
    META,
    STATE,
    UNCERTIFIED,
    committed,
    is_complete,
    latest_in,
    listed,
    numbered,
    others,
    steps,
)
from jaxtrain.config import invocation
from jaxtrain.errors import InputError
from jaxtrain.models import from_file
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import expanded, write_whole
from jaxtrain.storage.disks import disk_trouble

REASON = "reason.txt"  # added to a damaged checkpoint

Say = Callable[[str], None]
Verify = Callable[[Path], str]


def choose(
    resume: str | None,
    output_dir: Path | None,
    runs_root: Path,
    say: Say = terminal.out,
    hold: Callable[[Path], None] = lambda run: None,
    max_lost_steps: int = 0,
) -> Path | None:
    """Returns the verified checkpoint to start from; None for a fresh start. Cases 1 to 10 above.

    Args:
        resume: the flag's value: ``"latest"``, a step, or a path; None without the flag.
        output_dir: the run directory, if given.
        runs_root: ``output/NAME``.
        say: receives a line for each damaged checkpoint that ``"latest"`` skips.
        hold: locks a run directory before anything in it is moved.
        max_lost_steps: if no checkpoint is intact, ``"latest"`` starts fresh if at most this many
            steps are lost.

    Raises:
        InputError: refused (5, 8, 9); the message lists the existing checkpoints.
        RunAgain: a disk does not respond.
    """
    try:
        if resume is None:
            return None
        if resume == "latest":
            runs = _saved_runs(runs_root) if output_dir is None else [output_dir]
            return _latest(runs, say, hold, max_lost_steps)
        if _is_step(resume):
            if output_dir is not None:
                hold(output_dir)
            return _step(int(resume), output_dir)
        return _path(expanded(resume), say)
    except OSError as error:  # the checkpoints may be intact
        raise disk_trouble(
            error,
            f"--resume {resume}: {error.filename} cannot be read",
            "make it readable, or choose another --output-dir",
        ) from error


@dataclasses.dataclass(frozen=True)
class Latest:
    """What ``--resume latest`` does in one run, before anything in it is moved.

    Attributes:
        start: the checkpoint to start from; None if there is none.
        damaged: checkpoints to move aside -> their damage.
        refused: why the run must not start fresh; "" if it may or has a checkpoint.
    """

    start: Path | None
    damaged: dict[Path, str]
    refused: str


def latest_of(run: Path, max_lost_steps: int, verify: Verify = manifest.verify) -> Latest:
    """Decides cases 2 to 5 and 7 for one run; changes nothing.

    Args:
        run: the run directory.
        max_lost_steps: see :func:`choose`.
        verify: returns a checkpoint's damage; "" if it is intact.

    Raises:
        OSError: the disk does not respond.
    """

    def _newest_intact(folder: Path) -> tuple[Path | None, dict[Path, str]]:
        on_disk = {*numbered(folder), *files.replaced(folder)}
        return first_intact(folder, on_disk, lambda path: verify(files.before_give_back(path)))

    start, damaged = _newest_intact(run / CHECKPOINTS)
    best, damaged_best = _newest_intact(run / BEST)
    damaged |= damaged_best
    start = start or best
    if start is not None or _last_saved(run) <= max_lost_steps:
        return Latest(start, damaged, "")
    return Latest(None, damaged, _too_much_lost(run, damaged, max_lost_steps))


def _last_saved(run: Path) -> int:
    """Returns the last step that a run saved, intact or not; 0 if it never saved.

    If no checkpoint of a long run is intact, more than a first save has failed, for example a disk
    or a copy, which should be inspected before the run is repeated.
    """
    saved = [
        step
        for folder in _checkpoint_folders(run)
        for step in (*numbered(folder), *files.replaced(folder))
    ]
    return max(saved, default=0)


def _checkpoint_folders(run: Path) -> list[Path]:
    """Returns the folders for a run's checkpoints: intact, damaged, and uncertified."""
    asides = ("", DAMAGED, UNCERTIFIED)
    return [run / aside / folder for aside in asides for folder in (CHECKPOINTS, BEST)]


def _none_intact(run: Path, damaged: Mapping[Path, str]) -> str:
    which = [f"{path.relative_to(run)}: {wrong}" for path, wrong in damaged.items()]
    more = f", and {len(which) - 1} more" if len(which) > 1 else ""
    there = [aside for aside in (DAMAGED, UNCERTIFIED) if (run / aside).is_dir()]
    if not which:
        which = [f"all are in {' and '.join(there)}"]
    return (
        f"no checkpoint of {run} is intact ({which[0]}{more};"
        f" {invocation.program()} checkpoints {shlex.quote(str(run))} lists them)"
    )


def _too_much_lost(run: Path, damaged: Mapping[Path, str], max_lost_steps: int) -> str:
    return (
        f"--resume latest: {_none_intact(run, damaged)}, and more than {max_lost_steps} steps "
        "would be lost: to start from scratch, choose another --output-dir or move this directory "
        "away"
    )


def _latest(
    runs: Iterable[Path], say: Say, hold: Callable[[Path], None], max_lost_steps: int
) -> Path | None:
    refused = ""
    skipped: list[str] = []  # the damage of runs that saved later
    for run in runs:
        hold(run)
        for folder in (CHECKPOINTS, BEST):
            files.give_back(run / folder)
        latest = latest_of(run, max_lost_steps)
        refused = refused or latest.refused
        if not latest.refused:
            for path, wrong in latest.damaged.items():
                set_aside(path, wrong, say)
            _explain(run, latest, say)
        if latest.start is not None:
            for wrong in skipped:
                say(f"warning: {wrong}: resuming an older run from {latest.start} instead")
            return latest.start
        skipped.append(_none_intact(run, latest.damaged))
    if refused:
        raise InputError(refused)
    return None


def _explain(run: Path, latest: Latest, say: Say) -> None:
    """Reports which checkpoint is used instead of damaged ones."""
    if not latest.damaged:
        return
    if latest.start is None:
        say(f"warning: no intact checkpoint is left in {run}")
    elif latest.start.parent.name == BEST:
        say(f"warning: no intact checkpoint in {run / CHECKPOINTS}: resuming from {latest.start}")
    elif any(path.parent.name == CHECKPOINTS for path in latest.damaged):
        say(f"warning: resuming from {_newest_intact(latest.start)}")


def first_intact(
    folder: Path, steps: Iterable[int], verify: Verify = manifest.verify
) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest intact checkpoint of these, and the damage of newer ones.

    Raises:
        OSError: the disk does not respond.
    """
    damaged: dict[Path, str] = {}
    for step in sorted(steps, reverse=True):
        path = folder / str(step)
        wrong = verify(path)
        if not wrong:
            return path, damaged
        damaged[path] = wrong
    return None, damaged


def _newest_intact(path: Path) -> str:
    """Describes the checkpoint that is used instead of damaged ones.

    ``best/`` may have a newer one, but is used only if all of ``checkpoints/`` are damaged.
    """
    return f"{path}, the newest intact one in {path.parent.name}/"


def set_aside(path: Path, wrong: str, say: Say, to: str = DAMAGED) -> None:
    """Moves a damaged checkpoint aside; only warns if that fails.

    Args:
        path: of the checkpoint.
        wrong: the damage.
        say: prints a line.
        to: the folder to move it to, in the run directory.
    """
    kind = "damaged" if to == DAMAGED else to
    damage = f"warning: checkpoint {path} is {kind} ({wrong})"
    there = path.parent.parent / to / path.parent.name
    aside, number = there / path.name, 1
    try:
        while aside.exists():  # an earlier one of the same step
            number += 1
            aside = there / f"{path.name}.{number}"
        there.mkdir(parents=True, exist_ok=True)
        path.rename(aside)
    except OSError as error:
        say(f"{damage} and skipped; it cannot be moved to {aside} ({error.strerror})")
        return
    say(f"{damage}: moved to {aside}")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        write_whole(aside / REASON, f"{now} moved from {path}\n{wrong}\n")
    except OSError as error:
        say(f"warning: {aside / REASON} cannot be written ({error.strerror})")


def _is_step(resume: str) -> bool:
    return resume.isascii() and resume.isdigit()


def _step(step: int, output_dir: Path | None) -> Path:
    if output_dir is None:
        raise InputError(f"--resume {step} requires --output-dir, the run that saved this step")
    if not output_dir.is_dir():
        raise InputError(
            f"--resume {step}: {output_dir} does not exist: pass the --output-dir of the run that "
            "saved this step, or omit --resume to start from scratch"
        )
    damaged = ""
    for folder in (output_dir / CHECKPOINTS, output_dir / BEST):
        files.give_back(folder)
        path = folder / str(step)
        if path.is_dir():
            wrong = manifest.verify(path)
            if not wrong:
                return path
            damaged = damaged or f" ({wrong})"
    kept, best = (
        [other for other in steps(output_dir / folder) if other != step]
        for folder in (CHECKPOINTS, BEST)
    )
    there = f"complete checkpoints: {listed(kept)}"
    if best:
        there += f"; best: {listed(best)}"
    raise InputError(
        f"--resume {step}: {output_dir} has no complete checkpoint {step}{damaged}; {there}; "
        "pass one of these steps, or --resume latest"
    )


def _path(path: Path, say: Say) -> Path:
    if not path.exists():
        raise InputError(
            f"--resume {path}: no such folder: pass latest, a step, or the path of a checkpoint or "
            "run directory"
        )
    inside = (manifest.NAME, f"{STATE}/_METADATA", f"{META}/metadata")
    is_checkpoint = path.name.isdigit() or any((path / name).exists() for name in inside)
    if not is_checkpoint or (path / CHECKPOINTS).is_dir():  # a run may be named by digits, too
        return _newest_in(path, say)
    wrong = manifest.verify(path)
    if wrong:
        beside = path.parent
        names = (CHECKPOINTS, BEST) if beside.name in (CHECKPOINTS, BEST) else (beside.name,)
        found = {name: steps(beside.parent / name) for name in names}
        step = int(path.name) if path.name.isdecimal() else -1
        raise InputError(
            f"--resume {path}: {path} is not a complete checkpoint ({wrong}); {others(found, step)}"
        )
    return path


def _newest_in(path: Path, say: Say) -> Path:
    run = bool(numbered(path / CHECKPOINTS))
    damaged: dict[Path, str] = {}
    for folder in (path / CHECKPOINTS, path / BEST) if run else (path,):
        start, wrong = first_intact(folder, numbered(folder))
        damaged |= wrong
        for one, why in wrong.items():
            say(f"warning: checkpoint {one} is damaged ({why}): skipped")
        if start is not None:
            if damaged:
                say(f"warning: resuming from {_newest_intact(start)}")
            return start
    for one, why in damaged.items():
        raise InputError(f"--resume {path}: no checkpoint there is intact ({one}: {why})")
    raise InputError(f"--resume {path}: no complete checkpoint found there")


def problems(resume: str | None, output_dir: Path | None) -> Iterator[str]:
    """Yields what is wrong with ``--resume``, without reading checkpoints, which takes minutes.

    Args:
        resume: the flag's value; None without the flag.
        output_dir: the run directory, if given.
    """
    if resume is None or resume == "latest":
        return
    folders = [output_dir / folder for folder in (CHECKPOINTS, BEST)] if output_dir else []
    if not any(map(os.path.exists, folders if _is_step(resume) else [expanded(resume)])):
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
    return any(latest_in(output_dir / folder) for folder in (CHECKPOINTS, BEST))


def newest_runs(root: Path) -> list[Path]:
    """Returns the runs of all configs in ``output``, the one that saved last first."""
    names = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    runs = [run for name in names if not name.is_symlink() for run in _runs(name)]
    return sorted(runs, key=lambda run: (_last_save(run), run), reverse=True)


def _runs(root: Path) -> list[Path]:
    """Returns the runs in ``output/NAME`` with checkpoints, the one that saved last first.

    Sorted by the recorded time of the save, not the file's: a copied run is as old as the original.
    """
    saved = {run: _last_save(run) for run in root.iterdir()} if root.is_dir() else {}
    return sorted((run for run in saved if saved[run]), key=lambda run: (saved[run], run))[::-1]


def _saved_runs(root: Path) -> list[Path]:
    """Returns all runs in ``output/NAME`` that ever saved, the one that saved last first.

    Unlike :func:`_runs`, includes those without a readable checkpoint: a resume must not skip them
    silently.
    """

    def saved(run: Path) -> int:
        folders = [
            folder / name
            for folder in _checkpoint_folders(run)
            for name in (
                *map(str, numbered(folder)),
                *map("{}.replaced".format, files.replaced(folder)),
            )
        ]
        return _last_commit(folders) or max(
            (path.stat().st_mtime_ns for path in folders), default=0
        )

    found = {run: saved(run) for run in root.iterdir()} if root.is_dir() else {}
    return sorted((run for run in found if found[run]), key=lambda run: (found[run], run))[::-1]


def _last_save(run: Path) -> int:
    """Returns when a run saved last, in nanoseconds since 1970; 0 if no checkpoint records it."""
    folders = (run / CHECKPOINTS, run / BEST)
    return _last_commit(folder / str(step) for folder in folders for step in numbered(folder))


def _last_commit(checkpoints: Iterable[Path]) -> int:
    """Returns when the last of these was saved, in nanoseconds since 1970; 0 if none records it."""
    last = 0
    for path in checkpoints:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):  # damaged
            last = max(last, committed(path))
    return last


def check_directory(directory: Path, resume: str | None, start_from: Path | None) -> None:
    """Case 11: two runs in one directory would overwrite each other's checkpoints.

    Args:
        directory: the run directory to write to.
        resume: the flag's value; None without the flag.
        start_from: the result of :func:`choose`.

    Raises:
        InputError: the directory contains checkpoints of another run.
        RunAgain: its disk does not respond.
    """
    try:
        newest = latest_in(directory / CHECKPOINTS)
    except OSError as error:
        raise disk_trouble(
            error, f"{directory} cannot be read", "make it readable, or choose another --output-dir"
        ) from error
    if newest is None or _is_of(directory, start_from):
        return
    if resume is None:
        raise InputError(
            f"--output-dir {directory} already contains checkpoints (newest: {newest.name}): "
            "resume with --resume latest, or choose another directory"
        )
    raise InputError(
        f"--output-dir {directory} already contains checkpoints (newest: {newest.name}), and "
        f"--resume {resume} is another run: use --resume latest, or choose another directory"
    )


def _is_of(directory: Path, start_from: Path | None) -> bool:
    """Whether a checkpoint is in a run directory."""
    return start_from is not None and directory.resolve() in start_from.resolve().parents


def check_same_run(
    source: str,
    saved: Mapping[str, Any],
    *,
    model: Any,
    fingerprint: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    say: Say,
) -> None:
    """Case 12: the checkpoint must have this run's order of examples; prints other differences.

    Args:
        source: the checkpoint, as it is printed.
        saved: its metadata (:func:`jaxtrain.checkpoint.layout.read_run_meta`).
        model: this run's model config.
        fingerprint: of this run's data.
        settings: this run's config, from :func:`jaxtrain.config.to_dict`.
        versions: of jaxtrain and the packages that it uses.
        say: receives a line for each difference.

    Raises:
        InputError: the data, the seed or the meaning of the parameters differ.
    """
    saved = addresses.scrubbed(dict(saved))
    old = saved["config"]
    if saved["fingerprint"] != fingerprint:
        raise InputError(
            f"{source} was trained on different data ({_data_of(old, saved['fingerprint'])}) "
            f"than "
            f"this run ({_data_of(settings, fingerprint)}), so the order of examples would differ: "
            f"pass the same --config and --data.path{_same_clips(old['data'], settings['data'])}, "
            "or start a new run"
        )
    if old["seed"] != settings["seed"]:
        raise InputError(
            f"{source} was trained with seed {old['seed']}, and this run has seed "
            f"{settings['seed']}, so the order of examples would differ: omit --seed"
        )
    frozen = [sorted(set(one["model"].get("freeze", ()))) for one in (old, settings)]
    if frozen[0] != frozen[1]:
        raise InputError(
            f"{source} was trained with model.freeze={' '.join(frozen[0]) or '()'}, and this "
            f"run has {' '.join(frozen[1]) or '()'}, so the optimizer states differ: pass the same "
            f"--model.freeze, or start a new run with --model.init_from {source}"
        )
    for difference in config.differences(old, settings):
        say(f"differs from the checkpoint: {difference}")
    for difference in config.differences(saved["versions"], versions):
        say(f"version differs from the checkpoint: {difference}")
    from_file.check_not_in_weights(model, old["model"], source)


def check_constants(source: str, saved: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Case 12, for the weights that a model reads from files and does not train.

    Args:
        source: the checkpoint, as it is printed.
        saved: part of the model -> checksum of its values, from the metadata.
        found: likewise, of this run's files.

    Raises:
        InputError: names the first part whose values differ.
    """
    for part in sorted({*saved, *found}):
        was, now = (one[part][:8] if part in one else "none" for one in (saved, found))
        if saved.get(part) != found.get(part):
            raise InputError(
                f"{source} was trained with other values of {part} (checksum {was}) than this "
                f"config's files have ({now}): pass the files that the run started with, which its "
                "config.json names"
            )


def _data_of(settings: Mapping[str, Any], fingerprint: str) -> str:
    data = settings["data"]
    val = "" if data.get("val_path") is None else f" --data.val_path {data['val_path']}"
    return (
        f"--config {settings['name']} --data.path {data.get('path')}{val}, fingerprint "
        f"{fingerprint[:8]}"
    )


def _same_clips(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns the checkpoint's flag for the clips per video, if it differs."""
    had = old.get("clips_per_video")
    if had is None or had == new.get("clips_per_video"):
        return ""
    return f" and --data.clips_per_video {had}"


def best_so_far(
    saved: Mapping[str, Any],
    criterion: Mapping[str, object],
    start_from: Path,
    directory: Path,
    say: Say,
) -> dict[str, Any] | None:
    """Case 13: returns the best validation before a resume; None if there is none that counts.

    Process 0 looks it up: other hosts may see an outdated state of a network disk, and early
    stopping must be the same in all processes.

    Args:
        saved: the checkpoint's metadata: ``best``, with its ``step``, ``metric`` and ``mode``, and
            ``validation``, the digest of what validated.
        criterion: this run's ``metric``, ``mode`` and ``validation``.
        start_from: the checkpoint.
        directory: this run's directory.
        say: prints why the best validation so far does not count.

    Raises:
        InputError, RunAgain: in all processes, if the disk does not respond.
    """
    from jaxtrain.distributed import (
        process_group,
    )  # imports jax, which commands that only look do not need

    best = saved["best"]
    if best is None or not _is_of(directory, start_from):
        return None
    if not process_group.process_zero_decides(
        lambda: "there" if _has_best(directory, best["step"], start_from) else ""
    ):
        return None
    before = {name: best[name] for name in ("metric", "mode")} | {
        "validation": saved.get("validation")
    }
    changed = [name for name in before if before[name] != criterion[name]]
    if changed and criterion["metric"] is not None:
        what = "the validation set" if changed == ["validation"] else "checkpoint.best_metric"
        say(
            f"{what} differs from the checkpoint's: the best checkpoint so far ({best['metric']} "
            f"{best['value']:.4g} at step {best['step']}) and the patience no longer count"
        )
    return None if changed else best


def _has_best(directory: Path, step: int, start_from: Path) -> bool:
    """Whether the best checkpoint exists; links it again if only that link is missing."""
    path = directory / BEST / str(step)
    try:
        if not is_complete(path) and start_from.name == str(step):
            path.parent.mkdir(exist_ok=True)
            files.link(start_from, path)  # the run was killed before it was linked
            files.delete_oldest(path.parent, 1)
        return is_complete(path)
    except OSError as error:
        raise disk_trouble(error, f"{path} cannot be read", "make it readable") from error


def of_source(source: Path) -> Path:
    """Returns the checkpoint at a path, for a command that uses a trained model.

    That is the path itself, or in a run directory the best checkpoint, or else the newest; only
    intact ones count. Nothing is moved.

    Raises:
        InputError: the path is neither a checkpoint nor a run directory with an intact one.
        OSError: the disk does not respond.
    """
    if is_complete(source):
        return source
    for folder in (source / BEST, source / CHECKPOINTS):
        path, _ = first_intact(folder, steps(folder))
        if path is not None:
            return path
    raise InputError(
        f"no checkpoint found in {source} (run {invocation.program()} checkpoints "
        f"{shlex.quote(str(source))} to see what is there)"
    )


def complete_of_source(source: Path) -> Iterator[Path]:
    """Yields the complete checkpoints that :func:`of_source` tries first; reads no arrays."""
    if is_complete(source):
        yield source
    for folder in (source / BEST, source / CHECKPOINTS):
        path = latest_in(folder)
        if path is not None:
            yield path


def to_roll_back_to(run: Path, done: int, every: int, say: Say) -> Path | None:
    """Returns the newest intact checkpoint for a rollback; None if there is none.

    Checkpoints at multiples of ``every`` are preferred: those saved by a stop signal depend on its
    timing, and a stopped run should continue like one that was not stopped.

    Args:
        run: the run directory.
        done: number of completed steps; later checkpoints were abandoned by a resume.
        every: steps between checkpoints.
        say: receives a line for each damaged checkpoint, which is moved aside.

    Raises:
        InputError, RunAgain: the disk does not respond.
    """
    folder = run / CHECKPOINTS
    try:
        earlier = [step for step in numbered(folder) if step <= done]
        at_cadence = [step for step in earlier if step % every == 0]
        path, damaged = first_intact(folder, at_cadence)
        if path is None:
            others = [step for step in earlier if step not in at_cadence]
            path, more = first_intact(folder, others)
            damaged = {**damaged, **more}
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    if path is not None:
        for other, wrong in damaged.items():  # or they would prevent saving their steps again
            set_aside(other, wrong, say)
    return path
