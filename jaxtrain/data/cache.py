"""Files and folders that appear whole: written beside, fsynced, renamed.

A reader sees a folder of the cache either complete or not at all, whatever is killed in between
and however many processes build it at once.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.atomic import expanded, sync, write_whole
from jaxtrain.storage.disks import cure_of

MANIFEST = "manifest.json"


def root(cache_dir: str | None) -> Path:
    """The cache folder: ``cache_dir``, or ``$JAXTRAIN_CACHE``, or ``~/.cache/jaxtrain``.

    Raises:
        InputError: the folder cannot be made or written.
        RunAgain: not now: its disk is full or does not answer.
    """
    text = cache_dir or os.environ.get("JAXTRAIN_CACHE") or "~/.cache/jaxtrain"
    try:
        folder = expanded(text).absolute()
    except InputError as error:
        raise InputError(
            f"the cache folder {text}: no home folder is known: set HOME or $JAXTRAIN_CACHE, or "
            "name a folder with --data.cache_dir"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _trouble(error, folder) from error
    return folder


def digest(*parts: Any) -> str:
    """SHA-256 hex digest of JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_file(path: Path, text: str) -> None:
    """Write a text file so that it appears whole, replacing an older one.

    Raises:
        InputError: the disk is read-only.
        RunAgain: it is full.
    """
    with _explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder; None where there is none or a file is not as it says.

    The manifest lists every file with its size, so that a folder that lost a file or was cut short
    (a full disk, a copy broken off) counts as absent.
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
    """Return the manifest of ``folder``, building the folder first where it is not complete.

    Args:
        folder: the final place. Its name must depend on everything that its content depends on.
        build: fills an empty folder and returns what the manifest is to say.
        say: takes messages for the console.
        resumable: ``build`` also goes on with a folder that a killed one has left.

    Raises:
        InputError: the disk is read-only.
        RunAgain: it is full.

    Two processes may call this at once: on one file system the second waits for the first and then
    reads. Where locks do not work both build, and the first rename wins.
    """
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock"), say) as alone:
        manifest = read_manifest(folder)
        if manifest is not None:  # another process built it while this one waited
            return manifest
        if alone:  # nobody else builds this folder now: what lies here was left by a killed process
            for left in folder.parent.glob(f"{folder.name}.tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
        # Where locks do not work, two may be at it: each in a folder of its own.
        going_on = resumable and alone
        work = folder.with_name(folder.name + ".building") if going_on else _beside(folder)
        worth_keeping = False
        try:
            with _explained(folder.parent):
                work.mkdir(exist_ok=going_on)
                worth_keeping = going_on
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


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turns errors of a full or read-only disk into the way out: others may be of what is read."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise _trouble(error, folder) from error


def _trouble(error: OSError, folder: Path) -> InputError | RunAgain:
    """What to raise where the cache cannot be written: full or away, it may be well again later."""
    words = os.strerror(error.errno or 0)
    passes = bool(cure_of(words))
    message = (
        f"cannot write to the cache folder {folder} ({words}): "
        + ("free space there or bring the disk back, or " if passes else "")
        + "name a writable folder with --data.cache_dir or $JAXTRAIN_CACHE"
    )
    return RunAgain(message) if passes else InputError(message)


def _publish(
    work: Path, folder: Path, manifest: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Rename ``work`` to ``folder``; a damaged folder in the way is put aside first."""
    if folder.exists():
        other = read_manifest(folder)
        if other is not None:  # without locks, another process was faster
            return other
        say(f"the cache folder {folder} is damaged: building it anew")
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


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold an advisory lock; it ends with the process. Yields whether it was got.

    The lock only saves work: that a folder is never read half-written rests on the rename.
    """
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            say(f"another process builds {path.with_suffix('').name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError as error:
            say(f"{path.parent} takes no locks ({error.strerror}): several processes may build it")
            locked = False
        yield locked


def _beside(path: Path) -> Path:
    """A new name in the same folder; not from tempfile, which shuts other users out of it."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
