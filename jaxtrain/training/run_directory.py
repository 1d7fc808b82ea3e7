"""The run directory: its files, and how it is chosen, created, and checked."""

import contextlib
import datetime
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config, terminal
from jaxtrain.checkpoint import candidates, pointer
from jaxtrain.checkpoint import resume as checkpoint_resume
from jaxtrain.checkpoint.pointer import ASIDES, DATA, KINDS
from jaxtrain.checkpoint.remote import IN_BUCKET
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import atomic, json_lines, lock
from jaxtrain.storage.atomic import LATEST, expanded, write_whole
from jaxtrain.storage.disks import cure_of, disk_trouble
from jaxtrain.telemetry import history
from jaxtrain.terminal import Say

ROOT = Path("output")
_APPEARS_S = 10.0
_TROUBLES_TO_NAME = 3


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
    "restarts.json": "how often in a row SLURM or Kubernetes restarted the run without a new "
    "checkpoint; written by the launcher",
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
_HERE = (lock.NAME, FILES_DUE, FINDING_NAN, IN_BUCKET, "restarts.json")
_REPORT = "report.html"
# Folders with files of write_whole.
_WRITTEN_WHOLE = ("tensorboard", "samples", "profile", *KINDS, *ASIDES)
_FOLDERS = (*KINDS, *ASIDES, DATA)


def start_from(
    name: str,
    resume: str | None,
    output_dir: str | None,
    root: Path = ROOT,
    say: Callable[[str], None] | None = None,
    *,
    own_disk: bool = False,
    candidates_of: Callable[[Path, Say], candidates.CheckpointCandidates] | None = None,
) -> Path | None:
    """Returns the checkpoint to start from; :mod:`jaxtrain.checkpoint.resume` finds it.

    Process 0 decides for all processes.

    Args:
        name: of the config.
        resume: the flag's value; None without the flag.
        output_dir: the flag's value.
        root: contains ``NAME/<UTC time>/``.
        say: receives the warnings that process 0 also prints to stderr, such as damaged
            checkpoints.
        own_disk: whether each process has its own ``output_dir``.
        candidates_of: returns the checkpoints of a run directory; by default, those on its disk.

    Raises:
        InputError: in every process, if the checkpoint is rejected.
        RunAgain: in every process, if the disk does not respond, or another run uses the directory.
    """
    if resume is None:
        return None

    def warn(line: str) -> None:
        terminal.warn(line)
        if say is not None:
            say(line)

    def decide() -> str:
        chosen = checkpoint_resume.choose(
            resume,
            None if output_dir is None else _absolute(output_dir),
            root.absolute() / name,
            warn,
            lambda run: take(run, warn),
            None if candidates_of is None else lambda run: candidates_of(run, warn),
        )
        if chosen is None:
            return ""
        absolute = chosen.absolute()
        home = _absolute(output_dir or "")
        return str(
            absolute.relative_to(home) if own_disk and home in absolute.parents else absolute
        )

    chosen = process_group.process_zero_decides(decide)
    return _absolute(output_dir or "") / chosen if chosen else None


def origin(
    output_dir: str | None,
    shown: Path | str | None = None,
    fetch: Callable[[str], None] | None = None,
) -> str:
    """Returns the checkpoint of another run that the last start in a directory resumed from.

    A launcher restarts a run with ``--resume latest``, also one that was started from another run's
    checkpoint and was killed before it saved its own. Process 0 looks for all processes.

    Args:
        output_dir: the flag's value.
        shown: the run directory as it is printed; None if it is ``output_dir``.
        fetch: fetches a file of the run by its name, for a run in a bucket.

    Returns:
        A path or URL for ``--resume``; "" if there was no such start.

    Raises:
        InputError, RunAgain: in all processes; the bucket cannot be read.
    """

    def decide() -> str:
        if output_dir is None:
            return ""
        directory = _absolute(output_dir)
        path = directory / history.NAME
        if fetch is not None and not path.exists():
            fetch(history.NAME)
        source = ""
        # Of no start, or damaged.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            for record in json_lines.read(path):
                if record["event"] == "start":
                    source = record["from"] or ""
        return "" if source.startswith(f"{shown or directory}/") else source

    return process_group.process_zero_decides(decide)


