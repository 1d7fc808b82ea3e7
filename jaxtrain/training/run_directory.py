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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config, terminal
from jaxtrain.checkpoint import own_files, pointer, start, store
from jaxtrain.checkpoint.candidates import CheckpointCandidates
from jaxtrain.checkpoint.pointer import ASIDE, KINDS
from jaxtrain.checkpoint.resume import newest_run
from jaxtrain.checkpoint.store import CheckpointStore, Folder, Place
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.reporting import run_files, times
from jaxtrain.storage import atomic, lock, run_marker
from jaxtrain.storage.atomic import LATEST, expanded, write_whole
from jaxtrain.storage.disks import cure_of, disk_trouble

ROOT = Path("output")
_APPEARS_S = 10.0
_TROUBLES_TO_NAME = 3
_SHARE = "set --output-dir to storage that every host sees (NFS, Lustre, a shared volume)"


FILES = {
    "config.json": "the resolved config",
    "metrics.jsonl": "one JSON object per logged step, with full precision; "
    "see [metrics](metrics.md)",
    "history.jsonl": "for each start of the run: the hardware, the plan of a step, the seconds of "
    "each phase, and how it ended",
    "tensorboard/": "metrics, samples, and the config (the HParams tab compares runs)",
    "samples/": "from each validation: original, reconstruction, and error (white: a quarter of "
    "the range) as an image and as a clip, and the channels of the latents; for causal language "
    "models, `text_STEP.txt`",
    run_marker.NAME: "marks this folder as a run's; written before anything else",
    own_files.START: "what the run was told to start from, until it has saved a checkpoint",
    "checkpoints/STEP.json": "the newest checkpoints: each is a pointer to a folder in "
    "`checkpoints/files/`, with the sizes and checksums of its files",
    "best/STEP.json": "the best checkpoint by `checkpoint.best_metric`",
    "checkpoints/files/STEP-ID/": "the files of a checkpoint, which never change; deleted when "
    "nothing points to them",
    "aside/STEP-ID.json": "pointers of checkpoints that no longer count, each with the reason in "
    "`aside/STEP-ID.txt`: superseded (the run resumed from an earlier step), damaged, suspect (a "
    "device computed wrong results), or a bad step (with its batch, for `jaxtrain find-nan`)",
    "progress.json": "the validations so far, and the last step that was computed twice with equal "
    "results",
    ".lock": "held by the active run; names its host and process",
    "quarantine.jsonl": "input that is damaged or too short, with the reason; "
    "`quarantine.1.jsonl` is that of process 1",
    "bad_steps.jsonl": "skipped steps and their examples; `step` is the number of completed steps "
    "before it: 2 for what the console calls step 3",
    own_files.RESTARTS: "how often in a row SLURM or Kubernetes restarted the run without a new "
    "checkpoint",
    "report.html": "the run on one page, written when the run is done, and when it stops, unless "
    "its records have more than 8 MB",
    "examples.jsonl": "the examples of each step, with `--loop.record_examples True`",
    "log.txt": "the console output; `log.1.txt` is that of process 1",
    "doctor.0.txt": "with `launch/local.sh 4 --doctor`, what doctor says of process 0",
    "hang-0.txt": "the stacks of process 0 when it hung, and where the other processes were",
    "trackers/": "with `--track`, for each tracker: the id of its run, and the last step sent",
    "wandb/": "with `--track wandb`, W&B's own files",
    "profile/": "with `--profile 10:15`, about these steps: `summary.txt` (the slowest operations, "
    "by line of model code), a trace for Perfetto (`plugins/profile/TIME/HOST.trace.json.gz`), and "
    "the same for TensorBoard's profile page (`.xplane.pb`); other processes write to `process-N/`",
}
"""The contents of a run directory; docs/reference/run-directory.md is generated from this."""

