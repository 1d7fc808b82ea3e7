"""Which documents train and validate, and that examples cover them, with and without holes."""

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from data.text import small_text
from data.text.small_text import silent

from jaxtrain.data.text import (
    byte_level,
    documents,
    layout,
    rows,
    shards,
    windows,
)
from jaxtrain.data.text.layout import Corpus, Rule, Split
from jaxtrain.data.text.shards import CachedShard, Recipe
from jaxtrain.data.text.streams import Streams
from jaxtrain.errors import InputError
from jaxtrain.jobs import engines

TRAINED = byte_level.train(["a few words"], 300)
RECIPE = Recipe(TRAINED.to_str(), "", True, (0,), 300)
WINDOWS = Rule(7, overlap=1)
TEXTS = [f"{' '.join(random.Random(n).choices('abcdef', k=n % 9))} text {n}" for n in range(300)]


def prepared_shards(
    root: Path, name: str, texts: list[str], group_bytes: int = 2**27, recipe: Recipe = RECIPE
) -> list[CachedShard]:
    """The shards of some texts."""
    folder = root / name
    folder.mkdir(parents=True)
    for number in range(0, len(texts), 10):
        lines = "\n".join(json.dumps({"text": text}) for text in texts[number : number + 10])
        (folder / f"{number}.jsonl").write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "GROUP_BYTES", group_bytes)
        plan = shards.plan(documents.find(str(folder), "", root, silent), rows.Rows("text"))
    assert shards.prepare(plan, recipe, root, silent, engine=engines.Threads(1))
    return [CachedShard.of(root / shard.folder(recipe), recipe.dtype) for shard in plan]


def corpus(
    parts: list[CachedShard],
    side: Split | None = None,
    train_split: float = 0.9,
    most: int | None = None,
) -> Corpus:
    return Corpus("--data.path x", tuple((one, side) for one in parts), train_split, most)


def read_back(root: Path, corpora: list[Corpus], number: int, split: Split) -> list[str]:
    """The documents of a split, from its windows, in order."""
    folder, facts = layout.lay_out(corpora, WINDOWS, RECIPE, root, silent)
    totals = facts[number][split]
    streams = Streams(str(root), str(folder / f"{number}.{split}"), "uint16", totals["examples"])
    source = windows.WindowSource(
        streams=streams,
        token_bytes=str(folder / layout.TOKEN_BYTES),
        sequence_length=WINDOWS.step,
        fingerprint="",
    )
    ids = small_text.token_ids(source)
    texts = small_text.documents_in(ids, TRAINED.decode) if ids else []
    assert totals["documents"] == len(texts)
    assert totals["bytes"] == sum(len(text.encode()) for text in texts)
    assert totals["tokens"] == len(ids)
    return texts


@pytest.mark.parametrize("length", [9, 100])
def test_fitted_rows_have_complete_documents_of_their_side(tmp_path: Path, length: int) -> None:
    """Also with holes in the streams; a row depends only on its number."""
    parts = prepared_shards(tmp_path, "in", TEXTS, 2000)
    rule, held_out = Rule(length, overlap=1, fit=True), TEXTS[::7]
    corpora = [corpus(parts, "train"), corpus(prepared_shards(tmp_path, "val", held_out), "val")]
    folder, facts = layout.lay_out(corpora, rule, RECIPE, tmp_path, silent)
    assert folder != layout.lay_out(corpora, Rule(length, 1), RECIPE, tmp_path, silent)[0]
    want = {"train": set(TEXTS) - set(held_out), "val": set(held_out)}
    for number, split in enumerate(layout.SPLITS):
        totals = facts[number][split]
        source = windows.FittedSource(
            streams=Streams(
                str(tmp_path), str(folder / f"{number}.{split}"), "uint16", totals["examples"]
            ),
            token_bytes=str(folder / layout.TOKEN_BYTES),
            sequence_length=length,
            fingerprint="",
            begin=0,
        )
        texts, predicted = set(), 0
        for index in reversed(range(len(source))):
            example = source.example(index)
            used = int((example["targets"] >= 0).sum())
            ids = [int(example["tokens"][0]), *example["targets"][:used].tolist()]
            assert ids[0] == 0
            assert (example["targets"][used:] == windows.IGNORED).all()
            predicted += int(example["target_bytes"].sum())
            starts = [at for at, token in enumerate(ids) if token == 0]
            texts |= {
                TRAINED.decode(ids[a + 1 : b]) for a, b in itertools.pairwise([*starts, None])
            }
        assert predicted == totals["bytes"] == sum(len(text.encode()) for text in want[split])
        assert (texts == want[split]) == (length == 100)  # longer than each document


