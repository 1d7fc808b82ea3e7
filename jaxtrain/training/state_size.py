"""Sizes of a state, or of a part of it."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.sharding import HasShape


def parameter_count(params: Mapping[str, HasShape]) -> int:
    """Returns the number of elements of all parameters."""
    return sum(int(np.prod(array.shape)) for array in params.values())


def bytes_per_device(target: Any) -> int:
    """Returns the bytes per device of a state, or of any tree of its arrays."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(target)
    )


def total_bytes(target: Any) -> int:
    """Returns the bytes of a state over all devices, or of any tree of its arrays, each once."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(target))
