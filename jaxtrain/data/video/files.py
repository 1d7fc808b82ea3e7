"""Finds the video files at a path, and divides them into training and validation files.

A path is a folder (read recursively), one video file, one uncompressed ``.tar`` of videos, a
pattern of tars (``shards-{000..127}.tar``), or a list of files and tars:

* ``.json``: a list, or ``{"list": [...]}``
* ``.jsonl``: one item per line
* ``.csv``: with a column ``path`` or ``full_path``
* ``.txt``: one path per line; empty lines and lines that start with # are ignored

An item is a path, or an object with ``path`` or ``full_path``. Relative paths start at the list's
folder. For an item with both keys, ``path`` is tried first, then ``full_path``. Videos in a tar are
read in place and are named ``shard.tar/member.mp4``. A path may also be a URL (``https://``,
``s3://``, ``gs://``; with the last two also a folder): see :mod:`jaxtrain.data.remote`.

A list at a URL is not trusted. Its items may be relative paths on the list's own host or
bucket, or URLs with ``https://``, ``s3://`` and ``gs://``; ``http://`` is accepted only if the
list itself came by http. Absolute paths, ``~``, paths above the host's root and other schemes are
rejected, so that the list cannot reach files on this machine.
"""

import csv
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data import remote
from jaxtrain.data.video import tar_members
from jaxtrain.data.video.packets import Span
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses, disks, listing
from jaxtrain.storage.atomic import expanded

SUFFIXES = frozenset((".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"))
SUFFIXES |= frozenset((".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv", ".y4m"))
LISTS = frozenset((".json", ".jsonl", ".csv", ".txt"))
_MAX_ENTRY = 2**13  # characters; Linux limits paths to 4,096 bytes, URLs can be longer
_REMOVED = "its copy was removed from the cache: start again to fetch a new one"
PIECES = ".pieces"
"""Suffix of a folder with the prepared clips of one video."""


class Found(NamedTuple):
    """A file that the user's path leads to.

    Attributes:
        name: the file's path relative to the folder or list, so that it is the same on every
            machine.
        path: the absolute path; in a tar, the tar's path and the member's name. It may not exist.
        span: the place in a tar; None for a separate file.
        fetched: whether the file on disk is the cache's copy of a file at a URL.
        version: size and ETag of a file in a bucket that is not fetched yet; ``path`` is its URL.
    """

    name: str
    path: str
    span: Span | None = None
    fetched: bool = False
    version: tuple[int, str] | None = None

    @property
    def file(self) -> str:
        """Returns the file on disk: the video, or the tar."""
        return self.path if self.span is None else self.span.file


def is_absent(path: str) -> bool:
    """Returns whether a path does not exist; URLs and patterns of tars are not checked."""
    if addresses.is_address(path):
        return False
    top = expanded(path).absolute()
    return not os.path.exists(top) and not tar_members.is_pattern(str(top))


def absent(flag: str, path: str) -> str:
    """Returns the message for a path that :func:`is_absent`."""
    return (
        f"{flag} {path}: no such file or folder; pass a folder of videos, a video, a .tar "
        f"of videos, or a list of them ({', '.join(sorted(LISTS))})"
    )