@pytest.mark.parametrize("group_bytes", [2**27, 2000])
def test_each_document_is_on_the_side_that_its_digest_says(
    tmp_path: Path, group_bytes: int
) -> None:
    parts = prepared_shards(tmp_path, "in", TEXTS, group_bytes)
    assert (len(parts) > 3) == (group_bytes == 2000)
    one = corpus(parts, train_split=0.8)
    train, val = (read_back(tmp_path, [one], 0, split) for split in layout.SPLITS)
    assert sorted(train + val) == sorted(TEXTS)
    limit = int(0.8 * 2**64)
    assert all(shards.digest(text.encode()) < limit for text in train)
    assert all(shards.digest(text.encode()) >= limit for text in val)
    assert 30 < len(val) < 90
    more = corpus(prepared_shards(tmp_path, "more", [*TEXTS[:150], "new"]), train_split=0.8)
    assert set(read_back(tmp_path, [more], 0, "val")) <= {*val, "new"}


@pytest.mark.parametrize("group_bytes", [2**27, 2000])
def test_no_document_that_validates_is_trained_on(tmp_path: Path, group_bytes: int) -> None:
    """Whatever its source; equal documents for training stay. No token is made again."""
    here = {0: [*TEXTS, TEXTS[7], TEXTS[7]], 1: [*TEXTS[:50], "b"]}
    first = corpus(prepared_shards(tmp_path, "a", here[0], group_bytes), "train")
    second = corpus(prepared_shards(tmp_path, "b", here[1]), "train")
    before = {path.stat().st_ino for path in tmp_path.glob("shard-*/*")}
    for validating in ([TEXTS[n] for n in range(5, 290, 3)], TEXTS[40:60], ["none"], TEXTS[50:]):
        last = corpus(prepared_shards(tmp_path, f"val-{len(validating)}", validating), "val")
        corpora = [first, second, last]
        assert sorted(read_back(tmp_path, corpora, 2, "val")) == sorted(validating)
        for number, texts in here.items():
            expected = Counter(text for text in texts if text not in validating)
            assert Counter(read_back(tmp_path, corpora, number, "train")) == expected
            assert not read_back(tmp_path, corpora, number, "val")
    assert before <= {path.stat().st_ino for path in tmp_path.glob("shard-*/*")}
    everything = corpus(prepared_shards(tmp_path, "all", [*TEXTS, "b"]), "val")
    with pytest.raises(InputError, match=r"--data.path x: no text is left for training"):
        layout.lay_out([first, everything], WINDOWS, RECIPE, tmp_path, silent)


def test_a_document_that_validates_by_its_digest_does_not_train_elsewhere(tmp_path: Path) -> None:
    split = corpus(prepared_shards(tmp_path, "a", TEXTS), train_split=0.7)
    other = corpus(prepared_shards(tmp_path, "b", TEXTS[:100]), "train")
    val = read_back(tmp_path, [split, other], 0, "val")
    assert set(read_back(tmp_path, [split, other], 1, "train")) == set(TEXTS[:100]) - set(val)


@pytest.mark.parametrize("texts", [["a", "b"], ["a", "b", "b", "c"]])
@pytest.mark.parametrize("train_split", [0.0, 1.0])
def test_each_side_has_a_document(tmp_path: Path, texts: list[str], train_split: float) -> None:
    one = corpus(prepared_shards(tmp_path, "in", texts), train_split=train_split)
    train, val = (read_back(tmp_path, [one], 0, split) for split in layout.SPLITS)
    assert train
    assert val
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(texts)


def test_a_single_document_cannot_be_split(tmp_path: Path) -> None:
    for name, texts, words in (("a", ["a"], "has 1 document,"), ("b", ["a"] * 3, "3 documents, w")):
        with pytest.raises(InputError, match=f"{words}.*--data.val_path"):
            read_back(tmp_path, [corpus(prepared_shards(tmp_path, name, texts))], 0, "val")


