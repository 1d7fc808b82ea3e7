"""Finds the video files at a path.

A path is a folder (read recursively), one video file, one uncompressed ``.tar`` of videos, a
pattern of tars (``shards-{000..127}.tar``), or a list of files and tars:

* ``.txt``: one path per line; empty lines are ignored, and lines that start with #, unless a file
  has that name
* ``.csv``: with a column ``path``
* ``.jsonl``: a path, or an object with ``path``, per line

Relative paths start at the list's folder. Videos in a tar are read in place and are named
``shard.tar/member.mp4``. A path, also in a list, may be a URL (``https://``, ``s3://``, ``gs://``;
on the command line and with the last two also a folder): see :mod:`jaxtrain.data.remote`.
"""

import collections
import csv
import functools
import io
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.config import invocation
from jaxtrain.data import listing, remote
from jaxtrain.data.video import tar_members
from jaxtrain.data.video.reader import Span
from jaxtrain.errors import InputError
from jaxtrain.jobs import resumable
from jaxtrain.storage import addresses, disks, record
from jaxtrain.storage.atomic import expanded

SUFFIXES = frozenset((".264", ".265", ".3g2", ".3gp", ".asf", ".avc", ".avi", ".dv", ".f4v"))
SUFFIXES |= frozenset((".flv", ".gif", ".h264", ".h265", ".hevc", ".insv", ".ivf", ".m1v"))
SUFFIXES |= frozenset((".m2ts", ".m2v", ".m4v", ".mkv", ".mod", ".mov", ".mp4", ".mpeg", ".mpg"))
SUFFIXES |= frozenset((".mpv", ".mts", ".mxf", ".ogv", ".qt", ".tod", ".ts", ".vob", ".webm"))
SUFFIXES |= frozenset((".wmv", ".y4m"))
"""Of the formats that :data:`jaxtrain.data.video.reader.FORMATS` reads and cameras write."""
IMAGES = frozenset((".jpeg", ".jpg", ".png", ".webp"))
"""Videos of one frame."""
# Beside videos, these are posters, thumbnails, and a camera's small copies, and are not read.
_BESIDE = IMAGES | {".lrv"}
LISTS = frozenset((".jsonl", ".csv", ".txt"))
_KINDS = 5  # of other files, in a message
_AT_ONCE = 16  # requests for the versions of objects
_OF_JAXTRAIN = (resumable.REPORT, record.NAME)  # in folders of `prepare` and of the cache
_KNOWN = SUFFIXES | _BESIDE | {tar_members.SUFFIX}


class VideoFile(NamedTuple):
    """A file that the user's path leads to.

    Attributes:
        name: the file's path relative to the folder or list, so that it is the same on every
            machine.
        path: the absolute path on disk, of the cache's copy for a URL; in a tar, the tar's path and
            the member's name. It may not exist. "" if the file was left at a URL.
        span: the place in a tar; None for a separate file.
        url: of a file that was left there, or is to be fetched; "" for others.
        version: size and ETag of an object in a bucket; None if they are unknown.
    """

    name: str
    path: str = ""
    span: Span | None = None
    url: str = ""
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
    fetch_videos: bool = True,
    by_http: bool = False,
) -> list[VideoFile]:
    """Returns all video files that ``path`` leads to, sorted by name, each once.

    Args:
        fetch_videos: False leaves videos at URLs there, for :func:`fetched`; tars are fetched.
        by_http: False refuses files at https://, which are prepared before a run.

    Raises:
        InputError: the path is missing, has an unknown type or leads to no file; two files would
            have the same name; or a URL cannot be fetched or is rejected.
        RunAgain: a URL or disk is temporarily unavailable.
    """
    public_path = addresses.public(path)
    tar_members.check_not_packed(public_path.partition("?")[0], flag)
    if addresses.is_address(path):
        path = path.strip()
        addresses.check(path, flag)
        candidates, cure = _at_url(path, flag)
    else:
        candidates, cure = _on_disk(path, flag, say)
    candidates = list(dict.fromkeys(candidates))  # so that each is opened once
    for file in candidates:
        tar_members.check_not_packed(file.name, flag)
        if not by_http and file.url and addresses.split(file.url).scheme in addresses.HTTP:
            raise InputError(
                f"{flag} {addresses.public(file.url)}: runs read videos from disks and buckets: "
                f"prepare these first with `{invocation.program()} prepare clips {public_path} "
                f"OUT`, and pass {flag} OUT"
            )
    wanted = {
        file.url: file.version
        for file in candidates
        if file.url and (fetch_videos or _suffix(file.url) == tar_members.SUFFIX)
    }
    copies = remote.fetch(wanted, cache_root, flag, say)
    in_folder = [
        file._replace(path=copies[file.url], url="", version=None) if file.url in copies else file
        for file in candidates
    ]
    videos = [video for file in in_folder for video in _with_tar_members(file)]
    if not videos:
        raise InputError(f"{flag} {public_path}: no video files found: {cure}")
    return sorted(_distinct(videos, flag, public_path).values(), key=lambda video: video.name)


