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
from jaxtrain.doctor.subject import PREFIX, Subject
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.formats import large, size
from jaxtrain.storage.bucket import Bucket
from jaxtrain.storage.disks import disk_trouble, free_bytes
from jaxtrain.training import save_policy
from jaxtrain.training.state import State

_PROBE_BYTES = 2**20
LARGEST = 256 * 2**20  # bytes to write in the test, so that it ends in seconds
_DO_NOT_TRUST = (
    "do not save there: check the disk and its mount (dmesg, smartctl), or set another --output-dir"
)


def checks(subject: Subject) -> dict[str, Check]:
    """Returns the checks of the group "checkpoint"."""
    return {
        "shared storage": lambda: shared_storage(subject),
        "bucket": lambda: bucket_access(subject.url),
        "checkpoint": lambda: written_and_read(subject),
    }


def bucket_access(url: str | None) -> Iterator[Finding]:
    """Writes, reads, and deletes an object in the folder of the run, if it has a bucket."""
    if url is None:
        return
    name, content = f"{PREFIX}{secrets.token_hex(6)}", secrets.token_bytes(_PROBE_BYTES)
    folder = Bucket(url).impatient()
    try:
        began = time.monotonic()
        written = folder.put_if(name, content, None)
        stored = folder.get(name)
        rate = 2 * _PROBE_BYTES / 2**20 / (time.monotonic() - began)
        again = folder.put_if(name, content, None)
    finally:
        with contextlib.suppress(InputError, RunAgain):
            folder.delete([name])
    if stored is None or stored.data != content:
        yield problem(f"{url}: an object that was written is missing or differs", _DO_NOT_TRUST)
    elif written is None or again is not None:
        yield problem(
            f"{url} ignores the conditions of writes, so that a second run would not be detected",
            "use S3, Google Cloud Storage, R2, or a recent MinIO",
        )
    else:
        yield ok(f"{url} can be written and read ({rate:.0f} MiB/s for one small object, measured)")


def written_and_read(subject: Subject, largest: int = LARGEST) -> Iterator[Finding]:
    """Saves the config's state, or as many of its arrays as fit ``largest``, and reads it back."""
    if subject.shared is False:
        yield warning(
            "no checkpoint was tested: the processes do not share the output directory's storage",
            "fix that first",
        )
        return
    # The same in all processes, unless each writes on a disk of its own.
    own_folder = subject.base / f"{PREFIX}{secrets.token_hex(6)}"
    main_folder = Path(subject.store.gather("checkpoint folder", str(own_folder), ANSWER_S)[0])
    folder = main_folder if subject.url is None else own_folder
    subject.scratch(folder)  # before it exists: this process may be ended at any time
    try:
        folder.mkdir(exist_ok=True)
        yield from _tried(subject, folder, largest)
        subject.store.barrier("checkpoint read", ANSWER_S)
    except saver.SaveFailed as error:
        yield problem(
            f"a checkpoint could not be written at {subject.base}: {error.why}",
            "free space there (a quota may apply), or set another --output-dir",
        )
    except OSError as error:
        trouble = f"no checkpoint can be written at {folder.parent}"
        raise disk_trouble(error, trouble, "set another --output-dir") from error
    finally:
        if subject.store.index == 0 or subject.url is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _tried(subject: Subject, folder: Path, largest: int) -> Iterator[Finding]:
    own_size = min(largest, free_bytes(folder) // 3)  # two exist at a time
    limit_bytes = min(map(int, subject.store.gather("checkpoint size", str(own_size), ANSWER_S)))
    target = _subset(subject.built.saved, limit_bytes)
    written, total = _bytes(target), subject.state_bytes
    state = _random(target)
    meta = save_policy.describe(subject.run, "doctor").to_dict()
    own_disk = subject.url is not None and subject.store.count > 1
    uploads = _NoUploads() if own_disk else None
    checkpoints = saver.CheckpointSaver(folder, 1, lambda line: None, uploads=uploads)
    with contextlib.closing(checkpoints):
        for step in range(2):  # the second one counts: the first also starts Orbax
            state = dataclasses.replace(state, step=jnp.full_like(state.step, step))
            began = time.perf_counter()
            checkpoints.save(state, meta | {"step": step})
            checkpoints.wait()
            write_s = time.perf_counter() - began
    subject.store.barrier("checkpoint written", ANSWER_S)
    seen = f"{size(written)} written in {write_s:.2f} s ({large(written / write_s, 'B/s')})"
    if own_disk:  # only in the bucket are the files of all processes together
        yield ok(f"{seen}, each process its part at {subject.base}")
        return
    path = folder / pointer.CHECKPOINTS / "1.json"
    if damage := pointer.verify(path):
        yield problem(f"a checkpoint written at {subject.base} is damaged: {damage}", _DO_NOT_TRUST)
        return
    began = time.perf_counter()
    restored = jax.block_until_ready(restore(path, target))
    read_s = time.perf_counter() - began
    equal = jax.jit(lambda *states: jax.tree.map(jnp.array_equal, *states))(state, restored)
    if different := [name for name, same in named(equal).items() if not same]:
        yield problem(
            f"a checkpoint read back from {subject.base} differs from what was written: "
            f"{', '.join(different[:3])}",
            _DO_NOT_TRUST,
        )
        return
    seen += (
        f", verified, read back in {read_s:.2f} s ({large(written / read_s, 'B/s')}), and equal: "
    )
    predicted = f"{total * write_s / written:.0f} s to write (predicted)"
    extent = f"a part of the state; all {size(total)} would take {predicted}"
    yield ok(seen + (extent if written < total else "the config's complete state"))


class _NoUploads:
    """Leaves the files of each process on its disk."""

    def busy(self) -> str:
        """See :class:`saver.Uploads`."""
        return ""

    def offer(self, save: saver.Save, problem: str) -> None:
        """See there."""

    def in_use(self) -> set[str]:
        """See there."""
        return set()


def _subset(target: State, limit_bytes: int) -> State:
    """Returns the state, or parameters of at most ``limit_bytes`` bytes if it is larger."""
    if _bytes(target) <= limit_bytes:
        return target
    params, taken = {}, 0
    for name, leaf in sorted(target.params.items(), key=lambda item: -_bytes(item[1])):
        if taken + _bytes(leaf) <= limit_bytes:
            params[name] = leaf
            taken += _bytes(leaf)
    return dataclasses.replace(target, params=params, extras={}, opt=())


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _random(target: State) -> State:
    """Returns random arrays: compression would shrink a new optimizer's zeros to nothing."""
    rng = np.random.default_rng(0)  # the same in all processes

    def array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.asarray(rng.random(leaf.shape, np.float32)).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, values.__getitem__)

    return cast(State, jax.tree.map(array, target))
