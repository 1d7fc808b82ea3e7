"""Decides which files train and which validate.

Names that say it are followed: ``train/``, ``val/`` and ``test/`` folders, ``train/`` beside
``val.jsonl``, or files such as ``wiki.train.txt`` and ``wiki.valid.txt``. Otherwise the hash of a
file's name decides, so that added files usually move no other. Files that belong together, such as
the clips of one video or equal files, are one group, and on one side. The console always states
what decided.
"""

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

Side = Literal["train", "val", "test"]
_WORDS: dict[str, Side] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_WORD = re.compile(rf"(?<![^\W_])({'|'.join(_WORDS)})(?![^\W_])", re.IGNORECASE)
# Words that mean something else inside of a longer name.
_ALONE: dict[str, Side] = {
    **_WORDS,
    **dict.fromkeys(("validate", "eval", "evaluation", "heldout", "holdout"), "val"),
}
_INITIALS = {word[0] for word in _ALONE}
# What may follow a word that is alone, such as the number of a part: train1, val-00000-of-00008.
_NUMBER = re.compile(r"[-_.]*\d+([-_.]+of[-_.]+\d+)?$")
_SHOWN = 5  # names in a line on the console
_ROUNDING = 1e-6  # examples


def by_name(names: Sequence[str]) -> list[Side | None] | None:
    """Returns the side that each file's name says; None if the names say none.

    A word is followed if it is alone: the name of a folder, or of a file without its suffixes, up
    to a number. Inside of a longer name of a file, it counts only if the same name with another
    side's word exists: ``train_station.mp4`` is not training data because there is a
    ``test_drive.mp4``. Words must say train and another side, and at least half of the names must
    have a side.

    Args:
        names: relative names of the files, with ``/``.
    """
    depth = common_depth(names)
    alone = [_alone(name, depth) for name in names]
    marks = [_inside(name) for name in names]
    sides: dict[str, set[Side]] = {}
    for place, side in filter(None, marks):
        sides.setdefault(place, set()).add(side)
    says = {place for place, words in sides.items() if "train" in words and len(words) > 1}
    followed = [
        of_name or (mark[1] if mark and mark[0] in says else None)
        for of_name, mark in zip(alone, marks, strict=True)
    ]
    kinds = {*followed} - {None}
    if "train" not in kinds or len(kinds) < 2 or 2 * followed.count(None) > len(names):
        return None
    return followed


def common_depth(names: Sequence[str]) -> int:
    """Returns how many folders all files have in common, whose names decide nothing."""
    folders = [name.split("/")[:-1] for name in names]
    first, last = min(folders, default=[]), max(folders, default=[])
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return sum(1 for _ in pairs)


def says_side(name: str) -> Side | None:
    """Returns the side that a folder or a file without suffixes has as its name, up to a number."""
    if name.lstrip("-_")[:1].lower() not in _INITIALS:  # most of a million
        return None
    return _ALONE.get(_NUMBER.sub("", name.lower()).replace("-", "").replace("_", ""))


def _alone(name: str, depth: int) -> Side | None:
    """Returns the side of the first word that is alone in a name, below some folders."""
    *folders, file = name.split("/")
    for component in (*folders[depth:], file.partition(".")[0]):
        if side := says_side(component):
            return side
    return None


def _inside(name: str) -> tuple[str, Side] | None:
    """Returns the first word in a file's name, and its place: the name around it, without numbers.

    The places of ``c4-train.00000-of-01024.json.gz`` and ``c4-validation.00000-of-00008.json.gz``
    are equal.
    """
    folder, _, file = name.rpartition("/")
    match = _WORD.search(file)
    if match is None:
        return None
    around = f"{file[: match.start()]}*{file[match.end() :]}"
    return f"{folder}/" + re.sub(r"\d+", "#", around), _WORDS[match.group().lower()]


