"""Checkpoints: saved in the background, kept, found again, restored. Orbax stays behind this door.

In a run's directory::

    checkpoints/<step>/state/         every array by its dotted name, "params.encoder.0.kernel"
    checkpoints/<step>/meta/metadata  JSON: {"meta": what the caller says,
                                      "arrays": {NAME: {"shape", "dtype"}}}
    best/<step>/                      likewise; only one
    superseded/checkpoints/<step>/    what a resume from an earlier step has overtaken

``<step>`` counts completed updates. Orbax writes ``<step>.orbax-checkpoint-tmp`` and renames it, so
a folder with a number for a name is whole, unless it was copied or deleted in part:
:func:`is_complete` looks inside.
"""

import contextlib
import gc
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint_folders import (
    BEST,
    CHECKPOINTS,
    META,
    STATE,
    find,
    is_complete,
    latest_in,
    listed,
    numbered,
    read_meta,
    read_shapes,
    reason,
    steps,
)
from jaxtrain.errors import InputError
from jaxtrain.orbax_noise import quiet_orbax

__all__ = [
    "BEST",
    "CHECKPOINTS",
    "Checkpoints",
    "SaveFailed",
    "find",
    "is_complete",
    "latest_in",
    "read_meta",
    "read_shapes",
    "restore",
    "steps",
]

SUPERSEDED = "superseded"
# Time for all processes to write their part; after it the save counts as failed.
SAVE_TIMEOUT_S = 1200
_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted|partial)")
_ARRAYS_TO_NAME = 4


class SaveFailed(InputError):
    """A checkpoint could not be written, as on a full disk. Older ones are as they were."""


