"""Which checkpoint ``--resume`` means: one whose every byte was verified, or none.

``latest`` falls back: what is damaged is moved to ``<run>/damaged/checkpoints/<step>/`` with a
``reason.txt``, and the one before it is tried. A step or a path that was named is taken or refused.
What cannot be read now may be whole: that is an ``OSError``, and nothing is moved. Where all are
damaged and much would be lost, nothing is moved either, and ``latest`` is refused.
"""

import datetime
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.checkpoint import files, manifest
from jaxtrain.checkpoint.layout import (
    BEST,
    CHECKPOINTS,
    DAMAGED,
    META,
    STATE,
    committed,
    listed,
    numbered,
    steps,
)
from jaxtrain.config import invocation
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded, write_whole

REASON = "reason.txt"  # beside a damaged checkpoint's own files

Say = Callable[[str], None]


class NoneWhole(InputError):
    """A run has saved, and nothing of that is whole."""


def find(
    resume: str,
    output_dir: Path | None,
    runs_root: Path,
    say: Say = terminal.out,
    hold: Callable[[Path], None] = lambda run: None,
    little: int = 0,
) -> Path | None:
    """The checkpoint that ``--resume`` means, verified.

    Args:
        resume: ``"latest"``: the newest of ``output_dir``, or without one, of the run below
            ``runs_root`` that saved last. A number: that step of ``output_dir``, among the newest
            or the best. A path: of a checkpoint, or of a run's directory (its newest).
        output_dir: the run's directory, if it was given.
        runs_root: ``output/NAME``.
        say: takes a line for each damaged checkpoint that ``"latest"`` passes over.
        hold: takes the run's directory before anything in it is moved; keeps other runs out.
        little: so many updates may be lost where nothing is whole (:func:`starts_anew`).

    Returns:
        The folder of a checkpoint; None only for ``"latest"`` where there is none.

    Raises:
        InputError: a step or path that names no checkpoint, or a damaged one; ``"latest"`` where
            all are damaged and more than ``little`` would be lost.
        OSError: a disk does not tell now.
    """
    if resume == "latest":
        refused: NoneWhole | None = None
        for run in [output_dir] if output_dir is not None else _runs(runs_root):
            hold(run)
            try:
                found = newest_verified(run, say, little)
            except NoneWhole as error:
                refused = refused or error
                continue
            if found is not None:
                if refused:
                    say(f"warning: passed over a later run: {refused}")
                return found
        if refused:
            raise refused
        return None
    if resume.isascii() and resume.isdigit():
        if output_dir is not None:
            hold(output_dir)
        return _find_step(int(resume), output_dir)
    return _find_path(expanded(resume))


def newest_verified(run: Path, say: Say, little: int = 0) -> Path | None:
    """The newest checkpoint of a run that is what was saved; moves aside those that are not.

    Where none of ``checkpoints/`` is, the best one is better than to start anew. A damaged best one
    is moved aside in any case: nothing should be compared with it.

    Args:
        run: the run's directory.
        say: takes a line for each one that is not.
        little: so many updates may be lost where nothing is whole.

    Raises:
        NoneWhole: it has saved later than that, and all is damaged.
        OSError: the disk does not tell now; nothing was moved.
    """
    for folder in (CHECKPOINTS, BEST):
        files.give_back(run / folder)
    found, damaged = first_verified(run / CHECKPOINTS, numbered(run / CHECKPOINTS))
    best, damaged_best = first_verified(run / BEST, numbered(run / BEST))
    if found is None and best is None:
        _refuse_if_much_is_lost(run, damaged | damaged_best, little)
    for path, wrong in damaged.items():
        set_aside(path, wrong, say)
    if found is not None and damaged:
        say(f"warning: going on from {found}, the newest checkpoint that is whole")
    for path, wrong in damaged_best.items():
        set_aside(path, wrong, say)
    if found is None and best is not None:
        say(f"warning: no whole checkpoint in {run / CHECKPOINTS}: going on from {best}")
    elif found is None and damaged | damaged_best:
        say(f"warning: no whole checkpoint is left in {run}")
    return found or best


def starts_anew(run: Path, little: int) -> bool:
    """Whether a run of which no checkpoint is whole may begin again.

    It may where little is lost: where no later step was ever saved, also of what was found damaged
    before. Otherwise something else is wrong, such as a disk or a copy, and somebody should look
    before all is trained again.

    Args:
        run: the run's directory.
        little: updates; a first save that never ended, or was damaged, loses no more.
    """
    places = [run / place / folder for place in ("", DAMAGED) for folder in (CHECKPOINTS, BEST)]
    saved = [step for place in places for step in numbered(place)]
    saved += [step for place in places for step in files.replaced(place)]
    return max(saved, default=0) <= little


