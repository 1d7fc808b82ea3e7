"""Saves checkpoints in the background, and keeps the newest and the best.

Orbax writes the arrays into a new folder of ``checkpoints/files/``. When all processes have
written theirs, process 0 hashes the files and writes the pointer, which completes the checkpoint
(:mod:`jaxtrain.checkpoint.pointer`).
"""

import contextlib
import dataclasses
import errno
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax

from jaxtrain import terminal
from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.pointer import BAD_STEP, CHECKPOINTS, FILES, STATE, SUSPECT, Pointer
from jaxtrain.checkpoint.restore import named, shapes_of
from jaxtrain.checkpoint.store import CheckpointStore, Folder, claim
from jaxtrain.distributed import key_value
from jaxtrain.distributed.key_value import FailedElsewhere, Votes
from jaxtrain.errors import RunAgain
from jaxtrain.storage import run_marker
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.disks import FREE_SPACE, cure_of, disk_trouble, reason

# Seconds for all processes to write their part before the save counts as failed.
SAVE_TIMEOUT_S = 1200
_PROBE_BYTES = 2**16
# Orbax reports one failure per call; a limit, in case that it reports one forever.
_MOST_FAILURES = 100
# On a network disk, other hosts may see a folder created by process 0 late.
_APPEARS_WITHIN_S = 30.0


