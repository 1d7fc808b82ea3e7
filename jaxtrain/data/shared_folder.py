"""Detects nodes of a cluster that do not see the folders of a command.

They might have another folder under the same path, and write where no one looks.
"""

import dataclasses
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import create_whole

_TOKEN = ".token"


@dataclasses.dataclass(frozen=True)
class Marked:
    """A folder, and the content of a file in it.

    Attributes:
        folder: the folder.
        token: differs from that of all other folders.
        flag: what sets the folder, for messages.
    """

    folder: Path
    token: str
    flag: str

    def check(self) -> None:
        """Checks that this host sees the folder.

        Raises:
            InputError: it does not.
        """
        try:
            same = (self.folder / _TOKEN).read_text() == self.token
        except OSError:
            same = False
        if not same:
            raise InputError(
                f"{self.flag} {self.folder} on {socket.gethostname()} is not the folder of this "
                "command: use a folder that all nodes share under the same path"
            )


def mark(folder: Path, flag: str) -> Marked:
    """Marks a folder, so that other nodes recognize it.

    Raises:
        OSError: the folder is not writable.
    """
    path = folder / _TOKEN
    if not path.exists():
        create_whole(path, secrets.token_hex(16))
    return Marked(folder, path.read_text(), flag)


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
        raise InputError(
            f"{result.path} does not exist on {result.host}: use a folder that all nodes share "
            "under the same path"
        )
