"""Makes temporary folders in the cache, and removes those of killed processes."""

import contextlib
import errno
import fcntl
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.storage.disks import disk_trouble

# Without locks, a temporary folder of this age counts as left by a killed process.
_OLD_S = 7 * 24 * 3600.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has none


@contextlib.contextmanager
def temporary_folder(cache_root: Path) -> Iterator[Path]:
    """Makes a temporary folder in the cache, and removes it at the end.

    Also removes those of killed processes. A process locks the file ``NAME.lock`` while it uses the
    folder ``NAME``, as a cache may be in a folder that several machines share.

    Args:
        cache_root: the cache folder.

    Raises:
        RunAgain: the disk is full.
        InputError: it cannot be written.
    """
    top = cache_root / "scratch"
    with contextlib.ExitStack() as stack:
        with explained(top):
            top.mkdir(parents=True, exist_ok=True)
            clean(cache_root)
            folder = top / secrets.token_hex(8)
            lock = folder.with_suffix(".lock")
            file = stack.enter_context(open(lock, "x"))
            stack.callback(lock.unlink, missing_ok=True)
            with contextlib.suppress(OSError):  # without locks, others go by its age
                fcntl.flock(file, fcntl.LOCK_EX)
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def clean(cache_root: Path) -> None:
    """Removes the temporary folders of killed processes from a cache."""
    for lock in (cache_root / "scratch").glob("*.lock"):
        # NFS gives an exclusive lock only to a file that is open for writing.
        with contextlib.suppress(OSError), open(lock, "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # also if a live process has the lock
                if error.errno not in _NO_LOCKS or time.time() - lock.stat().st_mtime < _OLD_S:
                    continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()


@contextlib.contextmanager
def explained(top: Path) -> Iterator[None]:
    """Replaces errors of the disk by errors with a fix."""
    try:
        yield
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to the temporary folder {top}",
            "set $JAXTRAIN_CACHE to a folder on another disk",
        ) from error
