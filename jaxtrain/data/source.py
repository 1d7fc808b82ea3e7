"""Defines the contract between a data set and the pipeline.

A source is one split of one data set: it counts its examples and loads each of them by its index.
Order, epochs and substitutes belong to :mod:`jaxtrain.data.sampler`, batches and workers to
:mod:`jaxtrain.data.pipeline`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxtrain.errors import BadExample

ArrayTypes = dict[str, tuple[tuple[int, ...], str]]
"""Array of an example -> shape and dtype."""


class Source(Protocol):
    """One split. It is small and picklable: worker processes receive it and open its files.

    A source may also have an attribute ``block``: that many successive examples, from a multiple of
    it, are read together, such as the crops of one clip. They stay together in the order, and get
    equal random numbers. And it may have a method ``validated``, which chooses the examples of a
    validation (:func:`jaxtrain.data.validation.validated`), and ``groups``, the number of parts
    that are independent of each other, such as videos.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """The opened data of a config.

    Attributes:
        files: number of input files, intact and broken.
        bad: input files found broken when the data was opened, with reasons.
        pieces: number of pieces into which the files were cut, each of which can be damaged by
            itself; None if training reads the files.
        files_to_keep: name and content of files that each checkpoint stores, so that the model can
            be used without the data, such as a tokenizer.
        example_file: path of an input file, on which a user can try the model; may be empty.
        groups: what the groups of validation examples are, such as videos; "" if each example is
            one by itself.
    """

    train: Source
    val: Source
    files: int
    bad: tuple[BadExample, ...]
    summary: str
    pieces: int | None = None
    files_to_keep: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] = as_numbers
    example_file: str = ""
    groups: str = ""

    @property
    def small_training(self) -> str:
        """A warning if there are more examples for validation than for training; else ""."""
        train, val = (getattr(side, "groups", len(side)) for side in (self.train, self.val))
        if val <= train:
            return ""
        return (
            f"warning: {val:,} {self.groups or 'examples'} are for validation, and only {train:,} "
            "for training: add training data, or set --data.val_path"
        )
