"""Muon: momentum with orthogonalized updates, for matrices and kernels of convolutions.

The update of a matrix is the matrix nearest to its momentum with equal singular values, found with
five Newton-Schulz steps (Keller Jordan, https://kellerjordan.github.io/posts/muon/; momentum and
coefficients as in nanochat at c75fe54), or with five steps of Polar Express
(https://arxiv.org/abs/2505.16932). This needs the full matrix. Matrices of one shape are
stacked and distributed over the `n` devices: each receives some full matrices and sends the results
back. So per matrix a device sends `2 / n` of it, where an all-gather sends nearly all of it, and a
device computes one matrix in `n` (:func:`_distributed` has the exceptions). A kernel
[..., in, out] is the matrix of its taps and inputs by its outputs, as in
https://github.com/KellerJordan/cifar10-airbench.

The steps run in the dtype of the run's computation. If a momentum is nearly singular, five steps
multiply its small components by up to 3.4445^5 = 485, rounding errors included. A difference of
1e-6, such as between sums over one device and over eight, changes how some elements round to
bfloat16: 6e-5 of the matrix, and so 2e-2 of the update. In float32 it stays below 1e-3.

What else :class:`jaxtrain.config.Muon` offers is from nanochat at 92d63d4: rows of equal norm
before (https://arxiv.org/abs/2603.28254), the Frobenius norm of orthogonal matrices after Polar
Express (https://arxiv.org/abs/2602.21545), variance reduction per row
(https://arxiv.org/abs/2510.05491), and cautious weight decay. They are computed on the shards as
they are stored, so only norms of rows and of matrices are communicated.

Shapes: L matrices of one shape, M the shorter and N the longer side of a matrix.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import config, sharding
from jaxtrain.optim.schedule import GroupScalars

# A quintic that raises small singular values fast and brings all of them near one, to 0.7..1.2.
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
_EPS = 1e-7
# The paper's method for five iterations, with safety factor 2e-2 and cushion 2.
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_POLAR_MARGIN, _POLAR_EPS = 1.01, 1e-6
_LEAST_NORM, _LEAST_SQUARE = 1e-6, 1e-10

Arrays = dict[str, jax.Array]


class MuonState(NamedTuple):
    """State of :func:`muon`.

    Attributes:
        momentum: dotted name -> float32 array, of the parameter's shape.
        variance: dotted name -> mean square of each row or column; None without variance reduction.
    """

    momentum: Any
    variance: Any = None


def muon(
    settings: config.Muon,
    label: str,
    precision: config.Precision = "bfloat16",
    rule: sharding.ShardingRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds Muon for arrays in the layout [in, out] or [..., in, out].

    Args:
        settings: what is done before and after the orthogonalization.
        label: of the group, whose rate, momentum, and decoupled decay, which is multiplied by the
            rate as AdamW's, the update takes from its ``scalars``.
        precision: dtype of the Newton-Schulz steps and of their communication.
        rule: where the matrices are stored; None leaves it to the compiler.
    """

    def init(params: Any) -> MuonState:
        zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), params)
        squares = None
        if settings.variance_b2 is not None:
            squares = jax.tree.map(lambda m: jnp.zeros_like(_mean_square(m)), zeros)
        return MuonState(zeros, squares)

    def update(
        grads: Any, state: MuonState, params: Any, *, scalars: Mapping[str, GroupScalars], **_: Any
    ) -> tuple[Any, MuonState]:
        group = scalars[label]
        beta = group.momentum
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, grads)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, grads)  # Nesterov
        matrices = {name: array for name, array in ahead.items() if isinstance(array, jax.Array)}
        if settings.equilibrate:
            matrices = _map_by_shape(_equilibrated, matrices)
        rounded = {n: _stored(array.astype(precision), rule) for n, array in matrices.items()}
        results = orthogonal(rounded, rule, polar_express=settings.polar_express)
        directions = {name: array.astype(jnp.float32) for name, array in results.items()}
        if settings.polar_express:
            directions = _map_by_shape(_of_orthogonal_norm, directions)
        variance = None if state.variance is None else dict(state.variance)
        if variance is not None:
            assert settings.variance_b2 is not None, "the state has it only then"
            with_even_variance = functools.partial(_with_even_variance, b2=settings.variance_b2)
            for name, result in _map_by_shape(with_even_variance, directions, variance).items():
                directions[name], variance[name] = result
        updates = dict(ahead)
        for name, direction in directions.items():
            inputs, outputs = _matrix_shape(direction)
            factor = math.sqrt(max(1.0, outputs / inputs))
            updates[name] = -group.rate * factor * direction
            if settings.cautious_decay:
                agrees = direction * params[name] >= 0
                updates[name] -= group.rate * factor * group.decay * agrees * params[name]
            else:
                updates[name] -= group.rate * group.decay * params[name]
        return updates, MuonState(momentum, variance)

    return optax.GradientTransformationExtraArgs(init, update)