def _refuse_if_much_is_lost(run: Path, damaged: dict[Path, str], little: int) -> None:
    if starts_anew(run, little):
        return
    which = [f"{path.relative_to(run)}: {wrong}" for path, wrong in damaged.items()]
    more = f", and {len(which) - 1} more" if len(which) > 1 else ""
    raise NoneWhole(
        f"--resume latest: no checkpoint of {run} is whole ("
        f"{which[0] if which else 'all are in ' + DAMAGED}{more}; "
        f"{invocation.program()} checkpoints {shlex.quote(str(run))} lists "
        f"them), and more than {little} updates would be trained again: to start anew give another "
        "--output-dir, or move this directory away"
    )


def first_verified(folder: Path, steps: Iterable[int]) -> tuple[Path | None, dict[Path, str]]:
    """The newest of these checkpoints that is what was saved, and why newer ones are not.

    Raises:
        OSError: the disk does not tell now.
    """
    damaged: dict[Path, str] = {}
    for step in sorted(steps, reverse=True):
        path = folder / str(step)
        wrong = manifest.verify(path)
        if not wrong:
            return path, damaged
        damaged[path] = wrong
    return None, damaged


def set_aside(path: Path, wrong: str, say: Say) -> None:
    """Moves a damaged checkpoint out of the way; a disk that refuses that stops nobody."""
    found = f"warning: checkpoint {path} is damaged ({wrong})"
    place = path.parent.parent / DAMAGED / path.parent.name
    aside, number = place / path.name, 1
    try:
        while aside.exists():  # an earlier one of the same step
            number += 1
            aside = place / f"{path.name}.{number}"
        place.mkdir(parents=True, exist_ok=True)
        path.rename(aside)
    except OSError as error:
        say(f"{found}, cannot be moved to {aside} ({error.strerror}), and is passed over")
        return
    say(f"{found}: moved to {aside}")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        write_whole(aside / REASON, f"{now} moved from {path}\n{wrong}\n")
    except OSError as error:
        say(f"warning: {aside / REASON} cannot be written ({error.strerror})")


def newest_runs(root: Path) -> list[Path]:
    """The runs of all configs below ``output``, the one that saved last first."""
    names = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    runs = [run for name in names if not name.is_symlink() for run in _runs(name)]
    return sorted(runs, key=lambda run: (_last_save(run), run), reverse=True)


def _runs(root: Path) -> list[Path]:
    """The runs below ``output/NAME`` that hold checkpoints, the one that saved last first.

    By the time of the save, and not of the file: a copied run is as old as the original.
    """
    saved = {run: _last_save(run) for run in root.iterdir()} if root.is_dir() else {}
    return sorted((run for run in saved if saved[run]), key=lambda run: (saved[run], run))[::-1]


def _last_save(run: Path) -> int:
    """When a run saved last, nanoseconds since 1970; 0 if nothing tells."""
    last = 0
    for folder in (run / CHECKPOINTS, run / BEST):
        for step in numbered(folder):
            try:
                last = max(last, committed(folder / str(step)))
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue  # damaged: the others tell
    return last


def _find_step(step: int, output_dir: Path | None) -> Path:
    if output_dir is None:
        raise InputError(f"--resume {step} needs --output-dir, the run that holds this step")
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
        [one for one in steps(output_dir / folder) if one != step] for folder in (CHECKPOINTS, BEST)
    )
    there = f"complete ones are {listed(kept)}" if kept else "it holds no complete one"
    if best:
        there += f", and {listed(best)} as the best"
    raise InputError(
        f"--resume {step}: {output_dir} has no complete checkpoint {step}{damaged}: {there}"
    )


def _find_path(path: Path) -> Path:
    if not path.exists():
        raise InputError(
            f"--resume {path}: there is no such folder; give latest, a step, or the path of a "
            "checkpoint or of a run's directory"
        )
    inside = (manifest.NAME, f"{STATE}/_METADATA", f"{META}/metadata")
    found: Path | None = path
    if not path.name.isdigit() and not any((path / name).exists() for name in inside):
        folders = (path / CHECKPOINTS, path)
        found = next(
            (folder / str(max(there)) for folder in folders if (there := numbered(folder))), None
        )
    if found is None:
        raise InputError(f"--resume {path} holds no complete checkpoint")
    wrong = manifest.verify(found)
    if wrong:
        beside = [step for step in steps(found.parent) if str(step) != found.name]
        raise InputError(
            f"--resume {path}: {found} is not a complete checkpoint ({wrong}); beside it are "
            f"{listed(beside)}"
        )
    return found