_OTHER_FOLDER = "choose another --output-dir"
_REPORT = "report.html"
# Folders with files of write_whole.
_WRITTEN_WHOLE = ("tensorboard", "samples", "profile", "trackers")
_FOLDERS = (*KINDS, ASIDE)
_POINTER = re.compile(r"[0-9]+(-[0-9a-f]+)?\.(json|txt)")


def prepare(name: str, output_dir: str | None, resume: str | None, root: Path = ROOT) -> Path:
    """Creates, marks and locks the run directory in process 0; all processes must see it.

    It is ``output_dir``, or with ``--resume latest``, the directory of the run of this config that
    saved last, or a new ``root/NAME/<UTC time>``.

    Raises:
        InputError: in every process, if the directory cannot be written, has files of a user, or is
            not visible to a process.
        RunAgain: in every process, if its disk is full or does not respond, or another run uses it.
    """

    def decide() -> str:
        if output_dir is not None:
            directory = _absolute(output_dir)
            first_missing = next((path for path in directory.parents if not path.exists()), None)
            _claim(directory)
            # A mount point is not below the current folder, such as output/first.
            if first_missing is not None and not first_missing.is_relative_to(Path.cwd()):
                terminal.warn(
                    f"--output-dir {directory}: {directory.parent} did not exist and was created: "
                    "is its disk mounted?"
                )
        elif start.is_step(resume or ""):
            raise InputError(f"--resume {resume} requires --output-dir, the run that saved it")
        else:
            saved = newest_run(root.absolute() / name) if resume == "latest" else None
            directory = saved or _make_new(root.absolute() / name)
            _claim(directory)
        take(directory, terminal.warn)
        _probe(directory)
        return str(directory)

    directory = Path(process_group.process_zero_decides(decide))
    check_shared(directory)
    return directory


def hours_left(run: config.Run, directory: Path) -> float | None:
    """Returns the hours that this start of the run may take; None for no limit."""
    of_start, of_all = run.loop.max_hours, run.loop.max_total_hours
    if of_all is None:
        return of_start

    def read() -> str:
        starts = times.attempts(run_files.lines_of(directory / run_files.HISTORY, []))
        return repr(times.used_hours(starts[:-1]))

    left = of_all - float(process_group.process_zero_decides(read))
    return left if of_start is None else min(of_start, left)


def prepare_cache(directory: Path, bucket: Place) -> None:
    """Locks the folder in the cache of a run in a bucket. Process 0, for all.

    What an interrupted start has fetched of a checkpoint stays.
    """

    def decide() -> str:
        stored = CheckpointStore(bucket)
        take(directory, terminal.warn, set(map(stored.folder_of, stored.pointers())))
        _probe(directory, "set $JAXTRAIN_CACHE to another folder")
        return ""

    process_group.process_zero_decides(decide)


def check_shared(directory: Path, cure: str = _SHARE) -> None:
    """Checks that all processes see the same folder.

    Each process writes a file, and process 0 looks for all of them. Otherwise the same path could
    be a different, writable folder on each host, and the parts of a checkpoint would be scattered.

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
        listed = "; ".join(troubles[:_TROUBLES_TO_NAME])
        more = len(troubles) - _TROUBLES_TO_NAME
        listed += f"; and {more} more" if more > 0 else ""
        # A file that one process cannot write is missing for the others: the disk's error matters.
        of_disk = next(filter(None, map(cure_of, troubles_of_all)), "")
        if of_disk:
            raise RunAgain(
                f"{directory} is not usable in all processes: {listed}: {of_disk}, or use another "
                "disk"
            )
        raise InputError(f"{directory} is not the same folder for all processes: {listed}: {cure}")


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
    """Writes ``config.json``, and the same for TensorBoard, in process 0; failure is a warning."""
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


def _claim(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        store.claim(Folder(directory), "--output-dir")
    except OSError as error:
        raise _not_writable(error, directory) from error
    for folder in (*KINDS, ASIDE, pointer.FILES):
        if (directory / folder).is_symlink():
            raise InputError(
                f"{directory / folder} is a symbolic link, and checkpoints are only deleted in "
                "folders of the run itself: replace it by a folder, or link the run directory"
            )


def _probe(directory: Path, cure: str = _OTHER_FOLDER) -> None:
    """Writes a probe file, because permissions can be misleading."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise _not_writable(error, directory, cure) from error


