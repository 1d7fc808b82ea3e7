"""The contract between a data set and the pipeline.

A source is one split of one data set: it knows how many examples there are and how to make each of
them. Order, epochs, batches, workers and substitutes belong to :mod:`jaxtrain.data.pipeline`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxtrain.errors import BadExample


class Source(Protocol):
    """One split. Picklable and light: it travels to worker processes and opens files there."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of what the examples are; not of where they lie."""

    def __len__(self) -> int:
        """Examples in one epoch."""

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Example ``index`` as arrays without a batch dimension.

        Every random choice comes from ``rng``, which is a pure function of the example's place in
        the order.

        Raises:
            BadExample: the example cannot be read.
        """


@runtime_checkable
class Grouped(Source, Protocol):
    """A source some of whose examples cost less together: clips that share a decoding.

    Examples ``[g * group, (g + 1) * group)`` are group g; ``group`` divides the number of examples.
    In the order a group's examples stand ``spread`` positions apart.
    """

    @property
    def group(self) -> int:
        """Examples of a group; 1 is without groups."""

    @property
    def spread(self) -> int:
        """Positions in the order from one example of a group to the next."""

    def together(
        self,
        indices: Sequence[int],
        rngs: Sequence[np.random.Generator],
        shared: np.random.Generator,
    ) -> list[dict[str, np.ndarray] | BadExample]:
        """Examples of one group, or what is wrong with them.

        Each is a function of its index, its generator and ``shared``, which is one of the group's
        place in the order; not of which others are asked for.
        """


def as_numbers(ids: Sequence[int]) -> str:
    """What ids stand for in data that is no text: themselves."""
    return " ".join(map(str, ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """What a data config opens.

    Attributes:
        train: the training split.
        val: the validation split.
        files: input files found, good and bad.
        bad: input files found broken while opening, with reasons.
        summary: one line for the console.
        files_to_keep: name -> content of what each checkpoint is to hold, so that the model can be
            used without the data: a tokenizer.
        decode: ids of tokens -> the text that they stand for.
        faster: what makes examples of this data cheaper to read; empty where nothing is known.
    """

    train: Source
    val: Source
    files: int
    bad: tuple[BadExample, ...]
    summary: str
    files_to_keep: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] = as_numbers
    faster: str = ""
