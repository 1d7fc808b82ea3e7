"""Which files train and which validate: by their names, or by the hashes of their names."""

import pytest

from jaxtrain.data import splits

LAYOUTS = {
    "wikitext": {"wiki.train.tokens.txt": "train", "wiki.valid.tokens.txt": "val"}
    | {"wiki.test.tokens.txt": "test"},
    "TinyStories": {"TinyStoriesV2-GPT4-train.txt": "train", "TinyStoriesV2-GPT4-valid.txt": "val"},
    "a Hub dataset's parquet files": {
        "data/train-00000-of-00002.parquet": "train",
        "data/train-00001-of-00002.parquet": "train",
        "data/validation-00000-of-00001.parquet": "val",
        "data/test-00000-of-00001.parquet": "test",
    },
    "folders": {"train/0.txt": "train", "train/1.txt": "train", "val/0.txt": "val"},
    "classes below folders": {
        "train/dog/a.mp4": "train",
        "train/cat/b.mp4": "train",
        "validation/dog/c.mp4": "val",
        "test/cat/d.mp4": "test",
    },
    "a README beside": {"train.jsonl": "train", "dev.jsonl": "val", "README.md": None},
    "capitals": {"Train/a.txt": "train", "Dev/a.txt": "val"},
    "folders below a folder": {"en/train/a.txt": "train", "en/val/a.txt": "val"},
    "The Pile": {"train/00.jsonl.zst": "train", "train/01.jsonl.zst": "train"}
    | {"val.jsonl.zst": "val", "test.jsonl.zst": "test"},
    "C4": {"en/c4-train.00000-of-01024.json.gz": "train"}
    | {"en/c4-train.00001-of-01024.json.gz": "train"}
    | {"en/c4-validation.00000-of-00008.json.gz": "val"},
    "numbers": {"train1.jsonl": "train", "valid1.jsonl": "val", "test1.jsonl": "test"},
    "numbers of folders": {"train_1/a.mp4": "train", "valid-2/a.mp4": "val"},
    "eval": {"train/a.txt": "train", "eval/a.txt": "val"},
    "validate": {"train/a.txt": "train", "validate/a.txt": "val"},
    "held out": {"train.txt": "train", "held_out.txt": "val", "testing.txt": "test"},
    "several suffixes": {"train.tok.txt": "train", "dev.tok.txt": "val"},
    "one corpus of two without validation": {"a/train.txt": "train", "a/val.txt": "val"}
    | {"b/train.txt": "train"},
    "a folder above": {"test/train/a.mp4": "train", "test/train/b.mp4": "train"}
    | {"test/val/c.mp4": "val"},
    "a class with such a name": {"train/test/a.mp4": "train", "train/train/b.mp4": "train"}
    | {"val/train/c.mp4": "val"},
    "a file of another kind of name": {"train.txt": "train", "val.txt": "val", "more.txt": None},
    "pieces": {"train/a.mp4.pieces/0.mp4": "train", "val/b.mp4.pieces/0.mp4": "val"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_that_names_say_is_followed(layout: str) -> None:
    names = list(LAYOUTS[layout])
    assert splits.by_name(names) == list(LAYOUTS[layout].values())


@pytest.mark.parametrize(
    "names",
    [
        ["train_station.mp4", "test_drive.mp4", "valley.mp4"],
        ["test.txt", "unittest.txt", "string.txt"],
        ["src/test/a.txt", "src/main/b.txt"],
        ["train/a.mp4", "train/b.mp4"],  # only one side
        ["trains/a.mp4", "tests/b.mp4"],
        ["training day.mp4", "test.mp4"],
        ["00.jsonl", "val.jsonl", "test.jsonl"],
        ["train/a.mp4", "bus/b.mp4", "car/c.mp4"],  # classes
        ["trainer.py.txt", "validator.py.txt"],
        ["train ride.mp4", "test ride.mp4", *(f"{number}.mp4" for number in range(9))],
    ],
)
def test_a_word_alone_does_not_split(names: list[str]) -> None:
    assert splits.by_name(names) is None


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("count", [2, 3, 8, 22, 400])
def test_the_fraction_of_examples_is_near_the_wanted_one(count: int, share: float) -> None:
    """One group has a third of the examples, the others from 1 to 7."""
    groups = [f"{number}.mp4" for number in range(count)]
    for largest in range(min(count, 8)):
        sizes = [1 + 5 * number % 7 for number in range(count)]
        sizes[largest] = max(1, sum(sizes) // 2)
        trains = splits.by_hash(groups, sizes, share)
        assert 0 < sum(trains) < count
        val = sum(size for size, here in zip(sizes, trains, strict=True) if not here)
        wanted, smallest = (1 - share) * sum(sizes), min(sizes)
        assert val <= max(2 * wanted + 1e-6, smallest)
        assert val >= wanted / 2 or count < 8


def test_a_share_at_its_bound_is_kept() -> None:
    """1 - 0.95 is a little more than 0.05."""
    names = [f"{number}.mp4" for number in range(4000)]
    hashes = {name: splits._fraction(name) for name in names}
    val = [name for name in names if hashes[name] >= 0.95][:1]
    train = [name for name in names if hashes[name] < 0.95][:39]
    assert splits.by_hash([*val, *train], [1] * 40, 0.95) == [False] + [True] * 39


def test_a_group_is_on_one_side_and_added_files_move_no_other() -> None:
    groups = [f"{number // 5}.mp4" for number in range(1000)]
    trains = splits.by_hash(groups, [1] * 1000, 0.9)
    for first in range(0, 1000, 5):
        assert len(set(trains[first : first + 5])) == 1
    fewer = splits.by_hash(groups[:500], [1] * 500, 0.9)
    assert fewer == trains[:500]


@pytest.mark.parametrize(
    ("names", "sides", "expected"),
    [
        (
            ["a", "b", "c"],
            ["train", "val", None],
            [
                "--data.path T: 1 of 3 files train, and 1 validate, by their names: b",
                "--data.path T: 1 of 3 files are not used, because their names do not say train, "
                "as those of others do: c",
            ],
        ),
        (
            ["a", "b", "b"],
            ["train", "val", "val"],
            ["--data.path T: 1 of 3 files train, and 2 validate, by their names: b"],
        ),
    ],
)
def test_the_console_names_what_validates(
    names: list[str], sides: list[splits.Side | None], expected: list[str]
) -> None:
    lines: list[str] = []
    splits.report("--data.path T", names, sides, lines.append, decided="their names")
    assert lines == expected
    assert splits.listed(list("abcdefg")) == "a, b, c, d, e, and 2 more"


@pytest.mark.parametrize(
    ("names", "ignored"),
    [
        (["00.jsonl", "val.jsonl", "test.jsonl"], ["val.jsonl", "test.jsonl"]),
        (["train_station.mp4", "valley.mp4"], ["train_station.mp4"]),
        (["wiki-test.txt", "books.txt"], ["wiki-test.txt"]),
        (["train/a.mp4", "train/b.mp4"], []),  # nothing else to do
        (["a.txt", "contest.txt", "validity.txt"], []),
        (["test/a.txt", "test/b.txt"], []),  # a folder that all have in common
    ],
)
def test_words_that_are_not_followed_are_a_warning(names: list[str], ignored: list[str]) -> None:
    assert splits.by_name(names) is None
    assert splits.names_with_side(names) == ignored
    lines: list[str] = []
    for all_train in (False, True):
        sides = splits.decided("--data.path T", names, lines.append, all_train=all_train)
        assert sides == ["train"] * len(names)
    only_train = all(name.startswith("train") for name in ignored)  # which all files do then
    warnings = 0 if not ignored else 1 if only_train else 2
    assert [line[:31] for line in lines] == ["warning: --data.path T: the nam"] * warnings
    for line in lines[:1]:
        assert f"so all files are split: {ignored[0]}" in line
        assert line.endswith("; name folders train, val and test, or set data.val_path")
    for line in lines[1:]:
        assert f"so all files train: {ignored[0]}" in line
        assert line.endswith("; name folders train, val and test")
