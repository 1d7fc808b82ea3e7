"""Prints what ``--dry-run`` estimates."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from jaxtrain.data.estimate import SAMPLE, Estimate
from jaxtrain.errors import InputError
from jaxtrain.reporting import formats
from jaxtrain.storage import atomic, disks
from jaxtrain.storage.bucket import is_bucket


def add(parser: argparse.ArgumentParser, things: str, most: int = SAMPLE) -> None:
    """Adds ``--dry-run``.

    Args:
        parser: receives the flag.
        things: what a sample consists of, such as "videos".
        most: how many of them.
    """
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"only estimate time and bytes, from {most} {things}, and write nothing",
    )


def check_local(flags: argparse.Namespace) -> None:
    """Checks that an estimate of what a model takes is made on this machine.

    Raises:
        InputError: it is not.
    """
    if flags.dry_run and flags.engine == "ray":
        raise InputError(
            "--dry-run measures this machine's devices: omit --engine ray, and divide the time on "
            "one device by the number of workers"
        )


def write(found: Estimate, file: Path) -> None:
    """Writes an estimate as JSON."""
    atomic.write_whole(file, json.dumps(dataclasses.asdict(found), indent=1, default=str) + "\n")


def report(
    found: Estimate,
    out: Path | str,
    things: str,
    results: str,
    *,
    room: tuple[int, int],
    worker: str,
    say: Callable[[str], None],
) -> None:
    """Prints an estimate, what the disk lacks for the results, and why they cannot be made.

    Args:
        found: the estimate.
        out: the folder of the results, or a URL.
        things: what the files are, such as "videos".
        results: what becomes of them, such as "clips".
        room: number of workers, and of their machines.
        worker: what a worker runs on, such as "core".
        say: prints a line.
    """
    if found.files:
        say(
            f"estimated from {found.sampled} of {found.files:,} {things}"
            f"{_times(found, room, worker)}; {formats.size(found.out_bytes)} of {results} from "
            f"{formats.size(found.in_bytes)} of {things}"
        )
        for one in found.dropped:
            say(f"would be dropped: {one}")
        if not is_bucket(str(out)):
            _check_free(Path(out), found.out_bytes, say)
    else:
        say(f"nothing to do: {out} already has the {results}")
    if found.refused is not None:
        say(f"without --dry-run, this command would end with an error: {found.refused}")


def _times(found: Estimate, room: tuple[int, int], worker: str) -> str:
    workers, nodes = min(room[0], found.files), room[1]
    spread = "" if found.error is None else f" (plus or minus {2 * found.error:.0%})"
    text = f"{spread}: {formats.seconds(found.serial + found.seconds)} on one {worker}"
    if workers > 1:
        of = f" of {nodes} machines" if nodes > 1 else ""
        parallel = formats.seconds(found.serial + found.seconds / workers)
        text += f", {parallel} on {workers:,} {worker}s{of}"
    return text


def _check_free(out: Path, needed: float, say: Callable[[str], None]) -> None:
    there = out.absolute()
    free = disks.free_bytes(next(path for path in (there, *there.parents) if path.exists()))
    if needed > free:
        say(
            f"warning: {out} has only {formats.size(free)} of free space: free space there, or "
            "choose another folder"
        )
