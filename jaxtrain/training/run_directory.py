"""The directory of a run: which one, made, checked, and described."""

import contextlib
import dataclasses
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
from typing import Any, Self

import jax

from jaxtrain import config, terminal
from jaxtrain.checkpoint import resume as checkpoint_resume
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import lock
from jaxtrain.storage.atomic import expanded, write_whole
from jaxtrain.storage.disks import cure_of, disk_trouble
from jaxtrain.telemetry import history, line_files

ROOT = Path("output")
FILES = {
    "config.json": "the resolved config",
    "metrics.jsonl": "one JSON object per logged step, with all digits; see [metrics](metrics.md)",
    "history.jsonl": "one entry per start: the hardware, what a step needs, the seconds of each "
    "phase, and how it ended",
    "tensorboard/": "metrics, samples, and the config (the HParams tab compares runs)",
    "samples/": "from each validation: original, reconstruction, and error (black: none; white: a "
    "quarter of the range) as image and clip, and the channels of the latents; for causal language "
    "models `text_STEP.txt`",
    "checkpoints/": "the newest checkpoints, each named after its step; each is either complete or "
    "absent",
    "best/": "the best checkpoint by `checkpoint.best_metric`; it shares its files with "
    "`checkpoints/` while both exist",
    "superseded/": "checkpoints that a resume from an earlier step replaced",
    "damaged/": "checkpoints that a resume found damaged",
    ".lock": "held by the active run; names its host and process",
    "quarantine.jsonl": "input that is unreadable or too short, with the reason; it is never used "
    "for training. If more than a tenth of the files is affected (`data.max_bad_share`), the run ends",
    "bad_steps.jsonl": "skipped steps and their examples",
    "report.html": "the run on one page, written when the run is done",
    "examples.jsonl": "the examples of each step, with `--loop.record_examples True`",
    "log.txt": "the console output; `log.1.txt` is that of process 1",
    "hang-0.txt": "the stacks of process 0 when it hung, and where the other processes were",
    "profile/": "with `--profile 10:15`, of these steps: `summary.txt` (the slowest operations, by "
    "line of the model), a trace for Perfetto (`plugins/profile/TIME/HOST.trace.json.gz`), and the "
    "same for TensorBoard's profile page (`.xplane.pb`); other processes write to `process-N/`",
}
"""What a run directory holds; docs/reference/run-directory.md is generated from it."""

_APPEARS_S = 10.0
_TROUBLES_TO_NAME = 3


def start_from(
    name: str,
    resume: str | None,
    output_dir: str | None,
    root: Path = ROOT,
    say: Callable[[str], None] | None = None,
    max_lost_updates: int = 0,
) -> Path | None:
    """The checkpoint to start from, as :mod:`jaxtrain.checkpoint.resume` decides in process 0.

    Args:
        name: of the config.
        resume: the flag's value; None without the flag.
        output_dir: the flag's value.
        root: holds ``NAME/<UTC time>/``.
        say: takes what process 0 also prints to stderr at once: which checkpoints are damaged.
        max_lost_updates: see :func:`jaxtrain.checkpoint.resume.choose`.

    Raises:
        InputError: in every process, if the checkpoint is refused, or the run's directory contains
            symbolic links.
        RunAgain: in every process, if the disk does not answer, or another run is at work there.
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
            lambda run: _take(run, warn),
            max_lost_updates,
        )
        return "" if chosen is None else str(chosen.absolute())

    told = process_group.told_by_process_zero(decide)
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
            this run would not go on from, contains symbolic links, or is not seen by a process.
        RunAgain: in every process, if its disk is full or does not answer, or another run is at
            work in it.
    """

    def decide() -> str:
        if output_dir is not None:
            directory = _absolute(output_dir)
            made = next((path for path in directory.parents if not path.exists()), None)
            _make(directory)
            if made is not None:
                terminal.warn(
                    f"--output-dir {directory}: {directory.parent} did not exist and was made: is "
                    "its disk mounted?"
                )
            _take(directory, terminal.warn)
            checkpoint_resume.check_directory(directory, resume, start_from)
        elif resume == "latest" and start_from is not None:
            directory = start_from.parent.parent
            _make(directory)
            _take(directory, terminal.warn)
        else:
            directory = _make_new(root.absolute() / name)
            _take(directory, terminal.warn)
        return str(directory)

    directory = Path(process_group.told_by_process_zero(decide))
    check_shared(directory)
    return directory


