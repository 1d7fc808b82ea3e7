"""Restores a checkpoint's arrays directly into their target shardings."""

import contextlib
import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import pointer
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.disks import cure_of, disk_trouble, reason

_ARRAYS_TO_NAME = 4


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by dotted path; nodes without leaves are omitted."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    count = len(jax.tree.leaves(tree))
    if len(leaves) < count:
        raise ValueError(f"{count} arrays have only {len(leaves)} different dotted names")
    return leaves


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shape and dtype of each array, JSON-able."""
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }


def restore(
    path: Path, abstract_state: Any, *, subset: bool = False, verified: bool = False
) -> Any:
    """Restores a checkpoint directly into the target shardings, whatever its own were.

    Each process reads only its devices' shards, after the verification, which reads all files.

    Args:
        abstract_state: pytree of ``jax.ShapeDtypeStruct``, each with its target sharding.
        subset: allow more arrays in the checkpoint than requested, for example to restore
            parameters without the optimizer. They are not read.
        verified: process 0 has just verified the checkpoint, for example in
            :mod:`jaxtrain.checkpoint.start`. Otherwise each process verifies it first.

    Raises:
        InputError: the arrays differ in name, shape or dtype (checked before anything is loaded),
            or the files are damaged.
        RunAgain: the disk does not respond.
    """
    try:
        os.fsencode(path.absolute()).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(
            f"{path} cannot be read, because the name {path.absolute()} is not UTF-8, and the "
            "library that reads checkpoints takes no other: move it to another folder"
        ) from None
    import orbax.checkpoint as ocp  # takes a second, and commands that only look do not need it

    from jaxtrain.checkpoint.orbax_compat import quiet_orbax

    try:
        damage = "" if verified else pointer.verify(path)
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    if damage:
        raise InputError(f"{path} is damaged ({damage}){_advise_other(path)}")
    wanted = named(abstract_state)
    for name, leaf in wanted.items():
        if leaf.sharding is None:
            raise ValueError(f"{name} has no target sharding")
    differences = _differences(pointer.read_shapes(path), wanted, subset=subset)
    if differences:
        examples = "; ".join(differences[:_ARRAYS_TO_NAME])
        more = len(differences) - _ARRAYS_TO_NAME
        raise InputError(
            f"{path} has a different model or optimizer than this run: {examples}"
            + (f"; and {more} more" if more > 0 else "")
            + ": use the config that wrote it, or start a new run"
        )
    state = pointer.folder_of(path).absolute() / pointer.STATE
    quiet_orbax()
    failure = ""
    try:
        with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
            arrays = reader.restore(
                state,
                args=ocp.args.PyTreeRestore(
                    item=wanted,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                    partial_restore=subset,
                ),
            )
    except jax.errors.JaxRuntimeError:
        raise  # from the device, which may be out of memory
    except Exception as error:  # Orbax raises plain ones for damaged files
        failure = reason(error)
    if failure:
        gc.collect()  # ends Orbax's other readers now: later, their warnings would be printed
        cure = cure_of(failure)
        if cure:  # such as a network disk that is missing on one host
            raise RunAgain(f"{path} cannot be read ({failure}): {cure}")
        raise InputError(f"{path} cannot be read ({failure}){_advise_other(path)}")
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])


def _advise_other(path: Path) -> str:
    damaged = pointer.step_of(path.name)
    steps = [step for step in pointer.steps(path.parent) if step != damaged]
    return ": resume from another checkpoint" + (
        f" ({pointer.format_steps(steps)})" if steps else ""
    )


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, subset: bool) -> list[str]:
    """Returns one phrase per array that differs; different shapes and dtypes first."""
    in_run = {name: f"{array.dtype} {list(array.shape)}" for name, array in wanted.items()}
    in_checkpoint = {name: f"{array.dtype} {list(array.shape)}" for name, array in saved.items()}
    phrases = [
        f"{name} is {in_checkpoint[name]} in the checkpoint and {in_run[name]} in this run"
        for name in in_run
        if name in in_checkpoint and in_run[name] != in_checkpoint[name]
    ]
    phrases += [
        f"{name} {in_run[name]} is not in the checkpoint"
        for name in in_run
        if name not in in_checkpoint
    ]
    if not subset:
        phrases += [
            f"{name} {in_checkpoint[name]} is only in the checkpoint"
            for name in in_checkpoint
            if name not in in_run
        ]
    return phrases