def fetched(video: VideoFile, folder: Path, flag: str) -> VideoFile:
    """Fetches a video that :func:`find` left at a URL into a folder."""
    path = remote.fetch({video.url: video.version}, folder, flag, lambda line: None)[video.url]
    return video._replace(path=path)


def is_file(url: str) -> bool:
    """Returns whether a URL names a video or a tar, and not a folder."""
    return _suffix(url) in _KNOWN


def _at_url(url: str, flag: str) -> tuple[list[VideoFile], str]:
    """Returns the files at a URL, and what to do if they have no videos."""
    suffix = _suffix(url)
    if suffix in LISTS or suffix == ".json":
        raise InputError(
            f"{flag} {addresses.public(url)}: lists are read from a disk: download this one, and "
            "write complete URLs into it"
        )
    if is_file(url):
        urls = list(tar_members.expand(url))
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # a request for each
            versions = list(pool.map(functools.partial(remote.version_of, flag=flag), urls))
        files = [
            VideoFile(addresses.name_of(file), url=file, version=version)
            for file, version in zip(urls, versions, strict=True)
        ]
        return files, "pass a video, or a .tar that contains videos"
    files = [
        VideoFile(addresses.name_of(file), url=file, version=version)
        for file, version in remote.list_folder(url, flag).items()
        if is_file(file)
    ]
    return _of_one_kind(files), "pass a video, a .tar, or a folder of a bucket"


def _of_one_kind(files: list[VideoFile]) -> list[VideoFile]:
    """Returns the videos and tars of a folder or tar, or if there are none, all files."""
    videos = [file for file in files if os.path.splitext(file.name)[1].lower() not in _BESIDE]
    return videos or files


def _on_disk(path: str, flag: str, say: Callable[[str], None]) -> tuple[list[VideoFile], str]:
    """Returns the files at a path, and what to do if they have no videos."""
    top = expanded(path).absolute()
    suffix = top.suffix.lower()
    if os.path.isdir(top):
        if problem := listing.in_run(top, flag):
            raise InputError(problem)
        listed = [(file, file.relative_to(top).as_posix()) for file in listing.files(top, say)]
        files = _of_one_kind(
            [VideoFile(name, str(file)) for file, name in listed if file.suffix.lower() in _KNOWN]
        )
        read = {file.name for file in files}
        ignored = collections.Counter(
            file.suffix.lower() or "without a suffix"
            for file, name in listed
            if name not in read and name not in _OF_JAXTRAIN
        )
        if files and ignored:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in ignored.most_common(_KINDS))
            more = ", ..." if len(ignored) > _KINDS else ""
            count = f"{ignored.total():,} other file{'s' if ignored.total() > 1 else ''}"
            say(f"{flag} {path}: ignored {count} ({kinds}{more})")
        endings = ", ".join(sorted(SUFFIXES))
        return files, f"pass a folder with {endings} or .tar files, or a list of them"
    if not os.path.exists(top):
        if is_absent(path):
            raise InputError(absent(flag, path))
        above = str(top).partition("{")[0].rpartition("/")[0] or "/"
        files = [
            VideoFile(Path(tar).relative_to(above).as_posix(), tar)
            for tar in tar_members.expand(str(top))
        ]
        return files, "pass a pattern of .tar files that contain videos"
    if suffix in LISTS:
        return list(_listed(top, f"{flag} {path}")), "list one path per entry"
    if suffix in _KNOWN:
        return [VideoFile(top.name, str(top))], "add videos to it"
    raise InputError(
        f"{flag} {path}: the suffix {top.suffix!r} is not that of a video, a .tar, or a list "
        f"({', '.join(sorted(LISTS))}); pass a folder, a video, or a list of videos"
    )


