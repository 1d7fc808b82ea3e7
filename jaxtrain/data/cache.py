"""Writes cache files and folders atomically: to a temporary name, then fsync, then rename.

A reader sees a cache folder either complete or not at all, even if processes are killed or several
build it at once.

The cache may be a folder of a bucket: then :func:`root` is a local copy of it, :func:`make_folder`
fetches folders that are complete in the bucket, and uploads those that it builds.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import addresses, lock
from jaxtrain.storage.atomic import appearing, expanded, sync, write_whole
from jaxtrain.storage.bucket import is_bucket, normalized
from jaxtrain.storage.bucket_output import BucketOutput
from jaxtrain.storage.disks import check_room, cure_of

MANIFEST = "manifest.json"
CURE = "free space there, or set $JAXTRAIN_CACHE to a folder on another disk"
_FETCHING = ".fetching.json"  # describes what a folder is fetched from, until it is complete
_urls: dict[Path, str] = {}
"""Buckets by the folders of this process that are their local copies."""


def root(cache_dir: str | None) -> Path:
    """Returns the cache folder, after creating it if it is missing; for a bucket, the local copy.

    Raises:
        InputError: the folder cannot be created or is not writable.
        RunAgain: its disk is full or unavailable.
    """
    folder = path_of(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _trouble(error, folder) from error
    return folder


def path_of(cache_dir: str | None) -> Path:
    """Returns the cache folder: ``cache_dir``, ``$JAXTRAIN_CACHE`` or ``~/.cache/jaxtrain``.

    Raises:
        InputError: there is no home folder, or the variable has a URL.
    """
    if (where := url(cache_dir)) is not None:
        copy = path_of(None) / "copies" / hashlib.sha256(where.encode()).hexdigest()[:16]
        _urls[copy] = where
        return copy
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
    """Returns the URL of a cache in a bucket; None for a folder.

    Raises:
        InputError: it is another kind of URL.
    """
    if cache_dir and (is_bucket(cache_dir) or addresses.is_address(cache_dir)):
        return normalized(cache_dir, "--data.cache_dir")
    return None


def in_bucket(path: Path) -> tuple[BucketOutput, str] | None:
    """Returns the bucket, and the name in it, of a file or folder in a local copy; else None."""
    for folder in path.parents:
        if folder in _urls:
            return BucketOutput(_urls[folder]), path.relative_to(folder).as_posix()
    return None


def digest(*parts: Any) -> str:
    """Returns the SHA-256 hex digest of JSON-serializable values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_file(path: Path, text: str) -> None:
    """Writes a text file atomically, replacing an older one.

    Raises:
        InputError: the disk is read-only.
        RunAgain: the disk is full.
    """
    with _explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Does the same as :func:`write_file` with lines, of which memory holds a few."""
    with _explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as work, open(work, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def fetch_file(path: Path) -> None:
    """Fetches a file of a local copy from the bucket, if it is missing; does nothing for others.

    Raises:
        RunAgain, InputError: the bucket is unavailable, or the disk is full.
    """
    place_there = in_bucket(path)
    if place_there is None or path.exists():
        return
    output, name = place_there
    if output.bucket.about(name) is not None:
        with _explained(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with appearing(path) as beside:
                output.bucket.download(name, beside)


def upload_file(path: Path) -> None:
    """Uploads a file of a local copy; does nothing for others.

    Raises:
        RunAgain, InputError: the bucket is unavailable.
    """
    if (place_there := in_bucket(path)) is not None:
        output, name = place_there
        output.put(name, path)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest of a complete folder; None if it is missing or a file does not match.

    The manifest lists the size of every file, so a folder with a lost or truncated file (a full
    disk, an interrupted copy) counts as absent.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if sizes == manifest["files"] else None


def make_folder(
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
    say: Callable[[str], None],
    *,
    resumable: bool = False,
) -> dict[str, Any]:
    """Returns the manifest of ``folder``, after building the folder if it is not complete.

    Several processes may call this at once: the others wait for the first and then read its folder.
    On a file system without locks they all build, and the first rename wins.

    Args:
        folder: the final path. Its name must depend on everything that its content depends on.
        build: fills an empty folder and returns the content of the manifest.
        say: prints a message.
        resumable: whether ``build`` can also resume in a folder left by a killed process.

    Raises:
        InputError: the disk is read-only.
        RunAgain: the disk is full, or the cache is in a bucket that is unavailable.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = _make_folder(folder, build, say, resumable=resumable)
    _upload(folder, manifest, say)
    return manifest


