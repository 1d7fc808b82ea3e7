"""``jaxtrain checkpoints DIR``: lists and verifies the checkpoints of a run.

It changes nothing, except with ``--prune``, which deletes those in ``aside/``.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from jaxtrain import formats, terminal
from jaxtrain.checkpoint import pointer, remote, resume
from jaxtrain.checkpoint.candidates import CheckpointCandidates, newest_intact
from jaxtrain.checkpoint.pointer import ASIDE, CHECKPOINTS, DAMAGED, KINDS, SUPERSEDED, Damaged
from jaxtrain.checkpoint.store import BucketFolder, CheckpointStore, Folder, Place
from jaxtrain.cli import commands
from jaxtrain.config import invocation
from jaxtrain.errors import InputError
from jaxtrain.reporting import run_files
from jaxtrain.storage import atomic, bucket, cache, lease, lock
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import disk_trouble

_MIB = 2**20

# "unknown": it cannot be read now, or another version wrote it.
Integrity = Literal["verified", "damaged", "unknown"]
_INTEGRITY_TEXTS = {"verified": "verified", "damaged": "DAMAGED", "unknown": "UNKNOWN"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """A checkpoint, intact or not.

    Attributes:
        path: path in the run directory without ``.json``, such as ``checkpoints/12``.
        step: completed steps, according to its name.
        verdict: "verified" if every byte is as it was saved.
        why: why it is not verified, or was moved; "" otherwise.
        milestone: whether it is kept forever (``checkpoint.milestones``).
    """

    path: str
    step: int
    saved: str | None
    examples_seen: int | None
    bytes: int
    verdict: Integrity
    why: str
    milestone: bool


def main(flags: commands.Checkpoints) -> int:
    """Runs the command; returns 1 if a checkpoint is damaged or unreadable, else 0.

    Checkpoints that were moved to ``aside/`` do not count.
    """
    damaged: dict[str, str] = {}  # in a bucket
    directory, in_bucket = flags.directory, bucket.is_bucket(str(flags.directory))
    location = str(directory)
    if in_bucket:
        location = bucket.normalized(location, "DIR")
        if flags.prune:
            _prune_bucket(Bucket(location))
        holder = lease.holder(Bucket(location))
        directory = remote.run_to_read(location, cache.root(None), terminal.warn, damaged)
    run = _run_of(directory, location)
    if not in_bucket:
        if flags.prune:
            _prune(run)
        holder = lock.holder(run)
    saved = CheckpointCandidates(run)
    try:
        statuses = list(_statuses(saved, damaged))
        taken, outlook = _resume(saved)
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    terminal.out(_table(statuses))
    if aside := run_files.describe_aside(CheckpointStore(Folder(run))):
        command = f"{invocation.program()} checkpoints {shlex.quote(location)} --prune"
        terminal.out(f"{aside}; to delete them: {command}")
    if in_bucket:
        outlook = outlook.replace(str(run), location)
    # The lease of a run that was killed on another machine looks like that of a live one.
    activity = "holds the lease there" if in_bucket else "is active here"
    terminal.out(
        outlook + (f", after the run that {activity} ({holder}) has ended" if holder else "")
    )
    if flags.json:
        content = {
            "directory": location,
            "checkpoints": [dataclasses.asdict(status) for status in statuses],
            "latest": None if taken is None else str(taken).replace(str(run), location),
        }
        atomic.write_json(flags.json, content)
    counted = [status for status in statuses if status.path.partition("/")[0] in KINDS]
    return 1 if any(status.verdict != "verified" for status in counted) else 0


def _prune(run: Path) -> None:
    try:
        with lock.released():
            store = _store_of_run(Folder(run))
            lock.hold(run, terminal.warn)
            _pruned(store)
    except OSError as error:
        raise disk_trouble(error, f"{run} cannot be changed", "make it writable") from error


def _prune_bucket(folder: Bucket) -> None:
    store, held_lease = _store_of_run(BucketFolder(folder)), lease.Lease(folder, terminal.warn)
    held_lease.acquire()
    try:
        _pruned(store)
    finally:
        held_lease.release()


def _store_of_run(place: Place) -> CheckpointStore:
    store = CheckpointStore(place)
    if not store.run_id:
        raise InputError(f"checkpoints {place.location} --prune: this is not a run")
    return store


def _pruned(store: CheckpointStore) -> None:
    names = store.prune()
    store.collect()
    terminal.out(f"deleted {formats.counted(len(names), 'checkpoint')} of {store.place.location}")


def _run_of(directory: Path, location: str) -> Path:
    run = atomic.expanded(directory).absolute()
    if not run.is_dir() and not pointer.is_checkpoint(run):
        raise InputError(f"checkpoints {location}: no such folder; pass a run directory")
    if not any((run / name).is_dir() for name in (*KINDS, ASIDE)):
        above = [parent for parent in run.parents if (parent / CHECKPOINTS).is_dir()]
        described = "this run" if bucket.is_bucket(location) else f"this run ({run.resolve()})"
        raise InputError(
            f"checkpoints {location}: "
            + (
                f"{described} has not saved a checkpoint yet"
                if (run / "config.json").is_file()
                else f"this folder has no {CHECKPOINTS}/; pass a run directory"
            )
            + (f", such as {above[0]}" if above else "")
        )
    return run


def _resume(saved: CheckpointCandidates) -> tuple[Path | None, str]:
    """Returns the checkpoint that ``--resume latest`` would take, and a sentence about it."""
    try:
        start, damaged = newest_intact(saved)
    except (InputError, OSError) as error:
        return None, f"--resume latest would fail: {error}"
    if start is not None:
        start = start.with_suffix("")
        return start, f"--resume latest would resume from {start}"
    then = "be refused" if resume.refusal(saved, damaged) else "start from scratch"
    return None, f"--resume latest would {then}: no checkpoint can be used"


def _statuses(
    saved: CheckpointCandidates, damaged: Mapping[str, str]
) -> Iterator[CheckpointStatus]:
    """Yields the checkpoints of a run, the oldest of each folder first.

    Args:
        damaged: path of a checkpoint that could not be fetched from a bucket -> its damage.
    """
    disk = CheckpointStore(Folder(saved.directory))
    settings = run_files.config_of(saved.directory / run_files.CONFIG, [])
    milestones = settings.get("checkpoint", {}).get("milestones")
    for pointer_name in list(disk.pointers()):
        path, name = saved.directory / pointer_name, pointer_name.removesuffix(".json")
        aside = pointer.is_aside(path)
        integrity, why = _integrity(saved, path)
        if name in damaged:
            integrity, why = "damaged", damaged[name]
        if aside:
            why = disk.why_aside(path.stem) or why
            if why.startswith(DAMAGED):
                integrity = "damaged"
        if not path.exists():  # a run that is active has deleted it
            continue
        step = pointer.step_in(pointer_name)
        try:
            record = pointer.read(path)
        except (Damaged, InputError):
            record = None
        yield CheckpointStatus(
            path=name,
            step=step,
            saved=None if record is None else record.saved.replace("T", " ").removesuffix("Z"),
            examples_seen=None if record is None else record.meta.get("examples_seen"),
            bytes=0 if record is None else record.size(),
            verdict=integrity,
            why=why,
            milestone=bool(milestones) and name.startswith(CHECKPOINTS) and not step % milestones,
        )


def _integrity(saved: CheckpointCandidates, path: Path) -> tuple[Integrity, str]:
    try:
        damage = (
            pointer.verify(path)
            if pointer.is_aside(path)
            else saved.ensure_intact(path.relative_to(saved.directory).as_posix())
        )
    except OSError as error:
        return "unknown", f"{error.filename} cannot be read now ({error.strerror})"
    except InputError as error:
        return "unknown", str(error)
    return ("damaged", damage) if damage else ("verified", "")


def _state(status: CheckpointStatus) -> str:
    if status.path.startswith(f"{ASIDE}/"):
        return f"moved, {status.why or SUPERSEDED}"
    text = _INTEGRITY_TEXTS[status.verdict] + (f": {status.why}" if status.why else "")
    return f"{text}, milestone" if status.milestone else text


def _table(statuses: list[CheckpointStatus]) -> str:
    rows = [("checkpoint", "saved (UTC)", "examples seen", "size", "")]
    rows += [
        (
            status.path,
            status.saved or "?",
            "?" if status.examples_seen is None else str(status.examples_seen),
            f"{status.bytes / _MIB:.1f} MiB" if status.bytes else "?",
            _state(status),
        )
        for status in statuses
    ]
    return formats.columns(rows, {0, 1, 4})
