"""Loads a trained model for a command that uses it: its config, its module and its parameters.

Optional methods of the module decide what a model can do (the table in :mod:`jaxtrain.models`),
never its class: ``decode_step`` for generate, ``logits_at`` for fill, ``decode`` for videos.
"""

import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.models import from_file
from jaxtrain.training import state
from jaxtrain.xla import options


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model.

    Where a run averages its parameters, these are the average: what a validation saw.

    Attributes:
        config: of the model, without what only training needs.
        source: where the parameters come from, for messages.
        definition: the module without its arrays.
        params: dotted path -> float32 array on the host.
    """

    config: Any
    source: str
    definition: state.ModelDefinition
    params: Mapping[str, np.ndarray]

    def on_device(self, precision: str) -> state.Arrays:
        """The parameters on the first device.

        Args:
            precision: of the computation, and so of the parameters.
        """
        return {
            name: jnp.asarray(array, jnp.dtype(precision)) for name, array in self.params.items()
        }


def load(source: Path, command: str, method: str) -> TrainedModel:
    """Reads a trained model that has a method. Compiled programs are kept for the next use.

    Args:
        source: a checkpoint, a run's directory (its best checkpoint, or else its newest), a folder
            of transformers, or a weights file. One that does not say which model it is of is taken
            for the only kind of model that has the method.
        command: that uses it, for messages.
        method: optional method of the module that the command calls.

    Raises:
        InputError: nothing is there, it is damaged, or its model lacks the method; or jax does not
            see the GPU.
    """
    process_group.check_accelerator(os.environ)
    options.use_cache(os.environ, cache.root(None) / "compiled")

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


def has(model: Any, method: str) -> bool:
    """Whether the module of a model's config offers an optional method; makes no array."""
    return state.ModelDefinition(_bare(model).build).has(method)


def able(*methods: str) -> list[str]:
    """Short names of the models whose modules have one of these methods."""
    return sorted(
        name
        for name, kind in from_file.configs()
        if any(map(state.ModelDefinition(kind.tiny().build).has, methods))
    )


def cannot(model: Any, command: str, *methods: str, source: Path) -> InputError:
    """What to raise where a command cannot use a model.

    Args:
        model: its config.
        command: what was asked for.
        methods: of the module; the command needs one of them.
        source: of the model.
    """
    message = (
        f"{source} holds the model {from_file.name_of(model)}, which {command} cannot use: it "
        f"needs one of {', '.join(able(*methods))}"
    )
    if hasattr(model, "usage"):
        typed = model.usage.format(run=shlex.quote(str(source)), input="IN.mp4")
        message += f"; to use this one: {invocation.program()} {typed}"
    return InputError(message)


def _bare(model: Any) -> Any:
    return model.bare() if hasattr(model, "bare") else model
