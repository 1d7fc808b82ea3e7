"""Detects nodes of a cluster that do not see the folders of a command.

They might have another folder under the same path, and write where no one looks.
"""

import dataclasses
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.atomic import create_whole

_FIX = ": use a folder that all nodes share under the same path"
# An NFS client remembers for up to 60 s that there is no such file (acdirmax).
_APPEARS_S = 180.0
_POLL_S = 0.5


@dataclasses.dataclass(frozen=True)
class Mark:
    """A file in a folder, by which other nodes recognize the folder.

    Attributes:
        file: the file.
        token: its content, which differs from that of all other folders.
        folder: the folder, as messages name it.
    """

    file: Path
    token: str
    folder: str

    def check(self) -> None:
        """Checks that this host sees the folder.

        Raises:
            InputError: it does not.
        """
        try:
            same = self.file.read_text() == self.token
        except OSError:
            same = False
        if not same:
            raise InputError(
                f"{self.folder} on {socket.gethostname()} is not the folder of this command{_FIX}"
            )


def mark(file: Path, folder: str) -> Mark:
    """Writes the file of a mark, if it does not exist yet.

    Raises:
        OSError: the folder is not writable.
    """
    if not file.exists():
        create_whole(file, secrets.token_hex(16))
    return Mark(file, file.read_text(), folder)


@dataclasses.dataclass(frozen=True)
class Unseen:
    """A file that does not exist on a host."""

    path: str
    host: str


def unseen(path: str | Path) -> Unseen | None:
    """Returns None if a file exists on this host."""
    return None if os.path.exists(path) else Unseen(str(path), socket.gethostname())


def check_seen(result: Any) -> None:
    """Checks the result of a worker.

    Raises:
        InputError: the worker does not see a file that this host sees.
    """
    if isinstance(result, Unseen) and os.path.exists(result.path):
        raise not_seen(result.path, result.host)


def await_seen(path: Path) -> None:
    """Waits until this host sees a file or folder that another host has written.

    Raises:
        RunAgain: it does not appear for minutes.
    """
    end = time.monotonic() + _APPEARS_S
    while not path.exists():
        if time.monotonic() > end:
            raise RunAgain(
                f"{path} was written {_APPEARS_S:.0f} s ago, but does not exist on "
                f"{socket.gethostname()}: check that its disk responds, and start again; finished "
                "work is kept"
            )
        time.sleep(_POLL_S)


def not_seen(path: str | Path, host: str | None = None) -> InputError:
    """Returns the error for a file that other hosts see, and ``host`` (None: this one) does not."""
    return InputError(f"{path} does not exist on {host or socket.gethostname()}{_FIX}")
