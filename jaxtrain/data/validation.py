"""Chooses the examples of a validation.

Where examples are of groups, such as clips of videos, metrics are means over groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxtrain.data.source import Source, Sources


class Validated(NamedTuple):
    """The examples of a validation.

    Attributes:
        indices: of the examples, int64.
        weights: of the examples in the metrics, float32.
        groups: number of the group of each, int64. Metrics are means over groups, so the weights of
            a group sum up to 1.
    """

    indices: np.ndarray
    weights: np.ndarray
    groups: np.ndarray


def validated(source: Source, count: int) -> Validated:
    """Returns the examples of a validation: the source's choice, or evenly spaced over it."""
    choose: Callable[[int], Validated] | None = getattr(source, "validated", None)
    if choose is not None:
        return choose(count)
    indices = np.arange(count, dtype=np.int64) * len(source) // max(count, 1)
    return Validated(indices, np.ones(count, np.float32), indices)


def described(sources: Sources, count: int) -> str:
    """Says what validates."""
    chosen = validated(sources.val, min(count, len(sources.val)))
    text = f"{len(chosen.indices):,} examples validate"
    if not sources.groups:
        return text
    groups = len(np.unique(chosen.groups))
    return f"{text}, of {groups:,} {sources.groups}; metrics are means over {sources.groups}"
