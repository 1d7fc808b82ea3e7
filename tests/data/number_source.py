"""A source of numbers, of which some are broken."""

import dataclasses

import numpy as np

from jaxtrain.errors import BadExample


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Example i contains i and a random number."""

    size: int
    broken: frozenset[int] = frozenset()
    fingerprint: str = "numbers"

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        if index in self.broken:
            raise BadExample(f"file-{index}", "broken on purpose")
        return {"x": np.float32([index, rng.random()])}
