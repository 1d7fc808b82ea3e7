"""Which video files a path names, and which of them validate.

A path is a folder (read recursively), one video file, or a list of files:

* ``.json``: a list, or ``{"list": [...]}``
* ``.jsonl``: one item a line
* ``.csv``: with a column ``path`` or ``full_path``
* ``.txt``: one path a line; empty lines and lines that start with # do not count

An item is a path, or an object with ``path`` or ``full_path``. Relative paths count from the folder
of the list. An item with both keys is looked for at ``path``
first, then at ``full_path``.
"""

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data import folders
from jaxtrain.errors import InputError

SUFFIXES = frozenset((".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"))
SUFFIXES |= frozenset((".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv", ".y4m"))
LISTS = frozenset((".json", ".jsonl", ".csv", ".txt"))


class Found(NamedTuple):
    """A file that the user named.

    Attributes:
        name: what the example is called wherever the data lies: its path from the folder or list.
        path: where it lies now, absolute. It need not exist.
    """

    name: str
    path: str


def find(path: str, flag: str) -> list[Found]:
    """All video files that ``path`` names, sorted by name, each once.

    Args:
        path: a folder, a video file or a list of files.
        flag: the option that gave the path, for messages.

    Raises:
        InputError: the path is missing, is of no known kind, or names no file.
    """
    top = Path(path).expanduser().absolute()
    if top.is_dir():
        found = list(_walk(top))
        cure = f"give {flag} a folder with {', '.join(sorted(SUFFIXES))} files, or a list of them"
    elif not top.exists():
        raise InputError(f"{flag} {path}: no such file or folder")
    elif top.suffix.lower() in LISTS:
        found = [_locate(item, top.parent) for item in _items(top, flag)]
        cure = "put one path an entry into it"
    elif top.suffix.lower() in SUFFIXES:
        found = [Found(top.name, str(top))]
        cure = ""
    else:
        raise InputError(
            f"{flag} {path}: the ending {top.suffix!r} is neither of a video nor of a list "
            f"({', '.join(sorted(LISTS))}); give a folder, a video or a list of videos"
        )
    if not found:
        raise InputError(f"{flag} {path} names no video file: {cure}")
    return sorted({one.name: one for one in found}.values())


def split(names: list[str], train_share: float) -> list[bool]:
    """For each name whether it trains; the others validate.

    A name's side depends on its hash only, so that other files coming or going do not move it. At
    least one file stands on each side: where the hashes leave a side empty, the file nearest to it
    moves over.

    Args:
        names: of two files or more.
        train_share: 0 to 1.
    """
    places = [_place(name) for name in names]
    trains = [place < train_share for place in places]
    if all(trains):
        trains[places.index(max(places))] = False
    elif not any(trains):
        trains[places.index(min(places))] = True
    return trains


def _place(name: str) -> float:
    """A name's hash as a number from 0 to 1."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _walk(top: Path) -> Iterator[Found]:
    """Video files below ``top``."""
    for path in folders.files(top):
        if path.suffix.lower() in SUFFIXES:
            yield Found(path.relative_to(top).as_posix(), str(path))


def _items(path: Path, flag: str) -> Iterator[dict[str, str]]:
    """The entries of a list file, each with ``path`` or ``full_path`` or both."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte-order mark in front
        match path.suffix.lower():
            case ".json":
                whole = json.loads(text)
                raw = whole.get("list") if isinstance(whole, dict) else whole
                if not isinstance(raw, list):
                    raise InputError(
                        f'{flag} {path}: a list, or an object with "list", was expected'
                    )
            case ".jsonl":
                raw = [json.loads(line) for line in text.splitlines() if line.strip()]
            case ".csv":
                raw = list(csv.DictReader(text.splitlines()))
            case _:
                lines = [line.strip() for line in text.splitlines()]
                raw = [line for line in lines if line and not line.startswith("#")]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{flag} {path} cannot be read: {error}") from error
    for number, item in enumerate(raw, 1):
        yield _item(item, f"{flag} {path}, entry {number}")


def _item(item: Any, where: str) -> dict[str, str]:
    if isinstance(item, str):
        return {"path": item}
    if not isinstance(item, dict):
        raise InputError(f'{where}: a path, or an object with "path", was expected, not {item!r}')
    keys = {key: item[key] for key in ("path", "full_path") if item.get(key)}
    if not keys or not all(isinstance(value, str) for value in keys.values()):
        there = sorted(str(key) for key in item)
        raise InputError(f'{where}: neither "path" nor "full_path" holds a text; there is {there}')
    return keys


def _locate(item: dict[str, str], folder: Path) -> Found:
    """Where an entry's file lies, and its name, which moves with the list."""
    given = [os.path.expanduser(item[key]) for key in ("path", "full_path") if key in item]
    places = [os.path.normpath(folder / text) for text in given]
    path = next((place for place in places if os.path.exists(place)), places[0])
    named = Path(places[0])
    inside = named.is_relative_to(folder)
    return Found((named.relative_to(folder) if inside else named).as_posix(), path)
