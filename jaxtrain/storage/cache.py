"""Writes cache files and folders atomically: to a temporary name, then fsync, then rename.

A reader sees a cache folder either complete or not at all, even if processes are killed or several
build it at once.

The cache may be a folder of a bucket: then :func:`root` is a local copy of it, and
:func:`make_folder` fetches folders that are complete in the bucket and not on this disk. Only the
``prepare`` commands upload what they build.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import addresses, bucket_folders, lock, record, run_marker
from jaxtrain.storage.atomic import expanded, write_whole
from jaxtrain.storage.bucket import Bucket, is_bucket, normalized
from jaxtrain.storage.disks import disk_trouble

CURE = "free space there, or set $JAXTRAIN_CACHE to a folder on another disk"


@dataclasses.dataclass(frozen=True)
class CacheBucket:
    """A cache in a bucket, as worker processes receive it."""

    url: str
    copy: Path
    uploads: bool = False

    @property
    def store(self) -> Bucket:
        """Returns the client, one for each process."""
        return bucket_folders.opened(self.url)

    def name(self, path: Path) -> str:
        """Returns the name in the bucket of a file or folder in the local copy."""
        return path.relative_to(self.copy).as_posix()


def root(cache_dir: str | None) -> Path:
    """Returns the cache folder, after creating it if it is missing; for a bucket, the local copy.

    Raises:
        RunAgain: its disk is full or unavailable.
    """
    folder = path_of(cache_dir)
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:  # never a folder of the user, which backups would then skip
            run_marker.mark_cache(folder)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _trouble(error, folder) from error
    return folder


def path_of(cache_dir: str | None) -> Path:
    """Returns the cache folder: ``cache_dir``, ``$JAXTRAIN_CACHE`` or ``~/.cache/jaxtrain``."""
    if (address := url(cache_dir)) is not None:
        return path_of(None) / "copies" / hashlib.sha256(address.encode()).hexdigest()[:16]
    text = cache_dir or os.environ.get("JAXTRAIN_CACHE") or "~/.cache/jaxtrain"
    if addresses.is_address(text):
        raise InputError(
            f"JAXTRAIN_CACHE {text} is not a folder of this machine: set it to one, and pass the "
            "URL with --data.cache_dir"
        )
    try:
        return expanded(text).absolute()
    except InputError as error:
        raise InputError(
            f"the cache folder {text} needs a home folder, and none was found: set HOME or "
            "$JAXTRAIN_CACHE, or pass a folder with --data.cache_dir"
        ) from error


def url(cache_dir: str | None) -> str | None:
    """Returns the URL of a cache in a bucket; None for a folder."""
    if cache_dir and (is_bucket(cache_dir) or addresses.is_address(cache_dir)):
        return normalized(cache_dir, "--data.cache_dir")
    return None


def digest(*values: Any) -> str:
    """Returns the SHA-256 hex digest of JSON-serializable values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_file(path: Path, text: str) -> None:
    """Writes a text file atomically, replacing an older one.

    Raises:
        RunAgain: the disk is full.
    """
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def make_folder(
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
    say: Callable[[str], None],
    *,
    bucket: CacheBucket | None = None,
) -> dict[str, Any]:
    """Returns the record of ``folder``, after building the folder if it is not complete.

    A folder that is complete on this disk is used without a request to the bucket, except to see
    whether it must be uploaded.

    Several processes may call this at once: the others wait for the first and then read its folder.
    On a file system without locks they all build, and the first rename wins.

    Args:
        folder: the final path. Its name must depend on everything that its content depends on.
        build: fills an empty folder and returns the content of the record.

    Raises:
        RunAgain: the disk is full, or the cache is in a bucket that is unavailable.
    """
    made = record.read(folder, verify=True) or _make_folder(folder, build, say, bucket)
    assert made is not None, "build() has made it"
    if bucket is not None and bucket.uploads:
        bucket_folders.upload_folder(bucket.store, bucket.name(folder), folder, say)
    return made


def is_here(folder: Path, say: Callable[[str], None], bucket: CacheBucket | None) -> bool:
    """Returns whether a folder is complete on this disk, after fetching it if the bucket has it."""
    if bucket is None:
        return record.read(folder) is not None
    return _make_folder(folder, None, say, bucket) is not None


def _make_folder(
    folder: Path,
    build: Callable[[Path], dict[str, Any]] | None,
    say: Callable[[str], None],
    bucket: CacheBucket | None,
) -> dict[str, Any] | None:
    """Fetches or builds a folder that is not complete on this disk; None without ``build``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + ".lock")
    with lock.locked(beside, say, f"making {folder.name}") as alone:
        made = record.read(folder, verify=True)
        if made is not None:  # another process made it while this one waited
            return made
        if alone:  # this process has the lock, so a killed process left these folders
            beside_it = re.compile(re.escape(folder.name) + r"\.tmp-[0-9a-f]{12}")  # of _beside
            for left in filter(beside_it.fullmatch, os.listdir(folder.parent)):
                shutil.rmtree(folder.parent / left, ignore_errors=True)
        if bucket is not None and (made := _fetch(folder, say, alone, bucket)) is not None:
            return made
        if build is None:
            return None
        # Without locks, several processes may build at once, each in its own folder.
        work = _beside(folder)
        try:
            with explained(folder.parent):
                work.mkdir()
                return _publish(work, folder, record.write(work, build(work)), say)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turns errors of a full or read-only disk into messages with the fix.

    Other errors pass unchanged: they may come from reading the input.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise _trouble(error, folder) from error


def _trouble(error: OSError, folder: Path) -> InputError | RunAgain:
    return disk_trouble(
        error,
        f"cannot write to the cache folder {folder}",
        "pass a writable folder with --data.cache_dir, or set $JAXTRAIN_CACHE to one",
    )


def _publish(
    work: Path, folder: Path, made: record.Record, say: Callable[[str], None]
) -> record.Record:
    if folder.exists():
        other = record.read(folder, verify=True)
        if other is not None:  # without locks, another process may finish first
            return other
        say(f"the cache folder {folder} is damaged: rebuilding it")
    record.publish(work, folder, _beside(folder))
    return record.read(folder) or made


def _fetch(
    folder: Path, say: Callable[[str], None], alone: bool, bucket: CacheBucket
) -> dict[str, Any] | None:
    """Fetches a folder if it is complete in the bucket; else returns None.

    Args:
        alone: whether this process has the lock. Then files that an earlier process has fetched
            are kept: the name of the folder determines their content.
    """
    work = folder.with_name(f"{folder.name}.fetching") if alone else _beside(folder)
    keep = alone
    try:
        with explained(folder.parent):
            store, name = bucket.store, bucket.name(folder)
            if not bucket_folders.download_folder(store, name, work, CURE, say):
                keep = False
                return None
            made = record.read(work)
            return None if made is None else _publish(work, folder, made, say)
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)


def _beside(path: Path) -> Path:
    """Returns a new name in the same folder; tempfile's would be inaccessible to other users."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
