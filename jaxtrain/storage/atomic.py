"""Files that appear whole, files that grow by lines, and files that a stranger may have made."""

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

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


def open_own(path: Path, flags: int) -> int:
    """Opens a file of a run's directory, which nothing but this program makes.

    A run's directory that came from someone else may hold anything under the file's name: a link to
    one of your files, which would be written to or cut, or a pipe or a device, which never ends.

    Args:
        path: of the file. Symbolic links in the path of its folder are followed.
        flags: for :func:`os.open`.

    Returns:
        The descriptor.

    Raises:
        OSError: it cannot be opened, is a symbolic link, or is not a regular file.
    """
    # Without O_NONBLOCK a pipe would be waited for; of a regular file it changes nothing.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, "it is not a regular file", str(path))
    return descriptor


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
            self._descriptor = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
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


JSON_BYTES = 2**26
"""Default limit of :func:`read_json`. The manifest of a checkpoint of 10 TiB has 16 MiB."""
# Our own files are at most 10 deep. Far below Python's limit, so that what walks the result later,
# deeper in the stack, stays below it too.
_JSON_DEPTH = 100


@contextlib.contextmanager
def open_regular(path: Path, *, follow_links: bool = True) -> Iterator[BufferedReader]:
    """Opens a regular file that a stranger may have made, to read bytes.

    A pipe or a device is refused without waiting for it.

    Args:
        path: of the file.
        follow_links: whether it may be a symbolic link. Where what it contains is shown to others,
            a link could show them any file of the reader's.

    Raises:
        OSError: it cannot be opened, is a folder (IsADirectoryError), or a link.
        ValueError: it is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags) if follow_links else open_own(path, flags)
    with open(descriptor, "rb") as file:  # raises for a folder
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        yield file


def expanded(path: str | Path) -> Path:
    """A path that somebody typed, with ~ for a home folder.

    Raises:
        InputError: it begins with ~, and no such home folder is known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # a container's user, perhaps, without HOME and of no name
        raise InputError(
            f"{path}: the home folder that ~ stands for is not known: write the complete path, or "
            "set HOME"
        ) from None


def read_regular(path: Path, limit_bytes: int, *, follow_links: bool = True) -> bytes:
    """Reads a complete regular file that a stranger may have made (:func:`open_regular`).

    Args:
        path: of the file.
        limit_bytes: refuse a larger file.
        follow_links: whether it may be a symbolic link.

    Raises:
        OSError: it cannot be read, is a folder (IsADirectoryError), or a link.
        ValueError: it is not a regular file, or too large; says why in a few words.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit_bytes + 1) if size <= limit_bytes else b""
        size = max(size, len(content))
        if size > limit_bytes:
            raise ValueError(f"it has {size:,} bytes, more than {limit_bytes:,}")
        return content


def read_json(
    path: Path, limit_bytes: int = JSON_BYTES, *, follow_links: bool = True
) -> dict[str, Any]:
    """Reads a JSON object from a regular file that a stranger may have made.

    Args:
        path: of the file.
        limit_bytes: refuse a larger file.
        follow_links: whether it may be a symbolic link.

    Raises:
        OSError: it cannot be read, is a folder (IsADirectoryError), or a link.
        ValueError: it is not a regular file, too large, not JSON, nested too deeply, or JSON of
            another kind; says why in a few words, such as "it is not JSON".
    """
    content = parse_json(read_regular(path, limit_bytes, follow_links=follow_links))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parses JSON that a stranger may have made; NaN and Infinity are allowed.

    What it returns is nested at most 100 deep, and its texts can be encoded as UTF-8.

    Raises:
        ValueError: says why in a few words.
    """
    try:
        content = json.loads(text)
        _check_json(content)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    except UnicodeError:  # not UTF-8, or half a surrogate pair
        raise ValueError("it is not UTF-8 text") from None
    except ValueError:  # Python's limit of 4,300 digits
        raise ValueError("it holds a number of thousands of digits") from None
    return content


def _check_json(content: Any) -> None:
    level: list[Any] = [content]
    for _ in range(_JSON_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, str):
                node.encode()
            elif isinstance(node, list):
                below.extend(node)
            elif isinstance(node, dict):
                below.extend(node)
                below.extend(node.values())
        if not below:
            return
        level = below
    raise RecursionError


def drop_torn_line(path: Path) -> None:
    """Cuts what follows the last newline: the line that was being written when a process died.

    Raises:
        OSError: it cannot be written, is a symbolic link, or is not a regular file.
    """
    with open(open_own(path, os.O_RDWR), "rb+") as file:
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
        raise InputError(f"{flag} {path}: the folder {folder} does not exist: create it")
    if path.is_dir():
        raise InputError(
            f"{flag} {path} is a folder; name a file in it, such as {path / 'found.json'}"
        )
    if path.exists() and not path.is_file():  # it would be replaced
        raise InputError(f"{flag} {path} is a device or a pipe: name a file of your own")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{flag} {path}: {folder} cannot be written to; name another folder")
