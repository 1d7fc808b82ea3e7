"""Computes every Nth step twice and compares the results bit by bit (``loop.replay_every``).

A device that computes wrong numbers without an error is noticed if the two results differ. What a
wrong value did before it was summed over the devices cannot be told from its result, so the message
names a device only if one alone differs.
"""

import socket
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint.pointer import SUSPECT
from jaxtrain.checkpoint.restore import named
from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.disks import reason
from jaxtrain.training import run_progress
from jaxtrain.training.mirror import Mirror
from jaxtrain.training.run_progress import RunProgress

_SHOWN = 3  # arrays in a message


class Replay:
    """Runs a step twice; the checkpoints since the last equal results are suspect if they differ.

    Args:
        step: compiled without donation; (state, batch) -> (state, metrics).
        checkpoints: of the run.
        progress: of the run; its ``agreed`` is the last step whose results were equal.
        done: completed steps at the start. The state there counts as right, unless an earlier
            start was sure of fewer steps.
        settle: waits until a save in the background is complete.
        say: prints a line.
        mirror: of the run directory in a bucket, if any.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        checkpoints: Checkpoints,
        progress: RunProgress,
        done: int,
        settle: Callable[[], object],
        say: Callable[[str], None],
        mirror: Mirror | None = None,
    ) -> None:
        self._step = step
        self._checkpoints, self._progress = checkpoints, progress
        self._settle, self._say, self._mirror = settle, say, mirror
        self._agreed = done if progress.agreed is None else min(done, progress.agreed)
        self._record()

    def __call__(self, done: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Computes the step after ``done`` completed ones; returns the state and the metrics.

        Raises:
            RunAgain: in all processes; the two results differ.
            InputError: likewise, but a checkpoint that may be wrong cannot be moved, so that no
                launcher may resume.
        """
        first = self._step(state, batch)
        second = self._step(state, batch)
        different = differences(first, second)
        for array in jax.tree.leaves(second):
            array.delete()
        hosts = process_group.gather("replay", different and f"{different} ({_host()})")
        if any(hosts):
            self._reject(done + 1, "; ".join(filter(None, hosts)))
        self._agreed = done + 1
        self._record()
        return first

    def rewound(self, back_to: Position) -> None:
        """The run continues from an earlier checkpoint."""
        self._agreed = min(self._agreed, back_to.done)
        self._record()

    def _record(self) -> None:
        self._checkpoints.agreed = self._progress.agreed = self._agreed
        try:
            self._progress.write()
        except OSError as error:  # an earlier step stays recorded
            self._say(f"warning: {run_progress.NAME} cannot be written ({reason(error)})")

    def _reject(self, step: int, different: str) -> NoReturn:
        why = f"step {step} was computed twice with different results: {different}"
        self._settle()
        moved = process_group.process_zero_decides(lambda: self._set_aside(why))
        raise RunAgain(
            f"{why}; the state is discarded{moved}; if the same device is named again, replace it "
            "or check it with its vendor's diagnostics"
        )

    def _set_aside(self, why: str) -> str:
        """Moves the checkpoints since the last agreement, on disk and in the bucket; process 0."""
        problem = ""
        try:
            self._checkpoints.suspect_after(self._agreed, why)
        except OSError as error:
            problem = reason(error)
        if self._mirror is not None:
            problem = self._mirror.suspect_after(self._agreed, why) or problem
        if problem:
            raise InputError(
                f"{why}; a checkpoint after step {self._agreed}, the last one computed twice with "
                f"equal results, cannot be moved to {SUSPECT}/ ({problem}): delete the checkpoints "
                "after that step before you resume"
            )
        return (
            f", and the checkpoints after step {self._agreed}, the last one computed twice with "
            f"equal results, are in {SUSPECT}/: resume with --resume latest"
        )


def differences(first: Any, second: Any) -> str:
    """Returns which arrays of two results differ in a bit on which device; "" if none does.

    Each device compares its own shards, and only its answers are transferred.

    Args:
        first: pytree of arrays.
        second: another one of the same structure, shapes, and shardings.
    """
    names = list(named(first))
    by_device: dict[Any, list[tuple[int, jax.Array, jax.Array]]] = {}
    for number, (one, other) in enumerate(
        zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    ):
        for shard, copy in zip(one.addressable_shards, other.addressable_shards, strict=True):
            by_device.setdefault(shard.device, []).append((number, shard.data, copy.data))
    found = []
    for device, parts in by_device.items():
        numbers, ones, others = zip(*parts, strict=True)
        differ = np.flatnonzero(np.asarray(_differ(ones, others)))
        if differ.size:
            arrays = [names[numbers[index]] for index in differ]
            more = f" and {len(arrays) - _SHOWN} more" if len(arrays) > _SHOWN else ""
            found.append((device, ", ".join(arrays[:_SHOWN]) + more))
    if len(found) == 1 and len(by_device) > 1:
        return f"{found[0][1]} on device {found[0][0].id} ({found[0][0].device_kind})"
    return f"{found[0][1]} on {len(found)} devices" if found else ""


@jax.jit
def _differ(ones: tuple[jax.Array, ...], others: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([jnp.any(_bits(a) != _bits(b)) for a, b in zip(ones, others, strict=True)])


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def _host() -> str:
    return f"process {jax.process_index()} on host {socket.gethostname()}"
