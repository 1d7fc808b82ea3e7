"""``jaxtrain checkpoints DIR``: lists and verifies the checkpoints of a run; changes nothing."""

import argparse
import dataclasses
import datetime
import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from jaxtrain import terminal
from jaxtrain.checkpoint import bucket_checkpoints, manifest, resume
from jaxtrain.checkpoint.layout import (
    BEST,
    CHECKPOINTS,
    DAMAGED,
    META,
    SUPERSEDED,
    UNCERTIFIED,
    committed,
)
from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic, bucket, lease, lock
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.training import run_files

_MIB = 2**20
_REASON_BYTES = 2**16

# "unknown": it cannot be read now, or another version wrote it. "saving": a run is saving it.
Verdict = Literal["verified", "damaged", "unknown", "saving"]
_SHOWN = {
    "verified": "verified",
    "damaged": "DAMAGED",
    "unknown": "UNKNOWN",
    "saving": "being saved",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A checkpoint, intact or not.

    Attributes:
        path: path in the run directory, such as ``checkpoints/12``.
        step: completed steps, according to its name.
        saved: UTC time, such as ``2026-01-31 09:00:00``; None if unknown.
        examples_seen: examples seen; None if unreadable.
        bytes: total size of its files.
        verdict: "verified" if every byte is as it was saved.
        why: why it is not verified; "" if it is.
    """

    path: str
    step: int
    saved: str | None
    examples_seen: int | None
    bytes: int
    verdict: Verdict
    why: str


def main(arguments: list[str]) -> int:
    """Runs the command; returns 1 if a checkpoint is damaged or unreadable, else 0.

    Checkpoints that were moved to ``damaged/``, ``uncertified/``, and ``superseded/`` do not count.

    Raises:
        InputError: wrong use.
        RunAgain: the disk does not respond.
    """
    parser = _parser()
    if not arguments or arguments[0] in ("--help", "-h"):
        parser.print_help()
        return 0
    try:
        flags, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see {invocation.program()} checkpoints --help") from None
    if rest:
        raise InputError(
            f"checkpoints: unexpected argument {' '.join(rest)}; it takes one DIR and --json FILE"
        )
    damaged: dict[str, str] = {}  # in a bucket
    given, stored = flags.directory, bucket.is_bucket(str(flags.directory))
    shown = str(given)
    if stored:
        shown = bucket.normalized(shown, "DIR")
        at_work = lease.holder(Bucket(shown))
        given = bucket_checkpoints.run_to_read(shown, cache.root(None), terminal.warn, damaged)
    run = _run_of(given, shown)
    atomic.check_writable("--json", flags.json)
    if not stored:
        at_work = lock.holder(run)
    try:
        found = [
            one
            for aside in ("", SUPERSEDED, DAMAGED, UNCERTIFIED)
            for folder in (CHECKPOINTS, BEST)
            for one in _findings(run, run / aside / folder, damaged, bool(at_work))
        ]
        taken, words = _resume(run, {one.path: one for one in found})
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    terminal.out(_table(found))
    if stored:
        words = words.replace(str(run), shown)
    # The lease of a run that was killed on another machine looks like that of a live one.
    which = "holds the lease there" if stored else "is active here"
    terminal.out(words + (f", after the run that {which} ({at_work}) has ended" if at_work else ""))
    if flags.json:
        content = {
            "directory": str(run),
            "checkpoints": [dataclasses.asdict(one) for one in found],
            "latest": None if taken is None else str(taken),
        }
        atomic.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
    asides = tuple(f"{aside}/" for aside in (DAMAGED, UNCERTIFIED, SUPERSEDED))
    now = [one for one in found if not one.path.startswith(asides)]
    return 1 if any(one.verdict in ("damaged", "unknown") for one in now) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxtrain checkpoints",
        usage="jaxtrain checkpoints DIR [--json FILE]",
        description="Lists and verifies the checkpoints of a run; shows which one a resume uses.",
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="a run directory, or s3://BUCKET/PATH"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the results to FILE, as JSON"
    )
    return parser


def _run_of(given: Path, shown: str) -> Path:
    run = atomic.expanded(given).absolute()
    if not run.is_dir():
        raise InputError(f"checkpoints {shown}: no such folder; pass a run directory")
    if not any((run / name).is_dir() for name in (CHECKPOINTS, BEST, DAMAGED, UNCERTIFIED)):
        above = [one for one in run.parents if (one / CHECKPOINTS).is_dir()]
        this = "this run" if bucket.is_bucket(shown) else f"this run ({run.resolve()})"
        raise InputError(
            f"checkpoints {shown}: "
            + (
                f"{this} has not saved a checkpoint yet"
                if (run / "config.json").is_file()
                else f"this folder has no {CHECKPOINTS}/; pass a run directory"
            )
            + (f", such as {above[0]}" if above else "")
        )
    return run


def _resume(run: Path, findings: Mapping[str, Finding]) -> tuple[Path | None, str]:
    """Returns the checkpoint that ``--resume latest`` would take, and a sentence about it.

    Raises:
        OSError: the disk does not respond.
    """

    def verify(path: Path) -> str:
        finding = findings.get(path.relative_to(run).as_posix()) or _finding(run, path)
        if finding.verdict == "unknown":
            raise _Unknown(finding)
        return finding.why

    if (link := next(run_files.links(run), None)) is not None:
        shown = link.relative_to(run).as_posix()
        kind = "a symbolic link" if link.is_symlink() else "a pipe"
        return None, f"--resume latest would be refused: {shown} is {kind}: remove it"
    try:
        latest = resume.latest_of(run, _every(run), verify)
    except _Unknown as unknown:
        finding = unknown.finding
        return None, f"--resume latest would fail: {finding.path}: {finding.why}"
    if latest.start is not None:
        return latest.start, f"--resume latest would resume from {latest.start}"
    then = "would be refused" if latest.refused else "would start from scratch"
    return None, f"--resume latest {then}: no checkpoint can be used"


class _Unknown(Exception):
    """A checkpoint cannot be verified now."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.path)
        self.finding = finding


def _findings(
    run: Path, folder: Path, damaged: Mapping[str, str], at_work: bool
) -> Iterator[Finding]:
    """Yields the checkpoints in a folder, oldest first; ``12.2`` is a second one of step 12.

    Args:
        run: the run directory.
        folder: the folder of checkpoints.
        damaged: path of a checkpoint that could not be fetched from a bucket -> its damage.
        at_work: whether a run is active, which may save and delete meanwhile.
    """
    paths = [
        entry
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if re.fullmatch(r"[0-9]+(\.[0-9]+|\.replaced)?", entry.name) and entry.is_dir()
    ]
    paths.sort(key=lambda path: [int(one) for one in re.findall(r"\d+", path.name)])
    for path in paths:
        one = _finding(run, path)
        if one.path in damaged:
            one = dataclasses.replace(one, verdict="damaged", why=damaged[one.path])
        if at_work and not path.exists():
            continue
        newest = folder == run / CHECKPOINTS and path.name == str(_step(paths[-1]))
        unfinished = at_work and newest and one.path not in damaged
        if unfinished and not (path / manifest.NAME).exists():
            one = dataclasses.replace(one, verdict="saving", why="by the run that is active here")
        yield one


def _step(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _finding(run: Path, path: Path) -> Finding:
    aside = path.parent.parent.name
    verdict, why = _verdict(run, path)
    if aside == DAMAGED:
        verdict, why = "damaged", _told(path) or why or "moved"
    elif aside == UNCERTIFIED:
        why = _told(path) or why
    return Finding(
        path=path.relative_to(run).as_posix(),
        step=_step(path),
        saved=_saved(path),
        examples_seen=_examples_seen(path),
        bytes=_bytes(path),
        verdict=verdict,
        why=why,
    )


def _verdict(run: Path, path: Path) -> tuple[Verdict, str]:
    name = path.relative_to(run)
    for one in (name, *name.parents[:-1]):
        if (run / one).is_symlink():
            return "unknown", f"{one} is a symbolic link"
    try:
        wrong = manifest.verify(path)
    except OSError as error:
        return "unknown", f"{error.filename} cannot be read now ({error.strerror})"
    except InputError as error:
        return "unknown", str(error)
    return ("damaged", wrong) if wrong else ("verified", "")


def _every(run: Path) -> int:
    """Steps between checkpoints according to the run's config; 0 if unreadable."""
    try:
        every = atomic.read_json(run / "config.json")["checkpoint"]["every"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return every if type(every) is int else 0


def _bytes(path: Path) -> int:
    total = 0
    for one in path.rglob("*"):
        try:
            entry = one.lstat()
            total += entry.st_size if stat.S_ISREG(entry.st_mode) else 0
        except OSError:  # deleted meanwhile, or unreadable: see the verdict
            continue
    return total


def _saved(path: Path) -> str | None:
    try:
        nanoseconds = committed(path)
    except (OSError, ValueError):
        return None
    when = datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S") if nanoseconds else None


def _examples_seen(path: Path) -> int | None:
    try:
        seen = atomic.read_json(path / META / "metadata")["meta"]["examples_seen"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seen if type(seen) is int and 0 <= seen < 2**63 else None


def _told(path: Path) -> str:
    """Why a run has moved a checkpoint to ``damaged/`` or ``uncertified/``."""
    try:
        text = atomic.read_regular(path / resume.REASON, _REASON_BYTES).decode(errors="replace")
        return text.splitlines()[1]
    except (OSError, ValueError, IndexError):
        return ""


def _shown(one: Finding) -> str:
    for aside in (DAMAGED, UNCERTIFIED):
        if one.path.startswith(f"{aside}/"):
            return f"moved, {aside}"
    return _SHOWN[one.verdict]


def _table(found: list[Finding]) -> str:
    rows = [("checkpoint", "saved (UTC)", "examples seen", "size", "")]
    rows += [
        (
            one.path,
            one.saved or "?",
            "?" if one.examples_seen is None else str(one.examples_seen),
            # A damaged one in a bucket is not fetched.
            f"{one.bytes / _MIB:.1f} MiB" if one.bytes else "?",
            _shown(one) + (f": {one.why}" if one.why else ""),
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )
