"""Runs jaxtrain's training step like the training loop, for the comparisons."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.sharding import batch_sharding, make_mesh
from jaxtrain.training import step_setup


def on_one_device(run: config.Run) -> config.Run:
    """Returns the run on one device with a constant learning rate and without accumulation."""
    return dataclasses.replace(
        run,
        mesh=dataclasses.replace(run.mesh, data=1, fsdp=1),
        optim=dataclasses.replace(
            run.optim, schedule="constant", warmup_steps=0, warmup_fraction=None, accumulate=1
        ),
        loop=dataclasses.replace(run.loop, steps=10**6, epochs=None, tokens_per_param=None),
    )


class Training:
    """A config's compiled step and its state."""

    def __init__(self, run: config.Run) -> None:
        self._built = step_setup.build_step_setup(run, make_mesh(run.mesh), 1, lambda line: None)
        self._state = self._built.fresh_state()
        self._step = self._built.compile_step()
        self._done = 0

    def params(self) -> dict[str, np.ndarray]:
        """Returns the parameters by name."""
        return {name: np.asarray(array) for name, array in self._state.params.items()}

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Copies a batch to the device."""
        return jax.device_put(dict(batch), batch_sharding(self._built.rule.mesh))

    def step(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Runs one step; returns the loss before it, still on the device."""
        scalars = self._built.schedule.scalars(self._done)
        self._state, metrics = self._step(self._state, batch, scalars)
        self._done += 1
        return metrics["loss"]

    def finish(self) -> None:
        """Waits until all steps are done."""
        jax.block_until_ready(self._state.step)

    def losses(self, batches: Sequence[Mapping[str, Any]]) -> list[float]:
        """Trains on the batches in order; returns the loss of each before its step."""
        return [float(self.step(self.place(batch))) for batch in batches]
