"""Saves checkpoints in the background and keeps the newest and the best.

In a run directory::

    checkpoints/<step>/state/         every array by its dotted name, "params.encoder.0.kernel",
                                      except those that the model reads from files
    checkpoints/<step>/meta/metadata  JSON: {"meta": from the caller,
                                      "arrays": {NAME: {"shape", "dtype"}}}
    checkpoints/<step>/NAME           files added by the data, such as tokenizer.json
    checkpoints/<step>/manifest.json  size and checksum of every file; written last
    best/<step>/                      the same files; only one checkpoint
    checkpoints/<step>.replaced/      the old checkpoint while its step is saved again
    superseded/checkpoints/<step>/    abandoned by a resume from an earlier step
    damaged/checkpoints/<step>/       found damaged by a resume; with reason.txt
    uncertified/checkpoints/<step>/   saved after the last certified step, before a wrong one

``<step>`` is the number of completed steps. Orbax writes ``<step>.orbax-checkpoint-tmp`` and
renames it; the manifest, written last, completes the checkpoint.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax

from jaxtrain import terminal
from jaxtrain.checkpoint import files as checkpoint_files
from jaxtrain.checkpoint.layout import BEST, META, STATE, certified_step, latest_in
from jaxtrain.checkpoint.restore import named, shapes_of
from jaxtrain.distributed import key_value
from jaxtrain.distributed.key_value import FailedElsewhere, Votes
from jaxtrain.errors import RunAgain
from jaxtrain.storage.disks import FREE_SPACE, cure_of, disk_trouble, reason

# Seconds for all processes to write their part before the save counts as failed.
SAVE_TIMEOUT_S = 1200
_PROBE_BYTES = 2**16


class SaveFailed(RunAgain):
    """A checkpoint could not be written, for example on a full disk. Older ones are unchanged.

    All processes of a run raise it for the same save, whichever process failed.

    Attributes:
        target: the checkpoint.
        why: a short reason.
        said: whether it was already reported to the user.
    """

    def __init__(self, message: str, target: Path, why: str, *, said: bool) -> None:
        super().__init__(message)
        self.target = target
        self.why = why
        self.said = said


class CheckpointMirror(Protocol):
    """Copies complete checkpoints to another place, such as a bucket, while training continues."""

    def files_of_save(self) -> Mapping[str, bytes]:
        """Returns name -> content of further files; called once per save by each folder's owner."""

    def prepare(self, target: Path) -> str:
        """Returns why a checkpoint cannot be copied now; "" if it can, which keeps its files."""

    def begin(self, target: Path, problem: str, *, also_best: bool) -> None:
        """Begins the copy, or skips it if it cannot be made in some process."""


class BestNotKept(SaveFailed):
    """A checkpoint is complete but could not be linked as the best; the previous best remains."""


