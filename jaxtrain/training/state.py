"""Defines the training state; the only file of training/ that splits NNX modules and merges them.

A model is split once into a graph definition and flat dictionaries of arrays; the step merges them
again inside plain ``jax.jit``. Nothing else in the package keeps an NNX object across steps.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxtrain.config import param_groups
from jaxtrain.models.contract import Model
from jaxtrain.ops.layers import FromFile, PerExample
from jaxtrain.sharding import GatheredParam, ShardingRule, replicated
from jaxtrain.training import skip_step
from jaxtrain.xla import options

Arrays = dict[str, jax.Array]
Leaf = TypeVar("Leaf")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "examples_seen", "params", "extras", "opt", "skip_step"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Everything one step passes to the next.

    Attributes:
        step: completed steps, uint32 [].
        examples_seen: examples consumed, uint32 []; not step x batch, because a resumed run may
            change the batch size, and skipped steps consume examples, too.
        params: dotted path -> float32 array.
        extras: dotted path -> array of non-parameter model state (batch norm, replay).
        opt: the optimizer's state.
        skip_step: state of the detector of bad steps (:mod:`jaxtrain.training.skip_step`).
    """

    step: jax.Array
    examples_seen: jax.Array
    params: Arrays
    extras: Arrays
    opt: optax.OptState
    skip_step: Arrays


class ModelDefinition:
    """A model without its arrays: converts arrays to a callable module and back.

    Attributes:
        params: dotted path -> shape and dtype.
        frozen: dotted paths of the parameters that are not trained.
        file_weights: dotted paths of the extras that are read from files; checkpoints lack them.

    Raises:
        InputError: a path in `freeze` has no parameters.
    """

    def __init__(self, build: Callable[[nnx.Rngs], Model], freeze: Collection[str] = ()) -> None:
        self._build = build
        abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        self._module_class = type(abstract)
        self._graph, params, extras = _split(abstract)
        self._param_paths = _paths(params)
        self._extra_leaves = dict(nnx.to_flat_state(extras))
        self.params = _flatten(params)
        self.extras = _flatten(extras)
        self.file_weights = frozenset(
            _dotted(path) for path, leaf in self._extra_leaves.items() if isinstance(leaf, FromFile)
        )
        self.frozen = param_groups.frozen(freeze, self.params)
        for name, leaf in {**self.params, **self.extras}.items():
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(
                    f"the model has a random key in its state ({name}), which would make resumed "
                    "runs differ: use the keys that loss(batch, keys_B) receives"
                )

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Returns initial parameters and extras in float32. Pure: call it under ``jax.jit``."""
        _, params, extras = _split(self._build(nnx.Rngs(key)))
        return _flatten(params), _flatten(extras)

    def trained(self, params: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Returns the parameters, or anything by their names, without the frozen ones."""
        return {name: array for name, array in params.items() if name not in self.frozen}

    def param_shardings(self, rule: ShardingRule) -> dict[str, NamedSharding]:
        """Returns the sharding of each parameter.

        Frozen ones are replicated: they have no optimizer state, and nothing is gathered.
        """
        full = replicated(rule.mesh)
        return {
            name: full if name in self.frozen else rule(array)
            for name, array in self.params.items()
        }

    def extra_shardings(self, rule: ShardingRule) -> dict[str, NamedSharding]:
        """Returns the sharding of each array of non-parameter state."""
        return {
            _dotted(path): (rule.of_rows if isinstance(leaf, PerExample) else rule)(leaf)
            for path, leaf in self._extra_leaves.items()
        }

    def module(
        self,
        params: Mapping[str, jax.Array],
        extras: Mapping[str, jax.Array],
        gathered_from: Mapping[str, NamedSharding] | None = None,
    ) -> Any:
        """Returns the callable module with these arrays.

        Args:
            gathered_from: dotted path -> sharding of a parameter, which is then gathered where the
                model reads it if it is sharded. None uses the arrays as they are.
        """
        leaves: list[tuple[Any, nnx.Variable[Any]]] = []
        for path in self._param_paths:
            name = _dotted(path)
            if gathered_from is None or not any(gathered_from[name].spec):
                leaves.append((path, nnx.Param(params[name])))
            else:
                param = GatheredParam(params[name], shard_sharding=gathered_from[name])
                leaves.append((path, param))
        for path, leaf in self._extra_leaves.items():
            leaves.append((path, leaf.replace(extras[_dotted(path)])))
        return nnx.merge(self._graph, nnx.from_flat_state(leaves))

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns metrics that follow from the means of ``evaluate``; {} if there are none."""
        return self._module_class.derived(means)

    def baseline(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns metrics of the best answer that ignores the input; {} if there is none."""
        return self._module_class.baseline(sums)

    def sample_labels(
        self, batch: Mapping[str, Any]
    ) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Returns the labels of the model's samples; {} if it has none."""
        return self._module_class.sample_labels(batch)

    def extras_of(self, module: nnx.Module) -> Arrays:
        """Returns the extras after a call, for the next state."""
        _, _, extras = _split(module)
        return _flatten(extras)


