"""Combines several sources into one, each with its fraction of the training examples.

An epoch has as many examples as the sources in total. With weights ``w``, ``w_k / sum(w)`` of them,
to the nearest example, are of source k. They are shuffled again for each epoch, and are taken from
the source's own endless order, in which every example comes once before any is repeated. So a
source that gives more examples per epoch than it has is repeated within an epoch, and one that
gives fewer continues in the next epoch where it stopped.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxtrain.data.source import Source
from jaxtrain.storage import cache


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Concatenated sources; a :class:`jaxtrain.data.source.Source` itself.

    Attributes:
        sources: none is empty.
        per_epoch: examples of each source in an epoch; their sum is the number of examples.
    """

    sources: tuple[Source, ...]
    per_epoch: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """Returns a hex digest of all examples and of those of each source in an epoch."""
        return cache.digest([source.fingerprint for source in self.sources], self.per_epoch)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of examples of each source."""
        return tuple(len(source) for source in self.sources)

    def __len__(self) -> int:
        return sum(self.sizes)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns example ``index``, counted over all sources."""
        begins = [0, *itertools.accumulate(self.sizes)]
        number = bisect.bisect_right(begins, index) - 1
        return self.sources[number].example(index - begins[number], rng)


def combine(sources: Sequence[Source], weights: Sequence[float]) -> Source:
    """Combines sources into one; returns a single source unchanged.

    Args:
        weights: one positive weight per source; if empty, an epoch has each example once.
    """
    if len(sources) == 1:
        return sources[0]
    sizes = [len(source) for source in sources]
    per_epoch = shared_out(sum(sizes), weights) if weights else sizes
    return Mixture(tuple(sources), tuple(per_epoch))


def shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Divides a number by weight: rounds down, then adds by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
