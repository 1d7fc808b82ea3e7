import dataclasses
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import mixture, sampler
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import BadExample


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Examples that contain the number of their source and their index."""

    name: int
    size: int
    fingerprint: str = "numbers"

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        del rng
        return {"of": np.array([self.name, index])}


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, [1, 1], [5, 5]),
        (10, [3, 1], [8, 2]),  # 7.5 and 2.5: with equal remainders, the first wins
        (7, [1, 1, 1], [3, 2, 2]),
        (100, [0.5, 0.25, 0.25], [50, 25, 25]),
        (3, [1e-9, 1], [0, 3]),
    ],
)
def test_a_total_is_divided_by_weight(total: int, weights: list[float], parts: list[int]) -> None:
    assert mixture.shared_out(total, weights) == parts


def drawn(source: Mixture, positions: range, seed: int = 3) -> list[list[int]]:
    """Returns (source, index in it) at each position."""
    where = sampler.order_of(source, seed)
    rng = np.random.default_rng(0)
    return [source.example(where(position), rng)["of"].tolist() for position in positions]


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [((20, 5, 15), (1, 1, 2)), ((3, 21), (9, 1)), ((15, 15), ())],
)
def test_every_epoch_has_the_fractions_and_no_example_is_repeated_too_often(
    sizes: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    source = mixture.combine([Numbers(k, size) for k, size in enumerate(sizes)], weights)
    assert isinstance(source, Mixture)
    total, epochs = sum(sizes), 3
    assert len(source) == total
    seen = drawn(source, range(epochs * total))
    assert seen != drawn(source, range(epochs * total), seed=4)
    counts = {(k, i): 0 for k, size in enumerate(sizes) for i in range(size)}
    for epoch in range(epochs):
        part = seen[epoch * total : (epoch + 1) * total]
        assert [sum(k == which for which, _ in part) for k in range(len(sizes))] == list(
            source.per_epoch
        )
        for which, index in part:
            counts[which, index] += 1
        for k, size in enumerate(sizes):  # each once before any is repeated
            own = [counts[k, i] for i in range(size)]
            done = source.per_epoch[k] * (epoch + 1)
            assert {done // size, -(-done // size)} >= set(own)
            assert sum(own) == done
    # Shuffled: no source forms one block.
    first = [which for which, _ in seen[:total]]
    assert sum(a != b for a, b in itertools.pairwise(first)) > len(sizes)


def test_the_example_depends_on_the_position_alone() -> None:
    source = mixture.combine([Numbers(0, 40), Numbers(1, 10)], (1, 3))
    assert isinstance(source, Mixture)
    whole = drawn(source, range(60))
    assert drawn(source, range(43, 60)) == whole[43:]
    where = sampler.order_of(source, 3)
    where(0)
    again = pickle.loads(pickle.dumps(where))
    assert [again(p) for p in range(60)] == [where(p) for p in range(60)]
    assert len(pickle.dumps(where)) < 500


def test_substitutes_of_broken_examples_have_the_weights_of_the_mixture(tmp_path: Path) -> None:
    """Source 0 has a tenth of the examples and half of the weight."""

    class Broken(Numbers):
        def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
            if index % 2:
                raise BadExample(f"{self.name}-{index}", "broken on purpose")
            return super().example(index, rng)

    source = mixture.combine([Broken(0, 100), Broken(1, 900)], (1, 1))
    rows = sampler.TrainingRows(
        source, sampler.order_of(source, 3), 0, 1, 0, 1, 10**6, Quarantine(tmp_path / "list")
    )
    of_first = np.mean([rows.load(position)["of"][0] == 0 for position in range(2000)])
    assert 0.45 < of_first < 0.55  # a standard deviation is 0.011; uniform ones give 0.30


def test_a_single_source_is_unchanged_and_mixtures_have_their_own_fingerprints() -> None:
    one = Numbers(0, 4)
    assert mixture.combine([one], (7,)) is one
    prints = {
        mixture.combine(parts, weights).fingerprint
        for parts, weights in (
            ([one, Numbers(1, 8)], (1, 1)),
            ([one, Numbers(1, 8)], (1, 3)),
            ([one, Numbers(1, 8, "other")], (1, 1)),
        )
    }
    assert len(prints) == 3