def _map_by_shape(function: Callable[..., Any], *arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Applies a function to the arrays of each name.

    Arrays of one shape are stacked, so that the program has the operations once for each shape, and
    not for each matrix.
    """
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in arrays[0].items():
        shapes.setdefault(matrix.shape, []).append(name)
    results: dict[str, Any] = {}
    for names in shapes.values():
        stacks = (jnp.stack([argument[name] for name in names]) for argument in arrays)
        leaves, tree = jax.tree.flatten(jax.vmap(function)(*stacks))
        for name, own_leaves in zip(names, zip(*leaves, strict=True), strict=True):
            results[name] = jax.tree.unflatten(tree, own_leaves)
    return results


def _norm(matrix: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.square(matrix).sum())


def _equilibrated(matrix: jax.Array) -> jax.Array:
    """Scales what belongs to each output to the root mean square of their norms."""
    norms = jnp.sqrt(jnp.square(matrix).sum(tuple(range(matrix.ndim - 1)), keepdims=True))
    mean = _norm(matrix) / math.sqrt(matrix.shape[-1])
    return matrix * (mean / jnp.maximum(norms, _LEAST_NORM))


def _of_orthogonal_norm(matrix: jax.Array) -> jax.Array:
    """Scales to the norm of an orthogonal matrix."""
    norm = math.sqrt(min(_matrix_shape(matrix)))
    return matrix * (norm / jnp.maximum(_norm(matrix), _LEAST_NORM))


def _mean_square(matrix: jax.Array) -> jax.Array:
    """Returns that of each output, or of each input if there are more: along the shorter side."""
    inputs, outputs = _matrix_shape(matrix)
    of_output = tuple(range(matrix.ndim - 1))
    return jnp.square(matrix).mean(of_output if outputs >= inputs else -1, keepdims=True)


def _with_even_variance(
    matrix: jax.Array, average: jax.Array, b2: float
) -> tuple[jax.Array, jax.Array]:
    """Divides by the root of the average of mean squares, and keeps the norm of the matrix.

    Returns:
        The matrix, and the next average.
    """
    squares = _mean_square(matrix)
    average = b2 * average + (1 - b2) * squares
    scales = jax.lax.rsqrt(jnp.maximum(average, _LEAST_SQUARE))
    before, after = (jnp.sqrt(mean.sum()) for mean in (squares, squares * jnp.square(scales)))
    return matrix * scales * (before / jnp.maximum(after, _LEAST_SQUARE)), average


def orthogonal(
    matrices: Mapping[str, jax.Array],
    rule: sharding.ShardingRule | None = None,
    *,
    polar_express: bool = False,
) -> Arrays:
    """Orthogonalizes each matrix: brings all its singular values near one.

    Args:
        matrices: name -> array of two or more dimensions; computed and returned in its dtype.
        rule: where they are stored.
        polar_express: uses its polynomials.
    """
    method = functools.partial(newton_schulz, polar_express=polar_express)
    stacks: dict[tuple[Any, ...], list[str]] = {}
    for name, matrix in matrices.items():
        inputs, outputs = _matrix_shape(matrix)
        side = None if rule is None else _sharded_side(rule, matrix)
        side = None if side is None else side ^ (inputs > outputs)  # among (M, N)
        stacks.setdefault((tuple(sorted((inputs, outputs))), side), []).append(name)
    orthogonalized: Arrays = {}
    for (_, side), names in stacks.items():
        stack_LMN = jnp.stack([_flat(matrices[name]) for name in names])
        results = _distributed(method, stack_LMN, side, rule)
        for name, result_MN in zip(names, results, strict=True):
            orthogonalized[name] = _stored(_shaped(result_MN, matrices[name].shape), rule)
    return orthogonalized


def _matrix_shape(array: jax.Array) -> tuple[int, int]:
    """Returns the number of inputs, for a kernel times its taps, and of outputs."""
    return math.prod(array.shape[:-1]), array.shape[-1]


def _flat(array: jax.Array) -> jax.Array:
    """[..., inputs, outputs] -> [M, N]. Inputs come before taps, so that their shards stay."""
    matrix = jnp.moveaxis(array, -2, 0).reshape(_matrix_shape(array))
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _shaped(flat_MN: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts :func:`_flat`."""
    *taps, inputs, outputs = shape
    matrix = flat_MN.T if math.prod(taps) * inputs > outputs else flat_MN
    return jnp.moveaxis(matrix.reshape(inputs, *taps, outputs), 0, -2)


def newton_schulz(x_LMN: jax.Array, polar_express: bool = False) -> jax.Array:
    """Brings the singular values of each matrix [M, N], M <= N, near one; in its dtype.

    The polynomial is odd, so the result of a matrix's transpose is the transpose of its result.
    """
    wide = x_LMN.astype(jnp.float32)
    norm_L = jnp.sqrt(jnp.square(wide).sum((1, 2), keepdims=True))
    if polar_express:
        norm_L, polynomials = _POLAR_MARGIN * norm_L + _POLAR_EPS, _POLAR_EXPRESS
    else:
        norm_L, polynomials = norm_L + _EPS, _NEWTON_SCHULZ
    x_LMN = (wide / norm_L).astype(x_LMN.dtype)
    for a, b, c in polynomials:
        square_LMM = jnp.einsum("lmn,lkn->lmk", x_LMN, x_LMN)
        factor_LMM = b * square_LMM + c * (square_LMM @ square_LMM)
        x_LMN = a * x_LMN + factor_LMM @ x_LMN
    return x_LMN


def _distributed(
    method: Callable[[jax.Array], jax.Array],
    stack_LMN: jax.Array,
    side: int | None,
    rule: sharding.ShardingRule | None,
) -> jax.Array:
    """Runs a method on a stack, and distributes its matrices over devices.

    If the number of devices divides the number of matrices, it uses all of them. Otherwise it uses
    the ``fsdp`` axis and pads the stack with zeros: with all devices, results would be gathered
    over ``data``, too, and the padding would make that more than one gather. If it does not divide
    them and the matrices are not sharded, every device computes all of them.
    """
    if rule is None or rule.mesh.size == 1:
        return method(stack_LMN)
    data, fsdp = sharding.AXES
    count = stack_LMN.shape[0]
    even = count % rule.mesh.size == 0
    if not even and side is None:
        return method(stack_LMN)
    spare = 0 if even else -count % rule.mesh.shape[fsdp]
    stack_LMN = jnp.pad(stack_LMN, ((0, spare), (0, 0), (0, 0)))
    # Shardings in order: as stored, in shards along fsdp; also split along data, which needs no
    # communication; full matrices on each device.
    sides = [fsdp if number == side else None for number in range(2)]
    split = [PartitionSpec(data, *sides), PartitionSpec(sharding.AXES)]
    specs = [PartitionSpec(None, *sides), *(split if even else [PartitionSpec(fsdp)])]
    shardings = [NamedSharding(rule.mesh, spec) for spec in specs]
    for along in shardings:
        stack_LMN = jax.lax.with_sharding_constraint(stack_LMN, along)
    result_LMN = method(stack_LMN)
    for along in reversed(shardings):
        result_LMN = jax.lax.with_sharding_constraint(result_LMN, along)
    return result_LMN[:count]


def _stored(array: jax.Array, rule: sharding.ShardingRule | None) -> jax.Array:
    return array if rule is None else jax.lax.with_sharding_constraint(array, rule(array))


def _sharded_side(rule: sharding.ShardingRule, array: jax.Array) -> int | None:
    """Returns which side of the matrix is sharded, 0 for inputs or 1 for outputs; None if none."""
    spec = rule(array).spec
    axis = next((axis for axis, name in enumerate(spec) if name is not None), -1)
    side = axis - (array.ndim - 2)
    return side if side >= 0 else None