def _make_folder(
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
    say: Callable[[str], None],
    *,
    resumable: bool,
) -> dict[str, Any]:
    """Fetches or builds a folder that is not complete on this disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + ".lock")
    with lock.locked(beside, say, f"making {folder.name}") as alone:
        manifest = read_manifest(folder)
        if manifest is not None:  # another process made it while this one waited
            return manifest
        if alone:  # this process has the lock, so a killed process left these folders
            for left in folder.parent.glob(f"{folder.name}.tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
        manifest = _fetch(folder, say, alone)
        if manifest is not None:
            return manifest
        # Without locks, several processes may build at once, each in its own folder.
        resuming = resumable and alone
        work = unfinished(folder) if resuming else _beside(folder)
        worth_keeping = False
        try:
            with _explained(folder.parent):
                work.mkdir(exist_ok=resuming)
                worth_keeping = resuming
                manifest = build(work)
                files = {
                    p.relative_to(work).as_posix(): p.stat().st_size
                    for p in sorted(work.rglob("*"))
                    if p.is_file() and p.name != MANIFEST
                }
                manifest = {**manifest, "files": files}
                (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
                for path in work.rglob("*"):
                    sync(path)
                sync(work)
                published = _publish(work, folder, manifest, say)
                worth_keeping = False
                return published
        except InputError:
            worth_keeping = False
            raise
        finally:
            if not worth_keeping:
                shutil.rmtree(work, ignore_errors=True)


def unfinished(folder: Path) -> Path:
    """Returns the folder in which a resumable :func:`make_folder` builds ``folder``."""
    return folder.with_name(folder.name + ".building")


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
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
    """Returns the error for an unwritable cache: temporary if its disk is full or unavailable."""
    reason = os.strerror(error.errno or 0)
    temporary = bool(cure_of(reason))
    message = (
        f"cannot write to the cache folder {folder} ({reason}): "
        + ("free space there or reconnect the disk, or " if temporary else "")
        + "pass a writable folder with --data.cache_dir or $JAXTRAIN_CACHE"
    )
    return RunAgain(message) if temporary else InputError(message)


def _publish(
    work: Path, folder: Path, manifest: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Renames ``work`` to ``folder``, after moving a damaged folder out of the way."""
    if folder.exists():
        other = read_manifest(folder)
        if other is not None:  # without locks, another process may finish first
            return other
        say(f"the cache folder {folder} is damaged: rebuilding it")
        aside = _beside(folder)
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(work, folder)
    except OSError:
        other = read_manifest(folder)
        if other is None:
            raise
        return other
    sync(folder.parent)
    return manifest


def _complete_in(output: BucketOutput, name: str) -> dict[str, tuple[int, str]] | None:
    """Returns size and ETag of each file of a folder if it is complete in a bucket."""
    found = output.bucket.get(f"{name}/{MANIFEST}")
    if found is None:
        return None
    try:
        sizes = {str(one): int(size) for one, size in json.loads(found.data)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    sizes[MANIFEST] = len(found.data)
    there = output.bucket.versions(name)
    outside = any(PurePosixPath(one).is_absolute() or ".." in one.split("/") for one in sizes)
    complete = all(there.get(f"{name}/{one}", (-1, ""))[0] == sizes[one] for one in sizes)
    return {one: there[f"{name}/{one}"] for one in sizes} if complete and not outside else None


def _fetch(folder: Path, say: Callable[[str], None], alone: bool) -> dict[str, Any] | None:
    """Fetches a folder if it is complete in the bucket; else returns None.

    What an earlier process fetched is kept, unless the objects have changed since, or the machine
    was restarted, which may have lost what was written last.

    Args:
        folder: the final path.
        say: prints a message.
        alone: whether this process has the lock, so that no other one fetches the folder.
    """
    if (place_there := in_bucket(folder)) is None:
        return None
    work = folder.with_name(f"{folder.name}.fetching") if alone else _beside(folder)
    if (there := _complete_in(*place_there)) is None:
        shutil.rmtree(work, ignore_errors=True)
        return None
    output, name = place_there
    record, described = work / _FETCHING, json.dumps({"boot": lock.boot(), "files": there})
    keep = alone
    try:
        with _explained(folder.parent):
            if not record.exists() or record.read_text(encoding="utf-8") != described:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                write_whole(record, described)
            left = sum(size for size, _ in there.values()) - sum(
                (work / one).stat().st_size for one in there if (work / one).exists()
            )
            what = f"what is to be fetched of {output.url}/{name}"
            check_room(work, left, what, CURE)
            say(f"fetching {left / 1e6:,.1f} MB from {output.url}/{name}")
            for one, version in there.items():
                path = work / one
                path.parent.mkdir(parents=True, exist_ok=True)
                found = output.bucket.download(
                    f"{name}/{one}", path, most=version[0], version=version
                )
                if found is None:
                    raise RunAgain(f"{output.url}/{name}/{one} was deleted meanwhile: start again")
            record.unlink()
            keep = False
            manifest = read_manifest(work)
            return None if manifest is None else _publish(work, folder, manifest, say)
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)


def _upload(folder: Path, manifest: dict[str, Any], say: Callable[[str], None]) -> None:
    """Uploads a complete folder unless it is complete in the bucket; the manifest is last."""
    place_there = in_bucket(folder)
    if place_there is None or _complete_in(*place_there) is not None:
        return
    output, name = place_there
    say(f"uploading {sum(manifest['files'].values()) / 1e6:,.1f} MB to {output.url}/{name}")
    for one in (*manifest["files"], MANIFEST):
        output.put(f"{name}/{one}", folder / one)


def _beside(path: Path) -> Path:
    """Returns a new name in the same folder; tempfile's would be inaccessible to other users."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
