"""Loads a trained model for a command that uses it: its config, its module, and its parameters.

A model's ``task`` decides which commands can use it (:mod:`jaxtrain.models.contract`).
"""

import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import terminal
from jaxtrain.config import invocation
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.interop import weights
from jaxtrain.models import from_file
from jaxtrain.models.contract import Task
from jaxtrain.storage import cache
from jaxtrain.training import state
from jaxtrain.xla import options


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model.

    If the run averages its parameters, these are the average, which validation uses.

    Attributes:
        config: config of the model, without the parts that only training needs.
        definition: the module without its arrays.
        params: dotted path -> float32 array on the host.
    """

    config: Any
    source: str
    definition: state.ModelDefinition
    params: Mapping[str, np.ndarray]

    def on_device(self, precision: str, device: jax.Device | None = None) -> state.Arrays:
        """Returns the parameters on a device.

        Args:
            device: None for the first.
        """
        with jax.default_device(device):
            return {
                name: jnp.asarray(array, jnp.dtype(precision))
                for name, array in self.params.items()
            }


def load(source: Path, command: str, task: Task) -> TrainedModel:
    """Loads a trained model for a task, and enables the compilation cache.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, else its newest), a transformers
            folder, or a weights file. One without a model config is taken for TAEHV's.
    """
    process_group.check_accelerator(os.environ)
    use_cache()

    def check(model: Any) -> None:
        if model.task != task:
            raise cannot(model, command, task, source=source)

    stored = weights.load(source, "video_ae" if task == "reconstruct" else "", check)
    model = stored.model.bare()
    definition = state.ModelDefinition(model.build)
    return TrainedModel(model, stored.source, definition, stored.exactly(definition.params))


def use_cache() -> None:
    """Enables the compilation cache; without a writable folder for it, warns and continues."""
    try:
        folder = cache.root(None)
    except (InputError, RunAgain) as error:
        terminal.warn(f"warning: compiled programs are not kept for the next start: {error}")
        return
    options.use_cache(os.environ, folder / "compiled")


def able(*tasks: Task) -> list[str]:
    """Returns the short names of the models for one of these tasks."""
    return sorted(name for name, kind in from_file.configs() if kind.task in tasks)


def cannot(model: Any, command: str, *tasks: Task, source: Path) -> InputError:
    """Makes the error for a model that a command cannot use."""
    message = (
        f"{source} has the model {from_file.name_of(model)}, which {command} cannot use: pass a "
        f"model of the kind {' or '.join(able(*tasks))}"
    )
    if model.usage:
        arguments = model.usage.format(run=shlex.quote(str(source)), input="IN.mp4", out="")
        message += f"; to use this model: {invocation.program()} {arguments}"
    return InputError(message)