class SaveFailed(RunAgain):
    """A checkpoint could not be written, for example on a full disk. Older ones are unchanged.

    All processes of a run raise it for the same save, whichever process failed.
    """

    def __init__(self, message: str, why: str, *, reported: bool) -> None:
        super().__init__(message)
        self.why = why
        self.reported = reported


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint that this process has written.

    Attributes:
        kinds: ``checkpoints``, ``best``, or both.
        data: folder of its files in the run directory (:data:`pointer.FILES`).
        content: its pointer; for a run in a bucket, one that lists this process's files.
    """

    step: int
    kinds: tuple[str, ...]
    data: str
    content: bytes
    last_equal: int | None = None


class Uploads(Protocol):
    """Completes checkpoints in a bucket, with the files of all processes, while training continues.

    Each process has a disk of its own."""

    def busy(self) -> str:
        """Returns why another checkpoint cannot be uploaded now; "" if it can."""

    def offer(self, save: Save, problem: str) -> None:
        """Begins to upload a checkpoint, unless there is a problem in some process."""

    def in_use(self) -> set[str]:
        """Returns the folders of files that must not be deleted yet."""


class CheckpointSaver:
    """Saves a run's checkpoints. Every process must create one and make the same calls.

    A save returns once the state is copied to host memory; a thread writes it and its pointer. A
    failure in that thread is reported at once and raised by the next :meth:`wait`. All processes
    agree on it: if one of them cannot write, the save has failed for all.

    Args:
        run_dir: the run directory, shared by all processes; for a run in a bucket, a folder in the
            cache of this process.
        say: receives a line when a save fails, and when checkpoints are moved aside.
        every: steps between regular checkpoints.
        uploads: completes the checkpoints of a run in a bucket; None for a run on disk.
        resumed: the checkpoint in ``run_dir`` whose state the first save may have, if any.

    Attributes:
        last_equal: the last step whose replay gave the same result; its checkpoint, or the one
            before it, is kept. None if steps are not replayed.

    Raises:
        InputError: ``run_dir`` cannot be created or read, or has files of a user.
        RunAgain: a temporary failure of the disk.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        say: Callable[[str], None] = terminal.out,
        every: int = 1,
        files: Mapping[str, bytes] = MappingProxyType({}),
        *,
        milestones: int | None = None,
        uploads: Uploads | None = None,
        resumed: Path | None = None,
    ) -> None:
        import orbax.checkpoint as ocp  # takes a second, and commands that only look do not need it

        from jaxtrain.checkpoint import orbax_compat

        if keep < 1:
            raise ValueError(f"keep is {keep}: it must be at least 1")
        orbax_compat.quiet_orbax()
        self._run_dir = run_dir.absolute()
        self._keep, self._every, self._milestones, self._files = keep, every, milestones, files
        self._say = say
        self._uploads = uploads
        self._owns_folders = uploads is not None or jax.process_index() == 0
        self._store = CheckpointStore(Folder(self._run_dir), say)
        self.last_equal: int | None = None
        self._data_fd: int | None = None
        self._last_saved: Save | None = None
        self._last_saved_key: tuple[int, int] | None = None  # step and examples seen
        try:
            if self._owns_folders:
                self._run_dir.mkdir(parents=True, exist_ok=True)
                claim(self._store.place, "run directory")
                (self._run_dir / FILES).mkdir(parents=True, exist_ok=True)
                if resumed is not None and uploads is None:
                    self._store.go_back_to(f"{resumed.parent.name}/{resumed.name}")
                    if pointer.is_aside(resumed):
                        step = pointer.step_in(resumed.name)
                        resumed = self._run_dir / pointer.name_of(CHECKPOINTS, step)
                self._collect()
            self._newest = self._newest_step()
            if resumed is not None:
                self._register_resumed(resumed)
        except OSError as error:
            raise disk_trouble(
                error, f"{run_dir} cannot be read or written", "choose another --output-dir"
            ) from error
        store = key_value.of_run()
        # Of process 0, whose directory may be another one.
        self._run_id, self._start_id = store.decide(
            "checkpoint folders",
            lambda: f"{self._store.run_id}-{secrets.token_hex(4)}",
            SAVE_TIMEOUT_S,
        ).split("-")
        self._count = 0
        self._args = ocp.args
        self._votes = Votes(store, SAVE_TIMEOUT_S)
        self._checkpointer = orbax_compat.checkpointer(
            own_disk=uploads is not None, timeout_s=SAVE_TIMEOUT_S, barrier=self._votes.barrier
        )
        self._thread: threading.Thread | None = None
        self._failure: SaveFailed | None = None
        self._writing: str | None = None
        self._failed_before = False
        self._closed = False

    def save(
        self,
        state: Any,
        meta: Mapping[str, Any],
        kinds: tuple[str, ...] = (CHECKPOINTS,),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Saves ``state`` as ``checkpoints/<state.step>.json``; waits for an earlier save first.

        Saving the same state again only writes the pointers that are missing.

        Args:
            state: pytree of arrays with an attribute ``step``.
            meta: JSON-able, with the same ``step``, and with ``examples_seen``.

        Raises:
            SaveFailed: this save could not start, or the previous one failed unnoticed.
        """
        step = int(state.step)
        if meta["step"] != step:
            raise ValueError(f"meta says step {meta['step']}, the state says {step}")
        self.wait()
        key = step, int(meta.get("examples_seen", 0))
        same = self._last_saved if self._last_saved_key == key and not more else None
        if same is not None and set(kinds) <= set(same.kinds):
            return
        self._votes.begin()
        self._count += 1
        unique = f"{self._start_id}{self._count:04x}"
        folder = f"{FILES}/{run_marker.folder_name(self._run_id, step, unique)}"
        data = folder if same is None else same.data
        for vote, action in (
            ("prepare", lambda: self._prepare(data)),
            ("mounted", self._check_mounted),
        ):
            if failure := self._votes.agree(vote, _failure_of(action)):
                raise self._failed(step, failure, reported=False)
        self._last_saved_key, self._writing = None if more else key, data
        if same is not None:
            every_kind = tuple(dict.fromkeys((*same.kinds, *kinds)))
            self._complete_or_fail(
                dataclasses.replace(same, kinds=every_kind), lambda: same.content, ""
            )
            return
        arrays = named(state) | named(dict(more))
        shapes = shapes_of(arrays)
        save, failure = Save(step, kinds, data, b""), ""
        try:
            self._checkpointer.save(
                self._run_dir / data / STATE, args=self._args.PyTreeSave(arrays)
            )
        except (OSError, ValueError) as error:  # other processes may have started: vote
            failure = reason(error)
        self._thread = threading.Thread(
            target=self._complete_or_fail,
            args=(save, lambda: self._described(data, meta, shapes), failure),
            name="checkpoint",
        )
        self._thread.start()

    def suspect_after(self, step: int, why: str) -> None:
        """Moves the pointers of later steps on this disk to ``aside/``. Process 0.

        Args:
            step: the last one whose replay gave the same result.

        Raises:
            OSError: one cannot be moved.
        """
        self._store.set_aside_after(step, SUSPECT, why)

    def wait(self) -> None:
        """Waits until the background save is complete and older checkpoints are deleted.

        Raises:
            SaveFailed: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits for the last save, then frees the threads. Closing again does nothing.

        Raises:
            SaveFailed: the last save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            # After a failure, other threads may have kept writing files.
            if self._failed_before and self._owns_folders and not _failure_of(self._check_mounted):
                _failure_of(self._collect)
            if self._data_fd is not None:
                os.close(self._data_fd)

    def _register_resumed(self, resumed: Path) -> None:
        """Lets a first save of the state that was restored write only a pointer."""
        meta, content = pointer.read_meta(resumed), resumed.read_bytes()
        data, step = pointer.data_of(content), meta["step"]
        kinds = key_value.of_run().decide(
            "kinds of the checkpoint",
            lambda: " ".join(
                kind for kind in pointer.KINDS if self._store.data_folder(kind, step) == data
            ),
            SAVE_TIMEOUT_S,
        )
        self._last_saved = Save(step, tuple(kinds.split()), data, content)
        self._last_saved_key = step, int(meta.get("examples_seen", 0))

    def _prepare(self, data: str) -> None:
        """Creates the folder and tests writing, in process 0: Orbax notices failures late."""
        if not self._owns_folders:
            return
        self._check_mounted()
        folder = self._run_dir / data
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())

    def _check_mounted(self) -> None:
        """Checks that the run's disk is still mounted, or its mount point would be written to.

        Raises:
            OSError: the directory is gone or was replaced.
        """
        folder = self._run_dir / FILES
        if self._data_fd is None:
            self._data_fd = _opened(folder, wait=not self._owns_folders)
        if not os.path.samestat(os.fstat(self._data_fd), os.stat(folder)):
            raise OSError(errno.ESTALE, f"{folder} is not the same folder as before")

    def _complete_or_fail(self, save: Save, describe: Callable[[], bytes], failure: str) -> None:
        """Completes a save, in the background or at once; an exception is a failure of the save."""
        try:
            self._complete(save, describe, failure)
        except Exception as error:  # for example in a vote, when process 0 is gone
            self._failure = self._failed(save.step, reason(error), reported=False)
        if self._failure is not None:
            self._last_saved_key = None

    def _complete(self, save: Save, describe: Callable[[], bytes], failure: str) -> None:
        written = self._await_orbax()
        failure = failure or written or _failure_of(self._check_mounted)
        failure = self._votes.agree("written", failure)
        if self._owns_folders and not failure:
            try:
                save = dataclasses.replace(save, content=describe(), last_equal=self.last_equal)
                if self._uploads is None:
                    self._commit(save)
            except Exception as error:
                failure = reason(error)
        failure = self._votes.agree("end", failure)
        if failure:
            self._discard()
            self._failure = self._failed(save.step, failure, reported=True)
            self._say(f"warning: {self._failure}")
            return
        if BAD_STEP not in save.kinds:
            self._newest, self._last_saved = save.step, save
        if self._uploads is not None:
            self._uploads.offer(save, self._votes.agree("upload", self._uploads.busy()))
        if self._owns_folders:
            self._delete_old()

    def _commit(self, save: Save) -> None:
        """Writes the pointers; none of them is new if one cannot be written.

        Raises:
            OSError: one cannot be written.
        """
        old = [kind for kind in save.kinds if self._store.data_folder(kind, save.step) == save.data]
        try:
            self._store.commit(save.kinds, save.step, save.content)
        except OSError:
            for kind in set(save.kinds).difference(old):
                if self._store.data_folder(kind, save.step) == save.data:
                    self._store.delete(kind, save.step)
            raise

    def _described(self, data: str, meta: Mapping[str, Any], shapes: Mapping[str, Any]) -> bytes:
        folder = self._run_dir / data
        if not (folder / STATE / "_METADATA").is_file():
            raise OSError(errno.EIO, "Orbax never committed it")
        for name, content in self._files.items():
            write_whole(folder / name, content)
        return Pointer.of_folder(folder, meta, shapes).to_json()

    def _await_orbax(self) -> str:
        """Returns why the save failed; "" if it did not. Orbax reports one failure per call."""
        first = ""
        for _ in range(_MOST_FAILURES):
            failure = _failure_of(self._checkpointer.wait_until_finished)
            if not failure:
                break
            first = first or failure
        return first

    def _discard(self) -> None:
        """Deletes the files of a failed save, which would only fill the disk.

        Not if the save has failed in another process after this one had written the pointer.
        """
        self._failed_before = True
        data, self._writing = self._writing, None
        if not self._owns_folders or data is None:
            return
        if self._last_saved is not None and data == self._last_saved.data:
            return
        if any(self._store.folder_of(name) == data for name in self._store.pointers()):
            return
        if _failure_of(self._check_mounted):  # TensorStore recreates missing folders
            for folder in (self._run_dir / data, self._run_dir / FILES):
                _failure_of(folder.rmdir)
            return
        for _ in range(20):  # other writes may still create files
            _failure_of(lambda: self._store.place.delete_folder(data))
            time.sleep(0.1)
            if not (self._run_dir / data).exists():
                return

    def _delete_old(self) -> None:
        try:
            if self._uploads is not None:  # which writes the pointers
                self._store = CheckpointStore(self._store.place, self._say)
            else:
                self._store.retain(self._keep, self._every, self.last_equal, self._milestones)
            self._collect()
        except OSError as error:
            self._say(
                f"warning: older checkpoints in {self._run_dir} cannot be deleted "
                f"({reason(error)}): delete them before the disk fills up"
            )

    def _collect(self) -> None:
        in_use = set[str]()
        if self._uploads is not None:
            in_use = self._uploads.in_use()
            if self._last_saved is not None:
                in_use.add(self._last_saved.data)
        self._store.collect(in_use)

    def _newest_step(self) -> int | None:
        return max(self._store.steps(), default=None)

    def _failed(self, step: int, failure: str, *, reported: bool) -> SaveFailed:
        newest = self._newest
        with contextlib.suppress(OSError):  # the disk is gone
            on_disk = self._newest_step()
            newest = newest if on_disk is None else on_disk
        intact = "none is complete" if newest is None else f"the newest complete one is {newest}"
        usual = "check that disk, or choose another --output-dir"
        if key_value.NO_VOTE in failure:
            usual = "see the log of that process"
        cure = cure_of(failure) or usual
        if cure == FREE_SPACE:
            cure += " (lower --checkpoint.keep)"
        return SaveFailed(
            f"checkpoint {step} could not be written to {self._run_dir} ({failure}): {intact}; "
            f"{cure}",
            failure,
            reported=reported,
        )


def _opened(folder: Path, *, wait: bool) -> int:
    """Opens a folder; with ``wait``, waits for another process to create it."""
    deadline = time.monotonic() + (_APPEARS_WITHIN_S if wait else 0.0)
    while True:
        try:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.2)


def _failure_of(action: Callable[[], object]) -> str:
    try:
        action()
    except FailedElsewhere as error:
        return str(error)
    except Exception as error:  # Orbax raises plain exceptions
        return reason(error)
    return ""
