"""Reading a checkpoint's arrays straight to where they belong."""

import contextlib
import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.layout import (
    STATE,
    listed,
    read_shapes,
    steps,
)
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.disks import cure_of, disk_trouble, reason

_ARRAYS_TO_NAME = 4
# Orbax compresses with zstd. The moments of a fresh optimizer are zeros and take nothing, but the
# parameters are random, and take their size. What claims far more than its files was forged, and
# would only fill the memory.
_MOST_COMPRESSION = 64
_MOST_UNSTORED_BYTES = 2**26


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


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and dtype of each array, as JSON."""
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }


def restore(
    path: Path, abstract_state: Any, *, subset: bool = False, verified: bool = False
) -> Any:
    """Reads a checkpoint straight into the target shardings, whatever wrote it.

    Each process reads only what its devices hold.

    Args:
        path: of the checkpoint.
        abstract_state: pytree of ``jax.ShapeDtypeStruct``, each with its target sharding.
        subset: allow the checkpoint to hold more arrays than asked for (they are not read), as for
            parameters without an optimizer.
        verified: process 0 has just verified it, as :func:`jaxtrain.checkpoint.resume.choose` does.
            Otherwise each process does that first.

    Raises:
        InputError: the arrays differ in name, shape or dtype (found before anything is loaded), or
            the files are damaged.
        RunAgain: their disk does not answer.
    """
    import orbax.checkpoint as ocp  # takes a second: not for those who only look

    from jaxtrain.checkpoint.orbax_compat import quiet_orbax

    try:
        wrong = "" if verified else manifest.verify(path)
    except OSError as error:
        raise disk_trouble(error, f"{error.filename} cannot be read", "make it readable") from error
    if wrong:
        raise InputError(f"{path} is damaged ({wrong}){_beside(path)}")
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
    claimed = _check_size(path, wanted)
    quiet_orbax()
    failure = ""
    try:
        # A chunk of a forged array can be larger than the array; Orbax's own limit is 96 GB.
        most_gb = 1 + 2 * claimed // 10**9
        handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=min(96, most_gb))
        with contextlib.closing(ocp.Checkpointer(handler)) as reader:
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
        cure = cure_of(failure)
        if cure:  # as of one host whose network disk is away
            raise RunAgain(f"{path} cannot be read ({failure}): {cure}")
        raise InputError(f"{path} cannot be read ({failure}){_beside(path)}")
    for name, target in wanted.items():  # Orbax's own metadata can call an array something else
        array = arrays.get(name)
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (
            target.shape,
            target.dtype,
        ):
            raise InputError(
                f"{path} was not written by jaxtrain: what it holds as {name!a} is not the array "
                f"that its metadata describes{_beside(path)}"
            )
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])


def _check_size(path: Path, wanted: Mapping[str, Any]) -> int:
    """Refuses arrays that cannot be in the files, before memory is taken for them.

    Returns:
        Bytes of the arrays.

    Raises:
        InputError: says both sizes.
    """
    claimed = sum(math.prod(array.shape) * array.dtype.itemsize for array in wanted.values())
    try:
        stored = manifest.read(path).size()
    except manifest.Unusable as why:
        raise InputError(f"{path} is damaged ({why}){_beside(path)}") from None
    except OSError as error:
        raise disk_trouble(error, f"{path} cannot be read", "make it readable") from error
    if claimed > _MOST_COMPRESSION * stored + _MOST_UNSTORED_BYTES:
        raise InputError(
            f"{path} was not written by jaxtrain: its arrays would have {claimed:,} bytes, and its "
            f"files have {stored:,}"
        )
    return int(claimed)


def _beside(path: Path) -> str:
    others = [step for step in steps(path.parent) if str(step) != path.name]
    return ": resume from another one" + (f", beside it are {listed(others)}" if others else "")


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
