"""The checkpoints that a run may start from, on a disk or in a bucket.

:func:`newest_intact` looks at the pointers, the newest first, and verifies each: an intact one is
taken, a damaged one is passed over, and one that cannot be read at the moment ends the search with
an error, since it may be intact. :mod:`jaxtrain.checkpoint.start` decides.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.pointer import (
    ASIDE,
    BAD_STEP,
    CHECKPOINTS,
    DAMAGED,
    KINDS,
    SUPERSEDED,
    Damaged,
)
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.store import CheckpointStore, Folder, Place
from jaxtrain.storage.disks import reason
from jaxtrain.terminal import Say

Damage = dict[tuple[str, int], str]
"""Kind and step of a checkpoint -> its damage."""


class CheckpointCandidates:
    """Where the checkpoints of a run are looked for: on a disk, or in a bucket.

    Args:
        directory: of the run; for a run in a bucket, a folder that receives files of a checkpoint.
    """

    def __init__(
        self, directory: Path, say: Say = lambda line: None, bucket_run: RemoteRun | None = None
    ) -> None:
        self.directory, self.bucket_run = directory, bucket_run
        self._say = say
        self._store = CheckpointStore(Folder(directory), say)
        if bucket_run is not None:
            self._store = CheckpointStore(bucket_run.store.place, say)
        self._verdicts: dict[str, str] = {}

    @property
    def place(self) -> Place:
        """Returns the run directory or its bucket."""
        return self._store.place

    @property
    def location(self) -> str:
        """Returns the run directory or its URL."""
        return self._store.place.location

    def steps(self, kind: str) -> list[int]:
        """Returns the steps of the pointers in a folder, ascending."""
        return self._store.steps(kind)

    def path(self, kind: str, step: int) -> Path:
        """Returns the path of a pointer on disk."""
        return self.directory / pointer.name_of(kind, step)

    def ensure_intact(self, name: str) -> str:
        """Makes the disk have a checkpoint, intact; returns why that is impossible, else "".

        Args:
            name: of its pointer, such as ``best/12.json``.

        Raises:
            InputError, OSError, RunAgain: it is unknown at the moment.
        """
        if self.bucket_run is not None:
            return self.bucket_run.fetch(name, self.directory)
        try:
            content = pointer.read(self.directory / name)
        except Damaged as why:
            return str(why)
        if content.data not in self._verdicts:  # best/ and checkpoints/ may have the same files
            self._verdicts[content.data] = content.damage(self.directory)
        return self._verdicts[content.data]

    def intact(self, step: int, data: str = "") -> tuple[Path | None, str]:
        """Returns an intact checkpoint of a step, or None and why.

        Args:
            data: its folder of files, in which case it may be in ``aside/``; "" for any.

        Raises:
            InputError, OSError, RunAgain: it is unknown at the moment.
        """
        names = [pointer.name_of(kind, step) for kind in KINDS if step in self.steps(kind)]
        if data:
            aside = data.rpartition("/")[2]
            names += [f"{ASIDE}/{aside}.json"] if aside in self._store.asides() else []
            if self._store.why_aside(aside).startswith(BAD_STEP):
                return None, f"{ASIDE}/{aside} is a bad step, for find-nan"
            names = [name for name in names if self._store.folder_of(name) == data]
        why = ""
        for name in names:
            damage = self.ensure_intact(name)
            if not damage:
                return self.directory / name, ""
            why = why or damage
        return None, why

    def metas(self) -> Iterator[Mapping[str, Any]]:
        """Yields the metadata of each checkpoint, also of those aside; {} for a damaged pointer.

        Raises:
            InputError, OSError, RunAgain: it is unknown at the moment.
        """
        for name in self._store.pointers():
            try:
                yield self._store.read(name)[0].meta
            except Damaged:
                yield {}

    def set_aside(self, damaged: Damage) -> None:
        """Moves damaged checkpoints to ``aside/``; warns if the disk does not let it."""
        for (kind, step), why in damaged.items():
            try:
                if step in self.steps(kind):
                    self._store.set_aside(kind, step, DAMAGED, why)
            except OSError as error:
                self._say(
                    f"warning: checkpoint {self.location}/{kind}/{step} is damaged ({why}) and "
                    f"skipped; it cannot be moved to {ASIDE}/ ({reason(error)})"
                )

    def set_aside_after(self, step: int) -> None:
        """Moves later checkpoints, which a rollback abandons, to ``aside/``; not those in best/.

        Raises:
            OSError: the disk does not let it.
        """
        self._store.set_aside_after(step, SUPERSEDED, kinds=(CHECKPOINTS,))

    def unusable(self) -> bool:
        """Whether checkpoints were moved aside because they must not be used."""
        return self._store.has_unusable()


def newest_intact(
    checkpoints: CheckpointCandidates,
    kinds: Iterable[str] = KINDS,
    only: Callable[[int], bool] = lambda step: True,
) -> tuple[Path | None, Damage]:
    """Returns the newest intact checkpoint and the damage of newer ones; nothing is moved.

    Args:
        kinds: the folders, in this order: the second only counts if the first has none.

    Raises:
        InputError, OSError, RunAgain: one cannot be verified at the moment.
    """
    damaged: Damage = {}
    for kind in kinds:
        for step in reversed(checkpoints.steps(kind)):
            if only(step):
                damage = checkpoints.ensure_intact(pointer.name_of(kind, step))
                if not damage:
                    return checkpoints.path(kind, step), damaged
                damaged[kind, step] = damage
    return None, damaged
