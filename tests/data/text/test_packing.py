import numpy as np
import pytest

from jaxtrain.data.text.packing import fit, span_blocks
from jaxtrain.data.text.specials import SEP


def find_spans(tokens: np.ndarray, ends: np.ndarray, sequence_length: int, sep: int) -> np.ndarray:
    return np.concatenate(list(span_blocks(tokens, ends, sequence_length, sep)))


def stream(seed: int, mean: float, documents: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Documents of sentences with geometric lengths: (tokens, sentence ends)."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    ends: list[int] = []
    for _ in range(documents):
        for _ in range(rng.integers(1, 12)):
            tokens += rng.integers(5, 1000, rng.geometric(1 / mean)).tolist()
            ends.append(len(tokens))
        tokens.append(SEP)
    return np.array(tokens, np.uint16), np.array(ends, np.uint64)


@pytest.mark.parametrize("length", [3, 16, 256, 100_000])
@pytest.mark.parametrize("mean", [1, 25, 300])
def test_spans_have_every_token_once_in_order_and_fit(length: int, mean: float) -> None:
    for seed in range(3):
        tokens, ends = stream(seed, mean, documents=10)
        spans = find_spans(tokens, ends, length, SEP).astype(np.int64)
        parts = [tokens[start:end] for start, end in spans]
        assert all(1 <= len(part) <= length - 2 for part in parts)
        # Only separators between two examples, and the last one, are skipped.
        kept = np.zeros(len(tokens), int)
        for start, end in spans:
            kept[start:end] += 1
        assert (kept <= 1).all()
        assert (tokens[kept == 0] == SEP).all()
        assert (np.diff(spans.ravel()) >= 0).all()
        assert all(part[0] != SEP and part[-1] != SEP for part in parts)


def test_a_sentence_is_cut_only_to_save_padding() -> None:
    length, cuts = 120, 0
    tokens, ends = stream(0, 15, 400)
    sentence_ends = set(ends.tolist())
    spans = find_spans(tokens, ends, length, SEP).astype(np.int64)
    for start, end in spans[:-1]:
        empty = length - 2 - (end - start)
        assert empty <= length // 50
        if end not in sentence_ends:
            cuts += 1
            assert empty == 0
            last = max(e for e in sentence_ends if e <= end)
            assert last <= start or end - last > length // 50
    assert 0 < cuts < 0.9 * len(spans)
    assert 1 - ((spans[:, 1] - spans[:, 0]).mean() + 2) / length < 0.01


def test_short_documents_share_a_sequence() -> None:
    tokens = np.array([5, 6, SEP, 7, SEP, 8, 9, 10, SEP], np.uint16)
    ends = np.array([2, 4, 8], np.uint64)
    assert find_spans(tokens, ends, 20, SEP).tolist() == [[0, 8]]
    assert find_spans(tokens, ends, 7, SEP).tolist() == [[0, 4], [5, 8]]


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