def prepare(
    name: str,
    output_dir: str | None,
    resume: str | None,
    start_from: Path | None,
    root: Path = ROOT,
    *,
    own_disk: bool = False,
) -> Path:
    """Creates the run directory in process 0; all processes must see it.

    It is ``output_dir``, or the directory of the run that ``--resume latest`` resumes, or a new
    ``root/NAME/<UTC time>``.

    Args:
        name: of the config.
        output_dir: the flag's value.
        resume: the flag's value.
        start_from: from :func:`start_from`.
        root: contains ``NAME/<UTC time>/``.
        own_disk: whether each process has its own ``output_dir``, which exists.

    Returns:
        The absolute path.

    Raises:
        InputError: in every process, if the directory cannot be written, contains checkpoints from
            which this run would not resume, or is not visible to a process.
        RunAgain: in every process, if its disk is full or does not respond, or another run uses it.
    """

    def decide() -> str:
        if output_dir is not None:
            directory = _absolute(output_dir)
            made = next((path for path in directory.parents if not path.exists()), None)
            _make(directory)
            # A mount point is not below the current folder, such as output/first.
            if made is not None and not made.is_relative_to(Path.cwd()):
                terminal.warn(
                    f"--output-dir {directory}: {directory.parent} did not exist and was created: "
                    "is its disk mounted?"
                )
            take(directory, terminal.warn)
            checkpoint_resume.check_directory(directory, resume, start_from)
        elif resume == "latest" and start_from is not None:
            directory = pointer.run_of(start_from)
            _make(directory)
            take(directory, terminal.warn)
        else:
            directory = _make_new(root.absolute() / name)
            take(directory, terminal.warn)
        return str(directory)

    directory = Path(process_group.process_zero_decides(decide))
    if own_disk:
        return _absolute(output_dir or "")
    check_shared(directory)
    return directory


def check_shared(directory: Path) -> None:
    """Checks that all processes see the same folder.

    Each process writes a file, and process 0 looks for all of them. Otherwise the same path could
    be a different, writable folder on each host, and the parts of a checkpoint would be scattered.

    Args:
        directory: of the run; process 0 has created it.

    Raises:
        InputError: in every process, if one of them does not see the files of others.
        RunAgain: in every process, if a disk is full or does not respond.
    """
    if jax.process_count() == 1:
        return
    tokens = process_group.gather("shared storage", secrets.token_hex(8))
    files = [directory / f".shared-{token}" for token in tokens]
    own_file = files[jax.process_index()]
    trouble = ""
    try:
        try:
            with own_file.open("x") as file:
                os.fsync(file.fileno())
        except OSError as error:
            trouble = f"cannot write there ({error.strerror})"
        process_group.gather("shared storage", "")  # all have written
        if not trouble:
            wanted = range(len(files)) if jax.process_index() == 0 else (0,)
            trouble = _unseen(files, wanted)
        host = socket.gethostname()[:40]
        trouble = trouble and f"(on {host}) {trouble}"
        troubles_of_all = process_group.gather("shared storage", trouble)  # all have read
    finally:
        with contextlib.suppress(OSError):
            own_file.unlink()
    troubles = [
        f"process {number} {trouble}" for number, trouble in enumerate(troubles_of_all) if trouble
    ]
    if troubles:
        shown = "; ".join(troubles[:_TROUBLES_TO_NAME])
        more = len(troubles) - _TROUBLES_TO_NAME
        shown += f"; and {more} more" if more > 0 else ""
        # A file that one process cannot write is missing for the others: the disk's error matters.
        cure = next(filter(None, map(cure_of, troubles_of_all)), "")
        if cure:
            raise RunAgain(
                f"{directory} is not usable in all processes: {shown}: {cure}, or set another "
                "--output-dir"
            )
        raise InputError(
            f"{directory} is not the same folder for all processes: {shown}: set --output-dir to "
            "storage that every host sees (NFS, Lustre, a shared volume)"
        )


