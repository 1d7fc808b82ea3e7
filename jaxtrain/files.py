"""Files that appear whole, and files that grow line by line and never keep half a line."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.errors import InputError


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


_UMASK = _umask()  # read once, before there are threads


def write_whole(path: Path, data: bytes | str) -> None:
    """Replaces a file so that a reader sees the old one or the new one: beside, fsync, rename.

    Args:
        path: of the file; its folder must exist.
        data: the content; text is written as UTF-8.

    Raises:
        OSError: nothing is left beside, and an older file stays as it was.
    """
    content = data.encode() if isinstance(data, str) else data
    with appearing(path) as beside, open(beside, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A place beside a file for its new content, which takes the file's name in the end.

    Args:
        path: of the file; its folder must exist. The place has the same ending.

    Raises:
        OSError: the content cannot be kept. After any error nothing is left beside, and an older
            file stays as it was.
    """
    descriptor, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
    )
    os.close(descriptor)
    try:
        yield Path(name)
        sync(name)
        os.chmod(name, 0o666 & ~_UMASK)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename in (None, name):
            error.filename = str(path)  # nobody has heard of the other
        raise
    sync(path.parent)


def sync(path: str | Path) -> None:
    """Flushes a file or a folder to the disk.

    Raises:
        OSError: it may not be there after a loss of power.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What a full disk keeps from a file waits in memory, up to so much.
_MAX_WAITING_BYTES = 2**24


class Appended:
    """A file that only grows. Each piece reaches the operating system at once, whole or not at all.

    The file is opened with the first piece, and again after a failure. Pieces that could not be
    written wait in memory and go before the next one.

    Args:
        path: of the file; its folder is made with the first piece.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting = b""
        self._made = False

    def append(self, piece: bytes) -> None:
        """Writes a piece at the end.

        Raises:
            OSError: the piece is not in the file, not even in part. It is tried again before the
                next one; above 16 MiB of such pieces the newest are lost.
        """
        whole, self._waiting = self._waiting + piece, b""
        try:
            self._write(whole)
        except OSError:
            self._waiting = whole if len(whole) <= _MAX_WAITING_BYTES else whole[: -len(piece)]
            raise

    def _write(self, content: bytes) -> None:
        if self._descriptor is None:
            if not self._made:  # later: on a disk that is lost nothing should be made again
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._made = True
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with contextlib.suppress(OSError):  # no half pieces
                os.ftruncate(self._descriptor, size)
            self._close()
            raise

    def close(self) -> None:
        """Closes the file, after a last try of what waits; a later piece opens it again."""
        if self._waiting:
            with contextlib.suppress(OSError):
                self.append(b"")
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def drop_torn_line(path: Path) -> None:
    """Cuts what follows the last newline: the line that was being written when a process died."""
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)


def check_writable(flag: str, path: Path | None) -> None:
    """Refuses a file that cannot be written, before the work that it is to hold.

    Args:
        flag: that names the file.
        path: None is fine.

    Raises:
        InputError: names what is in the way.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{flag} {path}: {folder} is no folder; make it first")
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder; name a file in it, as {path / 'found.json'}")
    if path.exists() and not path.is_file():  # it would be replaced
        raise InputError(f"{flag} {path} is a device or a pipe: name a file of your own")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{flag} {path}: {folder} cannot be written to; name another folder")
