"""The state of training, and the only seam to Flax NNX.

A model is split once into a graph definition and flat dictionaries of arrays; the step merges them
again inside plain ``jax.jit``. Nothing else in the package holds an NNX object across a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.ops import layers
from jaxtrain.sharding import HasShape, ShardingRule, replicated
from jaxtrain.training import skip_step
from jaxtrain.xla import options

Arrays = dict[str, jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "examples_seen", "params", "extras", "opt", "guard"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that one step hands to the next.

    Attributes:
        step: completed updates, uint32 [].
        examples_seen: examples consumed, uint32 []; not step x batch, which a resume may change.
        params: dotted path -> float32 array.
        extras: dotted path -> array of model state that is no parameter (batch norm, replay).
        opt: the optimizer's state.
        guard: what tells a bad update (:mod:`jaxtrain.training.skip_step`).
    """

    step: jax.Array
    examples_seen: jax.Array
    params: Arrays
    extras: Arrays
    opt: optax.OptState
    guard: Arrays


class GatheredParam(nnx.Param, layers.Gathered):
    """A parameter that is stored in shards and gathered where it is read.

    The gathered copy is named, and :func:`jaxtrain.ops.layers.remat` never saves that name: the
    backward pass gathers again, which is what ZeRO-3 means. The gradient is constrained to the
    shards' layout, so that the compiler emits a reduce-scatter.
    """

    def get_value(self, *, index: Any = ..., **kwargs: Any) -> Any:
        """The gathered array; NNX calls this for each read."""
        value = super().get_value(**kwargs)
        stored = self.get_metadata().get("stored")
        if stored is not None and any(stored.spec):
            value = checkpoint_name(_gather(value, stored), layers.GATHERED)
        return value if index is ... else value[index]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: jax.Array, stored: NamedSharding) -> jax.Array:
    whole = NamedSharding(stored.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(shard, whole)


def _gather_forward(shard: jax.Array, stored: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(shard, stored), None


def _gather_backward(stored: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    # Whole first: a sum over devices that is then cut up becomes a reduce-scatter. Asked for the
    # shards at once, the compiler may move a scatter's operands (an embedding's rows) instead.
    whole = jax.lax.with_sharding_constraint(grad, NamedSharding(stored.mesh, PartitionSpec()))
    return (jax.lax.with_sharding_constraint(whole, stored),)


_gather.defvjp(_gather_forward, _gather_backward)


class ModelDefinition:
    """A model without its arrays: from arrays to a callable module and back.

    Attributes:
        params: dotted path -> shape and dtype.
        extras: likewise, for state that is no parameter.
    """

    def __init__(self, build: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self._build = build
        abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        self._graph_type = type(abstract)
        self._graph, params, extras = _split(abstract)
        self._param_paths = _paths(params)
        self._extra_leaves = dict(nnx.to_flat_state(extras))
        self.params = _flatten(params)
        self.extras = _flatten(extras)
        for name, leaf in {**self.params, **self.extras}.items():
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(
                    f"the model keeps a random key in its state ({name}): pass keys through "
                    "loss(batch, key) instead; saved keys break a resume"
                )

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Initial parameters and extras, float32 as built. Pure: call it under ``jax.jit``."""
        _, params, extras = _split(self._build(nnx.Rngs(key)))
        return _flatten(params), _flatten(extras)

    def module(
        self,
        params: Mapping[str, jax.Array],
        extras: Mapping[str, jax.Array],
        stored: Mapping[str, NamedSharding] | None = None,
    ) -> Any:
        """The callable module over these arrays.

        Args:
            params: dotted path -> array.
            extras: likewise.
            stored: where shards lie. With it each parameter is gathered where the model reads it;
                without it the arrays are used as they are.
        """
        leaves: list[tuple[Any, nnx.Variable[Any]]] = []
        for path in self._param_paths:
            name = _dotted(path)
            if stored is None:
                leaves.append((path, nnx.Param(params[name])))
            else:
                leaves.append((path, GatheredParam(params[name], stored=stored[name])))
        for path, leaf in self._extra_leaves.items():
            leaves.append((path, leaf.replace(extras[_dotted(path)])))
        return nnx.merge(self._graph, nnx.from_flat_state(leaves))

    def has(self, method: str) -> bool:
        """Whether the model offers an optional method of the contract."""
        return hasattr(self._graph_type, method)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """What the model makes of the means of its ``evaluate``; nothing where it does not say."""
        found = getattr(self._graph_type, "derived", None)
        return {} if found is None else cast(dict[str, float], found(means))

    def extras_of(self, module: nnx.Module) -> Arrays:
        """The extras after a call, for the next state."""
        _, _, extras = _split(module)
        return _flatten(extras)


def parameter_count(params: Mapping[str, HasShape]) -> int:
    """Elements of all parameters."""
    return sum(int(np.prod(array.shape)) for array in params.values())


def abstract_state(
    definition: ModelDefinition, optimizer: optax.GradientTransformation, rule: ShardingRule
) -> State:
    """The state's shapes, dtypes and shardings; touches no device."""
    shapes = jax.eval_shape(
        functools.partial(_initial, definition, optimizer),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    whole = replicated(rule.mesh)
    stored = cast(State, jax.tree.map(lambda leaf: _placed(leaf, rule(leaf)), shapes))
    guarding = {name: _placed(leaf, whole) for name, leaf in shapes.guard.items()}
    return dataclasses.replace(stored, guard=cast(Arrays, guarding))


def init_state(
    definition: ModelDefinition,
    optimizer: optax.GradientTransformation,
    target: State,
    rule: ShardingRule,
    seed: int,
) -> State:
    """A fresh state, each shard made on the device that holds it: no host ever has the whole.

    Args:
        definition: the model.
        optimizer: whose state is made too.
        target: what :func:`abstract_state` gave.
        rule: with which it was made.
        seed: of the initial parameters.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    platform = str(rule.mesh.devices.flat[0].platform)
    make = jax.jit(
        functools.partial(_initial, definition, optimizer),
        out_shardings=shardings,
        compiler_options=options.options(platform),
    )
    return cast(State, make(jax.random.key(seed)))


def with_values(
    state: State, params: Mapping[str, np.ndarray], extras: Mapping[str, np.ndarray]
) -> State:
    """A state with other values for some of its arrays, where those were.

    Args:
        state: the state.
        params: dotted path -> the whole array, on each host.
        extras: likewise.

    Raises:
        ValueError: there is no such array, or it has another shape.
    """

    def among(old: Arrays, new: Mapping[str, np.ndarray]) -> Arrays:
        found = dict(old)
        for name, array in new.items():
            if name not in old or old[name].shape != array.shape:
                shape = old[name].shape if name in old else "nothing"
                raise ValueError(f"{name} has shape {array.shape}, the model has {shape} there")
            whole = np.asarray(array, old[name].dtype)
            found[name] = jax.make_array_from_callback(
                whole.shape, old[name].sharding, whole.__getitem__
            )
        return found

    return dataclasses.replace(
        state, params=among(state.params, params), extras=among(state.extras, extras)
    )


def bytes_per_device(target: Any) -> int:
    """Bytes of one device's part of the state, or of a part of it."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(target)
    )


def _placed(leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _initial(
    definition: ModelDefinition, optimizer: optax.GradientTransformation, key: jax.Array
) -> State:
    params, extras = definition.init(key)
    return State(
        step=jnp.zeros((), jnp.uint32),
        examples_seen=jnp.zeros((), jnp.uint32),
        params=params,
        extras=extras,
        opt=optimizer.init(params),
        guard=skip_step.init(),
    )


def _split(module: Any) -> tuple[Any, nnx.State, nnx.State]:
    """Graph definition, parameters, everything else."""
    graph, params, extras = cast(Any, nnx.split)(module, nnx.Param, ...)
    return graph, params, extras


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


def _paths(tree: nnx.State) -> tuple[tuple[Any, ...], ...]:
    return tuple(path for path, _ in nnx.to_flat_state(tree))


def _flatten(tree: nnx.State) -> Arrays:
    return {_dotted(path): leaf.get_value() for path, leaf in nnx.to_flat_state(tree)}