def _not_writable(
    error: OSError, directory: Path, cure: str = _OTHER_FOLDER
) -> InputError | RunAgain:
    return disk_trouble(error, f"cannot write to the run directory {directory}", cure)


def _make_new(parent: Path) -> Path:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(error, parent) from error
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
    """Finds out whether checkpoints can be written to a run directory with this name."""
    directory = _absolute(output_dir or ".")
    try:
        os.fsencode(directory).decode("utf-8")
    except UnicodeDecodeError:
        yield (
            f"the run directory {directory} has a name that is not UTF-8, and the library that "
            "writes checkpoints takes no other: pass another --output-dir"
        )


def problems(output_dir: str, flags: start.Flags) -> Iterator[str]:
    """Finds what prevents a run from using a directory; removes the probes that it creates."""
    directory = _absolute(output_dir)
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if run_marker.read(directory):
            recorded = start.Recorded.of(Folder(directory), CheckpointCandidates(directory))
            start.decide(flags, recorded, str(directory))
        else:
            _probe(directory)
            names = os.listdir(directory)
            if refusal := run_marker.refusal(str(directory), "--output-dir", names):
                yield refusal
    except InputError as error:
        yield from error.messages
    except OSError as error:
        trouble = _not_writable(error, directory)
        if isinstance(trouble, InputError):
            yield from trouble.messages
    except RunAgain:  # a full disk is not wrong input; the start of the run reports it
        pass
    finally:
        with contextlib.suppress(OSError):
            for path in missing:  # deepest first
                path.rmdir()


def take(directory: Path, say: Callable[[str], None], keep: Collection[str] = frozenset()) -> None:
    """Locks the run directory and removes what killed processes left there.

    In the run that starts, no process writes there before process 0 has called this. Files of saves
    that were cut off may have filled the disk, so nothing may be written before. It does nothing in
    a folder that is not a run's.

    Args:
        say: receives a warning if the file system does not support locks.
        keep: folders of checkpoint files that stay without a pointer.

    Raises:
        InputError: it is a run of another version.
        RunAgain: another run uses it, or its disk does not respond.
    """
    try:
        if run_marker.read(directory):
            alone = lock.hold(directory, say)
            CheckpointStore(Folder(directory)).collect(keep)
            remove_leftovers(directory, alone=alone)
    except OSError as error:
        raise disk_trouble(
            error, f"{directory} cannot be read", "choose another --output-dir"
        ) from error


def point_latest(
    directory: Path, root: Path = ROOT, say: Callable[[str], None] = terminal.out
) -> None:
    """Writes into ``root/latest`` which run below ``root`` is the newest (``atomic.LATEST``).

    It writes nothing if the file already names this run, as after most saves.
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


def remove_leftovers(directory: Path, *, alone: bool) -> None:
    """Removes temporary files of the run's own files that killed processes left.

    Args:
        alone: whether no other process of a run writes there; otherwise see
            :func:`jaxtrain.storage.atomic.remove_leftovers`. A command may write the report.
    """
    folders = [directory, *(directory / name for name in _FOLDERS)]
    for name in _WRITTEN_WHOLE:
        if not (directory / name).is_symlink():
            folders += [Path(path) for path, _, _ in os.walk(directory / name)]
    for folder in folders:
        below = folder.relative_to(directory)
        for _, name in atomic.leftovers(folder):
            own = own_files.is_own((below / name).as_posix()) or name in own_files.HERE
            if own or (below.name in _FOLDERS and _POINTER.fullmatch(name)):
                atomic.remove_leftovers(folder, (name,), alone=alone and name != _REPORT)
