"""Computes every Nth step twice, compares the results bit by bit, and names a wrong device.

With ``loop.replay_every N``, such a step has a program of its own: the training step, and checksums
of each device's part of the activations, of the gradients, and of the new state. Activations are
checksummed before gradients are summed over the devices, after which a wrong value of one device is
a part of every result. The first checksum that differs names the device.

State that every device stores, such as biases, is also compared across the devices. A bit that
flips between two such steps in an array that is stored once has no second copy to compare with: it
is not found.
"""

import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint import layout, resume
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.sharding import AXES
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.disks import disk_trouble, reason
from jaxtrain.training.mirror import Mirror

# Operations after which activations are checksummed. Any wrong value before one of these changes
# its result, and a checksum after each operation would prevent fusions.
_TAPPED = (
    *("dot_general", "conv_general_dilated", "scan", "while", "cond", "jit", "remat"),
    *("checkpoint", "custom_jvp_call", "custom_vjp_call", "shard_map"),
)


class Probe:
    """Computes checksums of intermediate values, for each device, while a step is traced.

    Args:
        mesh: over all devices.

    Attributes:
        names: of the checksums that :meth:`function` computes, in order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.names: list[str] = []

    def function(self, function: Callable[[Any], Any], argument: Any, rows: int) -> tuple[Any, Any]:
        """Calls a function; checksums the results of its operations that are split by example.

        Args:
            function: traceable; its operations are evaluated one by one.
            argument: of the function.
            rows: global number of examples: an array with so many rows is split over the devices.

        Returns:
            The result, and checksums, uint32 [operations, devices].
        """
        closed, shape = jax.make_jaxpr(function, return_shape=True)(argument)
        split = PartitionSpec(AXES)
        self.names = []
        found: list[jax.Array] = []

        def tap(equation: Any, values: list[Any]) -> list[Any]:
            if not equation.primitive.name.startswith(_TAPPED):
                return values
            constant = constants_of(equation)
            for index, value in enumerate(values):
                floats = jnp.issubdtype(value.dtype, jnp.floating)
                if floats and value.shape[:1] == (rows,) and index not in constant:
                    values[index] = self.seen("activations", value, split)
                    found.append(checksums(values[index], self.mesh, split))
                    self.names.append(f"activations ({equation.primitive.name})")
            return values

        leaves = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(argument), tap)
        nothing = jnp.zeros((0, self.mesh.size), jnp.uint32)
        return (
            jax.tree.unflatten(jax.tree.structure(shape), leaves),
            jnp.stack(found) if found else nothing,
        )

    def arrays(self, what: str, arrays: Any, shardings: Any) -> tuple[Any, jax.Array]:
        """Checksums sharded arrays; returns them, and uint32 [arrays, devices]."""
        leaves, structure = jax.tree.flatten(arrays)
        specs = [one.spec for one in jax.tree.leaves(shardings)]
        leaves = [self.seen(what, leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        rows = [checksums(leaf, self.mesh, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(structure, leaves), jnp.stack(rows)

    def seen(self, what: str, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns a value that is about to be checksummed; tests plant wrong bits here."""
        del what, spec
        return value


def evaluate(
    jaxpr: Any,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    tap: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Evaluates a jaxpr; each equation's results pass through ``tap(equation, results)``."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = tap(equation, bind(equation, [read(atom) for atom in equation.invars]))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of a jaxpr."""
    how = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **how)
    return list(results) if equation.primitive.multiple_results else [results]


def constants_of(equation: Any) -> set[int]:
    """Returns the indices of the results of a ``jit`` that do not depend on variables.

    XLA computes checksums of constants when it compiles. With them, the step of ``demo_mlm`` with
    64 sequences of 256 tokens did not compile in 280 s on a busy CPU; without, in 9.5 s of CPU.
    """
    if equation.primitive.name != "jit":
        return set()
    inner = equation.params["jaxpr"].jaxpr

    def variables(atoms: Sequence[Any]) -> set[Any]:
        return {atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)}

    given = zip(inner.invars, equation.invars, strict=True)
    varies = {one for one, outer in given if variables([outer])}
    for one in inner.eqns:
        if varies & variables(one.invars):
            varies.update(one.outvars)
    return {index for index, one in enumerate(inner.outvars) if not varies & variables([one])}