def find(
    path: str,
    flag: str,
    cache_root: Path,
    say: Callable[[str], None],
    *,
    fetch_folders: bool = True,
) -> list[Found]:
    """Returns all video files that ``path`` leads to, sorted by name, each once.

    Args:
        path: a folder, a video file, a tar, a pattern of tars, or a list of files.
        flag: the option that set the path, for messages.
        cache_root: the cache folder, which holds fetched files and the lists of tar members.
        say: prints a message.
        fetch_folders: False leaves the videos of a folder in a bucket there, for :func:`fetched`.

    Raises:
        InputError: the path is missing, has an unknown type or leads to no file; two files would
            have the same name; or a URL cannot be fetched or is rejected.
        RunAgain: a URL is temporarily unavailable.
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
        named = _remote(path, flag, local, say, fetch_folders)
        cure = "pass a video, a .tar, a list, or a folder that can be listed"
    elif os.path.isdir(top):
        named = list(_walk(top, say))
        endings = ", ".join(sorted(SUFFIXES))
        cure = f"pass a folder with {endings} or .tar files, or a list of them"
    elif not os.path.exists(top):
        if is_absent(path):
            raise InputError(absent(flag, path))
        above = str(top).partition("{")[0].rpartition("/")[0] or "/"
        named = []
        for tar in tar_members.expand(str(top)):
            tar_members.check_exists(tar, path)
            named.append(Found(Path(tar).relative_to(above).as_posix(), tar))
        cure = "pass a pattern of .tar files that contain videos"
    elif top.suffix.lower() in LISTS:
        named = list(_located(_items(top, f"{flag} {path}"), str(top.parent)))
        for one in named:
            if addresses.is_address(one.path):
                addresses.check(one.path, f"{flag} {path}:")
        cure = "list one path per entry"
    elif top.suffix.lower() in SUFFIXES | {tar_members.SUFFIX}:
        named = [Found(top.name, str(top))]
        cure = "add videos to it"
    else:
        raise InputError(
            f"{flag} {path}: the suffix {top.suffix!r} is not that of a video, a .tar, or a list "
            f"({', '.join(sorted(LISTS))}); pass a folder, a video, or a list of videos"
        )
    named = list(dict.fromkeys(named))  # so that each is opened once
    wanted = [one for one in named if addresses.is_address(one.path) and one.version is None]
    paths = local([one.path for one in wanted])
    named = [
        one._replace(path=paths[one.path], fetched=True) if one.path in paths else one
        for one in named
    ]
    found = [inner for one in named for inner in _unfolded(one, flag, cache_root)]
    if not found:
        raise InputError(f"{flag} {shown}: no video files found: {cure}")
    return sorted(_distinct(found, flag, shown).values(), key=lambda one: one.name)


def fetched(found: Found, folder: Path, flag: str) -> Found:
    """Fetches a video that :func:`find` left in a bucket into a folder.

    Raises:
        InputError, RunAgain: see :func:`find`.
    """
    path = remote.fetch([found.path], folder, flag, lambda line: None)[found.path]
    return found._replace(path=path)


def video_of(name: str) -> str:
    """Returns the name of the video that a file was cut from, or the file's own name.

    ``jaxtrain prepare clips`` writes the clips of ``a/b.mp4`` to the folder ``a/b.mp4.pieces``.
    """
    return name.split(PIECES + "/", 1)[0]


def _walk(top: Path, say: Callable[[str], None]) -> Iterator[Found]:
    """Yields the videos and tars below ``top``."""
    for path in listing.files(top, say):
        if path.suffix.lower() in SUFFIXES | {tar_members.SUFFIX}:
            yield Found(path.relative_to(top).as_posix(), str(path))


def _unfolded(one: Found, flag: str, cache_root: Path) -> Iterator[Found]:
    """Yields the file itself, or the videos in it if it is a tar."""
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
    """Returns the files by name; if a tar holds a member twice, the last one counts.

    Raises:
        InputError: files at two places have the same name.
    """
    by_name: dict[str, Found] = {}
    for one in found:
        other = by_name.get(one.name, one)
        if other.path != one.path:
            raise InputError(
                f"{flag} {path}: {other.path} and {one.path} would have the same name {one.name}: "
                "remove one, or pass a folder or a list above both"
            )
        by_name[one.name] = one
    return by_name


def _expanded(item: dict[str, str], budget: tar_members.Budget) -> Iterator[dict[str, str]]:
    """Yields an entry for each tar that a pattern matches, or the entry if it is not a pattern."""
    path = item.get("path") or item["full_path"]
    if not path.lower().endswith(tar_members.SUFFIX) or not tar_members.is_pattern(path):
        yield item
        return
    for one in tar_members.expand(path, budget):
        yield {"path": one}


def _located(items: Iterable[dict[str, str]], folder: str) -> Iterator[Found]:
    """Locates the files of a list's entries.

    Raises:
        InputError: a tar of a pattern is missing.
    """
    budget = tar_members.Budget()
    for item in items:
        for one in _expanded(item, budget):
            found = _locate(one, folder)
            if one is not item and not addresses.is_address(found.path):
                tar_members.check_exists(found.path, item.get("path") or item["full_path"])
            yield found


def _items(path: Path, where: str) -> Iterator[dict[str, str]]:
    """Yields the entries of a list file, each with ``path`` or ``full_path`` or both."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte-order mark
        match path.suffix.lower():
            case ".json":
                parsed = json.loads(text)
                raw = parsed.get("list") if isinstance(parsed, dict) else parsed
                if not isinstance(raw, list):
                    raise InputError(f'{where}: expected a list, or an object with "list"')
            case ".jsonl":
                raw = [json.loads(line) for line in text.splitlines() if line.strip()]
            case ".csv":
                raw = list(csv.DictReader(text.splitlines()))
            case _:
                lines = [line.strip() for line in text.splitlines()]
                raw = [line for line in lines if line and not line.startswith("#")]
                if raw and not any(map(_looks_like_an_entry, raw)):
                    raise InputError(
                        f"{where} is not a list of videos: none of its {len(raw):,} lines ends "
                        "like the name of a video or a tar"
                    )
    except OSError as error:
        raise disks.disk_trouble(error, f"{where} cannot be read", "make it readable") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{where} cannot be read: {error}") from error
    for number, item in enumerate(raw, 1):
        yield _item(item, f"{where}, entry {number}")


