"""Loads a trained model for a command that uses it: its config, its module, and its parameters.

Optional methods of the module decide what a model can do (the table in :mod:`jaxtrain.models`),
never its class: ``decode_step`` for generate, ``logits_at`` for fill, ``decode`` for videos.
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
from jaxtrain.data import cache
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.interop import weights
from jaxtrain.models import from_file
from jaxtrain.training import state
from jaxtrain.xla import options


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model.

    If the run averages its parameters, these are the average, which validation uses.

    Attributes:
        config: config of the model, without the parts that only training needs.
        source: where the parameters come from, for messages.
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
            precision: type of the computation and of the returned parameters.
            device: None for the first.
        """
        with jax.default_device(device):
            return {
                name: jnp.asarray(array, jnp.dtype(precision))
                for name, array in self.params.items()
            }


def load(source: Path, command: str, method: str) -> TrainedModel:
    """Loads a trained model that has a method, and enables the compilation cache.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, else its newest), a transformers
            folder, or a weights file. A weights file without a model config is taken for the only
            model that has the method.
        command: the command that uses the model, for messages.
        method: optional method of the module that the command calls.

    Raises:
        InputError: the source is missing or damaged, its model lacks the method, or jax does not
            see the GPU.
    """
    process_group.check_accelerator(os.environ)
    use_cache()

    def only_kind() -> str | None:
        kinds = able(method)
        return kinds[0] if len(kinds) == 1 else None

    def check(model: Any) -> None:
        if not has(model, method):
            raise cannot(model, command, method, source=source)

    stored = weights.load(source, only_kind, check)
    model = _bare(stored.model)
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


def has(model: Any, method: str) -> bool:
    """Whether the module of a model's config has an optional method; allocates no arrays."""
    return state.ModelDefinition(_bare(model).build).has(method)


def able(*methods: str) -> list[str]:
    """Returns the short names of the models whose modules have one of these methods."""
    return sorted(
        name
        for name, kind in from_file.configs()
        if any(map(state.ModelDefinition(kind.tiny().build).has, methods))
    )


def cannot(model: Any, command: str, *methods: str, source: Path) -> InputError:
    """Makes the error for a model that a command cannot use.

    Args:
        model: config of the model.
        command: the command.
        methods: methods of the module, one of which the command needs.
        source: where the model is stored.
    """
    message = (
        f"{source} has the model {from_file.name_of(model)}, which {command} cannot use: pass a "
        f"model of the kind {' or '.join(able(*methods))}"
    )
    if hasattr(model, "usage"):
        typed = model.usage.format(run=shlex.quote(str(source)), input="IN.mp4")
        message += f"; to use this model: {invocation.program()} {typed}"
    return InputError(message)


def _bare(model: Any) -> Any:
    return model.bare() if hasattr(model, "bare") else model