def checksums(array: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Returns a checksum of the bits of each device's part of an array, uint32 [devices].

    A single flipped bit always changes it: 2^b times an odd number is not 0 modulo 2^32.
    """

    def local(part: jax.Array) -> jax.Array:
        if part.dtype == jnp.bool:
            part = part.astype(jnp.uint8)
        flat = part.reshape(-1)
        bits = jax.lax.bitcast_convert_type(flat, jnp.dtype(f"uint{8 * flat.dtype.itemsize}"))
        weights = 2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1
        return jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32, keepdims=True)

    each = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(AXES), check_vma=False
    )
    return each(array)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between the two results of a step, or between copies of an array.

    Attributes:
        what: the values that differ first, in the order of the computation.
        devices: indices in the mesh, in row-major order; empty if all devices are affected alike.
    """

    what: str
    devices: tuple[int, ...]


def compare(
    first: np.ndarray,
    second: np.ndarray,
    names: Sequence[str],
    copies: Mapping[int, Sequence[Sequence[int]]],
) -> Difference | None:
    """Compares the checksums of two computations, and those of the copies of an array.

    Args:
        first: uint32 [values, devices], in the order of the computation.
        second: likewise.
        names: of the values.
        copies: index of a value -> groups of devices that have the same part of it.

    Returns:
        The difference; None if there is none.
    """
    for row, (one, other) in enumerate(zip(first, second, strict=True)):
        wrong = np.flatnonzero(one != other)
        if len(wrong):
            everywhere = len(wrong) == len(one) > 1
            return Difference(names[row], () if everywhere else tuple(wrong.tolist()))
    for row, groups in copies.items():
        for group in groups:
            held = second[row][list(group)]
            values, counts = np.unique(held, return_counts=True)
            if len(values) > 1:
                most = values[counts.argmax()]
                majority = counts.max() * 2 > len(group)
                odd = tuple(d for d, v in zip(group, held, strict=True) if v != most)
                return Difference(f"copies of {names[row]}", odd if majority else tuple(group))
    return None


def copies_of(sharding: NamedSharding, shape: tuple[int, ...]) -> list[list[int]]:
    """Returns groups of devices, by index in the mesh, that have the same part of an array."""
    held = sharding.devices_indices_map(shape)
    groups: dict[str, list[int]] = {}
    for index, device in enumerate(sharding.mesh.devices.flat):
        groups.setdefault(str(held[device]), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


class Replay:
    """Runs a step twice, and certifies the run up to this step.

    Args:
        step: compiled; (state, batch) -> (state, metrics, checksums). It keeps its arguments.
        names: of the checksums.
        copies: see :func:`compare`.
        devices: a description of each device, in the order of the mesh.
        directory: of the run.
        done: completed steps at the start. The state there counts as right, unless an earlier
            start with a check has certified fewer steps.
        settle: waits until a save in the background is complete.
        say: prints a line.
        mirror: of the run directory in a bucket, if any.

    Raises:
        InputError, RunAgain: the certified step cannot be read or recorded.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        names: Sequence[str],
        copies: Mapping[int, Sequence[Sequence[int]]],
        devices: Sequence[str],
        directory: Path,
        done: int,
        settle: Callable[[], object],
        say: Callable[[str], None],
        mirror: Mirror | None = None,
    ) -> None:
        self._step = step
        self._names, self._copies, self._devices = names, copies, devices
        self._directory = directory
        self._settle, self._say, self._mirror = settle, say, mirror
        # Only process 0 decides by these files and checkpoints, also if others have their own.
        self._has_another_disk = jax.process_index() > 0 and mirror is not None and mirror.own_disk
        self._certified = int(process_group.process_zero_decides(lambda: str(self._begin(done))))
        if self._has_another_disk:
            self._record_or_warn()

    def __call__(self, done: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Computes the step after ``done`` completed ones; returns the state and the metrics.

        Raises:
            RunAgain: in all processes; the two results differ, and no later checkpoint than the
                newest certified one is left.
            InputError: likewise, but one is left that cannot be moved, so that no launcher may
                resume.
        """
        first = np.asarray(self._step(state, batch)[2])  # its state is freed before the second one
        following, metrics, second = self._step(state, batch)
        difference = compare(first, np.asarray(second), self._names, self._copies)
        if difference is not None:
            self._reject(done + 1, difference)
        self._certified = done + 1
        if jax.process_index() == 0 or self._has_another_disk:
            self._record_or_warn()
        return following, metrics

    def rewound(self, back_to: Position) -> None:
        """The run continues from an earlier checkpoint.

        Raises:
            InputError, RunAgain: in all processes; that cannot be recorded.
        """
        self._certified = min(self._certified, back_to.done)
        process_group.process_zero_decides(self._recorded)
        if self._has_another_disk:
            self._record_or_warn()

    def _begin(self, done: int) -> int:
        """Returns the certified step at the start, and records it, in process 0."""
        try:
            recorded = layout.certified_step(self._directory)
        except OSError as error:
            raise _trouble(error, self._directory, "read") from error
        self._certified = done if recorded is None else min(done, recorded)
        self._recorded()
        return self._certified

    def _recorded(self) -> str:
        try:
            self._record()
        except OSError as error:
            raise _trouble(error, self._directory, "written") from error
        return ""

    def _record_or_warn(self) -> None:
        try:
            self._record()
        except OSError as error:  # an earlier step stays recorded
            path = self._directory / layout.CERTIFIED
            self._say(f"warning: {path} cannot be written ({reason(error)})")

    def _record(self) -> None:
        write_whole(self._directory / layout.CERTIFIED, f"{self._certified}\n")

    def _reject(self, step: int, difference: Difference) -> NoReturn:
        where, again = "all devices alike, so the device is unknown", ""
        if difference.devices:
            where = ", ".join(self._devices[index] for index in difference.devices)
            one = "this device" if len(difference.devices) == 1 else "one of these devices"
            again = (
                f"; if {one} is named again, replace it or check it with its vendor's diagnostics"
            )
        wrong = (
            f"step {step} was computed twice with different results: {difference.what} on {where}"
        )
        self._settle()
        if self._has_another_disk:
            self._move(wrong)
        moved = process_group.process_zero_decides(lambda: self._set_aside(wrong))
        raise RunAgain(f"{wrong}; the state is discarded{moved}{again}")

    def _set_aside(self, wrong: str) -> str:
        """Moves the checkpoints after the last certified step; returns how to resume."""
        there, later = self._move(wrong)
        stuck = [str(path) for path in later if path.exists()]
        if self._mirror is not None and (problem := self._mirror.set_aside_after(self._certified)):
            stuck.append(f"a checkpoint in {self._mirror.url} ({problem})")
        if stuck:
            raise InputError(
                f"{wrong}; {stuck[0]} cannot be moved to {layout.UNCERTIFIED}/: delete the "
                f"checkpoints after step {self._certified}, which may be wrong, before you resume"
            )
        moved = f", checkpoints after step {self._certified} are in {layout.UNCERTIFIED}/"
        last = f"step {self._certified}, the last certified one"
        if later and len(later) == len(there):
            return f"{moved}: there is none up to {last}, so start again with another --output-dir"
        uses = f"uses the newest checkpoint up to {last}" if there else "starts from scratch"
        return f"{moved if later else ''}: resume with --resume latest, which {uses}"

    def _move(self, wrong: str) -> tuple[list[Path], list[Path]]:
        """Moves later checkpoints on disk; returns all, and those to move, where they were."""
        there = [
            (step, self._directory / folder / str(step))
            for folder in (layout.CHECKPOINTS, layout.BEST)
            for step in layout.numbered(self._directory / folder)
        ]
        later = [path for step, path in there if step > self._certified]
        for path in later:
            resume.set_aside(path, wrong, self._say, to=layout.UNCERTIFIED)
        return [path for _, path in there], later


def forget(directory: Path) -> None:
    """Empties the record of certified steps; all processes of a run without checks must call this.

    Otherwise a later start with checks would not trust the steps since then, and retention would
    keep an old checkpoint. The file stays, so that its copy in a bucket changes, too.

    Args:
        directory: of the run.

    Raises:
        InputError, RunAgain: in all processes; it cannot be emptied.
    """

    def empty() -> str:
        try:
            if layout.certified_step(directory) is not None:
                write_whole(directory / layout.CERTIFIED, "")
        except OSError as error:
            raise _trouble(error, directory, "written") from error
        return ""

    process_group.process_zero_decides(empty)


def _trouble(error: OSError, directory: Path, how: str) -> InputError | RunAgain:
    path = directory / layout.CERTIFIED
    return disk_trouble(error, f"{path} cannot be {how}", "make its folder writable")


def described(mesh: Mesh) -> list[str]:
    """Returns a name of each device with its host, in the order of the mesh; all must call it."""
    hosts = process_group.gather("host of the devices", socket.gethostname())
    return [
        f"device {one.id} ({one.device_kind}) of process {one.process_index} on host "
        f"{hosts[one.process_index]}"
        for one in mesh.devices.flat
    ]


def rows_of(
    probe: Probe, step_shape: Any, target: Any, rows: int
) -> tuple[list[str], dict[int, list[list[int]]]]:
    """Returns the names of a step's checksums, and the copies among them.

    Args:
        probe: after the step was traced.
        step_shape: the shapes of the step's metrics.
        target: shapes and shardings of the state.
        rows: number of checksums.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(target)
    ]
    state = [f"the new {name}" for name, _ in leaves]
    metrics = [f"the metric {name}" for name in sorted(step_shape)]
    gradients = ["gradients"]
    tail = [*gradients, *state, *metrics]
    within = rows - len(tail)
    per = max(1, len(probe.names))
    names = [probe.names[row % per] for row in range(within)] + tail
    begin = within + len(gradients)
    copies = {
        begin + index: copies_of(leaf.sharding, leaf.shape)
        for index, (_, leaf) in enumerate(leaves)
    }
    return names, {row: groups for row, groups in copies.items() if groups}