def names_with_side(names: Sequence[str], *, other_than: Side | None = None) -> list[str]:
    """Returns the names with a word for a side, if not all of them have the same.

    Args:
        other_than: a side whose words are not counted.
    """
    depth = common_depth(names)
    words = [_alone(name, depth) or ((mark := _inside(name)) and mark[1]) for name in names]
    if len({*words}) < 2:
        return []
    return [name for name, word in zip(names, words, strict=True) if word not in (None, other_than)]


def by_hash(groups: Sequence[str], sizes: Sequence[int], train_share: float) -> list[bool]:
    """Returns for each file whether it trains; the others validate.

    A group's side follows from the hash of its name. If the groups that validate have by chance
    less than half or more than twice of the examples that they should, the groups validate in the
    order of their hashes, each that brings the fraction of examples nearer to ``1 - train_share``.
    Each side gets at least one group.

    Args:
        groups: the name of each file's group; at least two different ones.
    """
    counts: Counter[str] = Counter()
    for group, size in zip(groups, sizes, strict=True):
        counts[group] += size
    total, wanted = counts.total(), (1 - train_share) * counts.total()
    order = sorted(counts, key=_fraction, reverse=True)
    val = {group for group in order if _fraction(group) >= train_share}
    share = sum(counts[group] for group in val)
    # 1 - 0.95 is a little more than 0.05, so one of 40 would be less than half of two.
    if not wanted / 2 - _ROUNDING <= share <= 2 * wanted + _ROUNDING:
        val, share = set(), 0
        for group in order:
            if abs(share + counts[group] - wanted) < abs(share - wanted):
                val.add(group)
                share += counts[group]
    if not val:
        val = {min(order, key=lambda group: counts[group])} if total else {order[0]}
    if len(val) == len(counts):
        val.remove(max(val, key=lambda group: counts[group]))
    return [group not in val for group in groups]


def _fraction(name: str) -> float:
    """Returns a name's hash as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def report(
    flag: str,
    names: Sequence[str],
    sides: Sequence[Side | None],
    say: Callable[[str], None],
    *,
    decided: str,
) -> None:
    """Prints which files validate, what decided it, and which are not used because of their names.

    Args:
        decided: what decided which files validate.
    """
    chosen = [name for name, side in zip(names, sides, strict=True) if side == "val"]
    unused = [name for name, side in zip(names, sides, strict=True) if side in ("test", None)]
    trains = f"{sides.count('train'):,} of {len(names):,} files train"
    if chosen:
        say(f"{flag}: {trains}, and {len(chosen):,} validate, by {decided}: {listed(chosen)}")
    if unused:
        say(
            f"{flag}: {len(unused):,} of {len(names):,} files are not used, because their names do "
            f"not say train, as those of others do: {listed(unused)}"
        )


def decided(
    flag: str, names: Sequence[str], say: Callable[[str], None], *, all_train: bool
) -> list[Side | None]:
    """Returns the side of each file; none is "val" unless names say what validates.

    Warns of words for a side that :func:`by_name` has not followed.

    Args:
        all_train: whether ``data.val_path`` validates, so that no file is split.
    """
    named_sides = by_name(names)
    ignored = names_with_side(names, other_than="train" if all_train else None)
    if named_sides is None and ignored:
        instead = "all files train" if all_train else "all files are split"
        fix = "name folders train, val and test" + ("" if all_train else ", or set data.val_path")
        say(
            f"warning: {flag}: the names of {len(ignored):,} of {len(names):,} files have words "
            f"such as train or test, but do not say what trains and what validates, so {instead}: "
            f"{listed(ignored)}; {fix}"
        )
    sides = list[Side | None](named_sides or ["train"] * len(names))
    if all_train or "val" not in sides:
        return ["train" if side == "train" else "test" for side in sides]
    return sides


def listed(names: Sequence[str]) -> str:
    """Returns the first names, each once, and how many more there are.

    The clips of one video have its name.
    """
    names = list(dict.fromkeys(names))
    more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
