"""``jaxtrain checkpoints DIR``: lists and verifies a run's checkpoints, and changes nothing."""

import argparse
import dataclasses
import datetime
import json
import re
from pathlib import Path

from jaxtrain import files, manifest, resuming
from jaxtrain.checkpoint_folders import BEST, CHECKPOINTS, DAMAGED, META, SUPERSEDED, committed
from jaxtrain.errors import InputError

_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one checkpoint, whole or not.

    Attributes:
        path: inside the run's directory, as ``checkpoints/12``.
        step: completed updates, by its name.
        saved: UTC, as ``2026-01-31 09:00:00``; None if nothing tells.
        examples_seen: None if it cannot be read.
        bytes: of all files that are there.
        damage: why it is not what was saved; "" if every byte is.
    """

    path: str
    step: int
    saved: str | None
    examples_seen: int | None
    bytes: int
    damage: str


def main(arguments: list[str]) -> int:
    """Runs the command; 0, or 1 if a checkpoint is damaged.

    Raises:
        InputError: wrong use.
    """
    parser = _parser()
    if not arguments or arguments[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    try:
        flags, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see jaxtrain checkpoints --help") from None
    if rest:
        raise InputError(f"checkpoints takes one DIR and --json FILE, and not {' '.join(rest)}")
    run = _run_of(flags.directory)
    files.check_writable("--json", flags.json)
    found = [
        _finding(run, path)
        for place in ("", SUPERSEDED, DAMAGED)
        for folder in (CHECKPOINTS, BEST)
        for path in _checkpoints(run / place / folder)
    ]
    taken = resuming.would_take(run, {run / one.path: one.damage for one in found})
    print(_table(found))
    print(f"--resume latest would take {taken or _none(run)}")
    if flags.json:
        content = {
            "directory": str(run),
            "checkpoints": [dataclasses.asdict(one) for one in found],
            "latest": None if taken is None else str(taken),
        }
        files.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
    return 1 if any(one.damage for one in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxtrain checkpoints",
        usage="jaxtrain checkpoints DIR [--json FILE]",
        description="Lists and verifies a run's checkpoints; says which one a resume would take.",
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run's directory")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write everything that was found there too"
    )
    return parser


def _run_of(given: Path) -> Path:
    run = given.expanduser().absolute()
    if not run.is_dir():
        raise InputError(f"checkpoints {given}: there is no such folder; name a run's directory")
    if not any((run / name).is_dir() for name in (CHECKPOINTS, BEST, DAMAGED)):
        above = [one for one in run.parents if (one / CHECKPOINTS).is_dir()]
        raise InputError(
            f"checkpoints {given}: this folder holds no {CHECKPOINTS}/; name a run's directory"
            + (f", as {above[0]}" if above else "")
        )
    return run


def _checkpoints(folder: Path) -> list[Path]:
    """Folders named by a step, oldest first; a second damaged one of step 12 is ``12.2``."""
    names = [
        entry.name
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if re.fullmatch(r"\d+(\.\d+)?", entry.name) and entry.is_dir()
    ]
    return [folder / name for name in sorted(names, key=lambda name: [*map(int, name.split("."))])]


def _finding(run: Path, path: Path) -> Finding:
    moved = path.parent.parent.name == DAMAGED
    return Finding(
        path=path.relative_to(run).as_posix(),
        step=int(path.name.partition(".")[0]),
        saved=_saved(path),
        examples_seen=_examples_seen(path),
        bytes=sum(one.stat().st_size for one in path.rglob("*") if one.is_file()),
        damage=(_told(path) if moved else "") or _damage(path) or ("moved" if moved else ""),
    )


def _damage(path: Path) -> str:
    try:
        return manifest.verify(path)
    except OSError as error:
        return f"nobody knows: {error.filename} cannot be read now: {error.strerror}"
    except InputError as error:
        return str(error)


def _none(run: Path) -> str:
    anew = "the run would start anew"
    return f"none: {anew if resuming.starts_anew(run, _every(run)) else 'it would be refused'}"


def _every(run: Path) -> int:
    """Updates between checkpoints, as the run's config says; 0 if it does not."""
    try:
        return int(json.loads((run / "config.json").read_text())["checkpoint"]["every"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _saved(path: Path) -> str | None:
    try:
        nanoseconds = committed(path)
    except (OSError, ValueError, AttributeError):
        return None
    when = datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S") if nanoseconds else None


def _examples_seen(path: Path) -> int | None:
    try:
        return int(json.loads((path / META / "metadata").read_text())["meta"]["examples_seen"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _told(path: Path) -> str:
    """Why a resume has moved it aside."""
    try:
        return (path / resuming.REASON).read_text().splitlines()[1]
    except (OSError, ValueError, IndexError):
        return ""


def _table(found: list[Finding]) -> str:
    rows = [("checkpoint", "saved (UTC)", "examples seen", "size", "")]
    rows += [
        (
            one.path,
            one.saved or "?",
            "?" if one.examples_seen is None else str(one.examples_seen),
            f"{one.bytes / _MIB:.1f} MiB",
            f"DAMAGED: {one.damage}" if one.damage else "verified",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )
