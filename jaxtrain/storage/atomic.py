"""Writes files atomically, appends lines, and reads files from untrusted sources."""

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError
from jaxtrain.storage import stand_ins


def _umask() -> int:
    """Returns the process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


_UMASK = _umask()  # read once, before there are threads


def write_whole(path: Path, data: bytes | str) -> None:
    """Replaces a file atomically: writes a temporary file, fsyncs it, and renames it.

    Args:
        path: the file; its folder must exist.
        data: the content; text is written as UTF-8.

    Raises:
        OSError: the temporary file is removed, and an older file is unchanged.
    """
    content = data.encode() if isinstance(data, str) else data
    with appearing(path) as beside, open(beside, "wb") as file:
        file.write(content)


def create_whole(path: Path, data: str) -> bool:
    """Creates a file, unless it exists.

    Several processes may do so at once, also on different machines: one of them succeeds. The file
    appears complete; only on a file system without hard links, a reader may see it empty before.

    Returns:
        Whether this process created it.
    """
    with _beside(path) as beside:
        beside.write_text(data, encoding="utf-8")
        _finish(beside)
        try:
            os.link(beside, path)
        except FileExistsError:
            return False
        except OSError:  # no hard links; a rename would replace the file of another process
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(data)
            except FileExistsError:
                return False
            sync(path)
    sync(path.parent)
    return True


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yields a temporary file in the same folder, which replaces ``path`` at the end of the block.

    Args:
        path: the file; its folder must exist. The temporary file has the same suffix.

    Raises:
        OSError: the file cannot be written. After any error the temporary file is removed, and an
            older file is unchanged.
    """
    with _beside(path) as beside:
        yield beside
        _finish(beside)
        os.replace(beside, path)
    sync(path.parent)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yields a new file in the same folder, with the same suffix, and removes it at the end."""
    descriptor, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
    )
    os.close(descriptor)
    try:
        yield Path(name)
    except OSError as error:
        if error.filename is None or str(error.filename) == name:
            with contextlib.suppress(AttributeError):  # PyAV's errors cannot be changed
                error.filename = str(path)  # the temporary name means nothing to the user
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _finish(beside: Path) -> None:
    sync(beside)
    os.chmod(beside, 0o666 & ~_UMASK)  # mkstemp makes it private


_OLD_S = 24 * 3600.0
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}(\.[^.]*)?")  # of _beside


def leftovers(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields temporary files in a folder, each with the name of the file that it would replace.

    They are of killed processes, or of processes that are writing now.

    Args:
        folder: the folder. If it does not exist, there are none.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        match = _TEMPORARY.fullmatch(name)
        if match is not None and Path(match[1]).suffix == (match[2] or ""):
            yield folder / name, match[1]


def remove_leftovers(folder: Path, names: Collection[str] | None = None, *, alone: bool) -> None:
    """Removes temporary files that killed processes left in a folder.

    Args:
        names: of the files that they would replace; None for all.
        alone: whether no other process writes there. Otherwise, one of the last 24 hours may be of
            a live process on another machine, and is kept.
    """
    for path, name in leftovers(folder):
        if names is None or name in names:
            with contextlib.suppress(OSError):
                if alone or time.time() - path.stat().st_mtime > _OLD_S:
                    path.unlink()


def sync(path: str | Path) -> None:
    """Flushes a file, or a folder where its file system can, to disk.

    Raises:
        OSError: it may be lost if the power fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems refuse it for every folder, such as some of FUSE and VirtualBox's shared
        # folders. SQLite and PostgreSQL ignore it, too.
        refused = error.errno == errno.EINVAL and stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if not refused:
            raise
    finally:
        os.close(descriptor)


# Maximum size of chunks kept in memory while the disk is full.
_MAX_WAITING_BYTES = 2**24


class Appended:
    """An append-only file. Each chunk is written to the operating system at once, or not at all.

    The file is opened for the first chunk, and again after a failure. What could not be written is
    kept in memory and written before the next chunk.

    Args:
        path: the file; its folder is created for the first chunk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting: list[bytes | Callable[[], None]] = []
        self._made = False

    def append(self, chunk: bytes) -> None:
        """Appends a chunk.

        Raises:
            OSError: nothing of the chunk is in the file. It is written again with the next one;
                beyond 16 MiB of such chunks, the newest are lost.
        """
        self._waiting.append(chunk)
        self._settle()

    def change(self, action: Callable[[], None]) -> None:
        """Changes the file once all earlier chunks are written.

        Args:
            action: changes the file, which is closed; must be repeatable after an OSError.

        Raises:
            OSError: the file could not be changed; this is retried before the next chunk.
        """
        self._waiting.append(action)
        self._settle()

    def close(self) -> None:
        """Closes the file, after a last attempt to write what is kept; a later chunk reopens it."""
        with contextlib.suppress(OSError, InputError):
            self._settle()
        self._close()

    def _settle(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            try:
                if isinstance(first, bytes):
                    self._write(first)
                else:
                    self._close()
                    first()
            except OSError:
                chunks = [chunk for chunk in self._waiting if isinstance(chunk, bytes)]
                if sum(map(len, chunks)) > _MAX_WAITING_BYTES:
                    self._waiting.remove(chunks[-1])
                raise
            self._waiting.pop(0)

    def _write(self, content: bytes) -> None:
        if self._descriptor is None:
            if not self._made:  # only once: if the disk is gone, the folder must not be recreated
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._made = True
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with contextlib.suppress(OSError):  # no partial chunks
                os.ftruncate(self._descriptor, size)
            self._close()
            raise

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


JSON_BYTES = 2**26
"""Default limit of :func:`read_json`."""
# jaxtrain's own files are at most 10 levels deep. This is far below Python's recursion limit, so
# that code that walks the result deeper in the stack stays below it too.
_JSON_DEPTH = 100


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Opens an untrusted regular file to read bytes.

    Rejects a pipe or device without blocking.

    Raises:
        OSError: the file cannot be opened, or is a folder (IsADirectoryError).
        ValueError: the file is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # raises for a folder
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        yield file


LATEST = "latest"
"""A file with the relative path of a folder beside it, for which its own path stands in commands.

A link would do the same for a shell, too, but TensorBoard follows links: it would show the newest
run of a folder twice.
"""


def expanded(path: str | Path) -> Path:
    """Expands ~ in a typed path, and ``output/latest`` to the run that this file names.

    Raises:
        InputError: the path begins with ~, and the home folder is unknown.
    """
    try:
        full_path = Path(path).expanduser()
    except RuntimeError:  # for example in a container without HOME or a user name
        raise InputError(
            f"{path}: the home folder for ~ is unknown: pass the full path, or set HOME"
        ) from None
    for parent in (full_path, *full_path.parents):
        if parent.name == LATEST and (named := _named_by(parent)) is not None:
            return named / full_path.relative_to(parent)
    return full_path


def _named_by(file: Path) -> Path | None:
    """Returns the folder that a file :data:`LATEST` names; None if it is another file."""
    try:
        folder = file.parent / file.read_text(encoding="utf-8").strip()
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # a folder, or another file
        return None


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Reads an untrusted regular file completely (:func:`open_regular`).

    Raises:
        ValueError: the file is not a regular file, too large, or only stands for another one
            (:mod:`jaxtrain.storage.stand_ins`); the message is a short reason.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit_bytes + 1) if size <= limit_bytes else b""
        size = max(size, len(content))
        if size > limit_bytes:
            raise ValueError(f"it has {size:,} bytes, and the limit is {limit_bytes:,}")
        if instead := stand_ins.reason(content[: stand_ins.HEAD_BYTES]):
            raise ValueError(f"it is {instead}")
        return content


def write_json(path: Path, content: Any) -> None:
    """Writes JSON, as :func:`write_whole` does."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path, limit_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Reads a JSON object from an untrusted regular file.

    Raises:
        ValueError: the file is not a regular file, too large, not JSON, nested too deeply, or not a
            JSON object; the message is a short reason, such as "it is not JSON".
    """
    content = parse_json(read_regular(path, limit_bytes))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parses untrusted JSON; NaN and Infinity are allowed.

    The result is nested at most 100 levels deep, and its strings can be encoded as UTF-8.

    Raises:
        ValueError: the message is a short reason.
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
        raise ValueError("it contains a number with thousands of digits") from None
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


_CHUNK_BYTES = 2**16


def drop_torn_line(path: Path) -> None:
    """Drops an unfinished last line, left by a killed process."""
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        for start in range(size - size % _CHUNK_BYTES, -1, -_CHUNK_BYTES):
            file.seek(start)
            end = start + file.read(_CHUNK_BYTES).rfind(b"\n") + 1
            if end > start:
                break
        if end < size:
            file.truncate(end)


def check_writable(flag: str, path: Path | None) -> None:
    """Checks that an output file can be written, before the work starts.

    Args:
        path: the file; None is accepted.

    Raises:
        InputError: the file cannot be written; the message gives the reason.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{flag} {path}: the folder {folder} does not exist: create it")
    if path.is_dir():
        raise InputError(
            f"{flag} {path} is a folder: pass a file in it, such as {path / 'found.json'}"
        )
    if path.exists() and not path.is_file():  # it would be replaced
        raise InputError(f"{flag} {path} is a device or a pipe: pass a regular file")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{flag} {path}: {folder} is not writable: use another folder")
