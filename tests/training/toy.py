"""A small model that compiles within a second, and helpers to run its step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

from jaxtrain import config
from jaxtrain.models.contract import Model, ModelConfig
from jaxtrain.ops import layers
from jaxtrain.optim import build as optim
from jaxtrain.optim.schedule import Scalars, Schedule
from jaxtrain.sharding import AXES, ShardingRule, batch_sharding
from jaxtrain.training import skip_step
from jaxtrain.training.state import ModelDefinition, State, abstract_state, jit_init
from jaxtrain.training.step import build_train_step, jit_train_step

WIDTH = 32


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class _Toy(Model):
    """Regression with weights in the batch, so that microbatches have different weights."""

    def __init__(self, blocks: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([_Block(rngs) for _ in range(blocks)])

    def loss(self, batch: dict[str, jax.Array], keys_B: jax.Array) -> Any:
        del keys_B
        x = batch["x"].astype(self.blocks[0].up.kernel[...].dtype)
        for block in self.blocks:
            x = layers.remat(_Block.__call__, "none")(block, x)
        error = jnp.square(x.astype(jnp.float32) - batch["y"]).mean(-1)
        total, weight = (error * batch["weight"]).sum(), batch["weight"].sum()
        return total, weight, {"error": (total, weight)}

    def evaluate(self, batch: dict[str, jax.Array]) -> Any:
        total, weight, _ = self.loss(batch, jax.random.key(0))
        return {"loss": (total, weight)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The toy's config."""

    blocks: int = 2
    freeze: tuple[str, ...] = ()

    def build(self, rngs: nnx.Rngs) -> Model:
        return _Toy(self.blocks, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        row = jax.ShapeDtypeStruct((batch_size, WIDTH), jnp.float32)
        return {"x": row, "y": row, "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32)}


def random_batch(spec: dict[str, jax.ShapeDtypeStruct], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns normally distributed examples with different weights."""
    rng = np.random.default_rng(seed)
    batch = {
        name: rng.standard_normal(part.shape).astype(np.float32) for name, part in spec.items()
    }
    batch["weight"] = rng.integers(1, 4, spec["weight"].shape).astype(np.float32)
    return batch


def stirred(params: Any) -> Any:
    """Perturbs parameters: some start as zeros, which would make other gradients zero."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda array: array + 0.05 * rng.standard_normal(array.shape).astype(np.float32), params
    )


def mesh_of(data: int, fsdp: int) -> jax.sharding.Mesh:
    """Returns a mesh of the first virtual devices."""
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


def recording() -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that changes nothing, and keeps the gradients in its state."""
    return optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params=None, **scalars: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


class Never:
    """A run that is never stopped."""

    def signaled(self) -> bool:
        return False

    def agreed(self) -> bool:
        return False


@dataclasses.dataclass
class Stepper:
    """Everything a step needs on one mesh."""

    definition: ModelDefinition
    rule: ShardingRule
    schedule: Schedule
    target: State
    state: State
    step: Callable[..., Any]
    compiled: jax.stages.Compiled
    spec: dict[str, jax.ShapeDtypeStruct]

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, float]:
        placed = jax.device_put(batch, batch_sharding(self.rule.mesh))
        self.state, found = self.compiled(self.state, placed, self.scalars())
        return {name: float(value) for name, value in found.items()}

    def scalars(self) -> Scalars:
        """Returns those of the next step."""
        return self.schedule.scalars(int(self.state.step))

    def params(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(array) for name, array in self.state.params.items()}


OPTIM = config.Optim(
    peak_lr=1e-2,
    schedule="constant",
    warmup_steps=0,
    weight_decay=0.01,
    accumulate=1,
    max_grad_norm=1.0,
)


def stepper(
    model: Any,
    *,
    data: int = 1,
    fsdp: int = 1,
    shard: Any = "params",
    accumulate: int = 1,
    batch_size: int = 16,
    precision: Any = "float32",
    optimizer: optax.GradientTransformationExtraArgs | None = None,
    schedule: Schedule | None = None,
    min_shard_elements: int = 1,
) -> Stepper:
    """Builds, initializes and compiles a step of ``model``."""
    mesh = mesh_of(data, fsdp)
    settings = config.Mesh(data=data, fsdp=fsdp, shard=shard, min_shard_elements=min_shard_elements)
    rule = ShardingRule(mesh, settings)
    definition = ModelDefinition(model.build, model.freeze)
    schedule = schedule or Schedule(OPTIM, 100)
    optimizer = optimizer or optim.make_optimizer(OPTIM, definition.trained(definition.params))
    target = abstract_state(definition, optimizer, rule)
    spec = model.batch_spec(batch_size)
    step = build_train_step(
        definition,
        optimizer,
        schedule,
        rule,
        skip_step.detector(OPTIM),
        precision=precision,
        accumulate=accumulate,
        seed=1,
    )
    state = jit_init(definition, optimizer, target, rule, seed=1)()
    moved = dataclasses.replace(state, params=stirred(jax.device_get(state.params)))
    return Stepper(
        definition,
        rule,
        schedule,
        target,
        jax.device_put(moved, jax.tree.map(lambda leaf: leaf.sharding, target)),
        step,
        jit_train_step(step, target, mesh).lower(target, spec, schedule.spec).compile(),
        spec,
    )
