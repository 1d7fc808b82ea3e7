"""Counts the floating-point operations of a traced step, rematerialization included."""

import math
from collections.abc import Iterator
from typing import Any

# cuDNN's fused attention, by jax's names: the number of matmuls over all queries and keys in it.
# The backward pass recomputes the scores.
_ATTENTION_PRODUCTS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}


def product_flops(jaxpr: Any) -> float:
    """Counts the operations of all matmuls and convolutions; a multiply-add counts as two.

    A loop counts once per iteration, and once if its length is unknown; a ``shard_map`` counts once
    per device; a conditional counts its most expensive branch. Sums, activations and the optimizer
    are omitted: they are bound by memory bandwidth, not by arithmetic.
    """
    total = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _dot(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        elif name in _ATTENTION_PRODUCTS:
            total += _ATTENTION_PRODUCTS[name] * _attention_product(equation)
        else:
            inner = [product_flops(jaxpr) for jaxpr in _inner(equation.params)]
            if name == "cond":
                total += max(inner)
            else:
                total += sum(inner) * _times(name, equation.params)
    return total


def has_convolutions(jaxpr: Any) -> bool:
    """Whether the program or one nested in it contains a convolution."""
    return any(
        equation.primitive.name == "conv_general_dilated"
        or any(has_convolutions(jaxpr) for jaxpr in _inner(equation.params))
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _times(name: str, params: dict[str, Any]) -> int:
    """How often an operation runs its nested programs; a ``shard_map`` runs them on each device."""
    if name == "scan":
        return int(params["length"])
    return int(params["mesh"].size) if name == "shard_map" else 1


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * depth


def _attention_product(equation: Any) -> float:
    """Counts masked scores too: causal attention counts in full, but a window only its keys."""
    batch, queries, heads, width = equation.invars[0].aval.shape
    keys = equation.invars[1].aval.shape[1]
    window = equation.params["sliding_window_length"]  # includes the query itself; None is all
    return 2.0 * batch * heads * queries * min(keys, window or keys) * width


def _convolution(equation: Any) -> float:
    """Per output element: kernel window times input channels; zeros of a dilated input are free."""
    kernel = equation.invars[1].aval.shape
    _, inputs, *window = equation.params["dimension_numbers"].rhs_spec
    depth = kernel[inputs] * math.prod(kernel[axis] for axis in window)
    dilated = math.prod(equation.params["lhs_dilation"])
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * depth / dilated


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item
