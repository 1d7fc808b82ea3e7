import numpy as np
import pytest

from jaxtrain.data import splits
from jaxtrain.data.text import splitting
from jaxtrain.data.text.splitting import SKIPPED, TRAIN, VAL, Split, by_document, of_sides
from jaxtrain.errors import InputError


def sides_of(split: Split) -> list[np.ndarray]:
    """The side of every document, for each file."""
    return [np.concatenate(list(split.of_file(file))) for file in range(len(split.counts))]


def assign(
    counts: list[int], names: list[str], *, train_split: float, max_examples: int | None
) -> Split:
    """Splits files by name, or the documents of one file by number."""
    if len(names) == 1:
        return by_document(counts, names[0], train_split=train_split, max_examples=max_examples)
    trains = splits.by_hash(names, counts, train_split)
    return of_sides(counts, [TRAIN if here else VAL for here in trains], max_examples)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_files_are_split_by_name_and_keep_their_side(share: float) -> None:
    names = [f"{number}.txt" for number in range(100)]

    def by_file(chosen: list[str]) -> dict[str, int]:
        sides = sides_of(assign([3] * len(chosen), chosen, train_split=share, max_examples=None))
        assert all(len(split) == 3 and len(set(split.tolist())) == 1 for split in sides)
        return {name: int(split[0]) for name, split in zip(chosen, sides, strict=True)}

    every = by_file(names)
    training = sum(side == TRAIN for side in every.values())
    assert abs(training - 100 * share) <= 12
    assert 1 <= training <= 99
    if 0 < share < 1:
        fewer = by_file(names[10:60])
        assert fewer.items() <= every.items()
    assert set(by_file(names[:2]).values()) == {TRAIN, VAL}


def test_one_file_is_split_by_document() -> None:
    (split,) = sides_of(assign([1000], ["a.jsonl"], train_split=0.9, max_examples=None))
    assert 60 < (split == VAL).sum() < 140
    (more,) = sides_of(assign([1100], ["b.jsonl"], train_split=0.9, max_examples=None))
    assert (more[:1000] == split).all()
    (two,) = sides_of(assign([2], ["a.txt"], train_split=0.9, max_examples=None))
    assert sorted(two.tolist()) == [TRAIN, VAL]
    with pytest.raises(InputError, match=r"has 1 document.*--data.val_path"):
        assign([1], ["a.txt"], train_split=0.9, max_examples=None)


@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize("count", [10_001, 25_000])
def test_parts_of_a_file_are_split_like_one_file(count: int, limit: int | None) -> None:
    """A Hugging Face dataset is fetched in parts of 10,000 documents."""
    parts = [10_000] * (count // 10_000) + [count % 10_000]
    (expected,) = sides_of(assign([count], ["a"], train_split=0.9, max_examples=limit))
    got = np.concatenate(sides_of(assign(parts, ["a"], train_split=0.9, max_examples=limit)))
    assert (got == expected).all()
    assert 0.89 < (got == TRAIN).sum() / (limit or count) < 0.91


@pytest.mark.parametrize("limit", [2, 3, 50, 999, 1000, 5000])
def test_max_examples_counts_documents_over_the_entire_corpus(limit: int) -> None:
    counts = [10] * 100
    names = [f"{number}.txt" for number in range(100)]
    full = np.concatenate(sides_of(assign(counts, names, train_split=0.9, max_examples=None)))
    got = np.concatenate(sides_of(assign(counts, names, train_split=0.9, max_examples=limit)))
    kept = got != SKIPPED
    assert kept.sum() == min(limit, 1000)
    assert (got[kept] == full[kept]).all()
    assert set(got[kept].tolist()) == {TRAIN, VAL}
    if limit == 50:
        assert abs(np.flatnonzero(kept).mean() - 500) < 50
        assert abs((got == VAL).sum() / 50 - (full == VAL).mean()) < 0.02
    alone = np.concatenate(sides_of(of_sides(counts, [TRAIN] * 100, limit)))
    assert (alone == TRAIN).sum() == min(limit, 1000)


@pytest.mark.parametrize("files", [1, 7])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_block_size_does_not_change_sides(
    files: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, names = [700 // files] * files, [f"{n}.txt" for n in range(files)]

    def every() -> list[int]:
        split = assign(counts, names, train_split=share, max_examples=123)
        found = np.concatenate(sides_of(split))
        for side in (TRAIN, VAL):
            assert (found == side).sum() == split.kept[side] > 0
        return found.tolist()

    expected = every()
    monkeypatch.setattr(splitting, "_BLOCK", 16)
    assert every() == expected


def test_a_billion_documents_need_no_table() -> None:
    split = assign([10**9] * 3, ["a", "b", "c"], train_split=0.5, max_examples=10**9)
    block = next(split.of_file(2))
    assert len(block) == splitting._BLOCK
    assert abs((block != SKIPPED).mean() - 1 / 3) < 1e-3
    assert sum(split.kept) == 10**9
