"""Saves checkpoints in the background and keeps the newest and the best.

In a run's directory::

    checkpoints/<step>/state/         every array by its dotted name, "params.encoder.0.kernel"
    checkpoints/<step>/meta/metadata  JSON: {"meta": what the caller says,
                                      "arrays": {NAME: {"shape", "dtype"}}}
    checkpoints/<step>/NAME           files that the data adds, as tokenizer.json
    checkpoints/<step>/manifest.json  size and checksum of every file; written last
    best/<step>/                      likewise; only one
    checkpoints/<step>.replaced/      while a step is saved again: the old one
    superseded/checkpoints/<step>/    what a resume from an earlier step has overtaken
    damaged/checkpoints/<step>/       what a resume found damaged, and reason.txt

``<step>`` counts completed updates. Orbax writes ``<step>.orbax-checkpoint-tmp`` and renames
it; then the manifest follows, and only with it a checkpoint is complete.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxtrain import terminal
from jaxtrain.checkpoint import files as checkpoint_files
from jaxtrain.checkpoint.layout import BEST, META, STATE, latest_in
from jaxtrain.checkpoint.restore import named, shapes_of
from jaxtrain.distributed import key_value
from jaxtrain.distributed.key_value import FailedElsewhere, Votes
from jaxtrain.errors import RunAgain
from jaxtrain.storage.disks import cure_of, disk_trouble, reason

# Time for all processes to write their part; after it the save counts as failed.
SAVE_TIMEOUT_S = 1200
_PROBE_BYTES = 2**16


class SaveFailed(RunAgain):
    """A checkpoint could not be written, as on a full disk. Older ones are as they were.

    All processes of a run learn it of the same save, in whichever it failed.

    Attributes:
        target: the checkpoint.
        why: in a few words.
        said: whether the user was told.
    """

    def __init__(self, message: str, target: Path, why: str, *, said: bool) -> None:
        super().__init__(message)
        self.target = target
        self.why = why
        self.said = said


class BestNotKept(SaveFailed):
    """A checkpoint is complete, but did not become the best one too; the one before it still is."""


class Checkpoints:
    """Saves a run's checkpoints. Every process makes one and calls it alike.

    A save returns when the state is copied to the host's memory; a thread writes it, and its
    manifest. A failure of that thread is said at once and raised by the next :meth:`wait`, and all
    processes agree on it: what one of them cannot write has failed for all.

    Args:
        directory: ``checkpoints/`` of the run; the best one goes to ``best/`` beside it. All
            processes share it.
        keep: how many of the newest checkpoints stay. An older one is deleted after a newer one is
            complete.
        say: takes a line when a save fails, and when checkpoints of an abandoned future are moved
            aside.
        every: steps between regular checkpoints; the newest of these always stays.
        files: name -> content of what each checkpoint holds beside the state.

    Raises:
        InputError: ``directory`` cannot be made or read.
        RunAgain: not now.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        say: Callable[[str], None] = terminal.out,
        every: int = 1,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        import orbax.checkpoint as ocp  # takes a second: not for those who only look

        from jaxtrain.checkpoint.orbax_compat import TemporaryPath, quiet_orbax

        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
        quiet_orbax()
        self._directory = directory.absolute()
        self._best = self._directory.parent / BEST
        self._keep, self._every, self._files = keep, every, files
        self._say = say
        self._process_zero = jax.process_index() == 0
        if self._process_zero:
            checkpoint_files.make(self._directory)
        self._home: int | None = None  # descriptor of the directory
        try:
            if self._process_zero:
                checkpoint_files.sweep(self._directory)
                checkpoint_files.sweep(self._best)
            self._newest = self.latest()
        except OSError as error:
            raise disk_trouble(error, f"{directory} cannot be read", "make it readable") from error
        self._args = ocp.args
        self._votes = Votes(key_value.of_run(), SAVE_TIMEOUT_S)
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                STATE,
                META,
                composite_options=ocp.CompositeOptions(temporary_path_class=TemporaryPath),
            ),
            temporary_path_class=TemporaryPath,
            async_options=ocp.options.AsyncOptions(
                timeout_secs=SAVE_TIMEOUT_S, barrier_sync_fn=self._votes.barrier
            ),
        )
        self._finisher: threading.Thread | None = None
        self._failure: SaveFailed | None = None
        self._last_failed: Path | None = None
        self._saved: dict[Path, int] = {}  # folder -> the step that was saved there last
        self._closed = False

    def save(self, state: Any, meta: Mapping[str, Any], *, best: bool = False) -> None:
        """Saves ``state`` as ``checkpoints/<state.step>/``; waits for an earlier save first.

        Saving the same step twice does nothing. Checkpoints of later steps are of a future that a
        resume has abandoned: they are moved to ``superseded/``, or they would count as the newest.

        Args:
            state: pytree of arrays with an attribute ``step``.
            meta: JSON-able, with the same ``step``.
            best: it becomes ``best/<state.step>/`` too, without being written twice.

        Raises:
            SaveFailed: this save could not start, or the one before it failed and nobody waited.
        """
        self._start(self._directory, state, meta, self._keep, also_best=best)

    def save_best(self, state: Any, meta: Mapping[str, Any]) -> None:
        """Saves ``state`` as ``best/<state.step>/``, in place of the one there."""
        self._start(self._best, state, meta, 1)

    def forget_after(self, step: int) -> None:
        """The run has gone back to ``step`` updates: later states are saved as new ones."""
        self._saved = {folder: saved for folder, saved in self._saved.items() if saved <= step}

    def latest(self) -> Path | None:
        """The newest complete checkpoint on the disk."""
        return latest_in(self._directory)

    def wait(self) -> None:
        """Returns when the save in the background is complete and older checkpoints are deleted.

        Raises:
            SaveFailed: it failed; or as ``BestNotKept``, only its second name did.
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
        """Waits, then frees the threads. Closing again does nothing.

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
            failed = self._last_failed  # whose files may have been written on until now
            if failed and self._process_zero and not _failure_of(self._check_there):
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
                if self._process_zero:
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
        except (OSError, ValueError) as error:  # the others may have started: tell them
            wrong = reason(error)
        self._finisher = threading.Thread(
            target=self._finish, args=(target, keep, also_best, wrong), name="checkpoint"
        )
        self._finisher.start()

    def _prepare(self, folder: Path, step: int, also_best: bool) -> None:
        """Process 0 makes room and tries to write: Orbax is slow to notice where it cannot."""
        if not self._process_zero:
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
        """Refuses to write where the run's disk was, after it went away: under its mount point.

        Raises:
            OSError: the directory is gone, or another one is in its place.
        """
        if self._home is None:
            self._home = checkpoint_files.opened(self._directory, wait=not self._process_zero)
        if not os.path.samestat(os.fstat(self._home), os.stat(self._directory)):
            raise OSError(errno.ESTALE, f"{self._directory} is another folder than before")

    def _finish(self, target: Path, keep: int, also_best: bool, wrong: str) -> None:
        """Runs beside the training; whatever goes wrong in it is a failure of the save."""
        try:
            self._end(target, keep, also_best, wrong)
        except Exception as error:  # as of a vote, when process 0 is gone
            self._failure = self._failed(target, reason(error), said=False)

    def _end(self, target: Path, keep: int, also_best: bool, wrong: str) -> None:
        """Waits for Orbax, completes the checkpoint, deletes older ones.

        Args:
            target: the checkpoint.
            keep: complete checkpoints that stay beside it.
            also_best: link it as the best one.
            wrong: why the save has failed already; "" if it has not.
        """
        written = self._await_orbax()
        wrong = wrong or written or _failure_of(self._check_there)
        wrong = self._votes.agree("written", wrong)
        if self._process_zero and not wrong:
            wrong = _failure_of(lambda: self._complete(target, keep))
        wrong = self._votes.agree("end", wrong)
        if not wrong:
            self._newest = target
            if also_best:
                self._keep_best(target)
            return
        if self._process_zero:  # half a checkpoint on a full disk helps nobody
            _failure_of(lambda: checkpoint_files.remove_failed(target))
            if _failure_of(self._check_there):  # and TensorStore makes folders that are gone
                _failure_of(target.parent.rmdir)
        self._last_failed, self._failure = target, self._failed(target, wrong, said=True)
        self._say(f"warning: {self._failure}")

    def _await_orbax(self) -> str:
        """Why the save failed, "" if it did not. Orbax keeps failures, and tells one at a time."""
        told: list[str] = []
        while (failure := _failure_of(self._checkpointer.wait_until_finished)) and len(told) < 100:
            told.append(failure)
        return told[0] if told else ""

    def _keep_best(self, target: Path) -> None:
        """Gives a complete checkpoint its second name; all processes learn whether it has it."""
        best, wrong = self._best / target.name, ""
        if self._process_zero:
            wrong = _failure_of(lambda: checkpoint_files.link(target, best))
            if not wrong:
                self._delete_oldest(best, 1)
        wrong = self._votes.agree("best", wrong)
        if wrong:
            self._failure = BestNotKept(
                f"the best checkpoint could not be kept as {best} ({wrong}): the one before it "
                "stays the best",
                best,
                wrong,
                said=True,
            )
            self._say(f"warning: {self._failure}")

    def _complete(self, target: Path, keep: int) -> None:
        checkpoint_files.complete(target, self._files)
        self._delete_oldest(target, keep)

    def _delete_oldest(self, target: Path, keep: int) -> None:
        every = self._every if target.parent == self._directory else 1
        try:
            checkpoint_files.forget_replaced(target)
            checkpoint_files.delete_oldest(target.parent, keep, every)
        except OSError as error:
            self._say(
                f"warning: an older checkpoint beside {target} cannot be deleted "
                f"({reason(error)}): delete it before the disk is full"
            )

    def _failed(self, target: Path, wrong: str, *, said: bool) -> SaveFailed:
        try:
            newest = self.latest() or self._newest
        except OSError:  # the disk is gone
            newest = self._newest
        intact = f"the newest complete one is {newest}" if newest else "no complete one exists"
        cure = cure_of(wrong) or "look at that disk, or give another --output-dir"
        return SaveFailed(
            f"checkpoint {target} could not be written ({wrong}): {intact}; {cure}",
            target,
            wrong,
            said=said,
        )


def _failure_of(action: Callable[[], object]) -> str:
    """Why it failed, in a few words; "" if it did not."""
    try:
        action()
    except FailedElsewhere as error:
        return str(error)
    except Exception as error:  # Orbax raises plain ones
        return reason(error)
    return ""
