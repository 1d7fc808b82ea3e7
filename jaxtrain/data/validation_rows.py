"""Reads the rows of validation batches."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data import sampler
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Source
from jaxtrain.data.validation import Validated, validated
from jaxtrain.errors import BadExample
from jaxtrain.storage import disks


@dataclasses.dataclass(frozen=True)
class ValidationRows:
    """The rows of one process's validation batches.

    Rows of weight zero fill up the last batch and replace broken examples. Metrics divide by the
    sum of the weights.

    Args:
        seed: an example's randomness is a function of this seed and its index.
        first_row: this process's first row in a global batch.
        rows_per_batch: number of this process's rows in a global batch.
    """

    source: Source
    seed: int
    examples: int
    batch_size: int
    first_row: int
    rows_per_batch: int
    spec: Mapping[str, Any]
    quarantine: Quarantine

    def __len__(self) -> int:
        return -(-len(self.chosen.indices) // self.batch_size) * self.rows_per_batch

    @functools.cached_property
    def chosen(self) -> Validated:
        """Returns the examples."""
        return validated(self.source, self.examples)

    def groups(self, batch: int) -> np.ndarray:
        """Returns the group of each row of a global batch, int64; -1 for a row that fills it up."""
        first = batch * self.batch_size
        groups = self.chosen.groups[first : first + self.batch_size]
        return np.pad(groups, (0, self.batch_size - len(groups)), constant_values=-1)

    def __getitem__(self, row: Any) -> dict[str, np.ndarray]:
        batch, offset = divmod(int(row), self.rows_per_batch)
        position = batch * self.batch_size + self.first_row + offset
        weight, example = np.array(0, np.float32), None
        if position < len(self.chosen.indices):
            index = int(self.chosen.indices[position])
            try:
                example = disks.when_readable(
                    lambda: self.source.example(index, sampler.generator(self.seed, index))
                )
                weight = self.chosen.weights[position]
            except BadExample as bad:
                self.quarantine.add(bad, during="validation", position=position)
        if example is None:
            example = {
                name: np.zeros(array.shape[1:], array.dtype) for name, array in self.spec.items()
            }
        return example | {sampler.WEIGHT: weight}
