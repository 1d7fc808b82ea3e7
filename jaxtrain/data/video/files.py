"""Which video files a path names, and which of them validate.

A path is a folder (read recursively), one video file, one uncompressed ``.tar`` with videos in it,
a pattern of such (``shards-{000..127}.tar``), or a list of files and tars:

* ``.json``: a list, or ``{"list": [...]}``
* ``.jsonl``: one item a line
* ``.csv``: with a column ``path`` or ``full_path``
* ``.txt``: one path a line; empty lines and lines that start with # do not count

An item is a path, or an object with ``path`` or ``full_path``. Relative paths count from the folder
of the list. An item with both keys is looked for at ``path`` first, then at ``full_path``. Videos
in a tar are read in place and are named ``shard.tar/member.mp4``. Each path may be an address
(``https://``, ``s3://``, ``gs://``; in the last two a folder too), see
:mod:`jaxtrain.data.remote`.

A list at an address is somebody else's: its items may name what is on the list's own host or bucket
by a relative path, and other places by ``https://``, ``s3://`` and ``gs://``; ``http://`` only
where the list itself came by http. Absolute paths, ``~``, paths that climb above the host, and
other schemes are refused, so that it cannot reach files of this machine.
"""

import csv
import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data import folders, remote
from jaxtrain.data.video import tar_members
from jaxtrain.data.video.packets import Span
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import expanded

SUFFIXES = frozenset((".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"))
SUFFIXES |= frozenset((".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv", ".y4m"))
LISTS = frozenset((".json", ".jsonl", ".csv", ".txt"))
_LONGEST_ENTRY = 2**13  # characters; of paths Linux takes 4,096 bytes, addresses are the longest
_REMOVED = "its copy was removed from the cache: start again to fetch it again"
PIECES = ".pieces"
"""Ends the name of a folder that holds the pieces of one video."""


class Found(NamedTuple):
    """A file that the user named.

    Attributes:
        name: what the example is called wherever the data lies: its path from the folder or list.
        path: where it lies now, absolute; in a tar: the tar's path and the member's name. It need
            not exist.
        span: where in a tar; None for a file of its own.
        fetched: whether the file on the disk is the cache's copy of what is at an address.
    """

    name: str
    path: str
    span: Span | None = None
    fetched: bool = False

    @property
    def file(self) -> str:
        """The file on the disk: the video, or the tar."""
        return self.path if self.span is None else self.span.file


def is_absent(path: str) -> bool:
    """Whether there is no such file or folder; addresses and patterns of tars may lead to some."""
    if addresses.is_address(path):
        return False
    top = expanded(path).absolute()
    return not os.path.exists(top) and not tar_members.is_pattern(str(top))


def absent(flag: str, path: str) -> str:
    """The message for a path that :func:`is_absent`."""
    return (
        f"{flag} {path}: no such file or folder; give {flag} a folder of videos, a video, a .tar "
        f"of videos, or a list of them ({', '.join(sorted(LISTS))})"
    )


def find(path: str, flag: str, cache_root: Path, say: Callable[[str], None]) -> list[Found]:
    """All video files that ``path`` names, sorted by name, each once.

    Args:
        path: a folder, a video file, a tar, a pattern of tars, or a list of files.
        flag: the option that gave the path, for messages.
        cache_root: of the cache, which has the members of tars, and what was fetched.
        say: takes messages for the console.

    Raises:
        InputError: the path is missing, is of no known kind, or names no file, or two files would
            have one name; an address cannot be fetched or is not accepted.
        RunAgain: an address cannot be fetched now.
    """
    if addresses.is_address(path):
        path = path.strip()
        addresses.check(path, flag)
    shown = addresses.public(path)
    tar_members.check_not_packed(shown.partition("?")[0], flag)

    def local(wanted: list[str]) -> dict[str, str]:
        return remote.fetch(wanted, cache_root, flag, say)

    top = expanded(path).absolute()
    if addresses.is_address(path):
        named = _remote(path, flag, local)
        cure = "name a video, a .tar, a list, or a folder that can be listed"
    elif os.path.isdir(top):
        named = list(_walk(top))
        endings = ", ".join(sorted(SUFFIXES))
        cure = f"give {flag} a folder with {endings} or .tar files, or a list of them"
    elif not os.path.exists(top):
        if is_absent(path):
            raise InputError(absent(flag, path))
        above = str(top).partition("{")[0].rpartition("/")[0] or "/"
        named = []
        for tar in tar_members.expand(str(top)):
            tar_members.check_exists(tar, path)
            named.append(Found(Path(tar).relative_to(above).as_posix(), tar))
        cure = "let it stand for .tar files with videos in them"
    elif top.suffix.lower() in LISTS:
        named = list(_located(_items(top, f"{flag} {path}"), str(top.parent)))
        for one in named:
            if addresses.is_address(one.path):
                addresses.check(one.path, f"{flag} {path}:")
        cure = "put one path an entry into it"
    elif top.suffix.lower() in SUFFIXES | {tar_members.SUFFIX}:
        named = [Found(top.name, str(top))]
        cure = "put videos into it"
    else:
        raise InputError(
            f"{flag} {path}: the ending {top.suffix!r} is neither of a video, a .tar nor of a list "
            f"({', '.join(sorted(LISTS))}); give a folder, a video or a list of videos"
        )
    named = list(dict.fromkeys(named))  # each is opened once
    places = local([one.path for one in named if addresses.is_address(one.path)])
    named = [
        one._replace(path=places[one.path], fetched=True) if one.path in places else one
        for one in named
    ]
    found = [inner for one in named for inner in _unfolded(one, flag, cache_root)]
    if not found:
        raise InputError(f"{flag} {shown} names no video file: {cure}")
    return sorted(_distinct(found, flag, shown).values(), key=lambda one: one.name)