def abstract_state(
    definition: ModelDefinition, optimizer: optax.GradientTransformation, rule: ShardingRule
) -> State:
    """Returns the state's shapes, dtypes, and shardings, without using a device."""
    shapes = jax.eval_shape(
        functools.partial(_initial, definition, optimizer),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    shardings = shardings_of(shapes, definition, rule)
    return cast(State, jax.tree.map(_with_sharding, shapes, shardings))


def shardings_of(state: State, definition: ModelDefinition, rule: ShardingRule) -> Any:
    """Returns where each array of a state is stored; only the shapes of ``state`` matter."""
    return dataclasses.replace(
        jax.tree.map(rule, state),
        skip_step=dict.fromkeys(state.skip_step, replicated(rule.mesh)),
        params=definition.param_shardings(rule),
        extras=definition.extra_shardings(rule),
    )


def jit_init(
    definition: ModelDefinition,
    optimizer: optax.GradientTransformation,
    target: State,
    rule: ShardingRule,
    seed: int,
) -> Any:
    """Jits the initialization of a state, which then takes no arguments.

    Each shard is computed on its device, and no host has the full arrays.
    """
    return jax.jit(
        lambda: _initial(definition, optimizer, jax.random.key(seed)),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target),
        compiler_options=options.options(str(rule.mesh.devices.flat[0].platform)),
    )


def with_values(
    state: State, params: Mapping[str, np.ndarray], extras: Mapping[str, np.ndarray]
) -> State:
    """Replaces the values of some arrays of a state, and keeps their shardings.

    Args:
        params: dotted path -> the full array, on each host.

    Raises:
        ValueError: there is no such array, or it has another shape.
    """

    def among(old: Arrays, new: Mapping[str, np.ndarray]) -> Arrays:
        arrays = dict(old)
        for name, array in new.items():
            if name not in old or old[name].shape != array.shape:
                shape = old[name].shape if name in old else "no such array"
                raise ValueError(f"{name} has shape {array.shape}, but the model has {shape}")
            full = np.asarray(array, old[name].dtype)
            arrays[name] = jax.make_array_from_callback(
                full.shape, old[name].sharding, full.__getitem__
            )
        return arrays

    return dataclasses.replace(
        state, params=among(state.params, params), extras=among(state.extras, extras)
    )


def saved_part(state: State, file_weights: Collection[str]) -> State:
    """Returns what a checkpoint stores of a state: all but the weights read from files."""
    extras = {name: leaf for name, leaf in state.extras.items() if name not in file_weights}
    return dataclasses.replace(state, extras=extras)


def checksums(file_weights: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns a SHA-256 of the values below each part of the model, such as ``lpips``."""
    digests: dict[str, Any] = {}
    for name, array in sorted(file_weights.items()):
        digest = digests.setdefault(name.partition(".")[0], hashlib.sha256())
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return {module: digest.hexdigest() for module, digest in digests.items()}


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _initial(
    definition: ModelDefinition, optimizer: optax.GradientTransformation, key: jax.Array
) -> State:
    params, extras = definition.init(key)
    return State(
        step=jnp.zeros((), jnp.uint32),
        examples_seen=jnp.zeros((), jnp.uint32),
        params=params,
        extras=extras,
        opt=optimizer.init(definition.trained(params)),
        skip_step=skip_step.init(),
    )


def _split(module: Any) -> tuple[Any, nnx.State, nnx.State]:
    graph, params, extras = cast(Any, nnx.split)(module, nnx.Param, ...)
    return graph, params, extras


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path)


def _paths(tree: nnx.State) -> tuple[tuple[Any, ...], ...]:
    return tuple(path for path, _ in nnx.to_flat_state(tree))


def _flatten(tree: nnx.State) -> Arrays:
    return {_dotted(path): leaf.get_value() for path, leaf in nnx.to_flat_state(tree)}
