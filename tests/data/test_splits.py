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
                "--data.path T: 1 of 3 files validate: b",
                "--data.path T: 1 of 3 files are not used, because their names do not say train, "
                "as those of others do: c",
            ],
        ),
        (["a", "b", "b"], ["train", "val", "val"], ["--data.path T: 2 of 3 files validate: b"]),
    ],
)
def test_the_console_names_what_validates(
    names: list[str], sides: list[splits.Side | None], expected: list[str]
) -> None:
    lines: list[str] = []
    splits.report("--data.path T", names, sides, lines.append)
    assert lines == expected
    assert splits.listed(list("abcdefg")) == "a, b, c, d, e, and 2 more"
