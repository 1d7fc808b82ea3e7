"""Decides which files train and which validate.

Names that say it are followed: ``train/``, ``val/`` and ``test/`` folders, or files such as
``wiki.train.txt`` and ``wiki.valid.txt``. Otherwise the hash of a file's name decides, so that
added files usually move no other. Files that belong together, such as the clips of one video or
equal files, are one group, and on one side.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

Side = Literal["train", "val", "test"]
_WORDS: dict[str, Side] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    "test": "test",
}
_WORD = re.compile(rf"(?<![^\W_])({'|'.join(_WORDS)})(?![^\W_])", re.IGNORECASE)
_SHOWN = 5  # names in a line on the console
_ROUNDING = 1e-6  # examples


def by_name(names: Sequence[str]) -> list[Side | None] | None:
    """Returns the side that each file's name says; None if the names say none.

    A word such as "train" counts only if the same place has another side's word in other names:
    ``train_station.mp4`` is not training data because there is a ``test_drive.mp4``. And at least
    half of the names must say a side.

    Args:
        names: relative names of the files, with ``/``.
    """
    marks = [_places(name) for name in names]
    sides: dict[str, set[Side]] = {}
    for of_name in marks:
        for place, side in of_name:
            sides.setdefault(place, set()).add(side)
    says = {place for place, words in sides.items() if "train" in words and len(words) > 1}
    if not says:
        return None
    followed = [next((side for place, side in of_name if place in says), None) for of_name in marks]
    return followed if 2 * followed.count(None) <= len(names) else None


def _places(name: str) -> list[tuple[str, Side]]:
    """Returns the words for a side in a name, each with its place: the name around it.

    Of a folder's name, what follows the folder does not matter; of a file's name, numbers do not:
    ``train-00003-of-00008.parquet`` and ``test-00000-of-00001.parquet``.
    """
    *folders, file = name.split("/")
    places = [
        ("/".join((*folders[:depth], "*")), _WORDS[folder.lower()])
        for depth, folder in enumerate(folders)
        if folder.lower() in _WORDS
    ]
    for match in _WORD.finditer(file):
        around = f"{file[: match.start()]}*{file[match.end() :]}"
        place = "/".join((*folders, re.sub(r"\d+", "#", around)))
        places.append((place, _WORDS[match.group().lower()]))
    return places


def by_hash(groups: Sequence[str], sizes: Sequence[int], train_share: float) -> list[bool]:
    """Returns for each file whether it trains; the others validate.

    A group's side follows from the hash of its name. If the groups that validate have by chance
    less than half or more than twice of the examples that they should, the groups validate in the
    order of their hashes, each that brings the fraction of examples nearer to ``1 - train_share``.
    Each side gets at least one group.

    Args:
        groups: the name of each file's group; at least two different ones.
        sizes: number of examples in each file.
        train_share: fraction of the examples for training, 0 to 1.
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
    flag: str, names: Sequence[str], sides: Sequence[Side | None], say: Callable[[str], None]
) -> None:
    """Prints which files validate, and which files are not used because of their names."""
    chosen = [name for name, side in zip(names, sides, strict=True) if side == "val"]
    unused = [name for name, side in zip(names, sides, strict=True) if side in ("test", None)]
    if chosen:
        say(f"{flag}: {len(chosen):,} of {len(names):,} files validate: {listed(chosen)}")
    if unused:
        say(
            f"{flag}: {len(unused):,} of {len(names):,} files are not used, because their names do "
            f"not say train, as those of others do: {listed(unused)}"
        )


def listed(names: Sequence[str]) -> str:
    """Returns the first names, each once, and how many more there are.

    The clips of one video have its name.
    """
    names = list(dict.fromkeys(names))
    more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
