"""Several sources as one, each with its share of the training.

An epoch has as many places as all sources have examples together. With weights ``w``, source k gets
``w_k / sum(w)`` of them, to the nearest place. Which places is shuffled anew each epoch; the places
of a source are then filled from its own endless order, in which each of its examples comes once
before any comes again. So a source with more than its size is repeated, and one with less goes on
in the next epoch where it stopped in this one.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.source import Source


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources one behind the other; see :class:`jaxtrain.data.source.Source`.

    Attributes:
        parts: the sources; none is empty.
        places: of each in an epoch; together as many as there are examples.
    """

    parts: tuple[Source, ...]
    places: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        """Of all examples and shares."""
        return cache.digest([part.fingerprint for part in self.parts], self.places)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each source."""
        return tuple(len(part) for part in self.parts)

    def __len__(self) -> int:
        return sum(self.sizes)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Example ``index``, counted over all sources."""
        begins = [0, *itertools.accumulate(self.sizes)]
        part = bisect.bisect_right(begins, index) - 1
        return self.parts[part].example(index - begins[part], rng)


def of(parts: Sequence[Source], weights: Sequence[float]) -> Source:
    """One source of several; of a single one itself.

    Args:
        parts: the sources; none is empty.
        weights: one for each, above 0; none gives each as many places as it has examples.
    """
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part) for part in parts]
    places = shared_out(sum(sizes), weights) if weights else sizes
    return Mixture(tuple(parts), tuple(places))


def shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` places by weight: rounded down, what is left to the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    places = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (places[i] - exact[i], i))
    for i in by_remainder[: total - sum(places)]:
        places[i] += 1
    return places