class Checkpoints:
    """Saves a run's checkpoints. Every process must create one and make the same calls.

    A save returns once the state is copied to host memory; a thread writes it and its manifest. A
    failure in that thread is reported at once and raised by the next :meth:`wait`. All processes
    agree on it: if one of them cannot write, the save has failed for all.

    Args:
        directory: the run's ``checkpoints/``; the best one goes to ``best/`` next to it. Shared by
            all processes.
        keep: number of newest checkpoints to keep. An older one is deleted after a newer one is
            complete, unless it is the newest certified one (``loop.replay_every``).
        say: receives a line when a save fails, and when checkpoints are moved to ``superseded/``.
        every: steps between regular checkpoints; the newest of these is always kept.
        files: name -> content of further files for each checkpoint.
        own_disk: whether each process has a ``directory`` of its own, on a disk that the others do
            not see. Each then saves all shards that it has.
        mirror: copies complete checkpoints to another place in the background, if any.

    Raises:
        InputError: ``directory`` cannot be created or read.
        RunAgain: a temporary failure of the disk.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        say: Callable[[str], None] = terminal.out,
        every: int = 1,
        files: Mapping[str, bytes] = MappingProxyType({}),
        *,
        own_disk: bool = False,
        mirror: CheckpointMirror | None = None,
    ) -> None:
        import orbax.checkpoint as ocp  # takes a second, and commands that only look do not need it

        from jaxtrain.checkpoint import orbax_compat

        if keep < 1:
            raise ValueError(f"keep is {keep}: it must be at least 1")
        orbax_compat.quiet_orbax()
        self._directory = directory.absolute()
        self._best = self._directory.parent / BEST
        self._keep, self._every, self._files = keep, every, files
        self._say = say
        self._owner = own_disk or jax.process_index() == 0  # of the folders
        self._mirror = mirror
        if self._owner:
            checkpoint_files.make_folder(self._directory)
        self._home: int | None = None  # descriptor of the directory
        try:
            if self._owner:
                checkpoint_files.sweep(self._directory)
                checkpoint_files.sweep(self._best)
            self._newest = self.latest()
        except OSError as error:
            raise disk_trouble(error, f"{directory} cannot be read", "make it readable") from error
        self._args = ocp.args
        self._votes = Votes(key_value.of_run(), SAVE_TIMEOUT_S)
        self._checkpointer = ocp.AsyncCheckpointer(
            orbax_compat.handlers(STATE, META, own_disk=own_disk),
            temporary_path_class=orbax_compat.TemporaryPath,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=None if own_disk else 0
            ),
            async_options=orbax_compat.async_options(
                own_disk=own_disk, timeout_secs=SAVE_TIMEOUT_S, barrier_sync_fn=self._votes.barrier
            ),
        )
        self._finisher: threading.Thread | None = None
        self._failure: SaveFailed | None = None
        self._last_failed: Path | None = None
        self._saved: dict[Path, int] = {}  # folder -> the step saved there last
        self._closed = False

    def save(self, state: Any, meta: Mapping[str, Any], *, best: bool = False) -> None:
        """Saves ``state`` as ``checkpoints/<state.step>/``; waits for an earlier save first.

        Saving the same step twice does nothing. Checkpoints of later steps were abandoned by a
        resume and are moved to ``superseded/``, as they would otherwise count as the newest.

        Args:
            state: pytree of arrays with an attribute ``step``.
            meta: JSON-able, with the same ``step``.
            best: also link it as ``best/<state.step>/``.

        Raises:
            SaveFailed: this save could not start, or the previous one failed unnoticed.
        """
        self._start(self._directory, state, meta, self._keep, also_best=best)

    def save_best(self, state: Any, meta: Mapping[str, Any]) -> None:
        """Saves ``state`` as ``best/<state.step>/``, replacing the previous best."""
        self._start(self._best, state, meta, 1)

    def forget_after(self, step: int) -> None:
        """Allows saving steps after ``step`` again, after a rollback to it."""
        self._saved = {folder: saved for folder, saved in self._saved.items() if saved <= step}

    def latest(self) -> Path | None:
        """Returns the newest complete checkpoint on disk."""
        return latest_in(self._directory)

    def wait(self) -> None:
        """Waits until the background save is complete and older checkpoints are deleted.

        Raises:
            SaveFailed: it failed; :class:`BestNotKept` if only linking it as the best failed.
        """
        if self._finisher is not None:
            self._finisher.join()
            self._finisher = None
        failure, self._failure = self._failure, None
        if failure is not None:
            if not isinstance(failure, BestNotKept):
                self._saved.pop(failure.target.parent, None)
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
            failed = self._last_failed  # other threads may have kept writing its files
            if failed and self._owner and not _failure_of(self._check_there):
                _failure_of(lambda: checkpoint_files.remove_failed(failed))
            if self._home is not None:
                os.close(self._home)

    def _start(
        self,
        folder: Path,
        state: Any,
        meta: Mapping[str, Any],
        keep: int,
        *,
        also_best: bool = False,
    ) -> None:
        step = int(state.step)
        if meta["step"] != step:
            raise ValueError(f"meta says step {meta['step']}, the state says {step}")
        if self._saved.get(folder) == step:
            return
        self.wait()
        target = folder / str(step)
        arrays = named(state)
        described = {"meta": dict(meta), "arrays": shapes_of(arrays)}
        self._votes.begin()
        for part, action in (
            ("prepare", lambda: self._prepare(folder, step, also_best)),
            ("there", self._check_there),
        ):
            wrong = self._votes.agree(part, _failure_of(action))
            if wrong:
                if self._owner:
                    _failure_of(lambda: checkpoint_files.give_back(folder))
                raise self._failed(target, wrong, said=False)
        self._saved[folder] = step
        wrong = ""
        try:
            self._checkpointer.save(
                target,
                args=self._args.Composite(
                    **{
                        STATE: self._args.PyTreeSave(arrays),
                        META: self._args.JsonSave(described),
                    }
                ),
            )
        except (OSError, ValueError) as error:  # other processes may have started: vote
            wrong = reason(error)
        self._finisher = threading.Thread(
            target=self._finish, args=(target, keep, also_best, wrong), name="checkpoint"
        )
        self._finisher.start()

    def _prepare(self, folder: Path, step: int, also_best: bool) -> None:
        """Prepares the folder and tests writing, in process 0: Orbax notices failures late."""
        if not self._owner:
            return
        self._check_there()
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
        checkpoint_files.supersede(folder, step, self._say)
        checkpoint_files.replace(folder / str(step))
        if also_best:
            checkpoint_files.supersede(self._best, step, self._say)

    def _check_there(self) -> None:
        """Checks that the run's disk is still mounted, or its mount point would be written to.

        Raises:
            OSError: the directory is gone or was replaced.
        """
        if self._home is None:
            self._home = checkpoint_files.opened(self._directory, wait=not self._owner)
        if not os.path.samestat(os.fstat(self._home), os.stat(self._directory)):
            raise OSError(errno.ESTALE, f"{self._directory} is not the same folder as before")

    def _finish(self, target: Path, keep: int, also_best: bool, wrong: str) -> None:
        """Runs in the background; any exception in it is a failure of the save."""
        try:
            self._end(target, keep, also_best, wrong)
        except Exception as error:  # for example in a vote, when process 0 is gone
            self._failure = self._failed(target, reason(error), said=False)

    def _end(self, target: Path, keep: int, also_best: bool, wrong: str) -> None:
        """Waits for Orbax, completes the checkpoint, deletes older ones.

        Args:
            target: the checkpoint.
            keep: number of complete checkpoints to keep.
            also_best: link it as the best.
            wrong: why the save has already failed; "" if it has not.
        """
        written = self._await_orbax()
        wrong = wrong or written or _failure_of(self._check_there)
        wrong = self._votes.agree("written", wrong)
        if self._owner and not wrong:
            wrong = _failure_of(lambda: self._complete(target, keep))
        wrong = self._votes.agree("end", wrong)
        if not wrong:
            self._newest = target
            if also_best:
                self._keep_best(target)
            if self._mirror is not None:
                problem = self._votes.agree("copy", self._mirror.prepare(target))
                self._mirror.begin(target, problem, also_best=also_best)
            return
        if self._owner:  # a partial checkpoint would only fill the disk
            _failure_of(lambda: checkpoint_files.remove_failed(target))
            if _failure_of(self._check_there):  # TensorStore recreates missing folders
                _failure_of(target.parent.rmdir)
        self._last_failed, self._failure = target, self._failed(target, wrong, said=True)
        self._say(f"warning: {self._failure}")

    def _await_orbax(self) -> str:
        """Returns why the save failed; "" if it did not. Orbax reports one failure per call."""
        told: list[str] = []
        while (failure := _failure_of(self._checkpointer.wait_until_finished)) and len(told) < 100:
            told.append(failure)
        return told[0] if told else ""

    def _keep_best(self, target: Path) -> None:
        """Links a complete checkpoint as the best; all processes agree on the result."""
        best, wrong = self._best / target.name, ""
        if self._owner:
            wrong = _failure_of(lambda: checkpoint_files.link(target, best))
            if not wrong:
                self._delete_oldest(best, 1)
        wrong = self._votes.agree("best", wrong)
        if wrong:
            self._failure = BestNotKept(
                f"the best checkpoint could not be linked as {best} ({wrong}): the previous best "
                "is kept",
                best,
                wrong,
                said=True,
            )
            self._say(f"warning: {self._failure}")

    def _complete(self, target: Path, keep: int) -> None:
        more = {} if self._mirror is None else self._mirror.files_of_save()
        checkpoint_files.complete(target, {**self._files, **more})
        self._delete_oldest(target, keep)

    def _delete_oldest(self, target: Path, keep: int) -> None:
        best = target.parent == self._best
        every = 1 if best else self._every
        try:
            checkpoint_files.forget_replaced(target)
            certified = None if best else certified_step(self._directory.parent)
            checkpoint_files.delete_oldest(target.parent, keep, every, certified)
        except OSError as error:
            self._say(
                f"warning: older checkpoints in {target.parent} cannot be deleted "
                f"({reason(error)}): delete them before the disk fills up"
            )

    def _failed(self, target: Path, wrong: str, *, said: bool) -> SaveFailed:
        try:
            newest = self.latest() or self._newest
        except OSError:  # the disk is gone
            newest = self._newest
        intact = f"the newest complete one is {newest}" if newest else "none is complete"
        usual = "check that disk, or choose another --output-dir"
        cure = "see its log" if key_value.NO_VOTE in wrong else cure_of(wrong) or usual
        if cure == FREE_SPACE:
            cure += " (lower --checkpoint.keep)"
        return SaveFailed(
            f"checkpoint {target} could not be written ({wrong}): {intact}; {cure}",
            target,
            wrong,
            said=said,
        )


def _failure_of(action: Callable[[], object]) -> str:
    """Returns a short reason why the action failed; "" if it did not."""
    try:
        action()
    except FailedElsewhere as error:
        return str(error)
    except Exception as error:  # Orbax raises plain exceptions
        return reason(error)
    return ""