def check_shared(directory: Path) -> None:
    """All processes must see the same folder: each writes a file, and process 0 reads all of them.

    The same path can be another folder on every host, and is then there and writable everywhere:
    a checkpoint would lie in pieces on all of them.

    Args:
        directory: of the run; process 0 has made it.

    Raises:
        InputError: in all processes alike; says who does not see what.
        RunAgain: likewise, where a disk is full or does not answer.
    """
    if jax.process_count() == 1:
        return
    tokens = process_group.gather("shared storage", secrets.token_hex(8))
    files = [directory / f".shared-{token}" for token in tokens]
    own = files[jax.process_index()]
    trouble = ""
    try:
        try:
            with own.open("x") as file:
                os.fsync(file.fileno())
        except OSError as error:
            trouble = f"cannot write there ({error.strerror})"
        process_group.gather("shared storage", "")  # all have written
        if not trouble:
            wanted = range(len(files)) if jax.process_index() == 0 else (0,)
            trouble = _unseen(files, wanted)
        host = socket.gethostname()[:40]
        trouble = trouble and f"(on {host}) {trouble}"
        said = process_group.gather("shared storage", trouble)  # all have read
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    troubles = [f"process {number} {one}" for number, one in enumerate(said) if one]
    if troubles:
        shown = "; ".join(troubles[:_TROUBLES_TO_NAME])
        more = len(troubles) - _TROUBLES_TO_NAME
        shown += f"; and {more} more" if more > 0 else ""
        # What one cannot write the others do not see: the disk's own words come first.
        cure = next(filter(None, map(cure_of, said)), "")
        if cure:
            raise RunAgain(
                f"{directory} does not work in all processes: {shown}: {cure}, or give another "
                "--output-dir"
            )
        raise InputError(
            f"{directory} is not one folder for all processes: {shown}: give --output-dir a place "
            "on storage that every host sees (NFS, Lustre, a shared volume)"
        )


def _unseen(files: list[Path], wanted: Iterable[int]) -> str:
    """Which do not appear, in words; over a network a new file may take a moment."""
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
    """Writes ``config.json``, and the same for TensorBoard; process 0 only, the others return at
    once.

    Args:
        directory: of the run.
        resolved: the config, in the form of :func:`jaxtrain.config.to_dict`.
        say: takes a line where it cannot be written; each checkpoint holds it too.
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
        say(f"warning: cannot write {path} ({error.strerror}): training goes on without it")


def _absolute(path: str) -> Path:
    return expanded(path).absolute()


def _make(directory: Path) -> None:
    """Makes the directory and proves by a file that it can be written: permissions alone lie."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write in the run's directory {directory}",
            "give another --output-dir",
        ) from error


def _make_new(parent: Path) -> Path:
    """A directory named by the UTC time; of two runs in one second the second gets a suffix."""
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
                error, f"cannot make {directory}", "give another --output-dir"
            ) from error
        return directory
    raise InputError(f"{parent} holds 99 runs of the second {now}: start again")


@dataclasses.dataclass(frozen=True)
class Before:
    """What there was of a run's directory before the run began.

    Attributes:
        missing: the directory and its parents that did not exist, the deepest first.
        empty: whether the directory contained nothing, or did not exist.
        named: whether ``--output-dir`` names the directory.
    """

    missing: tuple[Path, ...]
    empty: bool
    named: bool

    @classmethod
    def of(cls, directory: Path, *, named: bool = True) -> Self:
        """Looks at a directory."""
        missing = (path for path in (directory, *directory.parents) if not os.path.exists(path))
        return cls(tuple(missing), not _entries(directory), named)


