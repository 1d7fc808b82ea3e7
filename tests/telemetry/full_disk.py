"""Simulates a full disk for some files."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def full(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Makes writes to files with these names fail inside the block."""
    write = os.write

    def refuse(descriptor: int, content: bytes) -> int:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name in names:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        yield
