"""Building blocks that models share: rematerialization, float32 matmuls, norms, dropout.

Whatever is summed over a batch is summed in float32: gradients of embeddings (:func:`embed`), of
biases (:func:`add_shared`) and of norms, losses and metrics. The gradients of matmuls and
convolutions need no care: cuBLAS and cuDNN accumulate bfloat16 in float32.

Shapes: B examples, S positions, M chosen positions, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.ops import per_device
from jaxtrain.ops.per_device import platform

Remat = Literal["none", "block"]
Function = TypeVar("Function", bound=Callable[..., Any])

GATHERED = "gathered_param"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of a parameter that was gathered from its shards."""


class FromFile(nnx.Variable[jax.Array]):
    """A weight read from a file, not trained, and not saved (`ModelConfig.file_weights`)."""


class PerExample:
    """Marks an NNX variable with a row per example, which is split over devices like a batch."""


class Gathered:
    """Marks an NNX variable that is stored in shards and gathered where it is read."""


def remat(function: Function, mode: Remat) -> Function:
    """Wraps a block with rematerialization (activation checkpointing).

    Args:
        function: takes NNX modules, arrays and static values, such as `Block.__call__`.
        mode: "block" keeps only the block's inputs. "none" keeps everything except parameters
            that were gathered from their shards: the backward pass gathers them again, so that no
            full copy stays alive from the forward to the backward pass. This costs a second gather
            but no recomputation. If no variable of the modules passed is :class:`Gathered`, the
            function is called directly: the wrapper would round and copy what it keeps, in separate
            passes on a CPU.

    A value *derived* from a gathered parameter (a transpose, a slice) may be kept. So pass the
    parameter itself to the operation that uses it.
    """
    policies: dict[Remat, Callable[..., bool]] = {
        "none": _keep_all_but_gathered,
        "block": jax.checkpoint_policies.nothing_saveable,
    }
    if mode not in policies:
        raise ValueError(f"remat={mode!r} is unknown: use one of {', '.join(policies)}")
    wrapped = nnx.remat(function, policy=policies[mode])
    if mode == "block":
        return wrapped

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        modules = [argument for argument in arguments if isinstance(argument, nnx.Module)]
        unsharded = modules and not any(
            isinstance(leaf, Gathered) for module in modules for _, leaf in nnx.iter_graph(module)
        )
        return (function if unsharded else wrapped)(*arguments)

    return cast(Function, called)


