"""Averages the parameters over steps (EMA), in the optimizer's state.

After ``n`` entries, the next one sets the average to ``a average + (1 - a) parameters``, where
``a`` is ``min(decay, (1 + n) / (10 + n))`` (``ema``, TensorFlow's rule) or ``min(decay, n / 10)``
(``ramp``, from TAEHV's recipe, github.com/madebyollin/seraena). Until the first entry the average
equals the parameters, so the initial random values do not contribute.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxtrain import config

Leaf = TypeVar("Leaf")
# Names of averages among the dotted names of a state.
_AVERAGE = re.compile(r"opt\.(.*\.)?average\.(?P<name>.+)")


class Averaged(NamedTuple):
    """State of :func:`averaging`.

    Attributes:
        steps: completed, uint32 [].
        average: dotted name -> float32 array.
    """

    steps: jax.Array
    average: Any


def averaging(settings: config.Average) -> optax.GradientTransformation:
    """Builds a transformation that leaves updates unchanged and averages the new parameters."""

    def init(params: Any) -> Averaged:
        return Averaged(jnp.zeros((), jnp.uint32), jax.tree.map(jnp.asarray, params))

    def update(updates: Any, state: Averaged, params: Any) -> tuple[Any, Averaged]:
        count = state.steps + 1
        entries = (count // settings.every).astype(jnp.float32) - 1  # before this one
        early = (1 + entries) / (10 + entries) if settings.rule == "ema" else entries / 10
        stays = jnp.minimum(settings.decay, early)
        stays = jnp.where(count % settings.every == 0, stays, 1.0)
        stays = jnp.where(count <= settings.every, 0.0, stays)

        def entered(average: jax.Array, param: jax.Array, change: jax.Array) -> jax.Array:
            return average + (1 - stays) * (param + change - average)

        return updates, Averaged(count, jax.tree.map(entered, state.average, params, updates))

    return optax.GradientTransformation(init, update)


def with_averages(params: Mapping[str, Leaf], opt: Any) -> dict[str, Leaf]:
    """Returns the parameters, each replaced by its average if it has one."""
    averages = {
        name: array
        for leaf in jax.tree.leaves(opt, is_leaf=_is_average)
        if _is_average(leaf)
        for name, array in leaf.average.items()
        if not isinstance(array, optax.MaskedNode)
    }
    return {**params, **averages}


def names(stored: Mapping[str, Any]) -> dict[str, str]:
    """Maps each averaged parameter to the name of its average among a checkpoint's arrays."""
    matches = (_AVERAGE.fullmatch(name) for name in stored)
    return {match["name"]: match.string for match in matches if match}


def _is_average(leaf: Any) -> bool:
    return isinstance(leaf, Averaged)
