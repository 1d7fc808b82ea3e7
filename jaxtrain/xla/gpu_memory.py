"""Sets how much GPU memory jax reserves: the whole policy is here.

XLA takes one fraction of each GPU at the start and allocates from it. What a run needs of that
follows from its config: ``mesh.shard`` (:mod:`jaxtrain.sharding`), ``model.remat``
(:func:`jaxtrain.ops.layers.remat`) and the microbatch. ``plan`` predicts it, and
``training/diagnosis/out_of_memory.py`` explains an error when it does not fit.
"""

from collections.abc import MutableMapping

from jaxtrain import terminal

# Fraction of a GPU's memory that XLA allocates at the start, which is all it can use. jax's default
# is 0.75. CUDA's context, loaded kernels and NCCL's buffers need memory outside it; with too little
# left, NCCL fails to start ("unhandled system error").
MEMORY_FRACTION = 0.9
_FRACTION, _DEPRECATED_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def reserve_memory(environment: MutableMapping[str, str]) -> None:
    """Sets the fraction of each GPU's memory that XLA takes; call it before jax finds devices.

    jax reads two variables, ignores empty ones, and raises ValueError if both are set (jaxlib 0.10,
    ``generate_pjrt_gpu_plugin_options``). A value that you set takes precedence. If you set both,
    the deprecated one is removed, with a warning if it differs.
    """
    fraction, deprecated = environment.get(_FRACTION), environment.get(_DEPRECATED_FRACTION)
    if fraction and deprecated:
        del environment[_DEPRECATED_FRACTION]
        if fraction != deprecated:
            terminal.warn(
                f"warning: {_FRACTION}={fraction} and {_DEPRECATED_FRACTION}={deprecated} are both "
                "set: the second, which is deprecated, is ignored"
            )
    elif not (fraction or deprecated):
        environment[_FRACTION] = str(MEMORY_FRACTION)
