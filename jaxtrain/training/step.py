"""Builds the training step and the evaluation step: pure functions, compiled once.

``train_step(state, batch, scalars) -> (state, metrics)``. Sharding modes, precisions and
accumulation are composed when the step is built; the step itself has no flags. Only the model reads
the contents of a batch.

Reading order: :func:`build_train_step`, then :func:`build_gradients`. The rest is small.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import config
from jaxtrain.models.contract import Batch, Sums
from jaxtrain.ops import per_device
from jaxtrain.optim.schedule import Scalars, Schedule, recorded_rate
from jaxtrain.sharding import AXES, ShardingRule, batch_sharding, replicated
from jaxtrain.training import skip_step
from jaxtrain.training.state import Arrays, ModelDefinition, State
from jaxtrain.xla import options

Metrics = dict[str, jax.Array]

# A metric for the loop only: the number of bad steps in a row, including this one.
BAD_IN_A_ROW = "bad_in_a_row"
TrainStep = Callable[[State, Batch, Scalars], tuple[State, Metrics]]
Receive = Callable[[Batch], Batch]
"""Arrays of a batch as the workers make them -> those that the model requires."""


class LossSums(NamedTuple):
    """Sums over examples, all float32: the loss, its weight, and the metrics."""

    loss: jax.Array
    weight: jax.Array
    metrics: Sums


class StageOps(NamedTuple):
    """What a stage of sharding does to stored parameters and to gradients.

    Attributes:
        prepare_params: float32 shards -> the compute dtype, and gathered if the stage gathers
            once per step.
        finish_grads: gradients of prepared parameters -> float32, sharded like the parameters:
            reduce-scattered, or all-reduced if nothing is sharded.
    """

    prepare_params: Callable[[Arrays], Arrays]
    module: Callable[[Arrays, Arrays], Any]
    finish_grads: Callable[[Arrays], Arrays]


def stage_ops(
    definition: ModelDefinition, rule: ShardingRule, precision: config.Precision
) -> StageOps:
    """Composes the sharding mode and the precision.

    Parameters are cast before the all-gather, which thus communicates in the compute dtype. With
    ``mesh.shard="params"`` the model gathers each array where it reads it, forward and backward;
    otherwise all are gathered once per step. Gradients are communicated in the compute dtype and
    constrained to the shards' layout, which makes the compiler emit a reduce-scatter.
    """
    shardings = definition.param_shardings(rule)
    dtype = jnp.dtype(precision)

    def cast_and_shard(params: Arrays) -> Arrays:
        # Without the constraint, the compiler casts after the all-gather.
        return {
            name: jax.lax.with_sharding_constraint(array.astype(dtype), shardings[name])
            for name, array in params.items()
        }

    def cast_and_gather(params: Arrays) -> Arrays:
        whole = replicated(rule.mesh)
        return {
            name: jax.lax.with_sharding_constraint(array, whole)
            for name, array in cast_and_shard(params).items()
        }

    def module_of_shards(params: Arrays, extras: Arrays) -> Any:
        return definition.module(params, extras, gathered_from=shardings)

    def to_float32_shards(grads: Arrays) -> Arrays:
        return {
            name: jax.lax.with_sharding_constraint(grad, shardings[name]).astype(jnp.float32)
            for name, grad in grads.items()
        }

    def sum_to_float32_shards(grads: Arrays) -> Arrays:
        # First replicated: the shards' layout would otherwise propagate into the backward pass,
        # and activations would be communicated.
        whole = replicated(rule.mesh)
        return to_float32_shards(
            {name: jax.lax.with_sharding_constraint(grad, whole) for name, grad in grads.items()}
        )

    if rule.shard == "params":
        return StageOps(cast_and_shard, module_of_shards, to_float32_shards)
    return StageOps(cast_and_gather, definition.module, sum_to_float32_shards)


def build_train_step(
    definition: ModelDefinition,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    rule: ShardingRule,
    detect: skip_step.Detector,
    *,
    precision: config.Precision,
    accumulate: int,
    seed: int,
    receive: Receive = lambda batch: batch,
) -> TrainStep:
    """Builds the pure step, not yet compiled.

    Args:
        schedule: of the run; the step uses only which scalars there are, and not their values.
        detect: detects a bad step, which changes only the number of examples seen and the
            detector's state.
        precision: dtype of the computation; state, losses and metrics stay float32.
        seed: an example's randomness is a function of it and of the example's place in the order.
    """
    gradients = build_gradients(
        definition, rule, precision=precision, accumulate=accumulate, seed=seed, receive=receive
    )

    def train_step(state: State, batch: Batch, scalars: Scalars) -> Any:
        rows = jax.tree.leaves(batch)[0].shape[0]
        positions_B = state.examples_seen + jnp.arange(rows, dtype=jnp.uint32)
        batch = batch | {"step": jnp.full(rows, state.step)}
        grads, sums, extras = gradients(state.params, state.extras, batch, positions_B)
        loss, grads = means(grads, sums)
        trained = definition.trained(state.params)
        of_step = schedule.of_step(scalars, state.step)
        updates, opt = optimizer.update(grads, state.opt, trained, scalars=of_step)
        bad, detector_state, norms = detect(state.skip_step, loss, grads, scalars.warmup)
        metrics = {name: value[0] / value[1] for name, value in sums.metrics.items()} | {
            "loss": loss,
            **norms,
            "learning_rate": recorded_rate(of_step),
            BAD_IN_A_ROW: detector_state["bad_in_a_row"],
        }
        params = {**state.params, **cast(Arrays, optax.apply_updates(trained, updates))}

        def unless_bad(old: Any, new: Any) -> Any:
            return jax.tree.map(lambda old, new: jnp.where(bad, old, new), old, new)

        next_state = State(
            step=unless_bad(state.step, state.step + 1),
            examples_seen=state.examples_seen + jnp.uint32(rows),
            params=unless_bad(state.params, params),
            extras=unless_bad(state.extras, extras),
            opt=unless_bad(state.opt, opt),
            skip_step=detector_state,
        )
        return next_state, metrics

    return train_step


def build_gradients(
    definition: ModelDefinition,
    rule: ShardingRule,
    *,
    precision: config.Precision,
    accumulate: int,
    seed: int,
    receive: Receive,
) -> Callable[[Arrays, Arrays, Batch, jax.Array], tuple[Arrays, LossSums, Arrays]]:
    """Builds the first part of a step, with the arguments of :func:`build_train_step`.

    The gradient is over one batch, or over a scan of microbatches, whose sums are accumulated and
    divided once, so that the result equals that of the full batch even if microbatches have
    different weights. Frozen parameters have no gradient.

    Returns:
        A pure function: (params, extras, batch, positions [B]) -> gradients of the summed loss,
        sums, and the following extras. An example's position is the number of those before it.
    """
    stage, mesh = stage_ops(definition, rule, precision), rule.mesh

    def loss(
        params: Arrays, extras: Arrays, batch: Batch, positions_B: jax.Array
    ) -> tuple[jax.Array, tuple[LossSums, Arrays]]:
        module = stage.module(params, extras)
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), positions_B)
        total, weight, metrics = module.loss(receive(batch), keys_B)
        return total, (LossSums(total, weight, metrics), definition.extras_of(module))

    def microbatch_gradients(
        prepared: Arrays, extras: Arrays, batch: Batch, positions_B: jax.Array
    ) -> tuple[Arrays, LossSums, Arrays]:
        def loss_of_trained(trained: Arrays) -> tuple[jax.Array, tuple[LossSums, Arrays]]:
            return loss({**prepared, **trained}, extras, batch, positions_B)

        with per_device.tracing(mesh=mesh):
            value_and_grad = jax.value_and_grad(loss_of_trained, has_aux=True)
            (_, (sums, following)), grads = value_and_grad(definition.trained(prepared))
        return stage.finish_grads(grads), sums, following

    def single_batch(
        params: Arrays, extras: Arrays, batch: Batch, positions_B: jax.Array
    ) -> tuple[Arrays, LossSums, Arrays]:
        placed = jax.lax.with_sharding_constraint(positions_B, batch_sharding(mesh))
        return microbatch_gradients(stage.prepare_params(params), extras, batch, placed)

    def accumulated(
        params: Arrays, extras: Arrays, batch: Batch, positions_B: jax.Array
    ) -> tuple[Arrays, LossSums, Arrays]:
        prepared = stage.prepare_params(params)
        stacked = {name: _microbatches(rows, accumulate, mesh) for name, rows in batch.items()}
        positions = _microbatches(positions_B, accumulate, mesh)
        first = {name: rows[0] for name, rows in stacked.items()}
        _, sums, _ = jax.eval_shape(microbatch_gradients, prepared, extras, first, positions[0])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)

        def body(
            carry: tuple[Arrays, LossSums, Arrays], scanned: tuple[jax.Array, Batch]
        ) -> tuple[tuple[Arrays, LossSums, Arrays], None]:
            grads, sums, extras = carry
            microbatch_positions, microbatch = scanned
            new_grads, new_sums, extras = microbatch_gradients(
                prepared, extras, microbatch, microbatch_positions
            )
            return (*jax.tree.map(jnp.add, (grads, sums), (new_grads, new_sums)), extras), None

        zero_grads = jax.tree.map(jnp.zeros_like, definition.trained(params))
        carry = (stage.finish_grads(zero_grads), zeros, extras)
        following, _ = jax.lax.scan(body, carry, (positions, stacked))
        return following

    return single_batch if accumulate == 1 else accumulated


def _microbatches(rows: jax.Array, accumulate: int, mesh: jax.sharding.Mesh) -> jax.Array:
    """[B, ...] -> [A, B/A, ...]: microbatch m is examples m::A, so none leaves its device."""
    stacked = jnp.moveaxis(
        rows.reshape(rows.shape[0] // accumulate, accumulate, *rows.shape[1:]), 1, 0
    )
    return jax.lax.with_sharding_constraint(stacked, NamedSharding(mesh, PartitionSpec(None, AXES)))


def means(grads: Arrays, sums: LossSums) -> tuple[jax.Array, Arrays]:
    """Returns the mean loss and its gradients, from those of the summed loss."""
    scale = 1 / sums.weight  # XLA fuses a product with the next operation, but not a quotient
    return sums.loss / sums.weight, jax.tree.map(lambda grad: grad * scale, grads)


def build_eval_step(
    definition: ModelDefinition, rule: ShardingRule, *, precision: config.Precision, method: str
) -> Callable[[Arrays, Arrays, Batch], Any]:
    """Builds a pure function of (params, extras, batch) that calls ``module.METHOD(batch)``."""
    stage = stage_ops(definition, rule, precision)

    def eval_step(params: Arrays, extras: Arrays, batch: Batch) -> Any:
        return getattr(stage.module(stage.prepare_params(params), extras), method)(batch)

    return eval_step


def jit_train_step(
    step: TrainStep,
    target: State,
    mesh: jax.sharding.Mesh,
    *,
    donate: bool = True,
    gpu_options: Mapping[str, str | bool] = MappingProxyType({}),
    deterministic: bool = False,
    profiled: bool = False,
) -> Any:
    """Jits a train step for a mesh.

    Args:
        target: shapes and shardings of the state (:func:`~jaxtrain.training.state.abstract_state`).
        donate: reuse the old state's memory for the new one; off only for debugging.
    """
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    return jax.jit(
        step,
        in_shardings=(state_shardings, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(state_shardings, replicated(mesh)),
        donate_argnums=(0,) if donate else (),
        compiler_options=options.options(
            _platform(mesh), of_model=gpu_options, deterministic=deterministic, profiled=profiled
        ),
    )


def jit_eval_step(
    step: Callable[[Arrays, Arrays, Batch], Any],
    target: State,
    mesh: jax.sharding.Mesh,
    *,
    deterministic: bool = False,
) -> Callable[[Arrays, Arrays, Batch], Any]:
    """Jits an evaluation step like :func:`jit_train_step`; its results are replicated."""
    params, extras = jax.tree.map(lambda leaf: leaf.sharding, (target.params, target.extras))
    return jax.jit(
        step,
        in_shardings=(params, extras, batch_sharding(mesh)),
        out_shardings=replicated(mesh),
        compiler_options=options.options(_platform(mesh), deterministic=deterministic),
    )


def _platform(mesh: jax.sharding.Mesh) -> str:
    return str(mesh.devices.flat[0].platform)
