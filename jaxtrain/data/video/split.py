"""Chooses which videos train and which validate (:mod:`jaxtrain.data.splits`).

Equal videos are on one side: those whose sizes and both ends are equal.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxtrain.data import splits
from jaxtrain.errors import InputError
from jaxtrain.terminal import Say


class Videos(NamedTuple):
    """Videos of one input: their names, and values that are equal for equal videos."""

    names: Sequence[str]
    contents: Sequence[Hashable]


def choose(
    videos: Videos,
    val: Videos | None,
    sizes: Sequence[int],
    train_share: float,
    source: str,
    say: Say,
) -> tuple[list[int], list[int]]:
    """Returns the numbers of the videos for training and of those for validation.

    Args:
        videos: the usable videos of ``data.path``.
        val: those of ``data.val_path``, all of which validate; None splits ``videos``.
        sizes: number of examples in each of ``videos``.

    Raises:
        InputError: no video is left for training, or there is only one.
    """
    names = videos.names
    sides = splits.decided(source, names, say, all_train=val is not None)
    decided = "words in their names"
    first = dict[Hashable, str]()
    for name, content in sorted(zip(names, videos.contents, strict=True)):
        first.setdefault(content, name)
    groups = [first[content] for content in videos.contents]
    if val is not None:
        say(f"{source}: the files of data.val_path validate")
    elif "val" not in sides:
        decided = "the hashes of their names (data.train_split)"
        sides = _by_hash(names, sides, groups, sizes, train_share, source)
    splits.report(source, names, sides, say, decided=decided)
    validates: set[str | None]
    if val is None:
        validates = {group for group, side in zip(groups, sides, strict=True) if side == "val"}
    else:
        validates = {first.get(content) for content in val.contents}
    trains = [number for number, side in enumerate(sides) if side == "train"]
    twice = [names[number] for number in trains if groups[number] in validates]
    if twice:
        say(
            f"{source}: {len(twice):,} of {len(names):,} files are not trained on, because equal "
            f"files validate: {splits.listed(twice)}"
        )
    train = [number for number in trains if groups[number] not in validates]
    if not train:
        raise InputError(
            f"{source}: no video is left for training, because all of them validate; pass other "
            "videos with --data.path or --data.val_path"
        )
    if val is not None:
        return train, list(range(len(val.names)))
    return train, [number for number, side in enumerate(sides) if side == "val"]


def _by_hash(
    names: Sequence[str],
    sides: Sequence[splits.Side | None],
    groups: Sequence[str],
    sizes: Sequence[int],
    train_share: float,
    source: str,
) -> list[splits.Side | None]:
    """Splits the videos for training into such for training and such for validation."""
    trains = [number for number, side in enumerate(sides) if side == "train"]
    if len({groups[number] for number in trains}) < 2:
        raise InputError(
            f"{source} has only one usable video ({names[trains[0]]}), but training and validation "
            "need different videos: add videos, or pass others with --data.val_path"
        )
    by_hash = splits.by_hash(
        [groups[number] for number in trains], [sizes[number] for number in trains], train_share
    )
    val = {number for number, in_train in zip(trains, by_hash, strict=True) if not in_train}
    return ["val" if number in val else side for number, side in enumerate(sides)]