@pytest.mark.parametrize(("group_bytes", "most"), [(2**27, 2), (2000, 100), (2000, 10**6)])
def test_max_examples_counts_documents(tmp_path: Path, group_bytes: int, most: int) -> None:
    full = corpus(prepared_shards(tmp_path, "in", TEXTS, group_bytes))
    few = dataclasses.replace(full, max_documents=most)
    kept = {}
    for split in layout.SPLITS:
        everything = read_back(tmp_path, [full], 0, split)
        kept[split] = read_back(tmp_path, [few], 0, split)
        assert kept[split]
        assert set(kept[split]) <= set(everything)
        assert abs(len(kept[split]) - len(everything) * min(1, most / 300)) <= 1
    assert sum(map(len, kept.values())) == min(most, 300)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("group_bytes", [2**27, 2000])
def test_windows_cover_streams_with_holes(tmp_path: Path, group_bytes: int, overlap: int) -> None:
    """As if the documents that validate had never been there. Windows do not cross shards."""
    parts = prepared_shards(tmp_path, "in", TEXTS, group_bytes)
    validating = corpus(prepared_shards(tmp_path, "val", TEXTS[::4]), "val")
    rule = Rule(12, overlap)
    corpora = [corpus(parts, "train"), validating]
    folder, facts = layout.lay_out(corpora, rule, RECIPE, tmp_path, silent)
    train, ids, streams = facts[0]["train"], list[int](), set[int]()
    shards_of = Streams(str(tmp_path), str(folder / "0.train"), "uint16", train["examples"])
    for index in range(train["examples"]):
        shard, number, length = shards_of.place(index)
        window = shards_of.window(index, rule.step, overlap).tolist()
        assert len(window) == min(rule.step + overlap, length - number * rule.step)
        assert (shard in streams) == (number > 0)
        ids += window[overlap if number else 0 :]
        streams.add(shard)
    assert len(streams) == len(parts)
    assert len(ids) == train["tokens"]
    assert sorted(small_text.documents_in(ids, TRAINED.decode)) == sorted(
        text for text in TEXTS if text not in TEXTS[::4]
    )


@pytest.mark.parametrize(
    ("documents", "megabytes", "val_documents", "share"),
    [
        (100, 0.1, None, 0.1),
        (20_000, 80, None, 0.1),
        (25_000, 101, None, 0.05),
        (250_000, 1000, None, 0.00625),  # web pages
        (62_500, 1000, None, 0.00625),  # parts of books
        (10**9, 4e6, None, 0.1 / 2**13),
        (100, 0.1, 5, 0.05),
        (10**6, 4000, 2000, 0.003125),
        (10**6, 4000, 10**6, 0.1),
    ],
)
def test_how_much_validates_follows_from_the_text(
    documents: int, megabytes: float, val_documents: int | None, share: float
) -> None:
    assert layout.held_out(documents, int(megabytes * 1e6), val_documents) == share
    assert layout.held_out(0, 0, val_documents) == 0.1


@pytest.mark.parametrize(
    ("first", "last", "least", "most"),
    [
        (1, 99, 0.1, 9.9),
        (100, 799, 5, 10),
        (800, 12_799, 5, 80),
        (12_800, 10**7, 40, 80),
    ],
)
def test_how_much_validates_is_what_the_guide_says(
    first: int, last: int, least: float, most: float
) -> None:
    sizes = {int(first * (last / first) ** (n / 98)) for n in range(99)}
    shares = {size: layout.held_out(10**9, size * 10**6, None) for size in sizes}
    assert all(least <= share * size <= most for size, share in shares.items())
    if last == 99:
        assert {*shares.values()} == {0.1}
    if first == 800:
        assert {*shares.values()} == {0.00625}


def test_a_growing_text_moves_documents_only_to_training() -> None:
    shares = [layout.held_out(n, 4000 * n, None) for n in range(1000, 10**8, 99_991)]
    assert shares == sorted(shares, reverse=True)
    assert len({*shares}) < 14
    for n, share in zip(range(1000, 10**8, 99_991), shares, strict=True):
        assert share * 4000 * n >= 5_000_000 or share == 0.1
        assert share <= 0.01 or 4000 * n < 10**9
