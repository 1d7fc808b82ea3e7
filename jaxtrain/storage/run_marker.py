"""Which folders belong to a run: those with a marker, which is written before anything else.

A run deletes, moves and replaces files only in a folder that has its marker, on a disk and in a
bucket. In such a folder, a name is the run's own only in the exact form that the run writes: the
name of a folder of checkpoint files ends in a checksum over the run's id (:func:`folder_name`), so
that ``checkpoints/files/2024-0123456789abcdef/`` of a user is not taken for one.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.errors import InputError

NAME = "jaxtrain-run.json"
FORMAT = 6
"""Of the marker and of all that a run directory has; the marker of another format is refused."""

_CACHE = "CACHEDIR.TAG"  # https://bford.info/cachedir/
_CACHE_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_MOST_BYTES = 4096
_CHECK_DIGITS = 4
_FOLDER_NAME = re.compile(rf"(0|[1-9][0-9]*)-([0-9a-f]{{8,}}[0-9a-f]{{{_CHECK_DIGITS}}})")
# What a folder may have before a run is started in it: what systems leave, and what a launcher and
# `doctor` write there first.
_NO_CONTENT = re.compile(
    r"lost\+found|\.DS_Store|\.nfs.*|\.snapshot|slurm-[0-9]+(_[0-9]+)?\.(out|err)"
    r"|(log|doctor)\.[0-9]+\.txt|restarts\.json|\.jaxtrain-doctor-.*"
    rf"|\.{re.escape(NAME)}\..*"
)
_NAMES_TO_SHOW = 3


def new() -> str:
    """Returns the content of the marker of a new run."""
    about = {"jaxtrain": "run", "format": FORMAT, "id": secrets.token_hex(8)}
    return json.dumps(about) + "\n"


def run_id(content: bytes, location: str) -> str:
    """Returns the id of the run in a marker.

    Raises:
        InputError: it is damaged, or of another version.
    """
    try:
        about = json.loads(content)
        marks, version, identifier = about["jaxtrain"], about["format"], str(about["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        marks, version, identifier = "", None, ""
    if marks != "run":
        raise InputError(
            f"{location}/{NAME} is damaged, so it is unknown which files are the run's: restore it "
            "from a copy, or choose another folder"
        )
    if version != FORMAT:
        raise InputError(
            f"{location} is a run in the format of another version of jaxtrain ({version} instead "
            f"of {FORMAT}): use the version that wrote it, or choose another folder"
        )
    return identifier


def read(folder: Path) -> str:
    """Returns the id of the run in a folder; "" if the folder has no marker.

    Raises:
        InputError: see :func:`run_id`.
        OSError: the disk does not respond.
    """
    try:
        with (folder / NAME).open("rb") as file:
            return run_id(file.read(_MOST_BYTES), str(folder))
    except (FileNotFoundError, NotADirectoryError):
        return ""


def is_run(folder: Path) -> bool:
    """Whether a folder has the marker of a run, of any format."""
    return (folder / NAME).is_file()


def is_cache(folder: Path) -> bool:
    """Whether a folder has a ``CACHEDIR.TAG``: a cache of any program, or a Python environment."""
    try:
        with (folder / _CACHE).open("rb") as file:
            return file.read(len(_CACHE_SIGNATURE)) == _CACHE_SIGNATURE
    except OSError:
        return False


def mark_cache(folder: Path) -> None:
    """Writes the tag of a cache, if it is missing."""
    if not (folder / _CACHE).exists():
        (folder / _CACHE).write_bytes(_CACHE_SIGNATURE + b"\n# A cache of jaxtrain.\n")


def run_above(path: Path) -> Path | None:
    """Returns the run directory that a path is in, or that it is; None without one."""
    return next(filter(is_run, (path, *path.parents)), None)


def content_of(names: Iterable[str]) -> list[str]:
    """Returns the names in a folder because of which no run may be started there."""
    return sorted(name for name in names if not _NO_CONTENT.fullmatch(name))


def refusal(location: str, flag: str, names: Iterable[str]) -> str:
    """Returns why a folder is not used as an output; "" if it is empty, or has become a run."""
    content = content_of(names)
    if not content or NAME in content:  # another process may have marked it meanwhile
        return ""
    listed = ", ".join(content[:_NAMES_TO_SHOW])
    more = f" and {len(content) - _NAMES_TO_SHOW} more" if len(content) > _NAMES_TO_SHOW else ""
    return (
        f"{flag} {location} is not empty and not a run of this version of jaxtrain (it has {listed}"
        f"{more}): choose a new or empty folder"
    )


def folder_name(identifier: str, step: int, unique: str) -> str:
    """Returns the name of a folder of checkpoint files, such as ``12-0123456789abcdef``.

    Args:
        unique: hexadecimal digits, at least eight.
    """
    return f"{step}-{unique}{_check(identifier, step, unique)}"


def step_of_folder(name: str, identifier: str) -> int | None:
    """Returns the step in the name of a folder of checkpoint files.

    None if the run did not write it.
    """
    match = _FOLDER_NAME.fullmatch(name)
    if match is None or not identifier:
        return None
    step, unique = int(match[1]), match[2][:-_CHECK_DIGITS]
    return step if match[2].endswith(_check(identifier, step, unique)) else None


def _check(identifier: str, step: int, unique: str) -> str:
    return hashlib.sha256(f"{identifier} {step}-{unique}".encode()).hexdigest()[:_CHECK_DIGITS]