def _unseen(files: list[Path], wanted: Iterable[int]) -> str:
    """Returns a message about files that do not appear; on network storage this may take time."""
    deadline = time.monotonic() + _APPEARS_S
    left = list(wanted)
    while True:
        with contextlib.suppress(OSError):
            os.listdir(files[0].parent)  # makes a client of NFS look again
        try:
            left = [number for number in left if not files[number].exists()]
        except OSError as error:
            return f"cannot read there ({error.strerror})"
        if not left:
            return ""
        if time.monotonic() > deadline:
            return "does not see what process " + ", ".join(map(str, left[:5])) + " wrote"
        time.sleep(0.1)


def write_config(
    directory: Path, resolved: Mapping[str, Any], say: Callable[[str], None] = terminal.out
) -> None:
    """Writes ``config.json``, and the same for TensorBoard; does nothing in processes other than 0.

    Args:
        directory: of the run.
        resolved: the config, from :func:`jaxtrain.config.to_dict`.
        say: prints a warning if it cannot be written; each checkpoint contains the config, too.
    """
    if jax.process_index() != 0:
        return
    from jaxtrain.telemetry import tensorboard  # importing it takes a while

    path = directory / "config.json"
    try:
        write_whole(path, json.dumps(resolved, indent=2) + "\n")
        path = directory / "tensorboard"
        tensorboard.write_config(path, config.flat(resolved))
    except OSError as error:
        say(f"warning: cannot write {path} ({error.strerror}): training continues without it")


def _absolute(path: str) -> Path:
    return expanded(path).absolute()


def _make(directory: Path) -> None:
    """Creates the directory and writes a probe file, because permissions can be misleading."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to the run directory {directory}",
            "choose another --output-dir",
        ) from error


def _make_new(parent: Path) -> Path:
    """Creates a directory named after the UTC time, with a suffix if the name is taken."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    _make(parent)
    for attempt in range(1, 100):
        directory = parent / (now if attempt == 1 else f"{now}-{attempt}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise disk_trouble(
                error, f"cannot create {directory}", "choose another --output-dir"
            ) from error
        return directory
    raise InputError(f"{parent} contains 99 runs started at {now}: start this one again")


def problems_of_name(output_dir: str | None) -> Iterator[str]:
    """Finds out whether checkpoints can be written to a run directory with this name.

    Args:
        output_dir: the flag's value; None is a folder of the working directory.
    """
    directory = _absolute(output_dir or ".")
    try:
        os.fsencode(directory).decode("utf-8")
    except UnicodeDecodeError:
        yield (
            f"the run directory {directory} has a name that is not UTF-8, and the library that "
            "writes checkpoints takes no other: pass another --output-dir"
        )


def problems(output_dir: str, resume: str | None) -> Iterator[str]:
    """Finds what prevents a run from using a directory; removes the probes that it creates.

    Args:
        output_dir: the flag's value.
        resume: the flag's value.
    """
    directory = _absolute(output_dir)
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        _make(directory)
        if resume is None:
            checkpoint_resume.check_directory(directory, resume, None)
    except InputError as error:
        yield from error.messages
    except RunAgain:  # a full disk is not wrong input; the start of the run reports it
        pass
    finally:
        with contextlib.suppress(OSError):
            for path in missing:  # deepest first
                path.rmdir()


def take(directory: Path, say: Callable[[str], None]) -> None:
    """Locks the run directory and removes temporary files of killed processes.

    In the run that starts, no process writes
    there before process 0 has called this.

    Args:
        directory: of the run.
        say: receives a warning if the file system does not support locks.

    Raises:
        RunAgain: another run uses it.
    """
    remove_leftovers(directory, alone=lock.hold(directory, say))


def point_latest(
    directory: Path, root: Path = ROOT, say: Callable[[str], None] = terminal.out
) -> None:
    """Writes into ``root/latest`` which run below ``root`` is the newest (``atomic.LATEST``).

    It writes nothing if the file already names this run, as after most saves.

    Args:
        directory: of the run.
        root: contains ``NAME/<UTC time>/``.
        say: prints a warning if that fails, which does not end the run.
    """
    root = root.absolute()
    if jax.process_index() or root not in directory.parents:
        return
    file, named = root / LATEST, f"{directory.relative_to(root)}\n"
    try:
        if not file.is_file() or file.read_text() != named:
            write_whole(file, named)
    except OSError as error:
        say(f"warning: cannot write {file}, which names {directory} ({error.strerror})")


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
