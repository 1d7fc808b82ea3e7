"""The checkpoints of a run, in its directory or in a bucket: one set of rules for both.

:class:`CheckpointStore` knows the rules: which pointers are moved aside, kept and deleted, and
which folders in ``data/`` nothing needs. A place knows how a small file is listed, read, written
and deleted: :class:`Folder` on a disk, :class:`BucketFolder` in an object store. See
:mod:`jaxtrain.checkpoint.pointer` for what is where.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxtrain.checkpoint.pointer import (
    BEST,
    CHECKPOINTS,
    DATA,
    EVERY_KIND,
    KINDS,
    SUPERSEDED,
    Damaged,
    Pointer,
    data_of,
    name_of,
    step_of,
)
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import sync, write_whole
from jaxtrain.terminal import Say

if TYPE_CHECKING:
    from jaxtrain.storage.bucket import Bucket  # needs obstore, which a launcher may lack


class Place(Protocol):
    """Small files below a run directory or the URL of a run, and folders in ``data/``."""

    @property
    def shown(self) -> str:
        """Returns the path or the URL."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder; [] if it does not exist."""

    def get(self, name: str) -> bytes | None:
        """Returns the content of a file; None if there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Writes a file, which appears complete or not at all."""

    def delete(self, name: str) -> None:
        """Deletes a file."""

    def data_folders(self) -> set[str]:
        """Returns the folders in ``data/``, such as ``data/12-0123456789ab``."""

    def delete_data(self, folders: Iterable[str]) -> None:
        """Deletes folders in ``data/``."""


class Folder:
    """A run directory.

    Args:
        run_dir: the directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def shown(self) -> str:
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

    def delete(self, name: str) -> None:
        """Deletes a file."""
        (self.run_dir / name).unlink(missing_ok=True)

    def data_folders(self) -> set[str]:
        """Lists ``data/``."""
        return {f"{DATA}/{name}" for name in self.names(DATA)}

    def delete_data(self, folders: Iterable[str]) -> None:
        """Deletes folders."""
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):  # another thread still writes there
                shutil.rmtree(self.run_dir / folder)


class BucketFolder:
    """A run in a bucket.

    Args:
        bucket: the run's folder.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket

    @property
    def shown(self) -> str:
        """See :class:`Place`, also for the other methods."""
        return self.bucket.url

    def names(self, folder: str) -> list[str]:
        """Lists a folder."""
        return [name.removeprefix(f"{folder}/") for name in self.bucket.sizes(folder)]

    def get(self, name: str) -> bytes | None:
        """Reads a file."""
        content = self.bucket.get(name)
        return None if content is None else content.data

    def put(self, name: str, content: bytes) -> None:
        """Writes a file."""
        self.bucket.put(name, content)

    def delete(self, name: str) -> None:
        """Deletes a file."""
        self.bucket.delete([name])

    def data_folders(self) -> set[str]:
        """Lists ``data/``."""
        return {"/".join(name.split("/")[:2]) for name in self.bucket.sizes(DATA)}

    def delete_data(self, folders: Iterable[str]) -> None:
        """Deletes folders."""
        for folder in folders:
            self.bucket.delete(list(self.bucket.sizes(folder)))