def _looks_like_an_entry(line: str) -> bool:
    ending = os.path.splitext(addresses.public(line).partition("?")[0])[1].lower()
    return ending in SUFFIXES or ending == tar_members.SUFFIX


def _item(item: Any, where: str) -> dict[str, str]:
    if isinstance(item, str):
        item = {"path": item}
    if not isinstance(item, dict):
        short = reprlib.repr(item)
        raise InputError(f'{where}: expected a path, or an object with "path", not {short}')
    keys = {key: item[key] for key in ("path", "full_path") if item.get(key)}
    if not keys or not all(isinstance(value, str) for value in keys.values()):
        keys_found = reprlib.repr(sorted(str(key) for key in item))
        raise InputError(
            f'{where}: "path" or "full_path" must be a string; found keys {keys_found}'
        )
    for value in keys.values():
        if len(value) > _MAX_ENTRY:
            raise InputError(
                f"{where}: {value[:40]!a}... has {len(value):,} characters, and the limit is "
                f"{_MAX_ENTRY:,}: use one path per entry"
            )
        if "\0" in value:
            raise InputError(f"{where}: {reprlib.repr(value)} is not a valid file name")
    return keys


def _remote(
    address: str,
    flag: str,
    local: Callable[[list[str]], dict[str, str]],
    say: Callable[[str], None],
    fetch_folders: bool,
) -> list[Found]:
    """Returns the files at a URL: of a list, a folder, or a pattern, or one file."""
    ending = _ending(address)
    if ending in LISTS:
        return _listed(address, flag, Path(local([address])[address]))
    known = SUFFIXES | {tar_members.SUFFIX}
    if ending in known:
        return [Found(addresses.name_of(one), one) for one in tar_members.expand(address)]
    return [
        Found(
            addresses.name_of(one),
            one,
            version=version if _ending(one) in SUFFIXES and not fetch_folders else None,
        )
        for one, version in remote.list_folder(address, flag).items()
        if _ending(one) in known
    ]


def _ending(address: str) -> str:
    return os.path.splitext(addresses.split(address).path)[1].lower()


def _listed(address: str, flag: str, copy: Path) -> list[Found]:
    """Returns the files of a list at a URL.

    Args:
        address: the URL of the list.
        flag: the option that set it, for messages.
        copy: the list's copy in the cache, which is removed if it cannot be read.

    Raises:
        InputError: the list cannot be read, or an item is rejected.
    """
    where = f"{flag} {addresses.public(address)}"
    try:
        items = list(_items(copy, where))
    except InputError as error:
        remote.discard(str(copy))
        raise InputError(f"{error}; {_REMOVED}") from None
    budget = tar_members.Budget()
    return [_locate_at(one, address, where) for item in items for one in _expanded(item, budget)]


def _locate_at(item: dict[str, str], address: str, where: str) -> Found:
    """Returns the name and the place of an item of a list at a URL."""
    given = (item.get("path") or item["full_path"]).strip()
    home = addresses.split(address)
    if addresses.is_address(given):
        addresses.check(given, f"{where}:")
        scheme = addresses.split(given).scheme
        if scheme == "http" and home.scheme != "http":
            raise InputError(
                f"{where} contains {addresses.public(given)}: a list fetched by {home.scheme} may "
                "contain only https://, s3://, and gs:// URLs"
            )
        return Found(addresses.name_of(given), given)
    if given.startswith(("/", "~", "\\")):
        raise InputError(
            f"{where} contains {given}, a path on this machine: a list at a URL may contain "
            "only https://, s3://, and gs:// URLs and paths relative to its own folder"
        )
    inside, mark, query = given.partition("?")
    folder = home.path.rpartition("/")[0]
    path = f"{folder}/{inside}"
    if any(part in (".", "..") for part in inside.split("/")):
        parts: list[str] = []
        for part in path.split("/")[1:]:
            if part == ".." and not parts:
                raise InputError(
                    f"{where} contains {inside}, above the root of {home.host}: remove it"
                )
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        path = "/" + "/".join(parts)
    found = f"{home.scheme}://{home.host}{path}{mark}{query}"
    addresses.check(found, f"{where}:")
    return Found(addresses.name_of(found), found)


def _locate(item: dict[str, str], folder: str) -> Found:
    """Returns an item's file; its name is relative to the list's folder where possible."""
    given = [os.path.expanduser(item[key]) for key in ("path", "full_path") if key in item]
    if addresses.is_address(given[0]):
        return Found(addresses.name_of(given[0]), given[0].strip())
    paths = [os.path.normpath(os.path.join(folder, text)) for text in given]
    path = next(filter(os.path.exists, paths), paths[0])
    named = Path(paths[0])
    inside = named.is_relative_to(folder)
    return Found((named.relative_to(folder) if inside else named).as_posix(), path)
