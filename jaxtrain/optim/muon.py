"""Muon: momentum with orthogonalized updates, for matrices.

The update of a matrix is the matrix nearest to its momentum with equal singular values, found with
five Newton-Schulz steps (Keller Jordan, https://kellerjordan.github.io/posts/muon/; momentum and
coefficients as in nanochat at c75fe54). This needs the full matrix. Matrices of one shape are
stacked and distributed over the `n` devices: each receives some full matrices and sends the results
back. So per matrix a device sends `2 / n` of it, where an all-gather sends nearly all of it, and a
device computes one matrix in `n`.

The steps run in the dtype of the run's computation. If a momentum is nearly singular, five steps
multiply its small components by up to 3.4445^5 = 485, rounding errors included. A difference of
1e-6, such as between sums over one device and over eight, changes how some elements round to
bfloat16: 6e-5 of the matrix, and so 2e-2 of the update. In float32 it stays below 1e-3.

Shapes: L matrices of one shape, M the shorter and N the longer side of a matrix.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import config, sharding

# A quintic that raises small singular values fast and brings all of them near one, to 0.7..1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7

Arrays = dict[str, jax.Array]


class MuonState(NamedTuple):
    """State of :func:`muon`.

    Attributes:
        updates: completed steps, int32 [].
        momentum: dotted name -> float32 array, of the parameter's shape.
    """

    updates: jax.Array
    momentum: Any


def muon(
    settings: config.Muon,
    rate: optax.Schedule,
    precision: config.Precision = "bfloat16",
    rule: sharding.ShardingRule | None = None,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Builds Muon for matrices in the layout [in, out].

    Args:
        settings: the momentum.
        rate: completed steps -> learning rate.
        precision: dtype of the Newton-Schulz steps and of their communication.
        rule: where the matrices are stored; None leaves it to the compiler.
        weight_decay: decoupled decay per step, multiplied by the rate, as AdamW's and as in
            ``optax.contrib.muon``.
    """

    def init(params: Any) -> MuonState:
        zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), params)
        return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        beta = momentum_at(settings, state.updates)
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, grads)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, grads)  # Nesterov
        there = {
            name: _stored(one.astype(precision), rule)
            for name, one in ahead.items()
            if isinstance(one, jax.Array)
        }
        learning_rate = rate(state.updates)
        updates = dict(ahead)
        for name, one in orthogonal(there, rule).items():
            inputs, outputs = one.shape
            factor = math.sqrt(max(1.0, outputs / inputs))
            updates[name] = -learning_rate * factor * one.astype(jnp.float32)
            if weight_decay:
                updates[name] -= learning_rate * weight_decay * params[name]
        return updates, MuonState(optax.safe_increment(state.updates), momentum)

    return optax.GradientTransformation(init, update)


def momentum_at(settings: config.Muon, count: jax.Array) -> jax.Array:
    """Returns the momentum after ``count`` steps, float32 []."""
    share = jnp.minimum(count / max(settings.momentum_steps, 1), 1.0)
    return (1 - share) * settings.first_momentum + share * settings.momentum


def orthogonal(
    matrices: Mapping[str, jax.Array], rule: sharding.ShardingRule | None = None
) -> Arrays:
    """Orthogonalizes each matrix: brings all its singular values near one.

    Args:
        matrices: name -> array of two dimensions; computed and returned in its dtype.
        rule: where they are stored.
    """
    stacks: dict[tuple[Any, ...], list[str]] = {}
    for name, matrix in matrices.items():
        axis = None if rule is None else _sharded_axis(rule, matrix)
        turned = matrix.shape[0] > matrix.shape[1]
        side = None if axis is None else axis ^ turned  # among (M, N)
        stacks.setdefault((tuple(sorted(matrix.shape)), side), []).append(name)
    found: Arrays = {}
    for (_, side), names in stacks.items():
        stack_LMN = jnp.stack([_flat(matrices[name]) for name in names])
        results = _shared_out(stack_LMN, side, rule)
        for name, one in zip(names, results, strict=True):
            tall = matrices[name].shape[0] > matrices[name].shape[1]
            found[name] = _stored(one.T if tall else one, rule)
    return found


def _flat(matrix: jax.Array) -> jax.Array:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def newton_schulz(x_LMN: jax.Array) -> jax.Array:
    """Brings the singular values of each matrix [M, N], M <= N, near one; in its dtype.

    The polynomial is odd, so the result of a matrix's transpose is the transpose of its result.
    """
    wide = x_LMN.astype(jnp.float32)
    norm_L = jnp.sqrt(jnp.square(wide).sum((1, 2), keepdims=True))
    x_LMN = (wide / (norm_L + _EPS)).astype(x_LMN.dtype)
    for _ in range(_STEPS):
        square_LMM = jnp.einsum("lmn,lkn->lmk", x_LMN, x_LMN)
        factor_LMM = _B * square_LMM + _C * (square_LMM @ square_LMM)
        x_LMN = _A * x_LMN + factor_LMM @ x_LMN
    return x_LMN


def _shared_out(
    stack_LMN: jax.Array, side: int | None, rule: sharding.ShardingRule | None
) -> jax.Array:
    """Runs :func:`newton_schulz` on a stack whose matrices are distributed over devices.

    If the number of devices divides the number of matrices, it uses all of them. Otherwise it uses
    the ``fsdp`` axis and pads the stack with zeros: with all devices, results would be gathered
    over ``data``, too, and the padding would make that more than one gather.
    """
    if rule is None or rule.mesh.size == 1:
        return newton_schulz(stack_LMN)
    data, fsdp = sharding.AXES
    count = stack_LMN.shape[0]
    even = count % rule.mesh.size == 0
    if not even and side is None:
        return newton_schulz(stack_LMN)
    spare = 0 if even else -count % rule.mesh.shape[fsdp]
    stack_LMN = jnp.pad(stack_LMN, ((0, spare), (0, 0), (0, 0)))
    # Shardings in order: as stored, in shards along fsdp; also split along data, which needs no
    # communication; full matrices on each device.
    sides = [fsdp if number == side else None for number in range(2)]
    apart = [PartitionSpec(data, *sides), PartitionSpec(sharding.AXES)]
    ways = [PartitionSpec(None, *sides), *(apart if even else [PartitionSpec(fsdp)])]
    constrained = _constraint(rule)
    for way in ways:
        stack_LMN = constrained(stack_LMN, way)
    result_LMN = newton_schulz(stack_LMN)
    for way in reversed(ways):
        result_LMN = constrained(result_LMN, way)
    return result_LMN[:count]


def _constraint(rule: sharding.ShardingRule) -> Callable[[jax.Array, PartitionSpec], jax.Array]:
    return lambda array, spec: jax.lax.with_sharding_constraint(
        array, NamedSharding(rule.mesh, spec)
    )


def _stored(array: jax.Array, rule: sharding.ShardingRule | None) -> jax.Array:
    return array if rule is None else jax.lax.with_sharding_constraint(array, rule(array))


def _sharded_axis(rule: sharding.ShardingRule, array: jax.Array) -> int | None:
    spec = rule(array).spec
    return next((axis for axis, name in enumerate(spec) if name is not None), None)
