"""Which files in a run directory are the run's own, and links among them, which it refuses."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.checkpoint import in_bucket
from jaxtrain.checkpoint.layout import BEST, CHECKPOINTS, DAMAGED, SUPERSEDED, UNCERTIFIED
from jaxtrain.storage import lock

UPLOADING = ".uploading"  # hard links of the checkpoint that is being uploaded
UNCERTIFIED_DUE = ".uncertified-due"  # exists while they are moved in the bucket
FILES_DUE = ".files-due"  # exists from the fetch of a checkpoint until that of the files

# Names that a run, its launcher or its report may write in the run directory, and in its folders.
_OWN = re.compile(
    r"checkpoints|best|superseded|damaged|uncertified|samples|tensorboard|profile|trackers|wandb"
    r"|report\.html|certified\.txt|\.lock"
    r"|\.pod-restarts|(log|doctor|hang)[.-].*txt|.*\.jsonl?"
)
# Of this machine: never copied to a bucket or from one.
_HERE = (lock.NAME, UPLOADING, FILES_DUE, UNCERTIFIED_DUE, in_bucket.FETCHING)
_FOLDERS = (CHECKPOINTS, BEST, SUPERSEDED, DAMAGED, UNCERTIFIED)
_OWN_BELOW = re.compile(
    r"\d+|checkpoints|best|plugins|process-\d+|(wandb|trackio|mlflow)\.(jsonl|log)|(offline-)?run-.*"
)


def is_own(name: str) -> bool:
    """Whether a path in a run directory is of a file that a run writes, other than a checkpoint."""
    first = name.partition("/")[0]
    return bool(_OWN.fullmatch(first)) and first not in (*_FOLDERS, *_HERE)


def links(directory: Path) -> Iterator[Path]:
    """Yields the symbolic links with the name of a file or folder that a run would write."""
    for entry in entries(directory):
        if not (_OWN.fullmatch(entry.name) or entry.name in _HERE):
            continue
        below: list[Path] = []
        if entry.is_dir(follow_symlinks=False):
            if entry.name in (UPLOADING, in_bucket.FETCHING):  # a run writes at any depth there
                below = list(Path(entry.path).rglob("*"))
            else:
                below = [
                    Path(one) for one in entries(Path(entry)) if _OWN_BELOW.fullmatch(one.name)
                ]
        yield from (one for one in (Path(entry), *below) if one.is_symlink())


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """Lists a folder; returns [] if it cannot be read, which its later use reports."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError:
        return []
