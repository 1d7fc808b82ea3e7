"""The checkpoints that a run may start from, on a disk, in a bucket, or both.

:func:`newest_intact` looks at the pointers, the newest first, and verifies each: an intact one is
taken, a damaged one is passed over, and one that cannot be read at the moment ends the search with
an error, since it may be intact. :mod:`jaxtrain.checkpoint.resume` has the rules.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from jaxtrain.checkpoint import pointer, remote
from jaxtrain.checkpoint.pointer import (
    ASIDE,
    CHECKPOINTS,
    DAMAGED,
    KINDS,
    SUPERSEDED,
    SUSPECT,
    Damaged,
)
from jaxtrain.checkpoint.remote import RemoteRun
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.storage.disks import reason
from jaxtrain.terminal import Say

Damage = dict[tuple[str, int], str]
"""Kind and step of a checkpoint -> its damage."""


class CheckpointCandidates:
    """Where the checkpoints of a run are looked for: on a disk, in a bucket, or both.

    Args:
        directory: of the run.
        say: receives a line for each checkpoint that is moved.
        bucket_run: the run in a bucket, if any.
        disk_counts: whether checkpoints on the disk count. Not if each process has a disk of its
            own, with its part of each checkpoint.

    Attributes:
        directory, bucket_run: see above.
        disk_is_behind: whether another machine has continued the run in the bucket.
        disk_is_shared: whether the disk should have complete checkpoints.
    """

    def __init__(
        self,
        directory: Path,
        say: Say = lambda line: None,
        bucket_run: RemoteRun | None = None,
        *,
        disk_counts: bool = True,
    ) -> None:
        self.directory, self.bucket_run = directory, bucket_run
        self._say = say
        self._disk = CheckpointStore(Folder(directory), say)
        self.disk_is_behind = bucket_run is not None and self._is_behind(bucket_run)
        self.disk_is_shared = disk_counts
        self._disk_counts = disk_counts and not self.disk_is_behind
        self._verdicts: dict[str, str] = {}
        self._fetched: set[str] = set()  # folders of files
        self._bucket_steps: dict[str, list[int]] = {}  # kind -> steps in the bucket

    def steps(self, kind: str) -> list[int]:
        """Returns the steps of the pointers in a folder, ascending."""
        steps = set(self._disk.steps(kind)) if self._disk_counts else set()
        if self.bucket_run is not None:
            steps.update(
                step for step in self._steps_in_bucket(kind) if self._bucket_counts(kind, step)
            )
        return sorted(steps)

    def path(self, kind: str, step: int) -> Path:
        """Returns the path of a pointer on disk."""
        return self.directory / pointer.name_of(kind, step)

    def ensure_intact(self, kind: str, step: int) -> str:
        """Makes the disk have a checkpoint, intact; returns why that is impossible, else "".

        Raises:
            InputError, OSError, RunAgain: it is unknown at the moment.
        """
        damage, path = "there is no such checkpoint", self.path(kind, step).with_suffix("")
        on_disk = self._disk_counts and step in self._disk.steps(kind)
        if on_disk:
            damage = self._verified(kind, step)
        if damage and self.bucket_run is not None and step in self._steps_in_bucket(kind):
            if not self._bucket_counts(kind, step):
                return damage
            if on_disk:
                self._say(f"warning: checkpoint {path} is damaged ({damage}): fetching it again")
            damage = self.bucket_run.fetch(pointer.name_of(kind, step), self.directory)
            if not damage:
                data = self.bucket_run.store.data_folder(kind, step)
                self._fetched.add(data)
                self._verdicts[data] = ""
        return damage

    def set_aside(self, damaged: Damage) -> None:
        """Moves damaged checkpoints to ``aside/``; warns if the disk does not let it."""
        self._bucket_steps = {}
        for (kind, step), why in damaged.items():
            for store in self._stores():
                try:
                    if step in store.steps(kind):
                        store.set_aside(kind, step, DAMAGED, why)
                except OSError as error:
                    path = self.path(kind, step).with_suffix("")
                    self._say(
                        f"warning: checkpoint {path} is damaged ({why}) and skipped; it cannot be "
                        f"moved to {ASIDE}/ ({reason(error)})"
                    )

    def adopt_disk(self) -> None:
        """Makes the disk the place of the run, once a checkpoint is chosen.

        If the bucket is ahead, what is on the disk and not in the bucket is moved aside. Only then
        the disk counts as having what was fetched: a start that is interrupted begins again.

        Raises:
            OSError: the disk does not let it.
        """
        if self.bucket_run is None:
            return
        if self.disk_is_behind:
            for kind in KINDS:
                for step in self._disk.steps(kind):
                    if self._disk.data_folder(kind, step) != self.bucket_run.store.data_folder(
                        kind, step
                    ):
                        self._disk.set_aside(kind, step, SUPERSEDED)
        remote.note(self.directory, self.bucket_run.bucket.url, self._fetched)

    def unusable(self) -> bool:
        """Whether checkpoints were moved aside because they must not be used."""
        return any(
            store.why_aside(name).startswith((DAMAGED, SUSPECT))
            for store in self._stores()
            for name in store.asides()
        )

    def _bucket_counts(self, kind: str, step: int) -> bool:
        """Whether a checkpoint in the bucket counts beside those on the disk.

        Unless the bucket is ahead, the disk has had it: if it was superseded or is suspect there,
        the bucket has not recorded it yet. It may replace one that the disk has lost.
        """
        if not self._disk_counts or self.bucket_run is None:
            return True
        data = self.bucket_run.store.data_folder(kind, step)
        if any(
            data == self._disk.folder_of(f"{ASIDE}/{name}.json")
            and self._disk.why_aside(name).startswith((SUPERSEDED, SUSPECT))
            for name in self._disk.asides()
        ):
            return False
        on_disk = [number for folder in KINDS for number in self._disk.steps(folder)]
        return not on_disk or step <= max(on_disk)

    def _steps_in_bucket(self, kind: str) -> list[int]:
        """Returns the steps in the bucket, which is asked once."""
        if self.bucket_run is not None and kind not in self._bucket_steps:
            self._bucket_steps[kind] = self.bucket_run.store.steps(kind)
        return self._bucket_steps.get(kind, [])

    def _stores(self) -> list[CheckpointStore]:
        return [self._disk] if self.bucket_run is None else [self._disk, self.bucket_run.store]

    def _verified(self, kind: str, step: int) -> str:
        """Verifies a checkpoint on the disk; one that best/ and checkpoints/ have is read once."""
        path = self.path(kind, step)
        try:
            content = pointer.read(path)
        except Damaged as why:
            return str(why)
        if content.data not in self._verdicts:
            self._verdicts[content.data] = content.damage(self.directory)
        return self._verdicts[content.data]

    def _is_behind(self, bucket_run: RemoteRun) -> bool:
        for step in reversed(bucket_run.store.steps()):
            if data := bucket_run.store.data_folder(CHECKPOINTS, step):
                # Read last: an upload may complete at this moment, which notes it before.
                return data not in remote.noted(self.directory, bucket_run.bucket.url)
        return False


def newest_intact(
    checkpoints: CheckpointCandidates,
    kinds: Iterable[str] = KINDS,
    only: Callable[[int], bool] = lambda step: True,
) -> tuple[Path | None, Damage]:
    """Returns the newest intact checkpoint and the damage of newer ones; nothing is moved.

    Args:
        checkpoints: where to look.
        kinds: the folders, in this order: the second only counts if the first has none.
        only: whether a step counts.

    Raises:
        InputError, OSError, RunAgain: one cannot be verified at the moment.
    """
    damaged: Damage = {}
    for kind in kinds:
        for step in reversed(checkpoints.steps(kind)):
            if only(step):
                damage = checkpoints.ensure_intact(kind, step)
                if not damage:
                    return checkpoints.path(kind, step), damaged
                damaged[kind, step] = damage
    return None, damaged
