"""Counts the floating-point operations that a model needs."""

import dataclasses
import functools
from typing import Any, cast

import jax

from jaxtrain.cost import flops
from jaxtrain.models.contract import ModelConfig
from jaxtrain.ops import attention, per_device
from jaxtrain.training.state import Arrays, ModelDefinition


@functools.lru_cache(maxsize=4)
def model_flops(model: ModelConfig) -> float:
    """Returns the floating-point operations that a model needs for one example.

    They are those of all matmuls and convolutions of the loss and its gradient, in a program
    without rematerialization. Attention counts all keys of the sequence, also those that causal
    attention hides, which is the convention of MFU, and of a layer with a window those in it. For
    the language models this equals ``2 m n k`` summed over the matmuls of the forward pass, times
    3, and nanochat's count (https://github.com/karpathy/nanochat, estimate_flops). For the
    video autoencoder it includes products with zeros in folded kernels: 2% of them all at full
    width, 7% in the config `demo`.
    """
    if model.remat is not None:
        model = dataclasses.replace(cast(Any, model), remat="none")
    definition = ModelDefinition(model.build, model.freeze)

    def loss(trained: Arrays, params: Arrays, extras: Arrays, batch: Any, keys: Any) -> Any:
        return definition.module({**params, **trained}, extras).loss(batch, keys)[0]

    # On CPUs, attention is matmuls: cuDNN's backward pass computes the scores again.
    with per_device.tracing(platform="cpu"), attention.counted():
        traced = jax.jit(jax.grad(loss)).trace(
            definition.trained(definition.params),
            definition.params,
            definition.extras,
            model.batch_spec(1),
            jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1)),
        )
    return flops.product_flops(traced.jaxpr)
