"""The directory of a run: which one, made, checked, and described."""

import contextlib
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import checkpoint, processes
from jaxtrain.errors import InputError
from jaxtrain.files import write_whole

ROOT = Path("output")
_MESSAGE_BYTES = 8192


def start_from(
    name: str,
    resume: str | None,
    output_dir: str | None,
    root: Path = ROOT,
    say: Callable[[str], None] | None = None,
) -> Path | None:
    """The checkpoint to start from, verified and decided by process 0; None to start anew.

    Args:
        name: of the config.
        resume: the flag's value; None without the flag.
        output_dir: the flag's value.
        root: holds ``NAME/<UTC time>/``.
        say: takes what process 0 also prints to stderr at once: which checkpoints are damaged.

    Raises:
        InputError: in every process, if the flag names no complete checkpoint.
    """
    if resume is None:
        return None

    def warn(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if say is not None:
            say(line)

    def decide() -> str:
        given = None if output_dir is None else _absolute(output_dir)
        try:
            found = checkpoint.find(resume, given, root.absolute() / name, warn)
        except OSError as error:  # a disk that is gone: the run may be elsewhere than it seems
            raise InputError(
                f"--resume {resume}: {error.filename} cannot be read ({error.strerror}): bring "
                "its disk back, or give another --output-dir"
            ) from error
        return "" if found is None else str(found.absolute())

    told = _told_by_process_zero(decide)
    return Path(told) if told else None


def prepare(
    name: str,
    output_dir: str | None,
    resume: str | None,
    start_from: Path | None,
    root: Path = ROOT,
) -> Path:
    """Makes the run's directory; process 0 decides, and all processes must see it.

    It is ``output_dir``; or the run that ``--resume latest`` goes on with; or a new
    ``root/NAME/<UTC time>``.

    Args:
        name: of the config.
        output_dir: the flag's value.
        resume: the flag's value.
        start_from: what :func:`start_from` gave.
        root: holds ``NAME/<UTC time>/``.

    Returns:
        The absolute path.

    Raises:
        InputError: in every process, if the directory cannot be written, holds checkpoints that
            this run would not go on from, or is not seen by a process.
    """

    def decide() -> str:
        if output_dir is not None:
            directory = _absolute(output_dir)
            _make(directory)
            _refuse_foreign(directory, resume, start_from)
        elif resume == "latest" and start_from is not None:
            directory = start_from.parent.parent
            _make(directory)
        else:
            directory = _make_new(root.absolute() / name)
        return str(directory)

    directory = Path(_told_by_process_zero(decide))
    processes.check_same(
        "run directories",
        "there" if directory.is_dir() else "missing",
        f"{directory} must lie on a file system that all of them share",
    )
    return directory


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes ``config.json``; process 0 only, the others return at once.

    Args:
        directory: of the run.
        config: resolved, JSON-able.

    Raises:
        InputError: it cannot be written.
    """
    if jax.process_index() != 0:
        return
    path = directory / "config.json"
    try:
        write_whole(path, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}): give another --output-dir"
        ) from (error)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _make(directory: Path) -> None:
    """Makes the directory and proves by a file that it can be written: permissions alone lie."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise InputError(
            f"cannot write in the run's directory {directory} ({error.strerror}): give another "
            "--output-dir"
        ) from error


def _make_new(parent: Path) -> Path:
    """A directory named by the UTC time; of two runs in one second the second gets a suffix."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    _make(parent)
    for attempt in range(1, 100):
        directory = parent / (now if attempt == 1 else f"{now}-{attempt}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise InputError(f"{parent} holds 99 runs of the second {now}: start again")


def _refuse_foreign(directory: Path, resume: str | None, start_from: Path | None) -> None:
    """Two histories in one directory would overwrite one another."""
    newest = checkpoint.latest_in(directory / checkpoint.CHECKPOINTS)
    if newest is None:
        return
    if resume is None:
        raise InputError(
            f"--output-dir {directory} already holds checkpoints (newest: {newest.name}): go on "
            "with --resume latest, or give another directory"
        )
    if start_from is None or directory.resolve() not in start_from.resolve().parents:
        raise InputError(
            f"--output-dir {directory} already holds checkpoints of its own (newest: "
            f"{newest.name}), and --resume {resume} is another run: go on with --resume latest, or "
            "give another directory"
        )


def link_latest(directory: Path, root: Path = ROOT) -> None:
    """Points ``root/latest`` at a run below ``root``; a reader never finds it missing."""
    root = root.absolute()
    if jax.process_index() or root not in directory.parents:
        return
    link = root / "latest"
    beside = root / f".latest-{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        beside.symlink_to(directory.relative_to(root))
        os.replace(beside, link)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise InputError(
            f"cannot link {link} to {directory} ({error.strerror}): move {link} away, or give "
            "--output-dir a place outside of it"
        ) from error


def _told_by_process_zero(decide: Callable[[], str]) -> str:
    """Runs ``decide`` in process 0; every process returns its text or raises its InputError."""
    if jax.process_count() == 1:
        return decide()
    message = b""
    if jax.process_index() == 0:
        try:
            message = b"=" + decide().encode()
        except InputError as error:
            message = b"!" + str(error).encode()
        if len(message) > _MESSAGE_BYTES:
            message = b"!" + f"too long to tell the other processes: {message[:200]!r}".encode()
    padded = np.frombuffer(message.ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)
    text = told.tobytes().rstrip(b"\0").decode()
    if text.startswith("!"):
        raise InputError(text[1:])
    return text[1:]
