"""Writes, verifies, reads back, compares, and times a real checkpoint at the output directory."""

import contextlib
import dataclasses
import math
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import pointer, saver
from jaxtrain.checkpoint.restore import named, restore
from jaxtrain.doctor.finding import Check, Finding, ok, problem, warning
from jaxtrain.doctor.hosts import ANSWER_S, shared_storage
from jaxtrain.doctor.subject import Subject
from jaxtrain.doctor.system import PREFIX
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.bucket import Bucket, normalized
from jaxtrain.storage.disks import free_bytes
from jaxtrain.telemetry.formats import size
from jaxtrain.training import save_policy
from jaxtrain.training.state import State

_PROBE_BYTES = 2**20
LARGEST = 256 * 2**20  # bytes to write in the test, so that it ends in seconds


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "checkpoint"."""
    return {
        "shared storage": lambda: shared_storage(subject),
        "bucket": lambda: bucket_access(subject.url or subject.run.checkpoint.mirror),
        "checkpoint": lambda: written_and_read(subject),
    }


def bucket_access(url: str | None) -> Iterator[Finding]:
    """Writes, reads, and deletes an object in the folder of the run.

    Args:
        url: of the folder; None without one.
    """
    if url is None:
        return
    name, content = f"{PREFIX}{secrets.token_hex(6)}", secrets.token_bytes(_PROBE_BYTES)
    try:
        url = normalized(url, "checkpoint.mirror", or_disk=False)
        folder = Bucket(url).impatient()
        began = time.monotonic()
        folder.put(name, content)
        try:
            found = folder.get(name)
            seconds = time.monotonic() - began
            folder.delete([name])
            if found is None or found.data != content:
                raise RunAgain(f"{url}: an object that was written is missing or differs")
            first = folder.put_if(name, b"1", None)
            second = folder.put_if(name, b"2", None)
        finally:
            with contextlib.suppress(InputError, RunAgain):
                folder.delete([name])
    except (InputError, RunAgain) as error:
        yield problem(str(error), "see docs/guides/buckets.md")
        return
    if first is None or second is not None:
        yield problem(
            f"{url} ignores the conditions of writes, so that a second run would not be detected",
            "use S3, Google Cloud Storage, R2, or a recent MinIO",
        )
        return
    rate = 2 * _PROBE_BYTES / 2**20 / seconds
    yield ok(f"{url} can be written and read ({rate:.0f} MiB/s for one small object, measured)")


def written_and_read(subject: Subject, largest: int = LARGEST) -> Iterator[Finding]:
    """Saves the config's state, or as many of its arrays as fit, and reads it back.

    Args:
        subject: the config.
        largest: most bytes to write.
    """
    if subject.shared is False:
        yield warning(
            "no checkpoint was tested: the processes do not seem to share the output directory's "
            "storage",
            "fix that first",
        )
        return
    folder = _agreed_folder(subject)
    subject.scratch(folder)  # before it exists: this process may be ended at any time
    try:
        _make(folder)
        try:
            yield from _tried(subject, folder, largest)
        except saver.SaveFailed as error:
            yield problem(
                f"a checkpoint could not be written at {subject.base}: {error.why}",
                "free space there (a quota may apply), or set another --output-dir",
            )
        subject.store.barrier("checkpoint read", ANSWER_S)
    finally:
        if subject.store.index == 0 or subject.url is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _agreed_folder(subject: Subject) -> Path:
    """Returns the same new folder in all processes, on the file system of the output directory."""
    own = subject.base / f"{PREFIX}{secrets.token_hex(6)}"
    if subject.url is not None:
        return own
    return Path(subject.store.gather("checkpoint folder", str(own), ANSWER_S)[0])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"no checkpoint can be written at {folder.parent} ({error.strerror}): set another "
            "--output-dir"
        ) from error


def _tried(subject: Subject, folder: Path, largest: int) -> Iterator[Finding]:
    own = min(largest, free_bytes(folder) // 3)  # two exist at a time
    most = min(map(int, subject.store.gather("checkpoint size", str(own), ANSWER_S)))
    target, part = _part(subject.built.saved, most)
    state = _random(target)
    meta = save_policy.describe(subject.run, "doctor").to_dict()
    own_disk = subject.url is not None and subject.store.count > 1
    checkpoints = saver.Checkpoints(folder, 1, lambda line: None, own_disk=own_disk)
    with contextlib.closing(checkpoints):
        for step in range(2):  # the second one counts: the first also starts Orbax
            state = dataclasses.replace(state, step=jnp.full_like(state.step, step))
            began = time.perf_counter()
            checkpoints.save(state, meta | {"step": step})
            checkpoints.wait()
            write_s = time.perf_counter() - began
    subject.store.barrier("checkpoint written", ANSWER_S)
    if own_disk:  # only in the bucket are the files of all processes together
        yield ok(
            f"{size(part)} written in {write_s:.2f} s ({_speed(part / write_s)}), each process its "
            f"part at {subject.base}"
        )
        return
    newest = pointer.newest(folder / pointer.CHECKPOINTS)
    if newest is None or newest.name != "1.json":
        yield problem(f"a checkpoint written at {subject.base} is missing", _DO_NOT_TRUST)
        return
    damage = pointer.verify(newest)
    if damage:
        yield problem(f"a checkpoint written at {subject.base} is damaged: {damage}", _DO_NOT_TRUST)
        return
    began = time.perf_counter()
    restored = restore(newest, target)
    jax.block_until_ready(restored)
    read_s = time.perf_counter() - began
    different = _different(state, restored)
    if different:
        yield problem(
            f"a checkpoint read back from {subject.base} differs from what was written: "
            f"{', '.join(different[:3])}",
            _DO_NOT_TRUST,
        )
        return
    yield ok(_summary(subject, part, most, write_s, read_s))


_DO_NOT_TRUST = (
    "do not save there: check the disk and its mount (dmesg, smartctl), or set another --output-dir"
)


def _summary(subject: Subject, part: int, most: int, write_s: float, read_s: float) -> str:
    total, rate = subject.state_bytes, part / write_s
    seen = (
        f"{size(part)} written in {write_s:.2f} s ({_speed(rate)}), verified, read back in "
        f"{read_s:.2f} s ({_speed(part / read_s)}), and equal"
    )
    if part == total:
        return f"{seen}: the config's complete state"
    return (
        f"{seen}; this is a part of the state, because the test writes at most {size(most)}: all "
        f"{size(total)} would take {total / rate:.0f} s to write (predicted)"
    )


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _part(target: State, most: int) -> tuple[State, int]:
    """Returns the state, or parameters of at most ``most`` bytes if it is larger; and its size."""
    total = _size(target)
    if total <= most:
        return target, total
    chosen, taken = {}, 0
    for name, leaf in sorted(target.params.items(), key=lambda item: -_size(item[1])):
        if taken + _size(leaf) <= most:
            chosen[name] = leaf
            taken += _size(leaf)
    part = dataclasses.replace(target, params=chosen, extras={}, opt=())
    return part, _size(part)


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _random(target: State) -> State:
    """Returns random arrays: compression would shrink a new optimizer's zeros to nothing."""
    rng = np.random.default_rng(0)  # the same in all processes

    def array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        kind = np.dtype(leaf.dtype)
        count = max(1, math.prod(leaf.shape))
        values = (
            rng.random(count, np.float32).astype(kind)
            if jnp.issubdtype(kind, jnp.floating)
            else rng.integers(0, 2, count).astype(kind)
        )
        values = values.reshape(leaf.shape)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.asarray(values[index])
        )

    return cast(State, jax.tree.map(array, target))


def _different(written: State, restored: State) -> list[str]:
    """Returns the names of arrays that differ on any device."""
    equal = jax.jit(lambda one, other: jax.tree.map(jnp.array_equal, one, other))
    return [name for name, same in named(equal(written, restored)).items() if not same]
