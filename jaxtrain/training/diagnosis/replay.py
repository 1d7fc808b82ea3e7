"""Computes every Nth step twice, and compares the results bit by bit on each device.

With ``loop.replay_every N``, the compiled step computes such a step from a copy of the state, and
then from the state itself: a device needs the memory for a second state, and no other program. A
value that is wrong before the gradients are summed and their norm is taken is a part of the results
of all devices, so it is unknown which device is wrong. If only the results of one device differ, it
is named. A state that is wrong before both is not found.
"""

import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.checkpoint.pointer import ASIDE
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.checkpoint.uploader import Uploader
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.models.contract import Batch
from jaxtrain.optim.schedule import Scalars
from jaxtrain.sharding import AXES, replicated
from jaxtrain.storage.disks import reason
from jaxtrain.training.run_progress import NAME, RunProgress
from jaxtrain.training.state import State
from jaxtrain.training.step import Metrics, TrainStep


class Difference(NamedTuple):
    """A difference between the two results of a step.

    Attributes:
        arrays: the first array that differs, and the number of the other ones.
        devices: on which any array differs: indices in the mesh, in row-major order.
    """

    arrays: str
    devices: tuple[int, ...]


def twice(
    step: TrainStep, state: State, batch: Batch, scalars: Scalars
) -> tuple[State, Metrics, Difference | None]:
    """Computes a step twice; returns the second result, and how the first one differs from it.

    Args:
        step: compiled; may donate the state.
    """
    shardings = jax.tree.map(lambda array: array.sharding, state)
    first = step(jax.device_put(state, shardings, may_alias=False), batch, scalars)
    second = step(state, batch, scalars)
    named = [dict(zip(("state", "metrics"), pair, strict=True)) for pair in (first, second)]
    return *second, compare(*named)


def compare(first: Any, second: Any) -> Difference | None:
    """Compares all arrays of two trees on the devices; returns None if no bit differs."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(first), strict=True)
    mesh, specs = leaves[0].sharding.mesh, tuple(leaf.sharding.spec for leaf in leaves)
    differs = np.asarray(_differs(mesh, specs, leaves, jax.tree.leaves(second)))
    rows, devices = np.flatnonzero(differs.any(1)), np.flatnonzero(differs.any(0))
    if not len(rows):
        return None
    name = jax.tree_util.keystr(paths[rows[0]], simple=True, separator=".")
    others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return Difference(f"{name}{others}", tuple(devices.tolist()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _differs(
    mesh: Mesh,
    specs: Sequence[PartitionSpec],
    first: Sequence[jax.Array],
    second: Sequence[jax.Array],
) -> jax.Array:
    """Returns whether each device's part of each array differs in a bit: bool [arrays, devices].

    The program reads one pair of arrays after the other, and stores at most one array more.
    """

    def local(first_array: jax.Array, other: jax.Array) -> jax.Array:
        return (_bits(first_array) != _bits(other)).any().reshape(1)

    each = [
        jax.shard_map(
            local, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec(AXES), check_vma=False
        )(first_array, other)
        for spec, first_array, other in zip(specs, first, second, strict=True)
    ]
    return jax.lax.with_sharding_constraint(jnp.stack(each), replicated(mesh))


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


class Replay:
    """Runs a step twice; the checkpoints since the last equal results are suspect if they differ.

    Args:
        devices: a description of each device, in the order of the mesh.
        run_progress: of the run; its ``last_equal`` is the last step whose results were equal.
        completed_steps: at the start. The state there counts as right, unless an earlier
            start was sure of fewer steps.
    """

    def __init__(
        self,
        step: TrainStep,
        devices: Sequence[str],
        checkpoints: CheckpointSaver,
        run_progress: RunProgress,
        completed_steps: int,
        await_save: Callable[[], object],
        say: Callable[[str], None],
        uploader: Uploader | None = None,
    ) -> None:
        self._step, self._devices = step, devices
        self._checkpoints, self._run_progress = checkpoints, run_progress
        self._await_save, self._say, self._uploader = await_save, say, uploader
        self._last_equal = (
            completed_steps
            if run_progress.last_equal is None
            else min(completed_steps, run_progress.last_equal)
        )
        self._record()

    def __call__(
        self, completed_steps: int, state: State, batch: Batch, scalars: Scalars
    ) -> tuple[State, Metrics]:
        """Computes the step after ``completed_steps``; returns the state and the metrics.

        Raises:
            RunAgain: in all processes; the two results differ.
            InputError: likewise, but a checkpoint that may be wrong cannot be moved, so that no
                launcher may resume.
        """
        following, metrics, difference = twice(self._step, state, batch, scalars)
        if difference is not None:
            self._reject(completed_steps + 1, difference)
        self._last_equal = int(following.step)  # not one more if the step was bad
        self._record()
        return following, metrics

    def rewound(self, back_to: Position) -> None:
        """The run continues from an earlier checkpoint."""
        self._last_equal = min(self._last_equal, back_to.step)
        self._record()

    def _record(self) -> None:
        self._checkpoints.last_equal = self._run_progress.last_equal = self._last_equal
        try:
            self._run_progress.write()
        except OSError as error:  # an earlier step stays recorded
            self._say(f"warning: {NAME} cannot be written ({reason(error)})")

    def _reject(self, step: int, difference: Difference) -> NoReturn:
        count, again = len(difference.devices), ""
        location = f"{count} devices, so it is unknown which one is wrong"
        if count == 1:
            location = self._devices[difference.devices[0]]
            again = (
                "; if this device is named again, replace it or check it with its vendor's "
                "diagnostics"
            )
        why = (
            f"step {step} was computed twice with different results: {difference.arrays} on "
            f"{location}"
        )
        self._await_save()
        moved = process_group.process_zero_decides(lambda: self._set_aside(why))
        raise RunAgain(f"{why}; the state is discarded{moved}{again}")

    def _set_aside(self, why: str) -> str:
        problem = ""
        try:
            self._checkpoints.suspect_after(self._last_equal, why)
        except OSError as error:
            problem = reason(error)
        if self._uploader is not None:
            problem = self._uploader.suspect_after(self._last_equal, why) or problem
        if problem:
            raise InputError(
                f"{why}; a checkpoint after step {self._last_equal}, the last one computed twice "
                f"with equal results, cannot be moved to {ASIDE}/ ({problem}): delete the "
                "checkpoints after that step before you resume"
            )
        return (
            f", and the checkpoints after step {self._last_equal}, the last one computed twice "
            f"with equal results, are in {ASIDE}/: resume with --resume latest"
        )


def described(mesh: Mesh) -> list[str]:
    """Returns a name of each device with its host, in the order of the mesh; all must call it."""
    hosts = process_group.gather("host of the devices", socket.gethostname())
    return [
        f"device {device.id} ({device.device_kind}) of process {device.process_index} on host "
        f"{hosts[device.process_index]}"
        for device in mesh.devices.flat
    ]
