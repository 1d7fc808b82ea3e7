"""The checkpoints of a run, in its directory or in a bucket: one set of rules for both.

:class:`CheckpointStore` knows the rules: which pointers are moved aside, kept and deleted, and
which folders of files nothing needs. A place knows how a small file is listed, read, written and
deleted: :class:`Folder` on a disk, :class:`BucketFolder` in an object store. See
:mod:`jaxtrain.checkpoint.pointer` for what is where.

Nothing is deleted that the run did not write: a place without the run's marker has no files of a
run, and of a symbolic link only the link itself is looked at.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxtrain.checkpoint.pointer import (
    ASIDE,
    BAD_STEP,
    BEST,
    CHECKPOINTS,
    DAMAGED,
    FILES,
    KINDS,
    SUPERSEDED,
    SUSPECT,
    Damaged,
    Pointer,
    data_of,
    name_of,
    step_aside,
    step_in,
    step_of,
)
from jaxtrain.errors import InputError
from jaxtrain.storage import run_marker
from jaxtrain.storage.atomic import create_whole, sync, write_whole
from jaxtrain.terminal import Say

if TYPE_CHECKING:
    from jaxtrain.storage.bucket import Bucket  # needs obstore, which a launcher may lack


class Place(Protocol):
    """Small files below a run directory or the URL of a run, and the folders of checkpoints."""

    @property
    def location(self) -> str:
        """Returns the path or the URL."""

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, "" for the topmost; [] if it does not exist."""

    def get(self, name: str) -> bytes | None:
        """Returns the content of a file; None if there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Writes a file, which appears complete or not at all."""

    def create(self, name: str, content: bytes) -> None:
        """Writes a file, unless it exists."""

    def delete(self, name: str) -> None:
        """Deletes a file."""

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder with all that is in it."""


class Folder:
    """A run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def location(self) -> str:
        """See :class:`Place`, also for the other methods."""
        return str(self.run_dir)

    def names(self, folder: str) -> list[str]:
        """Lists a folder."""
        try:
            return os.listdir(self.run_dir / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def get(self, name: str) -> bytes | None:
        """Reads a file."""
        try:
            return (self.run_dir / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, name: str, content: bytes) -> None:
        """Writes a file."""
        path = self.run_dir / name
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            sync(path.parent.parent)
        write_whole(path, content)

    def create(self, name: str, content: bytes) -> None:
        """Writes a new file."""
        create_whole(self.run_dir / name, content.decode())

    def delete(self, name: str) -> None:
        """Deletes a file."""
        path = self.run_dir / name
        if not self._is_link(path.parent):
            path.unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder."""
        path = self.run_dir / folder
        if path.is_dir() and not self._is_link(path):
            with contextlib.suppress(FileNotFoundError):  # another thread still writes there
                shutil.rmtree(path)

    def _is_link(self, path: Path) -> bool:
        """Whether a symbolic link leads to a folder in the run directory."""
        return path.resolve() != self.run_dir.resolve() / path.relative_to(self.run_dir)


class BucketFolder:
    """A run in a bucket."""

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket

    @property
    def location(self) -> str:
        """See :class:`Place`, also for the other methods."""
        return self.bucket.url

    def names(self, folder: str) -> list[str]:
        """Lists a folder."""
        return self.bucket.names(folder)

    def get(self, name: str) -> bytes | None:
        """Reads a file."""
        content = self.bucket.get(name)
        return None if content is None else content.data

    def put(self, name: str, content: bytes) -> None:
        """Writes a file."""
        self.bucket.put(name, content)

    def create(self, name: str, content: bytes) -> None:
        """Writes a new file."""
        self.bucket.put_if(name, content, None)

    def delete(self, name: str) -> None:
        """Deletes a file."""
        self.bucket.delete([name])

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder."""
        self.bucket.delete(list(self.bucket.sizes(folder)))


def claim(place: Place, flag: str) -> str:
    """Marks a new or empty place as a run's, and returns the id of the run that it has.

    Raises:
        InputError: it has other files, or is a run of another version.
        OSError, RunAgain: it cannot be written.
    """
    while (content := place.get(run_marker.NAME)) is None:
        if refusal := run_marker.refusal(place.location, flag, place.names("")):
            raise InputError(refusal)
        place.create(run_marker.NAME, run_marker.new().encode())  # or another process has
    return run_marker.run_id(content, place.location)


def mark_copy(folder: Path, marker: str) -> None:
    """Makes a folder of the cache a copy of a run in a bucket, with the run's marker.

    A copy of another run that was there before is deleted, but not what a launcher has begun.

    Raises:
        OSError: the disk does not let it.
    """
    place = Folder(folder)
    if place.get(run_marker.NAME) == marker.encode():
        return
    for name in run_marker.content_of(place.names("")):
        path = folder / name
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    place.put(run_marker.NAME, marker.encode())


class CheckpointStore:
    """The checkpoints of a run in one place. One process at a time changes them."""

    def __init__(self, place: Place, say: Say = lambda line: None) -> None:
        self.place, self._say = place, say
        self._data: dict[str, str] = {}  # name of a pointer -> its folder
        self._run_id = ""

    @property
    def run_id(self) -> str:
        """Returns the id of the run; "" without a marker."""
        if not self._run_id and (content := self.place.get(run_marker.NAME)) is not None:
            self._run_id = run_marker.run_id(content, self.place.location)
        return self._run_id

    def steps(self, kind: str = CHECKPOINTS) -> list[int]:
        """Returns the steps of the pointers in a folder, such as ``"best"``, ascending."""
        numbers = map(step_of, self.place.names(kind))
        return sorted(step for step in numbers if step is not None)

    def asides(self) -> list[str]:
        """Returns the names of the checkpoints in ``aside/``, ``STEP-ID``, ordered by step."""
        names = [name for name in self.place.names(ASIDE) if step_aside(name) is not None]
        return sorted(
            (name.removesuffix(".json") for name in names),
            key=lambda name: (int(name.partition("-")[0]), name),
        )

    def why_aside(self, name: str) -> str:
        """Returns why a checkpoint is in ``aside/``: ``superseded``, or ``damaged: ...``."""
        reason = self.place.get(f"{ASIDE}/{name}.txt") or b""
        return reason.decode(errors="replace").strip()

    def has_unusable(self) -> bool:
        """Whether checkpoints were moved aside because they must not be used."""
        reasons = map(self.why_aside, self.asides())
        return any(why.startswith((DAMAGED, SUSPECT)) for why in reasons)

    def pointers(self) -> Iterator[str]:
        """Yields the name of each pointer, also of those aside."""
        for kind in KINDS:
            for step in self.steps(kind):
                yield name_of(kind, step)
        for name in self.asides():
            yield f"{ASIDE}/{name}.json"

    def read(self, name: str) -> tuple[Pointer, bytes]:
        """Returns the pointer with a name, and its stored form.

        Raises:
            Damaged: it is missing or damaged.
            InputError: another version wrote it, or the bucket cannot be read.
            OSError, RunAgain: it cannot be read at the moment.
        """
        content = self.place.get(name)
        if content is None:
            raise Damaged("there is no such checkpoint")
        try:
            return Pointer.parse(content, step_in(name)), content
        except InputError as error:
            raise InputError(f"{self.place.location}/{name}: {error}") from None

    def data_folder(self, kind: str, step: int) -> str:
        """Returns the folder of a checkpoint's files; "" if its pointer is damaged."""
        return self.folder_of(name_of(kind, step))

    def folder_of(self, name: str) -> str:
        """Returns the folder of the files of a pointer; "" if it is damaged."""
        if folder := self._data.get(name) or data_of(self.place.get(name)):
            self._data[name] = folder
        return folder

    def commit(self, kinds: Iterable[str], step: int, content: bytes) -> None:
        """Makes a checkpoint appear, whose files exist.

        Later steps were abandoned by a resume or a rollback: they are moved to ``aside/``, as they
        would count as the newest.

        Args:
            kinds: ``checkpoints``, ``best``, or both; later steps in the others stay. Or
                :data:`~jaxtrain.checkpoint.pointer.BAD_STEP`, whose reason is in the metadata.
        """
        if BAD_STEP in kinds:
            described = Pointer.parse(content, step)
            to = f"{ASIDE}/{described.data.rpartition('/')[2]}"
            self.place.put(f"{to}.txt", f"{BAD_STEP}: {described.meta['bad_step']}\n".encode())
            self._put(f"{to}.json", content)
            return
        self.set_aside_after(step, SUPERSEDED, kinds=kinds)
        # best/ first: it must exist once the run resumes from this one.
        for kind in [kind for kind in (BEST, CHECKPOINTS) if kind in kinds]:
            self._put(name_of(kind, step), content)

    def set_aside(self, kind: str, step: int, category: str, why: str = "") -> str:
        """Moves a pointer to ``aside/``, with a file that has the reason; reports it.

        Args:
            category: ``superseded``, ``damaged`` or ``suspect``.

        Returns:
            The new path in the run.
        """
        name = name_of(kind, step)
        content = self.place.get(name)
        if content is None:  # it was deleted meanwhile
            return ""
        folder = data_of(content).rpartition("/")[2]
        if not folder:  # the pointer is damaged
            unique = hashlib.sha256(content).hexdigest()[:12]
            folder = run_marker.folder_name(self.run_id, step, unique)
        to = f"{ASIDE}/{folder}"
        reason = f"{category}: {why}" if why else category
        self.place.put(f"{to}.txt", f"{reason}\n".encode())
        self._put(f"{to}.json", content)
        self.place.delete(name)
        self._data.pop(name, None)
        location = self.place.location
        state = f"{category} ({why})" if why else category
        self._say(
            f"{'warning: ' if why else ''}checkpoint {location}/{kind}/{step} is {state}: moved to "
            f"{location}/{to}"
        )
        return to

    def set_aside_after(
        self, step: int, category: str, why: str = "", *, kinds: Iterable[str] = KINDS
    ) -> None:
        """Moves all pointers of later steps aside."""
        for kind in kinds:
            for later in self.steps(kind):
                if later > step:
                    self.set_aside(kind, later, category, why)

    def bytes_aside(self) -> int:
        """Returns the bytes of the files that only checkpoints in ``aside/`` need."""
        used = {self.data_folder(kind, step) for kind in KINDS for step in self.steps(kind)}
        sizes: dict[str, int] = {}
        for name in self.asides():
            with contextlib.suppress(Damaged, InputError):
                pointer, _ = self.read(f"{ASIDE}/{name}.json")
                sizes[pointer.data] = 0 if pointer.data in used else pointer.size()
        return sum(sizes.values())

    def prune(self) -> list[str]:
        """Deletes the checkpoints in ``aside/``; returns their names. Their files are collected."""
        pruned = [
            name
            for name in self.asides()
            if run_marker.step_of_folder(name, self.run_id) is not None
        ]
        for name in pruned:
            self._forget_aside(name)
        return pruned

    def go_back_to(self, name: str) -> None:
        """Moves what a resume from a checkpoint abandons to ``aside/``, before the run continues.

        Otherwise a run that is killed before its first save would resume from a later one. A later
        one in ``best/`` alone is not abandoned: it was saved between two regular ones. A checkpoint
        in ``aside/`` comes back from there.
        """
        step, content = step_in(name), self.place.get(name)
        back = content if name.startswith(f"{ASIDE}/") else None
        first = step if back is None else step - 1  # another one of this step is abandoned, too
        if any(later > first for later in self.steps(CHECKPOINTS)):
            # best/ first: after a kill, it would not be looked at again.
            self.set_aside_after(first, SUPERSEDED, kinds=(BEST, CHECKPOINTS))
        if back is not None:
            self._put(name_of(CHECKPOINTS, step), back)
            self._forget_aside(name.rpartition("/")[2].removesuffix(".json"))

    def retain(
        self, keep: int, every: int, last_equal: int | None = None, milestones: int | None = None
    ) -> None:
        """Deletes old pointers.

        These stay: the newest ``keep``; the newest at a multiple of ``every``, so that a rollback
        does not depend on when a run was stopped; the newest up to the step ``last_equal``, to
        which a run returns if a device computes wrong results later; all at multiples of
        ``milestones``; and the newest in ``best/``.

        Args:
            last_equal: the last step whose replay gave the same result, if steps are replayed.
        """
        steps = self.steps(CHECKPOINTS)
        at_cadence = [step for step in steps if step % every == 0][-1:]
        sound = [step for step in steps if last_equal is not None and step <= last_equal][-1:]
        forever = [step for step in steps if milestones and step % milestones == 0]
        for step in set(steps[:-keep]).difference(at_cadence, sound, forever):
            self.delete(CHECKPOINTS, step)
        for step in self.steps(BEST)[:-1]:
            self.delete(BEST, step)

    def collect(self, keep: Iterable[str] = ()) -> None:
        """Deletes the folders of :meth:`unused`."""
        for folder in self.unused(keep):
            self.place.delete_folder(folder)

    def folders(self) -> list[str]:
        """Returns the folders of files that this run has written, whole or in part."""
        names = self.place.names(FILES)
        return sorted(
            f"{FILES}/{name}"
            for name in names
            if run_marker.step_of_folder(name, self.run_id) is not None
        )

    def unused(self, keep: Iterable[str] = ()) -> list[str]:
        """Returns the folders of this run to which nothing points.

        Not those of a step with a damaged pointer: it may point to one of them.
        """
        used, unknown = set(keep), set()
        for name in self.pointers():
            if folder := self.folder_of(name):
                used.add(folder)
            else:
                unknown.add(name.rpartition("/")[2].removesuffix(".json").partition("-")[0])
        return [
            folder
            for folder in self.folders()
            if folder not in used and folder.rpartition("/")[2].partition("-")[0] not in unknown
        ]

    def delete(self, kind: str, step: int) -> None:
        """Deletes a pointer."""
        self.place.delete(name_of(kind, step))
        self._data.pop(name_of(kind, step), None)

    def _forget_aside(self, name: str) -> None:
        self.place.delete(f"{ASIDE}/{name}.json")
        self.place.delete(f"{ASIDE}/{name}.txt")
        self._data.pop(f"{ASIDE}/{name}.json", None)

    def _put(self, name: str, content: bytes) -> None:
        self.place.put(name, content)
        self._data[name] = data_of(content)


def most_kept(keep: int, *, replays: bool) -> int:
    """Returns how many checkpoints :meth:`CheckpointStore.retain` leaves in ``checkpoints/``,
    milestones not counted.
    """
    return keep + 1 + replays
