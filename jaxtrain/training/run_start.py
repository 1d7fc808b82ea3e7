"""Where a run writes, and the checkpoint that it starts from."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax

from jaxtrain import config
from jaxtrain.checkpoint import pointer, resume
from jaxtrain.config.run_length import Position
from jaxtrain.data import cache
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError
from jaxtrain.sharding import as_found, make_mesh
from jaxtrain.storage import bucket
from jaxtrain.training import (
    preflight,
    run_directory,
)
from jaxtrain.training.mirror import Mirror
from jaxtrain.training.run_log import RunLog

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class OpenedDirectory:
    """Where a run writes, and where it starts.

    Attributes:
        path: the run directory.
        mesh: over all devices.
        mirror: the copy in a bucket, if any.
        start_from: the verified checkpoint to start from; None for a new run.
        shown_source: that checkpoint as it is printed; "" without one.
        position: where the run starts.
    """

    path: Path
    mesh: jax.sharding.Mesh
    mirror: Mirror | None
    start_from: Path | None
    shown_source: str
    position: Position

    @property
    def resumes(self) -> bool:
        """Whether the checkpoint is one of this run directory."""
        return resume.is_of(self.path, self.start_from)


def open_directory(
    run: config.Run, flags: preflight.Flags, log: RunLog, stack: contextlib.ExitStack
) -> OpenedDirectory:
    """Chooses the checkpoint to start from, locks the run directory, and opens its log.

    Raises:
        InputError, RunAgain: in all processes.
    """
    say = log.say
    with log.phases.within("start"):  # may read a complete checkpoint
        preflight.check(run, resumes=flags.resume is not None)
        mesh = make_mesh(run.mesh)
        mirror, output_dir = Mirror.of(run, flags.output_dir, say), flags.output_dir
        if mirror is not None:
            stack.callback(mirror.close)
            mirror.claim()
            output_dir = str(mirror.directory)
        own_disk = mirror is not None and mirror.own_disk
        # Before a resume writes its lock there.
        before = run_directory.before(run.name, output_dir)

        def choose(resumed: str | None) -> tuple[Path | None, str]:
            on_disk, shown = _on_disk(resumed, run, say)
            chosen = run_directory.start_from(
                run.name,
                on_disk,
                output_dir,
                say=log.log,  # already on the console
                own_disk=own_disk,
                opened=None if mirror is None else mirror.opened,
            )
            return chosen, shown

        start_from, shown_source = choose(flags.resume)
        if (
            start_from is None
            and flags.resume == "latest"
            and (origin := run_directory.origin(output_dir, mirror))
        ):
            say(
                f"--resume latest: no checkpoint yet: resuming from {origin}, from which this run "
                "was started"
            )
            try:
                start_from, shown_source = choose(origin)
            except InputError as error:
                raise InputError(
                    f"this run was started from {origin}, and has no checkpoint of its own yet: "
                    f"{error}; or omit --resume to start from scratch"
                ) from error
        path = run_directory.prepare(
            run.name, output_dir, flags.resume, start_from, own_disk=own_disk
        )
        if mirror is not None:
            mirror.refuse_other(flags.resume, start_from)
            mirror.fetch(start_from)
        if start_from is not None and not shown_source:
            own = start_from.is_relative_to(path)
            checkpoint = (start_from.relative_to(path) if own else start_from).with_suffix("")
            shown = path if mirror is None else mirror.shown
            shown_source = f"{shown}/{checkpoint}" if own else str(checkpoint)
        position = Position()
        if start_from is not None:
            position = Position.of_checkpoint(pointer.read_meta(start_from))
    log.open(
        run,
        path,
        shown_source or None,
        position,
        flags.arguments,
        before,
        flags.track,
        described="" if mirror is None else mirror.both,
    )
    stack.push(log.failed)  # before the mirror uploads log.txt for the last time
    if fit := as_found(run)[1]:
        say(fit)
    if flags.resume and start_from is None:
        say(f"--resume {flags.resume}: no checkpoint to resume from, starting from scratch")
    return OpenedDirectory(path, mesh, mirror, start_from, shown_source, position)


def _on_disk(resumed: str | None, run: config.Run, say: Say) -> tuple[str | None, str]:
    """Returns ``--resume`` with a fetched checkpoint instead of a URL, and its URL or ""."""
    if resumed is None or not bucket.is_bucket(resumed):
        return resumed, ""
    path, shown = process_group.process_zero_first(
        lambda: resume.of_url(resumed, "--resume", cache.root(run.data.cache_dir), say),
        "checkpoint",
    )
    return str(path), shown