def _keep_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """The policy of `remat(..., "none")`.

    Excluding the name alone is not enough: the named value would be recomputed from its operand,
    the same gathered array in another variable, which would be kept. The operand comes from a
    sharding constraint (perhaps inside a custom gradient rule, which policies see as one opaque
    call). Models do not depend on the mesh and have no other sharding constraints.
    """
    call = params.get("call_jaxpr")
    inner = {equation.primitive.name for equation in call.jaxpr.eqns} if call is not None else set()
    constrained = "sharding_constraint" in inner | {primitive.name}
    return not constrained and params.get("name") != GATHERED


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_float32(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of two arrays of one dtype with a float32 sum and result, for logits.

    The gradient is rounded to the arrays' dtype before it is multiplied. By default jax multiplies
    it in float32, which takes several times as long on a GPU, and a parameter's gradient is then
    communicated in float32, too.
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _einsum_forward(
    subscripts: str, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return einsum_float32(subscripts, x, y), (x, y)


def _einsum_backward(
    subscripts: str, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    low = grad.astype(x.dtype)
    (grad_x,) = jax.linear_transpose(lambda x: jnp.einsum(subscripts, x, y), x)(low)
    (grad_y,) = jax.linear_transpose(lambda y: jnp.einsum(subscripts, x, y), y)(low)
    return grad_x, grad_y


einsum_float32.defvjp(_einsum_forward, _einsum_backward)


def embed(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the vectors of these ids, [..., D], in the dtype of the table.

    The gradient is summed in float32 and rounded once. In bfloat16, of 8,192 gradients of one sign
    for the same token, 16% of the sum would arrive; of 2,048, 46%.

    Args:
        ids: integers [B, ...].
    """
    return _embed(table_VD.shape[0], table_VD, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(count: int, table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    del count
    return jnp.take(table_VD, ids, axis=0)


def _embed_forward(count: int, table_VD: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _embed(count, table_VD, ids), ids


def _embed_backward(count: int, ids: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
    def of_table(rows: tuple[jax.Array, jax.Array], _: None) -> per_device.Gradients:
        ids, grad = rows
        wide_VD = jax.ShapeDtypeStruct((count, grad.shape[-1]), jnp.float32)
        scatter_add = jax.linear_transpose(lambda table: jnp.take(table, ids, axis=0), wide_VD)
        (total_VD,) = scatter_add(grad.astype(jnp.float32))
        return None, total_VD.astype(grad.dtype)

    return per_device.by_device(of_table, (ids, grad), None)[1], None


_embed.defvjp(_embed_forward, _embed_backward)


def add_shared(x: jax.Array, shared: jax.Array) -> jax.Array:
    """Adds an array that all examples share, such as a bias; its gradient is summed in float32.

    Args:
        x: [B, ..., *shared.shape].
        shared: is cast to the dtype of `x`; its gradient has its own.
    """
    return _add_shared(x.ndim - shared.ndim, str(shared.dtype), x, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_shared(axes: int, dtype: str, x: jax.Array, shared: jax.Array) -> jax.Array:
    del dtype
    return x + shared.reshape((1,) * axes + shared.shape).astype(x.dtype)


def _add_shared_forward(
    axes: int, dtype: str, x: jax.Array, shared: jax.Array
) -> tuple[jax.Array, None]:
    return _add_shared(axes, dtype, x, shared), None


def _add_shared_backward(
    axes: int, dtype: str, _: None, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return grad, per_device.batch_sum(grad, axes, dtype)


_add_shared.defvjp(_add_shared_forward, _add_shared_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Computes the exact GELU, `x (1 + erf(x / sqrt 2)) / 2`, in float32; returns the dtype of `x`.

    `jax.nn.gelu(approximate=False)` uses `erfc`, which costs several times as much and differs only
    in the far tail (by less than 1e-6), and keeps intermediate results; this keeps `x`.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * lax.erf(x * math.sqrt(0.5))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    slope = _gelu_slope(x.astype(jnp.float32))
    return ((grad.astype(jnp.float32) * slope).astype(x.dtype),)


def _gelu_slope(x: jax.Array) -> jax.Array:
    return _normal_cdf(x) + x * math.sqrt(0.5 / math.pi) * jnp.exp(-0.5 * x * x)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def squared_relu(x: jax.Array) -> jax.Array:
    """Computes `max(x, 0)^2` (https://arxiv.org/abs/2109.08668).

    Its slope is twice the root of the result, which the next matmul keeps anyway: `x` is not kept.
    """
    return jnp.square(jax.nn.relu(x))


def _squared_relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = squared_relu(x)
    return y, y


def _squared_relu_backward(y: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    return ((2 * jnp.sqrt(y.astype(jnp.float32)) * grad.astype(jnp.float32)).astype(y.dtype),)


squared_relu.defvjp(_squared_relu_forward, _squared_relu_backward)


@jax.custom_vjp
def geglu(x: jax.Array) -> jax.Array:
    """Computes `gelu(a) b` of the halves `[a, b]` of the last axis (https://arxiv.org/abs/2002.05202).

    Its gradient is one pass that writes both halves. By autodiff, XLA writes the gradient of each
    half, copies both into one array, and keeps `gelu(a)` (benchmarks/LOG.md).
    """
    return _geglu_forward(x)[0]


def _geglu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return (first * _normal_cdf(first) * second).astype(x.dtype), x


def _geglu_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    first, second = (jnp.broadcast_to(halves[..., i : i + 1, :], halves.shape) for i in (0, 1))
    is_first = lax.broadcasted_iota(jnp.int32, halves.shape, halves.ndim - 2) == 0
    slopes = jnp.where(is_first, _gelu_slope(first) * second, first * _normal_cdf(first))
    return ((grad.astype(jnp.float32)[..., None, :] * slopes).reshape(x.shape).astype(x.dtype),)


geglu.defvjp(_geglu_forward, _geglu_backward)


def rms_norm(x: jax.Array, eps: float, scale: jax.Array | None = None) -> jax.Array:
    """Divides by the root of the mean square over the last dimension; float32 inside.

    Args:
        x: [..., D].
        scale: [D], multiplies the result; None is ones.
    """
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    if scale is not None:
        normal = normal * scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return normal.astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Normalizes the last dimension; statistics in float32.

    On GPUs the backward pass gets the statistics from the forward pass. If the compiler derives
    them again, it writes the products that the scale's gradient sums up, in float32: 2.5 times the
    memory traffic.

    Args:
        x: [..., D].
        scale: multiplies the result; as many dimensions as `x`, all but the last of size 1.
        bias: is added to it; same shape as the scale. None is for a norm without a bias.
    """
    normalize = _layer_norm if platform() == "cpu" else _layer_norm_with_statistics
    return normalize(x, scale, bias, eps)


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    return _scaled(centered * lax.rsqrt(variance + eps), scale, bias, x)


def _scaled(normal: jax.Array, scale: jax.Array, bias: jax.Array | None, x: jax.Array) -> jax.Array:
    scaled = normal * scale if bias is None else normal * scale + bias
    return scaled.astype(x.dtype)


_layer_norm_with_statistics = jax.custom_vjp(_layer_norm, nondiff_argnums=(3,))


def _layer_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, tuple[Any, ...]]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + eps)
    mean, inverse = lax.optimization_barrier((mean, inverse))
    normal = (wide - mean) * inverse
    return _scaled(normal, scale, bias, x), (x, mean, inverse, scale, bias)


def _layer_norm_backward(
    eps: float, kept: tuple[Any, ...], grad: jax.Array
) -> tuple[jax.Array | None, ...]:
    del eps
    x, mean, inverse, scale, bias = kept
    wide = grad.astype(jnp.float32)
    normal = (x.astype(jnp.float32) - mean) * inverse
    rows = tuple(range(x.ndim - 1))
    of_scale, of_bias = (term.sum(rows, keepdims=True) for term in (wide * normal, wide))
    scaled = wide * scale
    along = (scaled * normal).mean(-1, keepdims=True)
    of_x = inverse * (scaled - scaled.mean(-1, keepdims=True) - normal * along)
    of_bias = None if bias is None else of_bias.astype(scale.dtype)
    return of_x.astype(x.dtype), of_scale.astype(scale.dtype), of_bias


_layer_norm_with_statistics.defvjp(_layer_norm_forward, _layer_norm_backward)


def take_positions(x_BSD: jax.Array, positions_BM: jax.Array) -> jax.Array:
    """Returns the vectors at these positions of each sequence, [B, M, D].

    GPUs multiply by a matrix of zeros and ones, which is exact, and whose gradient is a matmul. The
    gradient of indexing is a scatter, and XLA then stores all activations of the model with B as
    the fastest dimension and transposes them before and after each layer.
    """
    if platform() == "cpu":
        return jnp.take_along_axis(x_BSD, positions_BM[:, :, None], axis=1)
    chosen_BMS = jax.nn.one_hot(positions_BM, x_BSD.shape[1], dtype=x_BSD.dtype)
    exact = lax.Precision.HIGHEST  # float32 would be rounded to TF32
    return jnp.einsum("bms,bsd->bmd", chosen_BMS, x_BSD, precision=exact)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Zeroes a fraction of the elements and scales up the others; without keys, returns `x`.

    Each example of `x` [B, ...] has its own key, so its mask does not depend on the others. The
    mask comes from :func:`random_bits` and is recomputed in the backward pass.
    """
    if keys_B is None or rate == 0:
        return x
    dropped_below = jnp.uint32(round(rate * 2**32))
    kept = random_bits(keys_B, x.shape[1:]) >= dropped_below
    return jnp.where(kept, x * (1 / (1 - rate)), jnp.zeros((), x.dtype))


def split_keys(keys_B: jax.Array | None, count: int) -> list[jax.Array] | list[None]:
    """Splits each example's key into `count`: returns a list of keys [B], or of None for None."""
    if keys_B is None:
        return [None] * count
    return list(jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys_B))


def random_bits(keys_B: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 [B, *shape]: hashes of each example's key and the element's index in it.

    A hash of a counter needs no memory and fuses with the operation that reads it.
    `jax.random.bits` would be stronger than dropout needs: its 20 rounds per element took a third
    of a training step of the masked language model on a CPU. The hash is "triple32" (three
    multiplications, avalanche close to a random permutation;
    https://github.com/skeeto/hash-prospector), with one half of the key added before it and the
    other mixed in, so that examples with similar first halves do not get shifted copies of one
    sequence.

    Args:
        shape: shape of an example; fewer than 2^32 elements.
    """
    key_data = jax.random.key_data(keys_B)
    first, second = (
        word.reshape(-1, *(1 for _ in shape)) for word in (key_data[:, 0], key_data[:, -1])
    )
    return mixed(numbers((1, *shape)) + first, second)


def numbers(shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 of this shape: the index of each element, in C order."""
    number = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        number += stride * lax.broadcasted_iota(jnp.uint32, shape, axis)
    return number


def mixed(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the hash "triple32" of uint32 `x`, with `other` mixed in after its first product."""
    x = (x ^ (x >> 17)) * jnp.uint32(0xED5AD4BB) ^ other
    x = (x ^ (x >> 11)) * jnp.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * jnp.uint32(0x31848BAB)
    return x ^ (x >> 14)


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Returns `cap tanh(z / cap)`, as in Gemma 2 (https://arxiv.org/abs/2408.00118); None: z."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, cap: float | None = None, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes the cost of the targets, and whether they are the most likely tokens.

    The logits of a large vocabulary are most of what a step of a language model moves. This reads
    them once (twice without a cap), and once more for the gradient, which needs no scatter. As
    written by autodiff, of a softmax with a cap and an argmax, XLA read or wrote them ten times:
    149 of 386 GB of a step of a GPT of depth 12 with 65,536 tokens.

    Args:
        logits: [..., V] of any dtype, not capped; they are computed with in float32.
        targets: int32 [...]; with a negative one, the cost is not used.
        bias: [V] of any dtype, is added to the logits where they are read, so that no sums are
            stored; minus infinity excludes a token. Not with a cap.

    Returns:
        Nats, float32 [...], and bool [...]: whether the target is the most likely token, the first
        of equal ones, as argmax has it. Logits of bfloat16 often tie.
    """
    return _cross_entropy(logits, targets, bias, cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropy(
    logits: jax.Array, targets: jax.Array, bias: jax.Array | None, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    return _cross_entropy_forward(logits, targets, bias, cap)[0]


# Above it, exponentials relative to the cap could all be 0 in float32.
_LARGEST_SHIFT = 30.0


def _cross_entropy_forward(
    logits: jax.Array, targets: jax.Array, bias: jax.Array | None, cap: float | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    wide, ids = _biased(logits, bias), _ids(logits)
    is_target, is_before = ids == targets[..., None], ids < targets[..., None]
    # The cap keeps the order, so it is applied to the results. XLA would store capped logits that
    # are used several times.
    on_target = jnp.where(is_target, wide, 0)
    on_before = jnp.where(is_before, wide, -jnp.inf)
    on_after = jnp.where(is_before | is_target, -jnp.inf, wide)
    if cap is not None and cap <= _LARGEST_SHIFT:
        # A bound, so that the largest need not be known, and one reduction, which reads once.
        shift = jnp.full(targets.shape, cap, wide.dtype)
        total, of_target, before, after = lax.reduce(
            (jnp.exp(capped(wide, cap) - cap), on_target, on_before, on_after),
            (np.float32(0), np.float32(0), np.float32(-np.inf), np.float32(-np.inf)),
            lambda first, second: (
                first[0] + second[0],
                first[1] + second[1],
                lax.max(first[2], second[2]),
                lax.max(first[3], second[3]),
            ),
            (logits.ndim - 1,),
        )
    else:
        of_target, before, after = on_target.sum(-1), on_before.max(-1), on_after.max(-1)
        largest = jnp.maximum(jnp.where(targets < 0, -jnp.inf, of_target), before)
        shift = capped(jnp.maximum(largest, after), cap)
        total = jnp.exp(capped(wide, cap) - shift[..., None]).sum(-1)
    cost = jnp.log(total) + shift - capped(of_target, cap)
    right = (of_target > before) & (of_target >= after)
    return (cost, right), (logits, targets, bias, shift, total)


def _cross_entropy_backward(
    cap: float | None, kept: tuple[Any, ...], grads: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None, jax.Array | None]:
    logits, targets, bias, shift, total = kept
    if per_device.platform() != "cpu":
        # Otherwise XLA stores the capped logits of the forward pass, in float32, for this one.
        logits = lax.optimization_barrier(logits)
    values = capped(_biased(logits, bias), cap)
    chances = jnp.exp(values - shift[..., None]) / total[..., None]
    grad = grads[0][..., None] * (chances - (_ids(logits) == targets[..., None]))
    if cap is not None:
        grad = grad * (1 - jnp.square(values / cap))
    grad = grad.astype(logits.dtype)
    if bias is None:
        return grad, None, None
    return grad, None, per_device.batch_sum(grad, grad.ndim - 1, bias.dtype)


def _biased(logits: jax.Array, bias: jax.Array | None) -> jax.Array:
    wide = logits.astype(jnp.float32)
    if bias is None:
        return wide
    return wide + bias.astype(jnp.float32).reshape((1,) * (logits.ndim - 1) + bias.shape)


def _ids(logits: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
