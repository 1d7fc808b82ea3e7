"""Which files in a run directory are the run's own, other than its checkpoints.

Only these are uploaded to a bucket, fetched from it, replaced or deleted: a user may have files of
other names beside them.
"""

import re

from jaxtrain.storage import lock, run_marker

START = "start.json"
"""What the run was told to start from (:mod:`jaxtrain.checkpoint.start`)."""
RESTARTS = "restarts.json"
"""How often in a row a launcher restarted the run without a new checkpoint."""
LAUNCH = "JAXTRAIN_LAUNCH"
"""Environment variable with the name of a launch, the same for all of its starts; both files have
it."""

HERE = (lock.NAME, run_marker.NAME, START, RESTARTS)
"""Files that are not copied: the lock, and those that are written to a bucket directly."""

# What a run, its launcher, its report and its trackers write.
_FILE = re.compile(
    r"(config|progress)\.json|(metrics|history)\.jsonl|report\.html"
    r"|(examples|bad_steps|quarantine)(\.\d+)?\.jsonl|(log|doctor)(\.\d+)?\.txt|hang-\d+\.txt"
    r"|samples/[a-z0-9_]+_\d+\.(png|mp4|txt)|tensorboard/(.+/)?events\.out\.tfevents\.[^/]+"
    r"|trackers/[a-z]+\.json|(profile|wandb)/.+"
)
_OF_PROCESS = re.compile(r"(?:\w+[.-](\d+)\.\w+|profile/process-(\d+)/.*)")

FOLDERS = ("samples", "tensorboard", "trackers", "profile", "wandb")
"""Folders of such files."""


def is_own(name: str) -> bool:
    """Whether a path in a run directory is of such a file.

    Not that of a file in the making, with a dot before its name.
    """
    hidden = name.rpartition("/")[2].startswith(".")
    return not hidden and _FILE.fullmatch(name) is not None


def process_of(name: str) -> int:
    """Returns the process that writes such a file, by its name: 0 if the name has no number."""
    match = _OF_PROCESS.fullmatch(name)
    return int(match[1] or match[2]) if match else 0