def split(names: list[str], train_share: float) -> list[bool]:
    """For each name whether it trains; the others validate.

    A name's side depends on its hash only, so that other files coming or going do not move it; and
    the pieces of one video stand on its side (:func:`video_of`). At least one video stands on each
    side: where the hashes leave a side empty, the one nearest to it moves over.

    Args:
        names: of files from two videos or more.
        train_share: 0 to 1.
    """
    videos = [video_of(name) for name in names]
    places = [_place(video) for video in videos]
    trains = {video: place < train_share for video, place in zip(videos, places, strict=True)}
    if all(trains.values()):
        trains[videos[places.index(max(places))]] = False
    elif not any(trains.values()):
        trains[videos[places.index(min(places))]] = True
    return [trains[video] for video in videos]


def video_of(name: str) -> str:
    """The name of the video that a file was cut from; the file's own name where it was not cut.

    ``jaxtrain prepare clips`` puts the pieces of ``a/b.mp4`` into the folder ``a/b.mp4.pieces``.
    """
    return name.split(PIECES + "/", 1)[0]


def _place(name: str) -> float:
    """A name's hash as a number from 0 to 1."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _walk(top: Path) -> Iterator[Found]:
    """Videos and tars below ``top``."""
    for path in folders.files(top):
        if path.suffix.lower() in SUFFIXES | {tar_members.SUFFIX}:
            yield Found(path.relative_to(top).as_posix(), str(path))


def _unfolded(one: Found, flag: str, cache_root: Path) -> Iterator[Found]:
    """The file itself, or the videos in it if it is a tar."""
    tar_members.check_not_packed(one.path, flag)
    if not one.path.lower().endswith(tar_members.SUFFIX):
        yield one
        return
    try:
        members = tar_members.members(one.path, cache_root)
    except InputError as error:
        if not one.fetched:
            raise
        remote.discard(one.path)
        raise InputError(f"{flag} {one.name}: {error}; {_REMOVED}") from None
    for name, span in members:
        hidden = any(part.startswith(".") for part in name.removeprefix("./").split("/"))
        if os.path.splitext(name)[1].lower() in SUFFIXES and not hidden:
            name = name.removeprefix("./")
            yield Found(f"{one.name}/{name}", f"{one.path}/{name}", span, one.fetched)


def _distinct(found: list[Found], flag: str, path: str) -> dict[str, Found]:
    """By name; a tar may hold a member twice, and the last one counts.

    Raises:
        InputError: two places have one name.
    """
    by_name: dict[str, Found] = {}
    for one in found:
        other = by_name.get(one.name, one)
        if other.path != one.path:
            raise InputError(
                f"{flag} {path}: both {other.path} and {one.path} would be called {one.name}: "
                "leave one out, or name a folder or a list above both"
            )
        by_name[one.name] = one
    return by_name


def _expanded(item: dict[str, str], budget: tar_members.Budget) -> Iterator[dict[str, str]]:
    """An entry for each tar that a pattern stands for; the entry itself where it is none."""
    path = item.get("path") or item["full_path"]
    if not path.lower().endswith(tar_members.SUFFIX) or not tar_members.is_pattern(path):
        yield item
        return
    for one in tar_members.expand(path, budget):
        yield {"path": one}


def _located(items: Iterable[dict[str, str]], folder: str) -> Iterator[Found]:
    """Where the files of a list's entries are.

    Raises:
        InputError: a tar that a pattern stands for is missing.
    """
    budget = tar_members.Budget()
    for item in items:
        for one in _expanded(item, budget):
            found = _locate(one, folder)
            if one is not item and not addresses.is_address(found.path):
                tar_members.check_exists(found.path, item.get("path") or item["full_path"])
            yield found


def _items(path: Path, where: str) -> Iterator[dict[str, str]]:
    """The entries of a list file, each with ``path`` or ``full_path`` or both."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte-order mark in front
        match path.suffix.lower():
            case ".json":
                whole = json.loads(text)
                raw = whole.get("list") if isinstance(whole, dict) else whole
                if not isinstance(raw, list):
                    raise InputError(f'{where}: a list, or an object with "list", was expected')
            case ".jsonl":
                raw = [json.loads(line) for line in text.splitlines() if line.strip()]
            case ".csv":
                raw = list(csv.DictReader(text.splitlines()))
            case _:
                lines = [line.strip() for line in text.splitlines()]
                raw = [line for line in lines if line and not line.startswith("#")]
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{where} cannot be read: {error}") from error
    for number, item in enumerate(raw, 1):
        yield _item(item, f"{where}, entry {number}")


