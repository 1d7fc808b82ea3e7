"""Which videos train and which validate."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxtrain.data.video import split
from jaxtrain.data.video.index import Entry
from jaxtrain.data.video.packets import Keyframe, Scan, Span
from jaxtrain.errors import InputError

Made = Callable[..., Entry]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a file with some content, and its entry in the index."""

    def make(name: str, content: str = "", frames: int = 9) -> Entry:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content or name)
        info = Scan(0, frames, 96, 64, 0, False, 0, (), 1.0, 25.0, (Keyframe(0, 0),))
        size = path.stat().st_size
        return Entry(name=name, path=str(path), size=size, mtime_ns=0, info=info)

    return make


def chosen(
    entries: Sequence[Entry], val: Sequence[Entry] | None = None, share: float = 0.9
) -> tuple[set[str], set[str], list[str]]:
    lines: list[str] = []
    sizes = [1] * len(entries)
    sides = split.choose(entries, val, sizes, share, "--data.path V", lines.append)
    train, validates = ({entry.name for entry in side} for side in sides)
    return train, validates, lines


def test_named_folders_are_followed(made: Made) -> None:
    names = ["train/dog/0.mp4", "train/cat/1.mp4", "val/dog/0.mp4", "test/cat/0.mp4", "x.mp4"]
    train, val, lines = chosen([made(name) for name in names])
    assert (train, val) == (set(names[:2]), {"val/dog/0.mp4"})
    assert lines == [
        "--data.path V: 2 of 5 files train, and 1 validate, by words in their names: val/dog/0.mp4",
        "--data.path V: 2 of 5 files are not used, because their names do not say train, "
        "as those of others do: test/cat/0.mp4, x.mp4",
    ]
    # Without videos for validation, some of those for training validate, never the test set.
    names = [*(f"train/{number}.mp4" for number in range(20)), "test/a.mp4"]
    train, val, _ = chosen([made(name) for name in names])
    assert len(val) in (1, 2, 3, 4)
    assert train | val == set(names[:-1])
    # With data.val_path, only the videos for training are used.
    train, val, _ = chosen([made(name) for name in names], [made("other.mp4")])
    assert (train, val) == (set(names[:-1]), {"other.mp4"})


def test_with_other_videos_for_validation_a_warning_of_words_says_that_all_train(
    made: Made,
) -> None:
    names = ["a.mp4", "test_0.mp4"]
    train, _, lines = chosen([made(name) for name in names], [made("other.mp4")])
    assert train == set(names)
    assert ["so all files train: test_0.mp4" in line for line in lines] == [True, False]


def test_equal_videos_are_on_one_side(made: Made) -> None:
    """By content, not by size and packets; also where only one of them is a part of a tar."""
    contents = [f"{number // 3:03}" for number in range(90)]
    entries = [made(f"{n}.mp4", content) for n, content in enumerate(contents)]
    _, val, _ = chosen(entries)
    assert len(val) > 0
    for number in range(0, 90, 3):
        assert len({f"{number + more}.mp4" for more in range(3)} & val) in (0, 3)
    tar = made("a.tar", "xx007yy")
    span = Span(tar.path, 2, 3)
    member = Entry(name="m", path="a.tar/m", size=3, mtime_ns=0, info=tar.info, span=span)
    groups = split.content_groups([*entries, member])
    assert groups[-1] == groups[21]
    assert len(set(groups)) == 30


def test_clips_of_a_video_are_on_one_side(made: Made) -> None:
    """Also of a video that is equal to another one."""
    entries = [
        made(f"{n}.mp4.pieces/{piece:05}.mp4", f"{n // 2:02} {piece}")
        for n in range(40)
        for piece in range(5)
    ]
    _, val, _ = chosen(entries, share=0.7)
    for number in range(0, 40, 2):
        names = {f"{n}.mp4.pieces/{p:05}.mp4" for n in (number, number + 1) for p in range(5)}
        assert len(names & val) in (0, 10)


def test_the_fraction_counts_clips_and_not_videos(made: Made) -> None:
    """A video with most of the clips validates only if it is the only video."""
    for long in range(6):
        entries = [
            made(f"{n}.mp4.pieces/{piece}.mp4")
            for n in range(6)
            for piece in range(50 if n == long else 4)
        ]
        _, val, _ = chosen(entries)
        assert len(val) in (4, 8)


def test_what_validates_is_not_trained_on(made: Made) -> None:
    entries = [made(f"{number}.mp4", f"{number:03}") for number in range(5)]
    train, val, lines = chosen(entries, [made("val/x.mp4", "003")])
    assert (train, val) == ({f"{number}.mp4" for number in (0, 1, 2, 4)}, {"val/x.mp4"})
    assert any("1 of 5 files are not trained on" in line and "3.mp4" in line for line in lines)
    same_names = [
        dataclasses.replace(entry, path=made(f"val/{entry.name}").path) for entry in entries
    ]
    train, _, _ = chosen(entries, same_names)
    assert len(train) == 5
    with pytest.raises(InputError, match="no video is left for training"):
        chosen(entries, entries)
    with pytest.raises(InputError, match=r"only one usable video \(0.mp4\).*--data.val_path"):
        chosen(entries[:1])
