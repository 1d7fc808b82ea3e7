"""Defines the contract between a data set and the pipeline.

A source is one split of one data set: it counts its examples and loads each of them by its index.
Order, epochs and substitutes belong to :mod:`jaxtrain.data.sampler`, batches and workers to
:mod:`jaxtrain.data.pipeline`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxtrain.errors import BadExample

ArrayTypes = dict[str, tuple[tuple[int, ...], str]]
"""Array of an example -> shape and dtype."""


class Source(Protocol):
    """One split. It is small and picklable: worker processes receive it and open its files.

    A source may also have an attribute ``block``: that many successive examples, from a multiple of
    it, are read together, such as the crops of one clip. They stay together in the order, and get
    equal random numbers. And it may have a method ``validated``, which chooses the examples of a
    validation (:func:`validated`), and ``groups``, the number of parts that are independent of each
    other, such as videos.
    """

    @property
    def fingerprint(self) -> str:
        """Returns a hex digest of the examples, independent of where they are stored."""

    def __len__(self) -> int:
        """Returns the number of examples in one epoch."""

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns example ``index`` as arrays without a batch dimension.

        Every random choice must come from ``rng``, a pure function of the example's position in
        the order (or its block's), or, in a validation, of its index.

        Raises:
            BadExample: the example cannot be read.
            DiskAway: it cannot be read now. The pipeline waits, and tries again with the same
                randomness (:func:`jaxtrain.storage.disks.when_readable`).
        """


def as_numbers(ids: Sequence[int]) -> str:
    """Returns the ids as decimal numbers, which is how data that is not text is decoded."""
    return " ".join(map(str, ids))


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
    """Returns the examples of a validation: the source's choice, or evenly spaced over it.

    Args:
        source: the validation split.
        count: number of examples, at most that of the split.
    """
    choose: Callable[[int], Validated] | None = getattr(source, "validated", None)
    if choose is not None:
        return choose(count)
    indices = np.arange(count, dtype=np.int64) * len(source) // max(count, 1)
    return Validated(indices, np.ones(count, np.float32), indices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """The opened data of a config.

    Attributes:
        train: the training split.
        val: the validation split.
        files: number of input files, intact and broken.
        bad: input files found broken when the data was opened, with reasons.
        summary: one line for the console.
        files_to_keep: name and content of files that each checkpoint stores, so that the model can
            be used without the data, such as a tokenizer.
        decode: turns token ids into text.
        example_file: path of an input file, on which a user can try the model; may be empty.
        groups: what the groups of validation examples are, such as videos; "" if each example is
            one by itself.
    """

    train: Source
    val: Source
    files: int
    bad: tuple[BadExample, ...]
    summary: str
    files_to_keep: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] = as_numbers
    example_file: str = ""
    groups: str = ""

    def validation(self, count: int) -> str:
        """Says what validates.

        Args:
            count: number of examples to use, if there are as many.
        """
        chosen = validated(self.val, min(count, len(self.val)))
        text = f"{len(chosen.indices):,} examples validate"
        if not self.groups:
            return text
        groups = len(np.unique(chosen.groups))
        return f"{text}, of {groups:,} {self.groups}; metrics are means over {self.groups}"

    @property
    def small_training(self) -> str:
        """A warning if there are more examples for validation than for training; else ""."""
        train, val = (getattr(side, "groups", len(side)) for side in (self.train, self.val))
        if val <= train:
            return ""
        return (
            f"warning: {val:,} examples are for validation, and only {train:,} for training: add "
            "training data, or set --data.val_path"
        )
