import numpy as np
import pytest

from jaxtrain.data.text.packing import fit


@pytest.mark.parametrize("length", [1, 4, 64, 1000])
@pytest.mark.parametrize("mean", [3, 50, 900])
def test_fitted_documents_lose_nothing_and_begin_each_row(length: int, mean: float) -> None:
    lengths = 1 + np.random.default_rng(length).geometric(1 / mean, 300)
    found = fit(lengths, length)
    begins = np.cumsum(lengths) - lengths
    pieces = found.pieces[np.argsort(found.pieces[:, 0], kind="stable")]
    assert pieces[0, 0] == 0
    assert (pieces[1:, 0] == pieces[:-1, 1]).all()  # each token once
    assert pieces[-1, 1] == lengths.sum()
    assert (pieces[:, 2] == ~np.isin(pieces[:, 0], begins)).all()
    sizes = found.pieces[:, 1] - found.pieces[:, 0] + found.pieces[:, 2]
    assert (sizes >= 2).all()
    assert found.rows[0, 0] == 0
    assert (found.rows[1:, 0] == found.rows[:-1, 1]).all()
    assert found.rows[-1, 1] == len(pieces)
    of_rows = np.add.reduceat(sizes, found.rows[:, 0])
    assert of_rows.max() <= length + 1
    assert found.padding == (length + 1 - of_rows).sum()
    ends = set((begins + lengths).tolist())
    for (_, stop, _), size in zip(found.pieces.tolist(), sizes, strict=True):
        assert stop in ends or size == length + 1  # a cut fills its row, and predicts no begin


def test_the_longest_documents_come_first_and_the_row_with_least_space_is_taken() -> None:
    found = fit(np.array([3, 6, 4, 2, 2, 5]), 7)  # rows of 8: 6 + 2, 5 + 3, 4 + 2
    rows = [found.pieces[a:b, :2].tolist() for a, b in found.rows]
    assert rows == [[[0, 3], [17, 22]], [[3, 9], [13, 15]], [[9, 13], [15, 17]]]
    assert found.padding == 2


def test_much_text_needs_little_padding() -> None:
    lengths = 1 + np.random.default_rng(0).geometric(1 / 300, 20_000)
    found = fit(lengths, 256)
    assert found.padding < 0.005 * len(found.rows) * 256
