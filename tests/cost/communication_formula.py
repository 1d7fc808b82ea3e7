"""The bytes that a step must send, by the formula of its sharding."""

from collections.abc import Mapping

import numpy as np

from jaxtrain import config
from jaxtrain.sharding import HasShape, ShardingRule
from jaxtrain.training.step_setup import StepSetup

_BF16 = 2


def of_step(built: StepSetup) -> float:
    """Returns the bytes that each device sends per step."""
    definition, run = built.definition, built.run
    file_weights = {name: definition.extras[name] for name in definition.file_weights}
    trained = definition.trained(built.target.params)
    return formula_bytes(trained, file_weights, built.rule, run.mesh, run.optim.accumulate)


def formula_bytes(
    params: Mapping[str, HasShape],
    file_weights: Mapping[str, HasShape],
    rule: ShardingRule,
    settings: config.Mesh,
    accumulate: int,
) -> float:
    """Computes the bytes that a device sends per step, with parameters and gradients in bfloat16.

    A program may send a little less: the backward pass does not read the first layer's kernel. With
    ``shard="params"``, each microbatch gathers the sharded parameters in both passes and
    reduce-scatters their gradients; ``"optimizer"`` gathers once per step. In each microbatch, the
    gradients of unsharded parameters are all-reduced over all devices, and those of shards over
    ``data``. Each microbatch gathers the sharded weights of files once: they have no gradient, and
    a teacher that was kept for the next microbatch would need its full memory.

    Args:
        params: the trained parameters; frozen ones are not communicated.
        file_weights: the weights of a teacher and of LPIPS.
        rule: where arrays are stored.
        settings: the mesh.
        accumulate: microbatches per step.
    """
    sharded, unsharded = _sizes(params, rule)
    gathered, _ = _sizes(file_weights, rule)
    n, d, all_devices = settings.fsdp, settings.data, settings.devices
    if settings.shard == "none":
        sharded, unsharded, gathered = 0, sharded + unsharded, 0
    gathers = {"params": 2 * accumulate, "optimizer": 1, "none": 0}[settings.shard]
    along_fsdp = (sharded * (gathers + accumulate) + gathered * accumulate) * (n - 1) / n
    along_data = 2 * sharded / n * (d - 1) / d * accumulate
    whole = 2 * unsharded * (all_devices - 1) / all_devices * accumulate
    return along_fsdp + along_data + whole


def _sizes(arrays: Mapping[str, HasShape], rule: ShardingRule) -> tuple[int, int]:
    """Returns the bytes in bfloat16 of sharded and of other arrays."""
    sharded = unsharded = 0
    for array in arrays.values():
        size = int(np.prod(array.shape)) * _BF16
        if any(axis is not None for axis in rule(array).spec):
            sharded += size
        else:
            unsharded += size
    return sharded, unsharded