class CheckpointStore:
    """The checkpoints of a run in one place. One process at a time changes them.

    Args:
        place: where they are.
        say: receives a line for each checkpoint that is moved aside.

    Attributes:
        place: see above.
    """

    def __init__(self, place: Place, say: Say = lambda line: None) -> None:
        self.place, self._say = place, say
        self._data: dict[str, str] = {}  # name of a pointer -> its folder

    def steps(self, kind: str = CHECKPOINTS) -> list[int]:
        """Returns the steps of the pointers in a folder, such as ``"best"``, ascending."""
        numbers = map(step_of, self.place.names(kind))
        return sorted(step for step in numbers if step is not None)

    def pointers(self) -> Iterator[tuple[str, int]]:
        """Yields the folder and the step of each pointer, also of those aside."""
        for kind in EVERY_KIND:
            for step in self.steps(kind):
                yield kind, step

    def read(self, kind: str, step: int) -> tuple[Pointer, bytes]:
        """Returns a pointer and its stored form.

        Raises:
            Damaged: it is missing or damaged.
            InputError: another version wrote it, or the bucket cannot be read.
            OSError, RunAgain: it cannot be read at the moment.
        """
        name = name_of(kind, step)
        content = self.place.get(name)
        if content is None:
            raise Damaged("there is no such checkpoint")
        try:
            return Pointer.parse(content, step), content
        except InputError as error:
            raise InputError(f"{self.place.shown}/{name}: {error}") from None

    def data_folder(self, kind: str, step: int) -> str:
        """Returns the folder of a checkpoint's files; "" if its pointer is damaged."""
        name = name_of(kind, step)
        if folder := self._data.get(name) or data_of(self.place.get(name)):
            self._data[name] = folder
        return folder

    def commit(self, kinds: Iterable[str], step: int, content: bytes) -> None:
        """Makes a checkpoint appear, whose files exist.

        Later steps were abandoned by a resume or a rollback: they are moved to ``superseded/``, as
        they would count as the newest.

        Args:
            kinds: ``checkpoints``, ``best``, or both; later steps in the others stay.
            step: completed steps.
            content: of the pointer.
        """
        for kind in kinds:
            for later in self.steps(kind):
                if later > step:
                    self.set_aside(kind, later, SUPERSEDED)
        # best/ first: it must exist once the run resumes from this one.
        for kind in [kind for kind in (BEST, CHECKPOINTS) if kind in kinds]:
            self._put(name_of(kind, step), content)

    def set_aside(self, kind: str, step: int, aside: str, why: str = "") -> str:
        """Moves a pointer aside, with a file that has the reason; reports it.

        An earlier checkpoint of the same step there is forgotten.

        Args:
            kind: ``checkpoints`` or ``best``.
            step: its step.
            aside: where to, such as ``damaged``.
            why: the reason, if the checkpoint cannot be used.

        Returns:
            The new path in the run.
        """
        name = name_of(kind, step)
        to = f"{aside}/{name}"
        if (content := self.place.get(name)) is None:  # it was deleted meanwhile
            return to
        if why:
            self.place.put(f"{to.removesuffix('.json')}.txt", f"{why}\n".encode())
        self._put(to, content)
        self.place.delete(name)
        self._data.pop(name, None)
        shown = self.place.shown
        state = f"{aside} ({why})" if why else aside
        self._say(
            f"{'warning: ' if why else ''}checkpoint {shown}/{kind}/{step} is {state}: moved to "
            f"{shown}/{to}"
        )
        return to

    def set_aside_after(self, step: int, aside: str, why: str = "") -> None:
        """Moves all pointers of later steps aside."""
        for kind in KINDS:
            for later in self.steps(kind):
                if later > step:
                    self.set_aside(kind, later, aside, why)

    def go_back_to(self, step: int) -> None:
        """Moves what a resume from a step abandons to ``superseded/``, before the run continues.

        Otherwise a run that is killed before its first save would resume from a later one. A later
        one in ``best/`` alone is not abandoned: it was saved between two regular ones.
        """
        if any(later > step for later in self.steps(CHECKPOINTS)):
            self.set_aside_after(step, SUPERSEDED)

    def retain(self, keep: int, every: int, last_equal: int | None = None) -> None:
        """Deletes old pointers.

        These stay: the newest ``keep``; the newest at a multiple of ``every``, so that a rollback
        does not depend on when a run was stopped; the newest up to the step ``last_equal``, to
        which a run returns if a device computes wrong results later; and the newest in ``best/``.

        Args:
            keep: number of checkpoints to keep.
            every: steps between checkpoints.
            last_equal: the last step whose replay gave the same result, if steps are replayed.
        """
        steps = self.steps(CHECKPOINTS)
        at_cadence = [step for step in steps if step % every == 0][-1:]
        sound = [step for step in steps if last_equal is not None and step <= last_equal][-1:]
        for step in set(steps[:-keep]).difference(at_cadence, sound):
            self.delete(CHECKPOINTS, step)
        for step in self.steps(BEST)[:-1]:
            self.delete(BEST, step)

    def collect(self, keep: Iterable[str] = ()) -> None:
        """Deletes the folders of :meth:`unused`.

        Args:
            keep: folders that are being written or uploaded.
        """
        self.place.delete_data(self.unused(keep))

    def unused(self, keep: Iterable[str] = ()) -> list[str]:
        """Returns the folders in ``data/`` to which nothing points.

        Not those of a step with a damaged pointer: it may point to one of them.

        Args:
            keep: folders that count as used.
        """
        used, unknown = set(keep), set()
        for kind, step in self.pointers():
            if folder := self.data_folder(kind, step):
                used.add(folder)
            else:
                unknown.add(step)
        return [
            folder
            for folder in sorted(self.place.data_folders() - used)
            if (number := folder.removeprefix(f"{DATA}/").partition("-")[0]).isdecimal()
            and int(number) not in unknown
        ]

    def delete(self, kind: str, step: int) -> None:
        """Deletes a pointer."""
        self.place.delete(name_of(kind, step))
        self._data.pop(name_of(kind, step), None)

    def _put(self, name: str, content: bytes) -> None:
        self.place.put(name, content)
        self._data[name] = data_of(content)


def most_kept(keep: int, *, replays: bool) -> int:
    """Returns how many checkpoints :meth:`CheckpointStore.retain` leaves in ``checkpoints/``.

    Args:
        keep: see there.
        replays: whether steps are replayed.
    """
    return keep + 1 + replays
