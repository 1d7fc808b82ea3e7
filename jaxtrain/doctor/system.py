"""Checks the host: shared memory, workers, and the disk for the checkpoints."""

import dataclasses
import math
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.checkpoint import store
from jaxtrain.config import Run
from jaxtrain.data import worker_count
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.subject import Subject
from jaxtrain.storage.disks import free_bytes
from jaxtrain.telemetry.formats import counted, size

PREFIX = ".jaxtrain-doctor-"
"""Prefix of the folders that doctor makes beside the output directory, and removes."""

SHARED_MEMORY = Path("/dev/shm")


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "system"."""
    # The checks need the number of workers, which the config may leave to the host.
    data = dataclasses.replace(subject.run.data, workers=subject.workers)
    run = dataclasses.replace(subject.run, data=data)
    return {
        "shared memory": lambda: shared_memory(run, subject.rows),
        "workers": lambda: workers(subject.workers, subject.gpus),
        "writable": lambda: writable(subject),
        # Files in a bucket survive without the folder where they are staged.
        "file system": lambda: (
            () if subject.url else file_system(kind_of_file_system(subject.base))
        ),
        "free disk": lambda: free_disk(run, subject.base, subject.state_bytes),
    }


def shared_memory(run: Run, rows: int, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Checks that the batches that workers prefetch fit into the host's shared memory.

    Args:
        run: the config.
        rows: examples of a batch that this process loads.
        folder: where shared memory is mounted.
    """
    workers, prefetch = run.data.workers, run.data.prefetch
    if not workers:
        yield ok("no workers: batches do not use shared memory")
        return
    batch = worker_count.shared_batch_bytes(run.data, run.model, rows)
    if not batch:
        yield ok(f"batches of {rows} examples are small: they are sent through pipes")
        return
    need = batch * _batches(run, rows, workers, prefetch)
    free = free_bytes(folder)
    what = (
        f"{folder} has {size(free)} free; {counted(workers, 'worker')}, data.prefetch {prefetch} "
        f"and batches of {size(batch)} need up to {size(need)}"
    )
    if need <= free:
        yield ok(what)
        return
    fewer = next(
        (n for n in range(workers, 0, -1) if batch * _batches(run, rows, n, 1) <= free), None
    )
    lower = f"; or --data.workers {fewer} --data.prefetch 1" if fewer else ""
    yield problem(
        what,
        f"docker run --shm-size={math.ceil(need / 2**30) + 1}g (the default is 64 MB; in a pod: "
        f"an emptyDir of medium Memory), or mount -o remount,size=...{lower}",
    )


def _batches(run: Run, rows: int, workers: int, prefetch: int) -> float:
    """Returns the most batches in shared memory."""
    devices = run.mesh.devices * rows // run.data.batch_size
    return worker_count.most_batches(rows, workers, prefetch, devices)


def workers(number: int, gpus: int) -> Iterator[Finding]:
    """Checks, like a run, that this host has the open files and the memory for the workers.

    Args:
        number: of workers of this process.
        gpus: of this process.
    """
    if text := worker_count.too_many(number, gpus):  # says what to do
        yield Finding(level="problem", seen=text)
    else:
        yield ok(f"this host has open files and memory for {counted(number, 'worker')}")


def writable(subject: Subject) -> Iterator[Finding]:
    """Checks by writing that the output directory is writable: permissions alone do not show it."""
    output, base = subject.output, subject.base
    cure = "set another --output-dir, or make this one writable (mount, owner, quota)"
    if not base.is_dir():
        yield problem(f"{output} cannot be created: {base} is a file", "set another --output-dir")
        return
    try:
        folder = base / f"{PREFIX}{secrets.token_hex(6)}"
        subject.scratch(folder)  # before it exists: this process may be ended at any time
        try:
            folder.mkdir()
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        yield problem(f"cannot write in {base} ({error.strerror})", cure)
        return
    yield ok(f"{base} is writable" if base == output else f"{output} can be created in {base}")


def file_system(kind: str) -> Iterator[Finding]:
    """Checks that the output directory's files survive the end of the machine or container.

    Args:
        kind: type of the file system.
    """
    where = f"the output directory is on {kind}"
    if kind in ("tmpfs", "ramfs"):
        yield warning(
            f"{where}: this is memory, which is lost at the next restart",
            "set --output-dir to a place on a disk",
        )
    elif kind == "overlayfs":
        yield warning(
            f"{where}: this is the container's own layer, which is lost with the container",
            "set --output-dir to a volume: docker run -v /data:/data, or a pod's volume claim",
        )
    else:
        yield ok(where)


def kind_of_file_system(folder: Path) -> str:
    """Returns the type of the file system that holds a folder, such as "ext2/ext3" or "nfs"."""
    command = ["stat", "--file-system", "--format=%T", "--", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "an unknown file system"


def free_disk(run: Run, folder: Path, state_bytes: int) -> Iterator[Finding]:
    """Checks that all checkpoints that are kept fit, plus the one being written."""
    settings = run.checkpoint
    best = 1 if settings.best_metric is not None else 0
    most = store.most_kept(settings.keep, replays=run.loop.replay_every is not None)
    count = most + best + 1
    need, free = count * state_bytes, free_bytes(folder)
    kept = f"{most} kept{' + the best' if best else ''} + 1 being written"
    seen = (
        f"{size(free)} free at {folder}; {count} checkpoints of {size(state_bytes)} need "
        f"{size(need)} ({kept})"
    )
    if need <= free:
        yield ok(seen)
        return
    fits = settings.keep - (count - int(free // state_bytes))
    lower = f"--checkpoint.keep {fits}, " if fits >= 1 else ""
    yield problem(seen, f"{lower}free {size(need - free)} there, or set another --output-dir")