def _suffix(url: str) -> str:
    return os.path.splitext(addresses.split(url).path)[1].lower()


def _with_tar_members(file: VideoFile) -> Iterator[VideoFile]:
    """Yields the file itself, or the videos in it if it is a tar."""
    if not file.path.lower().endswith(tar_members.SUFFIX):
        yield file
        return
    inside = []
    for member, span in tar_members.members(file.path):
        member = member.removeprefix("./")
        hidden = any(component.startswith(".") for component in member.split("/"))
        if os.path.splitext(member)[1].lower() in SUFFIXES | _BESIDE and not hidden:
            name, path = f"{file.name}/{member}", f"{file.path}/{member}"
            inside.append(file._replace(name=name, path=path, span=span))
    yield from _of_one_kind(inside)


def _distinct(videos: Iterable[VideoFile], flag: str, path: str) -> dict[str, VideoFile]:
    """Returns the files by name; if a tar has a member twice, the last one counts.

    Raises:
        InputError: files at two places have the same name.
    """
    by_name: dict[str, VideoFile] = {}
    for video in videos:
        other = by_name.setdefault(video.name, video)
        places = [file.path or file.url for file in (other, video)]
        if len({*places}) > 1:
            raise InputError(
                f"{flag} {path}: {' and '.join(places)} would have the same name {video.name}: "
                "remove one, or pass a folder or a list above both"
            )
        by_name[video.name] = video
    return by_name


def _listed(path: Path, location: str) -> Iterator[VideoFile]:
    """Yields the files of a list.

    A name is relative to the list's folder if the file is in it.

    Raises:
        InputError, RunAgain: the list cannot be read, or has an invalid entry.
    """
    for entry in _entries(path, location):
        expands = entry.lower().endswith(tar_members.SUFFIX)
        for listed in tar_members.expand(entry) if expands else (entry,):
            if addresses.is_address(listed):
                url = listed.strip()
                addresses.check(url, f"{location}:")
                yield VideoFile(addresses.name_of(url), url=url)
                continue
            file = Path(os.path.normpath(path.parent / os.path.expanduser(listed)))
            inside = file.is_relative_to(path.parent)
            name = (file.relative_to(path.parent) if inside else file).as_posix()
            yield VideoFile(name, str(file))


def _entries(path: Path, location: str) -> Iterator[str]:
    """Yields the paths in a list, in which a line feed ends a line, and no other character does."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte-order mark
        raw: list[Any]
        match path.suffix.lower():
            case ".jsonl":
                raw = [json.loads(line) for line in text.split("\n") if line.strip()]
            case ".csv":
                raw = list(csv.DictReader(io.StringIO(text)))
            case _:
                lines = [line.strip(" \t") for line in text.split("\n")]
                raw = [line for line in lines if line and not _is_comment(line, path)]
                if raw and not any(map(_looks_like_an_entry, raw)):
                    raise InputError(
                        f"{location} is not a list of videos: none of its {len(raw):,} lines ends "
                        "like the name of a video or a tar"
                    )
    except OSError as error:
        raise disks.disk_trouble(error, f"{location} cannot be read", "make it readable") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{location} cannot be read: {error}") from error
    for number, item in enumerate(raw, 1):
        entry = item.get("path") if isinstance(item, dict) else item
        if not isinstance(entry, str) or not entry or "\0" in entry:
            raise InputError(
                f'{location}, entry {number}: expected a path, or an object or column "path", not '
                f"{reprlib.repr(item)}"
            )
        yield entry


def _is_comment(line: str, path: Path) -> bool:
    """Returns whether a line of a .txt list is a comment, not a name such as "#shorts 1.mp4"."""
    return line.startswith("#") and not (
        _looks_like_an_entry(line) and os.path.exists(path.parent / line)
    )


def _looks_like_an_entry(line: str) -> bool:
    return os.path.splitext(addresses.public(line).partition("?")[0])[1].lower() in _KNOWN