def before(name: str, output_dir: str | None, root: Path = ROOT) -> Before:
    """What there is of a run's directory before :func:`prepare` makes it.

    Args:
        name: of the config.
        output_dir: the flag's value.
        root: holds ``NAME/<UTC time>/``.
    """
    if output_dir is not None:
        return Before.of(_absolute(output_dir))
    # The directory itself gets a new name; one that a resume goes on in contains checkpoints.
    new = root.absolute() / name / "new"
    return dataclasses.replace(Before.of(new, named=False), empty=True)


def discard_unused(directory: Path, before: Before) -> None:
    """Removes what a run of one process wrote if it ended before it had anything to keep.

    As with a ``--data.path`` that does not exist: its only line is on the console. What was there
    before the run stays.
    """
    if jax.process_count() > 1 or not before.empty:
        return
    unused = {lock.NAME, line_files.LOG, history.NAME}
    with contextlib.suppress(OSError):
        written = list(directory.iterdir())
        if {path.name for path in written} <= unused:
            for path in written:
                path.unlink()
            directories = before.missing if before.named else (directory, *before.missing[1:])
            for path in directories:
                path.rmdir()  # fails where other runs are


def problems(output_dir: str, resume: str | None) -> Iterator[str]:
    """What keeps a run from using a directory; what is made to find out is removed again.

    Args:
        output_dir: the flag's value.
        resume: the flag's value.
    """
    directory = _absolute(output_dir)
    before = Before.of(directory)
    try:
        _make(directory)
        _refuse_links(directory)
        if resume is None:
            checkpoint_resume.check_directory(directory, resume, None)
    except InputError as error:
        yield from error.messages
    except RunAgain:  # a full disk is not wrong input: the start itself reports it
        pass
    finally:
        with contextlib.suppress(OSError):
            for path in before.missing:
                path.rmdir()


# Names that a run, its launcher or its report may write to in the run's directory, and in folders
# there.
_OWN = re.compile(
    r"checkpoints|best|superseded|damaged|samples|tensorboard|profile|report\.html|\.lock"
    r"|\.pod-restarts|(log|doctor|hang)[.-].*txt|.*\.jsonl?"
)
_OWN_BELOW = re.compile(r"\d+|checkpoints|best|plugins|process-\d+")


def _take(directory: Path, say: Callable[[str], None]) -> None:
    """Keeps other runs out of a run's directory, and this run in it.

    Raises:
        InputError: it contains symbolic links.
        RunAgain: another run is at work there.
    """
    _refuse_links(directory)
    lock.hold(directory, say)


def _refuse_links(directory: Path) -> None:
    """A link in the directory of another person's run may point to any file or folder of yours.

    Raises:
        InputError: there is one in the place of something that the run itself would make.
    """
    own = [entry for entry in _entries(directory) if _OWN.fullmatch(entry.name)]
    for entry in own:
        below = _entries(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else []
        for one in (entry, *(one for one in below if _OWN_BELOW.fullmatch(one.name))):
            if one.is_symlink():
                raise InputError(
                    f"the run's directory {directory} contains a symbolic link, "
                    f"{Path(one.path).relative_to(directory)}, and a run must not write outside "
                    "its directory: remove the link, or to keep a run on another disk, give an "
                    "--output-dir on that disk"
                )


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it cannot be read, which is reported where it is used."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def link_latest(
    directory: Path, root: Path = ROOT, say: Callable[[str], None] = terminal.out
) -> None:
    """Points ``root/latest`` at a run below ``root``; a reader never finds it missing.

    Nothing is written where the link already points there, as after most saves.

    Args:
        directory: of the run.
        root: holds ``NAME/<UTC time>/``.
        say: takes a line where that fails; a run does not end over a link.
    """
    root = root.absolute()
    if jax.process_index() or root not in directory.parents:
        return
    link = root / "latest"
    beside = root / f".latest-{os.getpid()}"
    target = directory.relative_to(root)
    with contextlib.suppress(OSError):  # there is no link yet
        if link.readlink() == target:
            return
    try:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        beside.symlink_to(target)
        os.replace(beside, link)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        say(f"warning: cannot link {link} to {directory} ({error.strerror})")
