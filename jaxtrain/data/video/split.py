"""Chooses which videos train and which validate (:mod:`jaxtrain.data.splits`).

The clips of one video, and equal files, are on one side. Two files are equal if their sizes and
packets are, and then their bytes: so only files that are probably equal are read.
"""

import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxtrain.data import splits
from jaxtrain.data.video.files import video_of
from jaxtrain.data.video.index import Entry
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import disks

_BLOCK = 1 << 20
_OTHER = "\0"  # in front of a name from another input


def choose(
    entries: Sequence[Entry],
    val: Sequence[Entry] | None,
    sizes: Sequence[int],
    train_share: float,
    source: str,
    say: Callable[[str], None],
) -> tuple[list[Entry], list[Entry]]:
    """Returns the files for training and those for validation.

    Args:
        entries: the usable files of ``data.path``.
        val: those of ``data.val_path``; None splits ``entries``.
        sizes: number of examples in each of ``entries``.
        train_share: fraction of the examples for training.
        source: ``data.path``, for messages.
        say: prints which files validate, and which are not used.

    Raises:
        InputError: no file is left for training, or there is only one video.
    """
    names = [entry.name for entry in entries]
    said = splits.by_name(names)
    if said is None:
        splits.warn_of_words(source, names, say, all_train=val is not None)
    sides: list[splits.Side | None] = list(said or ["train"] * len(entries))
    decided = "words in their names"
    if val is not None or "val" not in sides:
        sides = ["train" if side == "train" else "test" for side in sides]
    groups = content_groups(entries, val or ())
    if val is not None:
        say(f"{source}: the files of data.val_path validate")
    elif "val" not in sides:
        decided = "the hashes of their names (data.train_split)"
        sides = _by_hash(names, sides, groups, sizes, train_share, source)
    splits.report(source, [video_of(name) for name in names], sides, say, decided=decided)
    validates = {group for group, side in zip(groups, sides, strict=False) if side == "val"}
    validates |= set(groups[len(entries) :])
    trains = [
        (entry, group in validates)
        for entry, side, group in zip(entries, sides, groups, strict=False)
        if side == "train"
    ]
    twice = [entry.name for entry, validates_too in trains if validates_too]
    if twice:
        say(
            f"{source}: {len(twice):,} of {len(entries):,} files are not trained on, because equal "
            f"files validate: {splits.listed(twice)}"
        )
    train = [entry for entry, validates_too in trains if not validates_too]
    if not train:
        raise InputError(
            f"{source}: no video is left for training, because all of them validate; pass other "
            "videos with --data.path or --data.val_path"
        )
    if val is None:
        val = [entry for entry, side in zip(entries, sides, strict=True) if side == "val"]
    return train, list(val)


def _by_hash(
    names: Sequence[str],
    sides: Sequence[splits.Side | None],
    groups: Sequence[str],
    sizes: Sequence[int],
    train_share: float,
    source: str,
) -> list[splits.Side | None]:
    """Splits the files for training into such for training and such for validation."""
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


def content_groups(entries: Sequence[Entry], others: Sequence[Entry] = ()) -> list[str]:
    """Returns a name for each file, which is equal for the clips of one video and of equal videos.

    Args:
        entries: the files of one input.
        others: those of another one, in which equal names mean nothing. Their names follow.

    Raises:
        DiskAway: the disk has not responded for some time.
    """
    videos_of = [video_of(entry.name) for entry in entries]
    videos_of += [f"{_OTHER}{video_of(entry.name)}" for entry in others]
    clips: dict[str, list[Entry]] = defaultdict(list)
    for video, entry in zip(videos_of, (*entries, *others), strict=True):
        clips[video].append(entry)
    alike: dict[object, list[str]] = defaultdict(list)
    for video, parts in clips.items():
        packets = [(part.size, part.scanned.frames, part.scanned.keyframes) for part in parts]
        alike[tuple(sorted(packets))].append(video)
    group = {video: video for video in clips}
    for videos in alike.values():
        if len(videos) == 1:  # most: a link costs 14 calls of the system for each file
            continue
        at = {_places(clips[video]): video for video in videos}
        contents: dict[object, str] = {}
        if len(at) > 1:
            for place, video in at.items():
                contents[place] = disks.when_readable(functools.partial(_digest, clips[video]))
        first: dict[object, str] = {}
        for video in sorted(videos):
            place = _places(clips[video])
            group[video] = first.setdefault(contents.get(place, place), video)
    return [group[video] for video in videos_of]


def _places(entries: Sequence[Entry]) -> tuple[tuple[str, int], ...]:
    """Returns where the contents of a video's files are: the same file may have several names."""
    return tuple(
        sorted(
            (os.path.realpath(entry.file), 0 if entry.span is None else entry.span.offset)
            for entry in entries
        )
    )


def _digest(entries: Sequence[Entry]) -> str:
    """Returns the SHA-256 of the contents of a video's files.

    Raises:
        DiskAway: the disk does not respond now.
    """
    digests = []
    for entry in entries:
        digest = hashlib.sha256()
        try:
            with open(entry.file, "rb") as file:
                if entry.span is not None:
                    file.seek(entry.span.offset)
                left = entry.size
                while data := file.read(min(_BLOCK, left)):
                    digest.update(data)
                    left -= len(data)
        except OSError as error:
            failure = disks.unreadable(entry.path, error, existed=True)
            if not isinstance(failure, BadExample):
                raise failure from error
            digest.update(os.fsencode(entry.path))  # its clips are refused when they are read
        digests.append(digest.hexdigest())
    return " ".join(sorted(digests))
