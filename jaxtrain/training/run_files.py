"""The files of a run directory: what each is, and which are the run's own."""

import os
import re
from pathlib import Path

from jaxtrain.checkpoint.pointer import ASIDES, DATA, KINDS
from jaxtrain.checkpoint.remote import IN_BUCKET
from jaxtrain.storage import atomic, lock

FILES = {
    "config.json": "the resolved config",
    "metrics.jsonl": "one JSON object per logged step, with full precision; "
    "see [metrics](metrics.md)",
    "history.jsonl": "for each start of the run: the hardware, the memory and computation that a "
    "step needs, the seconds of each phase, and how it ended",
    "tensorboard/": "metrics, samples, and the config (the HParams tab compares runs)",
    "samples/": "from each validation, with labels: original, reconstruction, and error (black: "
    "none; white: a quarter of the range) as an image and as a clip, and the channels of the "
    "latents; for causal language models, `text_STEP.txt`",
    "checkpoints/STEP.json": "the newest checkpoints: each is a pointer to a folder in `data/`, "
    "with the sizes and checksums of its files, and either complete or absent",
    "best/STEP.json": "the best checkpoint by `checkpoint.best_metric`; it may have the same files "
    "as one in `checkpoints/`",
    "data/STEP-ID/": "the files of a checkpoint, which never change; deleted when nothing points "
    "to them",
    "superseded/": "pointers that were replaced when the run resumed from an earlier step. Delete "
    "this folder, `damaged/`, or `suspect/` to free the disk: the next save deletes their files in "
    "`data/`",
    "damaged/": "pointers of checkpoints that were found to be damaged when the run resumed, each "
    "with the reason in a text file",
    "suspect/": "pointers after the last step that `loop.replay_every` has computed twice with the "
    "same result, moved when a device computed a wrong one",
    "progress.json": "the validations so far, from which a resumed run knows the best one, and the "
    "last step that was computed twice with equal results",
    ".in-bucket": "the checkpoints that were given to the bucket or fetched from it",
    ".files-due": "present until the metrics and logs are fetched from the bucket, too",
    ".finding-nan": "present while `loop.find_nan` examines a step: a start that finds it does not "
    "try again",
    ".lock": "held by the active run; names its host and process",
    "quarantine.jsonl": "input that is damaged or too short, with the reason; clips that contain "
    "damage are never used "
    "for training. If more than a tenth of the files are affected (`data.max_bad_share`), the run "
    "ends",
    "bad_steps.jsonl": "skipped steps, their examples, and with `loop.find_nan` where the NaN/Inf "
    "began; `step` is the number of completed steps before it: 2 for what the console calls step 3",
    "report.html": "the run on one page, written when the run is done",
    "examples.jsonl": "the examples of each step, with `--loop.record_examples True`",
    "log.txt": "the console output; `log.1.txt` is that of process 1",
    "hang-0.txt": "the stacks of process 0 when it hung, and where the other processes were",
    "trackers/": "with `--track`, for each tracker: the id of its run, and the last step sent",
    "wandb/": "with `--track wandb`, W&B's own files",
    "profile/": "with `--profile 10:15`, about these steps: `summary.txt` (the slowest operations, "
    "by line of model code), a trace for Perfetto (`plugins/profile/TIME/HOST.trace.json.gz`), and "
    "the same for TensorBoard's profile page (`.xplane.pb`); other processes write to `process-N/`",
}
"""The contents of a run directory; docs/reference/run-directory.md is generated from this."""

FINDING_NAN = ".finding-nan"  # exists while loop.find_nan examines a step
FILES_DUE = ".files-due"  # exists from the fetch of a checkpoint until that of the files

# Names that a run, its launcher or its report may write in the run directory, and in its folders.
_OWN = re.compile(
    r"checkpoints|best|data|superseded|damaged|suspect|samples|tensorboard|profile|trackers|wandb"
    r"|report\.html"
    r"|(log|doctor|hang)[.-].*txt|.*\.jsonl?"
)
# Of this machine: never copied to a bucket or from one.
_HERE = (
    *(lock.NAME, FILES_DUE, FINDING_NAN, IN_BUCKET),
    *(".pod-restarts", ".slurm-restarts"),  # of launchers
)
_REPORT = "report.html"
# Folders with files of write_whole.
_WRITTEN_WHOLE = ("tensorboard", "samples", "profile", *KINDS, *ASIDES)
_FOLDERS = (*KINDS, *ASIDES, DATA)


def is_own(name: str) -> bool:
    """Whether a path in a run directory is of a file that a run writes, other than a checkpoint.

    Not that of a file in the making, with a dot before its name.
    """
    first, hidden = name.partition("/")[0], name.rpartition("/")[2].startswith(".")
    return bool(_OWN.fullmatch(first)) and not hidden and first not in (*_FOLDERS, *_HERE)


def remove_leftovers(directory: Path, *, alone: bool) -> None:
    """Removes temporary files of the run's own files that killed processes left.

    Args:
        directory: of the run.
        alone: whether no other process of a run writes there; otherwise see
            :func:`jaxtrain.storage.atomic.remove_leftovers`. A command may write the report.
    """
    folders = [directory]
    for name in _WRITTEN_WHOLE:
        folders += [Path(path) for path, _, _ in os.walk(directory / name)]
    for folder in folders:
        below = folder.relative_to(directory)
        for _, name in atomic.leftovers(folder):
            if is_own((below / name).as_posix()) or name in _HERE or below.name in KINDS:
                atomic.remove_leftovers(folder, (name,), alone=alone and name != _REPORT)


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """Lists a folder; returns [] if it cannot be read, which its later use reports."""
    try:
        with os.scandir(directory) as listed:
            return sorted(listed, key=lambda entry: entry.name)
    except OSError:
        return []
