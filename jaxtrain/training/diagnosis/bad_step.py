"""Keeps the first bad step of a run that bad steps end, and opens it again for ``find-nan``.

A bad step changes neither parameters nor optimizer. So at the end of such a run, the state is the
one before the first of the bad steps in a row, except for the number of examples seen and of bad
steps. It is saved with the batch as a checkpoint in ``aside/``, from which no resume starts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config
from jaxtrain.checkpoint import pointer, same_run
from jaxtrain.checkpoint.restore import restore
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.config import mesh_fit, overrides, record
from jaxtrain.config.run_length import Position
from jaxtrain.data import text, video  # noqa: F401  defines the configs of data
from jaxtrain.data.contract import DataConfig
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.models import from_file
from jaxtrain.models.contract import Batch
from jaxtrain.sharding import batch_sharding, make_mesh
from jaxtrain.training.diagnosis import nan_origin
from jaxtrain.training.first_state import weights_from_files
from jaxtrain.training.save_policy import RunMeta
from jaxtrain.training.state import State, checksums, with_values
from jaxtrain.training.step import build_gradients
from jaxtrain.training.step_setup import StepSetup, build_without_data


class KeptStep(NamedTuple):
    """A step whose loss or gradient is NaN/Inf.

    Attributes:
        in_a_row: number of bad steps directly before it.
    """

    position: Position
    in_a_row: int
    batch: Batch
    ids: Sequence[int]
    description: str


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Saves a bad step."""

    checkpoints: CheckpointSaver
    meta: RunMeta
    target: State
    batches: jax.sharding.Sharding
    command: str
    await_save: Callable[[], object]
    finish: Callable[[], object]
    say: Callable[[str], None]

    def __call__(self, kept: KeptStep, state: State) -> str:
        """Saves a bad step; returns the command that examines it, or "" if it cannot be saved.

        Args:
            state: before it, or after it and any number of bad steps.
        """
        placed = functools.partial(
            jnp.asarray, dtype=jnp.uint32, device=state.examples_seen.sharding
        )
        before = dataclasses.replace(
            state,
            examples_seen=placed(kept.position.examples_seen),
            skip_step=state.skip_step | {"bad_in_a_row": placed(kept.in_a_row)},
            extras={name: state.extras[name] for name in self.target.extras},
        )
        rows = jax.tree.leaves(kept.batch)[0].shape[:1]
        ids = np.asarray(kept.ids, np.uint32)
        ids_B = jax.make_array_from_process_local_data(self.batches, ids, rows)
        meta = self.meta.to_dict() | kept.position.to_meta() | {"bad_step": kept.description}
        self.await_save()
        try:
            arrays = {"batch": kept.batch, "ids": ids_B}
            self.checkpoints.save(before, meta, (pointer.BAD_STEP,), arrays)
            self.checkpoints.wait()
            self.finish()
        except RunAgain as error:
            self.say(f"warning: the bad step is not saved for find-nan: {error}")
            return ""
        return self.command


@dataclasses.dataclass(frozen=True)
class Opened:
    """A saved bad step, and the parts of the step that recompute it."""

    path: Path
    meta: Mapping[str, Any]
    setup: StepSetup

    @classmethod
    def at(cls, path: Path) -> "Opened":
        """Opens a saved bad step for as many devices of this machine as divide its batch."""
        meta = pointer.read_meta(path)
        run = _run_of(meta, str(path))
        devices = jax.devices()
        rows = run.data.batch_size
        count = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
        if count != run.mesh.devices:
            run = overrides.replaced(run, mesh_fit.fit_mesh(run, 1, count, "find-nan"))
        return cls(path, meta, build_without_data(run, make_mesh(run.mesh, devices[:count])))

    def examine(self) -> tuple[nan_origin.Origin, Sequence[int]]:
        """Returns where the NaN/Inf begins, and the ids of the examples that compute it alone."""
        setup, run = self.setup, self.setup.run
        weights = weights_from_files(setup)
        same_run.check_file_weights(str(self.path), self.meta["file_weights"], checksums(weights))
        saved, placed = setup.saved, batch_sharding(setup.rule.mesh)
        target: dict[str, Any] = {"params": saved.params, "extras": saved.extras}
        target |= {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)
            for name, array in pointer.read_shapes(self.path).items()
            if name == "ids" or name.startswith("batch.")
        }
        read = restore(self.path, target, subset=True)
        batch = {
            name.removeprefix("batch."): array
            for name, array in read.items()
            if name.startswith("batch.")
        }
        steps = np.full(run.data.batch_size, self.meta["step"], np.uint32)
        with_step = batch | {"step": jax.device_put(steps, placed)}
        before = dataclasses.replace(setup.target, params=read["params"], extras=read["extras"])
        before = self._completed(before, weights)
        gradients = build_gradients(
            setup.definition,
            setup.rule,
            precision=run.precision,
            accumulate=run.optim.accumulate,
            seed=run.seed,
            receive=run.received,
        )
        origin = nan_origin.examine(
            gradients,
            setup.rule.mesh,
            before.params,
            before.extras,
            with_step,
            self.meta["examples_seen"],
        )
        if not origin.is_reproduced:  # the rest of the state is needed only for this
            before = self._completed(restore(self.path, saved, subset=True), weights)
            step = setup.compile_step(donate=False)
            scalars = setup.schedule.scalars(int(before.step))
            if of_update := nan_origin.of_update(step, before, batch, scalars):
                origin = nan_origin.Origin(of_update)
        return origin, np.asarray(read["ids"])[list(origin.rows)].tolist()

    def _completed(self, state: State, weights: Mapping[str, np.ndarray]) -> State:
        extras = self.setup.target.extras | state.extras
        return with_values(dataclasses.replace(state, extras=extras), {}, weights)


def _run_of(meta: Mapping[str, Any], source: str) -> config.Run:
    """Builds the config that a checkpoint has recorded; neither data nor devices are needed."""
    saved = meta["config"]
    model = from_file.model_config(saved["model"], source, meta["model_file"])
    kinds = {record.short_name(kind): kind for kind in from_file.below(DataConfig)}
    if (name := saved["data"]["class"]) not in kinds:
        raise InputError(
            f"{source}: its data {name} are not part of jaxtrain: pass the config that it was "
            "trained with, --config FILE.py"
        )
    data = record.section(kinds[name], saved["data"], source, "data")
    return record.section(config.Run, saved | {"model": model, "data": data}, source, "run")
