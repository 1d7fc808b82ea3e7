"""Which videos train and which validate."""

from collections.abc import Mapping, Sequence

import pytest

from jaxtrain.data.video import split
from jaxtrain.errors import InputError


def videos(names: Sequence[str]) -> split.Videos:
    """Returns videos that all differ."""
    return split.Videos(names, [f"content of {name}" for name in names])


def with_contents(contents: Mapping[str, str]) -> split.Videos:
    return split.Videos(list(contents), list(contents.values()))


def chosen(
    given: split.Videos,
    val: split.Videos | None = None,
    share: float = 0.9,
    sizes: Sequence[int] | None = None,
) -> tuple[set[str], set[str], list[str]]:
    lines: list[str] = []
    sizes = sizes or [1] * len(given.names)
    train, validates = split.choose(given, val, sizes, share, "--data.path V", lines.append)
    of_val = given if val is None else val
    assert len({*train}) == len(train)
    return {given.names[n] for n in train}, {of_val.names[n] for n in validates}, lines


def test_named_folders_are_followed() -> None:
    names = ["train/dog/0.mp4", "train/cat/1.mp4", "val/dog/0.mp4", "test/cat/0.mp4", "x.mp4"]
    train, val, lines = chosen(videos(names))
    assert (train, val) == (set(names[:2]), {"val/dog/0.mp4"})
    assert lines == [
        "--data.path V: 2 of 5 files train, and 1 validate, by words in their names: val/dog/0.mp4",
        "--data.path V: 2 of 5 files are not used, because their names do not say train, "
        "as those of others do: test/cat/0.mp4, x.mp4",
    ]
    # Without videos for validation, some of those for training validate, never the test set.
    names = [*(f"train/{number}.mp4" for number in range(20)), "test/a.mp4"]
    train, val, _ = chosen(videos(names))
    assert len(val) in (1, 2, 3, 4)
    assert train | val == set(names[:-1])
    # With data.val_path, only the videos for training are used.
    train, val, _ = chosen(videos(names), videos(["other.mp4"]))
    assert (train, val) == (set(names[:-1]), {"other.mp4"})


def test_with_other_videos_for_validation_a_warning_of_words_says_that_all_train() -> None:
    names = ["a.mp4", "test_0.mp4"]
    train, _, lines = chosen(videos(names), videos(["other.mp4"]))
    assert train == set(names)
    assert ["so all files train: test_0.mp4" in line for line in lines] == [True, False]


def test_equal_videos_are_on_one_side() -> None:
    """By their content; the order of the list does not matter."""
    contents = {f"{number}.mp4": f"{number // 3:03}" for number in range(90)}
    train, val, _ = chosen(with_contents(contents))
    assert len(val) > 0
    assert train | val == contents.keys()
    for number in range(0, 90, 3):
        assert len({f"{number + more}.mp4" for more in range(3)} & val) in (0, 3)
    backwards = dict(reversed(contents.items()))
    assert chosen(with_contents(backwards))[:2] == (train, val)


def test_a_video_stays_on_its_side_when_others_are_added() -> None:
    names = [f"{number}.mp4" for number in range(300)]
    _, few, _ = chosen(videos(names[:200]))
    _, many, _ = chosen(videos(names))
    assert few == many & {*names[:200]}


def test_the_fraction_counts_clips_and_not_videos() -> None:
    """A video with most of the clips validates only if it is the only video."""
    names = [f"{number}.mp4" for number in range(6)]
    for long in range(6):
        sizes = [50 if number == long else 4 for number in range(6)]
        _, val, _ = chosen(videos(names), sizes=sizes)
        assert len(val) in (1, 2)
        assert names[long] not in val


def test_what_validates_is_not_trained_on() -> None:
    contents = {f"{number}.mp4": f"{number:03}" for number in range(5)}
    train, val, lines = chosen(with_contents(contents), with_contents({"x.mp4": "003"}))
    assert (train, val) == ({f"{number}.mp4" for number in (0, 1, 2, 4)}, {"x.mp4"})
    assert any("1 of 5 files are not trained on" in line and "3.mp4" in line for line in lines)
    same_names = with_contents({name: f"another {name}" for name in contents})
    train, _, _ = chosen(with_contents(contents), same_names)
    assert len(train) == 5
    with pytest.raises(InputError, match="no video is left for training"):
        chosen(with_contents(contents), with_contents(contents))
    with pytest.raises(InputError, match=r"only one usable video \(0.mp4\).*--data.val_path"):
        chosen(with_contents({"0.mp4": "000"}))
    equal = dict.fromkeys(contents, "000")
    with pytest.raises(InputError, match=r"only one usable video \(0.mp4\)"):
        chosen(with_contents(equal))