def _item(item: Any, where: str) -> dict[str, str]:
    if isinstance(item, str):
        item = {"path": item}
    if not isinstance(item, dict):
        short = reprlib.repr(item)
        raise InputError(f'{where}: a path, or an object with "path", was expected, not {short}')
    keys = {key: item[key] for key in ("path", "full_path") if item.get(key)}
    if not keys or not all(isinstance(value, str) for value in keys.values()):
        there = reprlib.repr(sorted(str(key) for key in item))
        raise InputError(f'{where}: neither "path" nor "full_path" holds a text; there is {there}')
    for value in keys.values():
        if len(value) > _LONGEST_ENTRY:
            raise InputError(
                f"{where}: {value[:40]!a}... has {len(value):,} characters, and the limit is "
                f"{_LONGEST_ENTRY:,}: put one path an entry into it"
            )
        if "\0" in value:
            raise InputError(f"{where}: {reprlib.repr(value)} is not the name of a file")
    return keys


def _remote(address: str, flag: str, local: Callable[[list[str]], dict[str, str]]) -> list[Found]:
    """What an address names: the files of a list, of a folder or of a pattern, or one file."""
    ending = _ending(address)
    if ending in LISTS:
        return _listed(address, flag, Path(local([address])[address]))
    several = list(tar_members.expand(address))
    known = SUFFIXES | {tar_members.SUFFIX}
    if ending not in known:
        several = [one for one in remote.list_below(address, flag) if _ending(one) in known]
    return [Found(addresses.name_of(one), one) for one in several]


def _ending(address: str) -> str:
    return os.path.splitext(addresses.split(address).path)[1].lower()


def _listed(address: str, flag: str, place: Path) -> list[Found]:
    """The files that a list at an address names; ``place`` has it in the cache.

    Raises:
        InputError: it cannot be read, and was removed from the cache; or an item is not accepted.
    """
    where = f"{flag} {addresses.public(address)}"
    try:
        items = list(_items(place, where))
    except InputError as error:
        remote.discard(str(place))
        raise InputError(f"{error}; {_REMOVED}") from None
    budget = tar_members.Budget()
    return [_locate_at(one, address, where) for item in items for one in _expanded(item, budget)]


def _locate_at(item: dict[str, str], address: str, where: str) -> Found:
    """Where an item of a list at an address is, and its name."""
    given = (item.get("path") or item["full_path"]).strip()
    home = addresses.split(address)
    if addresses.is_address(given):
        addresses.check(given, f"{where}:")
        scheme = addresses.split(given).scheme
        if scheme == "http" and home.scheme != "http":
            raise InputError(
                f"{where} names {addresses.public(given)}: a list that came by {home.scheme} may "
                "name https://, s3:// and gs:// only"
            )
        return Found(addresses.name_of(given), given)
    if given.startswith(("/", "~", "\\")):
        raise InputError(
            f"{where} names {given}, a path on this machine: a list at an address may name paths "
            "relative to its own folder, https://, s3:// and gs:// only"
        )
    inside, mark, query = given.partition("?")
    folder = home.path.rpartition("/")[0]
    path = f"{folder}/{inside}"
    if any(part in (".", "..") for part in inside.split("/")):
        parts: list[str] = []
        for part in path.split("/")[1:]:
            if part == ".." and not parts:
                raise InputError(f"{where} names {inside}, which is above {home.host}: remove it")
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        path = "/" + "/".join(parts)
    found = f"{home.scheme}://{home.host}{path}{mark}{query}"
    addresses.check(found, f"{where}:")
    return Found(addresses.name_of(found), found)


def _locate(item: dict[str, str], folder: str) -> Found:
    """Where an item's file is, and its name, which moves with the list."""
    given = [os.path.expanduser(item[key]) for key in ("path", "full_path") if key in item]
    if addresses.is_address(given[0]):
        return Found(addresses.name_of(given[0]), given[0].strip())
    places = [os.path.normpath(os.path.join(folder, text)) for text in given]
    path = next((place for place in places if os.path.exists(place)), places[0])
    named = Path(places[0])
    inside = named.is_relative_to(folder)
    return Found((named.relative_to(folder) if inside else named).as_posix(), path)