class Checkpoints:
    """Saves a run's checkpoints. Every process makes one and calls it alike.

    A save returns when the state is copied to the host's memory; a thread writes it. The next call
    of any method that saves or waits reports a failure of that thread.

    Args:
        directory: ``checkpoints/`` of the run; the best one goes to ``best/`` beside it. All
            processes share it.
        keep: how many of the newest checkpoints stay. An older one is deleted after a newer one is
            complete.
        say: takes a line when checkpoints of an abandoned future are moved aside; process 0 only.
    """

    def __init__(self, directory: Path, keep: int, say: Callable[[str], None] = print) -> None:
        import orbax.checkpoint as ocp  # takes a second: not for those who only look

        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
        quiet_orbax()
        self._directory = directory.absolute()
        self._best = self._directory.parent / BEST
        self._keep = keep
        self._say = say
        self._process_zero = jax.process_index() == 0
        if self._process_zero:
            _sweep(self._directory)
            _sweep(self._best)
        self._args = ocp.args
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(STATE, META), timeout_secs=SAVE_TIMEOUT_S
        )
        self._finisher: threading.Thread | None = None
        self._failure: tuple[Path, BaseException] | None = None
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
            SaveFailed: this save could not start, or the one before it failed.
        """
        self._start(self._directory, state, meta, self._keep, also_best=best)

    def save_best(self, state: Any, meta: Mapping[str, Any]) -> None:
        """Saves ``state`` as ``best/<state.step>/``, in place of the one there."""
        self._start(self._best, state, meta, 1)

    def latest(self) -> Path | None:
        """The newest complete checkpoint on the disk."""
        return latest_in(self._directory)

    def wait(self) -> None:
        """Returns when the save in the background has ended and older checkpoints are deleted.

        Raises:
            SaveFailed: it failed.
        """
        if self._finisher is not None:
            self._finisher.join()
            self._finisher = None
        if self._failure is not None:
            (target, error), self._failure = self._failure, None
            self._saved.pop(target.parent, None)
            raise self._failed(target, error) from error

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
        described = {"meta": dict(meta), "arrays": _described(arrays)}
        try:
            if self._process_zero:
                folder.mkdir(parents=True, exist_ok=True)
                self._supersede(folder, step)
                if also_best:
                    self._supersede(self._best, step)
            self._checkpointer.save(
                target,
                args=self._args.Composite(
                    **{
                        STATE: self._args.PyTreeSave(arrays),
                        META: self._args.JsonSave(described),
                    }
                ),
            )
        except (OSError, ValueError) as error:
            raise self._failed(target, error) from error
        self._saved[folder] = step
        self._finisher = threading.Thread(
            target=self._finish, args=(target, keep, also_best), name="checkpoint"
        )
        self._finisher.start()

    def _finish(self, target: Path, keep: int, also_best: bool) -> None:
        """Runs beside the training: waits for Orbax, then deletes what is no longer kept."""
        try:
            self._checkpointer.wait_until_finished()
            if self._process_zero:
                if also_best:
                    _link(target, self._best / target.name)
                    _delete_oldest(self._best, 1)
                _delete_oldest(target.parent, keep)
        except BaseException as error:  # handed to the main thread by wait()
            self._failure = (target, error)
            if self._process_zero:  # half a checkpoint on a full disk helps nobody
                _sweep_while_written(target.parent)

    def _supersede(self, folder: Path, step: int) -> None:
        """Moves aside what would stand in the way of ``folder/<step>`` or count as newer."""
        for number in [number for number in numbered(folder) if number >= step]:
            aside = folder.parent / SUPERSEDED / folder.name / str(number)
            if aside.exists():
                shutil.rmtree(aside)
            aside.parent.mkdir(parents=True, exist_ok=True)
            (folder / str(number)).rename(aside)
            self._say(
                f"checkpoint {folder.name}/{number} is from before this resume: moved to {aside}"
            )

    def _failed(self, target: Path, error: BaseException) -> SaveFailed:
        newest = self.latest()
        intact = f"the newest complete one is {newest}" if newest else "no complete one exists"
        return SaveFailed(
            f"checkpoint {target} could not be written ({reason(error)}): {intact}; free space "
            "on that disk or lower --checkpoint.keep, then go on with --resume latest"
        )


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree under their dotted paths; nodes without leaves leave no trace."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    count = len(jax.tree.leaves(tree))
    if len(leaves) < count:
        raise ValueError(f"{count} arrays have only {len(leaves)} different dotted names")
    return leaves


def restore(path: Path, abstract_state: Any, *, subset: bool = False) -> Any:
    """Reads a checkpoint straight into the target shardings, whatever wrote it.

    Each process reads only what its devices hold.

    Args:
        path: of the checkpoint.
        abstract_state: pytree of ``jax.ShapeDtypeStruct``, each with its target sharding.
        subset: allow the checkpoint to hold more arrays than asked for (they are not read), as for
            parameters without an optimizer.

    Raises:
        InputError: the arrays differ in name, shape or dtype (found before anything is loaded), or
            the files are damaged.
    """
    import orbax.checkpoint as ocp

    wanted = named(abstract_state)
    for name, leaf in wanted.items():
        if leaf.sharding is None:
            raise ValueError(f"{name} has no target sharding")
    differences = _differences(read_shapes(path), wanted, subset=subset)
    if differences:
        shown = "; ".join(differences[:_ARRAYS_TO_NAME])
        more = len(differences) - _ARRAYS_TO_NAME
        raise InputError(
            f"{path} holds another model or optimizer than this run: {shown}"
            + (f"; and {more} more" if more > 0 else "")
            + ": take the config that wrote it, or start a new run"
        )
    quiet_orbax()
    failure = ""
    try:
        with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
            arrays = reader.restore(
                path.absolute() / STATE,
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=subset,
                ),
            )
    except jax.errors.JaxRuntimeError:
        raise  # of the device, which may be out of memory
    except Exception as error:  # Orbax raises plain ones for damaged files
        failure = reason(error)
    if failure:
        gc.collect()  # the other readers, while somebody listens to what they say
        others = [step for step in steps(path.parent) if str(step) != path.name]
        raise InputError(
            f"{path} cannot be read ({failure}): resume from another one"
            + (f", beside it are {listed(others)}" if others else "")
        )
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])


def _described(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, subset: bool) -> list[str]:
    """One phrase for each array that differs; those of other shapes first."""
    here = {name: f"{array.dtype} {list(array.shape)}" for name, array in wanted.items()}
    there = {name: f"{array.dtype} {list(array.shape)}" for name, array in saved.items()}
    found = [
        f"{name} is {there[name]} in the checkpoint and {here[name]} in this run"
        for name in here
        if name in there and here[name] != there[name]
    ]
    found += [f"{name} {here[name]} is not in the checkpoint" for name in here if name not in there]
    if not subset:
        found += [
            f"{name} {there[name]} is only in the checkpoint" for name in there if name not in here
        ]
    return found


def _delete_oldest(folder: Path, keep: int) -> None:
    for step in steps(folder)[:-keep]:
        _delete(folder / str(step))


def _link(source: Path, target: Path) -> None:
    """The same files under a second name, or copies where the file system has no hard links."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    partial = target.with_name(f"{target.name}.partial")
    shutil.copytree(source, partial, copy_function=link)
    partial.rename(target)


def _delete(path: Path) -> None:
    """Deletes a checkpoint; if that breaks off, what is left no longer looks like one."""
    doomed = path.with_name(f"{path.name}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sweep(folder: Path) -> None:
    """Removes what interrupted saves and deletions have left."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def _sweep_while_written(folder: Path) -> None:
    """After a failure: other writes of the same save may still be under way, and make files."""
    for _ in range(20):
        _sweep(folder)
        time.sleep(0.1)
        if not any(_LEFTOVER.fullmatch(entry.name) for entry in folder.iterdir()):
            return
